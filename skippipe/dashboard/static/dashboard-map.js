// Nodes in columns by stage, links coloured by load, paths of lanes, and microbatches in flight in a recorded iteration.
import { bytes, byId, draw, make, seconds } from "./dashboard-words.js";

const LEVELS = 5;
const GAP = 42; // between columns, for links
const STATUSES = {
  works: "at work", recovering: "fetches its stage's state", here: "has joined", slow: "slow: was waited for",
  lost: "lost", spare: "without a stage",
};
const HEADING = 110; // what stands over a column
const TOP = 58;
const NARROW = 640; // pixels, below which stages stand below each other if they have no room beside each other
const SIDE = 10; // between nodes that stand beside each other
const REPLAY_S = 12; // for an iteration, however long it took

export class RunMap {
  constructor() {
    this.map = { nodes: [], stages: [], lanes: [] };
    this.links = { links: [], visits: [] };
    this.recorded = null;
    this.chosen = new Set(); // lanes
    this.chosenNode = null;
    this.playing = false;
    byId("moment").addEventListener("input", () => { this.play(false); this.fly(); });
    addEventListener("resize", () => this.draw());
    byId("play").addEventListener("click", () => this.play(!this.playing));
    byId("node-legend").replaceChildren(
      ...Object.entries(STATUSES).map(([status, words]) => make("span", {},
        draw("svg", { width: 26, height: 14 }, draw("g", { class: `node ${status}` },
          draw("rect", { class: "box", x: 2, y: 2, width: 22, height: 10, rx: 3 }))), words)),
      make("span", {}, draw("svg", { width: 26, height: 14 }, draw("g", { class: "node" },
        draw("rect", { class: "box", x: 2, y: 2, width: 22, height: 10, rx: 3 }),
        draw("rect", { class: "busy", x: 2, y: 2, width: 14, height: 10, rx: 3 }))),
      "filled: share of the recorded iteration in which it computed"));
  }

  show(map) {
    this.map = map;
    const lanes = new Set(map.lanes.keys());
    this.chosen = new Set([...this.chosen].filter((lane) => lanes.has(lane)));
    this.draw();
    this.drawLanes();
  }

  load(found) {
    this.links = found;
    this.draw();
  }

  record(chart) {
    const bars = chart.iteration === null ? [] : chart.measured.length ? chart.measured : chart.planned;
    this.recorded = bars.length ? recording(chart, bars) : null;
    byId("play").disabled = byId("moment").disabled = !this.recorded;
    this.draw();
  }

  layout() {
    const { nodes, stages } = this.map;
    const spare = nodes.flatMap((node, number) => (node.stage === null ? [number] : []));
    const columns = stages.map((stage, number) => ({
      title: `stage ${number}`, nodes: stage.nodes,
      under: `${stage.layers} layer${stage.layers > 1 ? "s" : ""}${number ? "" : ", head"}`,
    }));
    if (spare.length) columns.push({ title: "no stage", under: "spare or lost", nodes: spare });
    const tallest = Math.max(1, ...columns.map((column) => column.nodes.length));
    const step = tallest > 24 ? 20 : tallest > 10 ? 26 : 36; // crowds are drawn smaller
    const longest = Math.max(6, ...nodes.map((node) => Math.min(18, node.name.length)));
    const wide = 24 + longest * 6.6; // with room for a dot
    const places = new Map();
    const room = Math.max(200, byId("map").clientWidth - 24); // none before the page is laid out
    if (30 + columns.length * (wide + GAP) > room && room < NARROW) return this.stacked(columns, step, wide, room);
    const gap = Math.max(GAP, Math.min(240, (room - columns.length * wide - HEADING) / Math.max(1, columns.length - 1)));
    columns.forEach((column, at) => {
      column.x = 30 + at * (wide + gap);
      const top = TOP + ((tallest - column.nodes.length) * step) / 2;
      column.nodes.forEach((node, row) => places.set(node, { x: column.x, y: top + row * step, column: at }));
    });
    const width = columns.at(-1).x + Math.max(wide, HEADING) + 10;
    return { columns, places, step, wide, tall: step - 8, width, height: TOP + 8 + tallest * step };
  }

  // where there is no room for columns: stages below each other
  stacked(columns, step, wide, room) {
    const places = new Map();
    const abreast = Math.max(1, Math.floor((room + SIDE) / (wide + SIDE)));
    let y = 0;
    columns.forEach((column, at) => {
      [column.x, column.y] = [2, y];
      column.nodes.forEach((node, number) => places.set(node, {
        x: 2 + (number % abreast) * (wide + SIDE), y: y + TOP + Math.floor(number / abreast) * (step + 4), column: at }));
      y += TOP + Math.ceil(column.nodes.length / abreast) * (step + 4) + 14;
    });
    return { columns, places, step, wide, tall: step - 8, width: Math.min(room, 2 + abreast * (wide + SIDE)), height: y,
      stacked: true };
  }

  draw() {
    if (!this.map.nodes.length) {
      byId("map").replaceChildren(make("p", { class: "note" }, "No plan yet: it is being made, or the run has not begun."));
      return;
    }
    const at = (this.at = this.layout());
    const svg = draw("svg", { width: at.width, height: at.height, role: "img", "aria-label": "nodes and links" });
    const loads = this.links.links.map((link) => link[2] + link[3]);
    const least = Math.min(...loads), most = Math.max(...loads);
    const level = (load) => (most > least
      ? Math.min(LEVELS - 1, Math.floor((LEVELS * Math.log(load / least)) / Math.log(most / least))) : LEVELS - 1);
    for (const [a, b, there, back] of [...this.links.links].reverse()) {
      if (!at.places.has(a) || !at.places.has(b)) continue;
      const [from, to] = [this.map.nodes[a].name, this.map.nodes[b].name];
      const told = `${from} → ${to}: ${bytes(there)}\n${to} → ${from}: ${bytes(back)}`;
      svg.append(draw("path", { class: `link load-${level(there + back)}`, d: this.line(a, b) }, draw("title", {}, told)));
    }
    this.paths = svg.appendChild(draw("g", {}));
    at.columns.forEach((column, number) => {
      const visits = this.links.visits[number], top = column.y ?? 0;
      svg.append(
        draw("text", { class: "stage", x: column.x, y: top + 16 }, column.title),
        draw("text", { class: "faint", x: column.x, y: top + 30 }, column.under),
        draw("text", { class: "faint", x: column.x, y: top + 44 }, visits === undefined ? "" : `${visits} microbatches`));
    });
    for (const [number, place] of at.places) svg.append(this.box(number, place));
    this.flight = svg.appendChild(draw("g", {}));
    this.svg = svg;
    byId("map").replaceChildren(svg);
    this.drawLoadLegend(least, most);
    this.drawPaths();
    this.fly();
  }

  box(number, place) {
    const node = this.map.nodes[number], { wide, tall } = this.at;
    const busy = this.recorded?.busy.get(node.name);
    const told = [
      `${node.name} (${node.location})`, `${STATUSES[node.status] ?? node.status}`,
      node.stage === null ? "holds no stage" : `stage ${node.stage}, on ${node.lanes} lanes, room for ${node.slots}`,
      ...(busy === undefined ? [] : [`computed for ${Math.round(busy * 100)} % of the recorded iteration`]),
    ].join("\n");
    if (number === this.chosenNode) byId("node-told").textContent = told.replaceAll("\n", "; ");
    const group = draw("g", { class: `node ${node.status}`, transform: `translate(${place.x} ${place.y})` },
      draw("title", {}, told), draw("rect", { class: "box", width: wide, height: tall, rx: 4 }));
    if (busy) group.append(draw("rect", { class: "busy", width: wide * Math.min(1, busy), height: tall, rx: 4 }));
    group.append(draw("text", { x: 6, y: tall / 2 + 4 },
      node.name.length > 18 ? `${node.name.slice(0, 17)}…` : node.name));
    if (number === this.chosenNode) group.classList.add("chosen");
    group.addEventListener("click", () => this.chooseNode(number));
    return group;
  }

  // from side to side; within a stage and where a column lies between, in an arc
  line(a, b, apart = 0) {
    let [from, to] = [this.at.places.get(a), this.at.places.get(b)];
    if (from.column > to.column) [from, to] = [to, from];
    if (this.at.stacked) return this.fall(from, to, apart);
    const middle = this.at.tall / 2 + apart;
    const [y1, y2] = [from.y + middle, to.y + middle];
    if (from.column === to.column) {
      const bulge = from.x - 8 - Math.min(20, Math.abs(y2 - y1) / 8);
      return `M${from.x} ${y1}C${bulge} ${y1} ${bulge} ${y2} ${to.x} ${y2}`;
    }
    const x1 = from.x + this.at.wide, pull = Math.min(70, (to.x - x1) / 2);
    return `M${x1} ${y1}C${x1 + pull} ${y1} ${to.x - pull} ${y2} ${to.x} ${y2}`;
  }

  // the same from top to bottom
  fall(from, to, apart) {
    const [x1, x2] = [from, to].map((place) => place.x + this.at.wide / 2 + apart);
    if (from.column === to.column) {
      const bulge = Math.min(from.y, to.y) - 14;
      return `M${x1} ${from.y}C${x1} ${bulge} ${x2} ${bulge} ${x2} ${to.y}`;
    }
    const y1 = from.y + this.at.tall, pull = Math.min(50, (to.y - y1) / 2);
    return `M${x1} ${y1}C${x1} ${y1 + pull} ${x2} ${to.y - pull} ${x2} ${to.y}`;
  }

  drawLoadLegend(least, most) {
    if (!Number.isFinite(most)) {
      byId("load-legend").replaceChildren(make("span", {}, "No tensors have been sent yet."));
      return;
    }
    const bound = (level) => least * (most / least) ** (level / LEVELS);
    const entries = most > least ? [...Array(LEVELS).keys()] : [LEVELS - 1];
    const spans = entries.map((level) => make("span", {},
      draw("svg", { width: 26, height: 8 }, draw("line", { class: `load-${level}`, x1: 0, y1: 4, x2: 26, y2: 4 })),
      level === LEVELS - 1 || most === least ? `up to ${bytes(most)}` : `up to ${bytes(bound(level + 1))}`));
    const { iteration, left_out: leftOut } = this.links;
    spans.unshift(make("span", {}, `Both directions together, in iteration ${iteration + 1}:`));
    if (leftOut) spans.push(make("span", {}, `${leftOut} links with the fewest bytes are not drawn`));
    byId("load-legend").replaceChildren(...spans);
  }

  drawLanes() {
    const { lanes, nodes } = this.map;
    byId("lane-count").textContent = lanes.length
      ? `${lanes.length} lanes, ${lanes.reduce((sum, lane) => sum + lane.microbatches, 0)} microbatches an iteration` : "";
    byId("lanes").replaceChildren(...lanes.map((lane, number) => {
      const dot = make("b");
      dot.style.background = lane.hue;
      const path = lane.path.map((node) => nodes[node].name).join(" → ");
      const row = make("li", { class: "lane", tabindex: 0 }, dot, ` ${number}: ${path} `,
        make("i", {}, `×${lane.microbatches}, stages ${lane.stages.join(" ")}`));
      const choose = () => this.choose(this.chosen.size === 1 && this.chosen.has(number) ? [] : [number]);
      row.addEventListener("click", choose);
      row.addEventListener("keydown", (key) => { if (key.key === "Enter") choose(); });
      return row;
    }));
    this.drawPaths();
  }

  chooseNode(number) {
    const again = this.chosenNode === number;
    const lanes = this.map.lanes.flatMap((lane, each) => (lane.path.includes(number) ? [each] : []));
    this.choose(again ? [] : lanes, again ? null : number);
  }

  choose(lanes, node = null) {
    byId("node-told").textContent = "\u00a0";
    this.chosen = new Set(lanes);
    this.chosenNode = node;
    this.draw();
  }

  drawPaths() {
    if (!this.svg) return;
    const shown = [...this.chosen].filter((lane) => this.map.lanes[lane]);
    this.svg.classList.toggle("paths-shown", shown.length > 0);
    this.paths.replaceChildren(...shown.flatMap((number, index) => {
      const { path, hue } = this.map.lanes[number];
      const apart = ((index % 7) - 3) * 1.6; // lanes over one link lie beside each other
      return path.slice(1).map((node, hop) => draw("path",
        { class: "path", stroke: hue, d: this.line(path[hop], node, shown.length > 1 ? apart : 0) }));
    }));
    [...byId("lanes").children].forEach((row, number) => row.classList.toggle("chosen", this.chosen.has(number)));
  }

  play(on) {
    this.playing = on && Boolean(this.recorded);
    byId("play").textContent = this.playing ? "Pause" : "Play";
    if (!this.playing) return;
    const slider = byId("moment");
    if (Number(slider.value) >= 1000) slider.value = 0;
    let before = performance.now();
    const turn = (now) => {
      if (!this.playing) return;
      slider.value = Math.min(1000, Number(slider.value) + (now - before) / REPLAY_S);
      if (Math.floor(now / 40) !== Math.floor(before / 40)) this.fly();
      before = now;
      if (Number(slider.value) >= 1000) this.play(false);
      else requestAnimationFrame(turn);
    };
    slider.step = "any";
    requestAnimationFrame(turn);
  }

  // where every microbatch of the recorded iteration was at the moment on the slider
  fly() {
    if (!this.flight || !this.recorded) return;
    const moment = (Number(byId("moment").value) / 1000) * this.recorded.end;
    const byName = new Map(this.map.nodes.map((node, number) => [node.name, number]));
    const dots = [];
    let computing = 0;
    for (const [lane, bars] of this.recorded.lanes) {
      const next = bars.findIndex((bar) => bar[3] > moment);
      if (next < 0 || (next === 0 && bars[0][2] > moment)) continue;
      const bar = bars[next], before = bars[next - 1];
      const [to, from] = [bar, before ?? bar].map((each) => this.middle(byName.get(this.recorded.rows[each[0]].name)));
      if (!to || !from || (before && before[5] !== bar[5] && bar[2] > moment)) continue; // its next has not set out
      const inside = bar[2] <= moment;
      computing += inside ? 1 : 0;
      const share = inside ? 1 : (moment - before[3]) / Math.max(1e-9, bar[2] - before[3]);
      dots.push(draw("circle", {
        class: "flying", r: 5, fill: this.recorded.hues[lane] ?? "#888",
        cx: from.x + share * (to.x - from.x), cy: from.y + share * (to.y - from.y),
      }, draw("title", {}, `lane ${lane}, microbatch ${bar[5]}`)));
    }
    this.flight.replaceChildren(...dots);
    byId("moment-told").textContent = `iteration ${this.recorded.iteration + 1}, as recorded, at ${seconds(moment)}: `
      + `${dots.length} microbatches in flight, ${computing} of them on a node`;
  }

  middle(number) {
    const place = this.at.places.get(number);
    return place && { x: place.x + this.at.wide - 10, y: place.y + this.at.tall / 2 };
  }
}

// what happened to every lane, and how busy nodes were
function recording(chart, bars) {
  const weights = chart.kinds.indexOf("weights");
  const end = bars.reduce((most, bar) => (bar[4] >= 0 ? Math.max(most, bar[3]) : most), 1e-9);
  const lanes = new Map(), busy = new Map();
  for (const bar of bars) {
    if (bar[4] < 0) continue;
    const { name } = chart.rows[bar[0]];
    busy.set(name, (busy.get(name) ?? 0) + (bar[3] - bar[2]) / end);
    if (bar[1] === weights) continue;
    if (!lanes.has(bar[4])) lanes.set(bar[4], []);
    lanes.get(bar[4]).push(bar);
  }
  for (const each of lanes.values()) each.sort((a, b) => a[2] - b[2]);
  return { iteration: chart.iteration, rows: chart.rows, hues: chart.hues, lanes, busy, end };
}
