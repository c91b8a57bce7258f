// The Gantt chart of a recorded iteration, on a canvas since it may have tens of thousands of bars; and curves.
import { byId, bytes, colour, count, draw, make, seconds } from "./dashboard-words.js";

const BRIEF = 1.35; // an iteration this many times as long as its passes is shown whole
const NARROWEST = 300; // pixels; where there is less room, it scrolls
const NEUTRAL = { averaging: "#a9b2bd", optimizer: "#4d4d4d" };
const SHADES = { forward: [255, 0.5], head: [255, 0], backward: [0, 0.15], weights: [0, 0.5] };
const CURVES = [
  ["loss", "Loss (dashed: held out)", (value) => value.toFixed(4), "validation_loss"],
  ["tokens_per_s", "Tokens a second", count, null, true],
  ["seconds", "Seconds", (value) => value.toFixed(2), "promised_s", true],
  ["sent_bytes", "Bytes sent in an iteration", bytes, null, true],
];

const dark = matchMedia("(prefers-color-scheme: dark)");

export class Chart {
  constructor() {
    this.chart = { iteration: null };
    byId("whole").addEventListener("change", () => this.draw());
    addEventListener("resize", () => this.draw());
    dark.addEventListener("change", () => this.draw());
    byId("chart-bars").addEventListener("mousemove", (event) => this.tell(event));
  }

  show(chart) {
    this.chart = chart;
    this.draw();
  }

  draw() {
    const { chart } = this, there = chart.iteration !== null;
    for (const id of ["chart", "chart-legend"]) byId(id).hidden = !there;
    byId("chart-count").textContent = there ? `iteration ${chart.iteration + 1}` : "";
    byId("chart-told").textContent = there ? "\u00a0" : "None is recorded yet; report.recorded in the job says how often.";
    if (!there) return;
    const all = [...chart.planned, ...chart.measured];
    const end = (bars) => bars.reduce((most, bar) => Math.max(most, bar[3]), 0);
    const passes = end(all.filter((bar) => bar[4] >= 0)), whole = end(all);
    byId("whole-label").hidden = whole <= BRIEF * passes;
    const shown = whole > BRIEF * passes && !byId("whole").checked ? 1.05 * passes : whole;
    const longest = Math.max(...chart.rows.map((row) => `${row.stage} ${row.name}`.length));
    const row = chart.rows.length > 60 ? 13 : chart.rows.length > 24 ? 18 : 24;
    const width = Math.max(NARROWEST, byId("chart").clientWidth - 16);
    const names = Math.min(170, 0.4 * width, 20 + 6.5 * longest);
    this.at = { names, row, width, shown, scale: (width - names - 8) / Math.max(1e-9, shown) };
    this.drawLegend();
    this.drawAxis();
    this.drawBars();
  }

  y(row) {
    return row * this.at.row + this.chart.rows[row].stage * 6;
  }

  drawBars() {
    const { chart, at } = this;
    const height = this.y(chart.rows.length - 1) + at.row + 4;
    const paper = sheet(byId("chart-bars"), at.width, height);
    paper.font = `${Math.min(12, at.row - 3)}px system-ui, "DejaVu Sans", sans-serif`;
    paper.textBaseline = "middle";
    chart.rows.forEach((row, number) => {
      paper.fillStyle = colour("text");
      paper.fillText(`${row.stage}  ${row.name}`, 2, this.y(number) + at.row / 2, at.names - 6);
      paper.fillStyle = colour("line");
      paper.fillRect(at.names, this.y(number) + at.row - 1, at.width - at.names, 0.5);
    });
    paper.save();
    paper.beginPath();
    paper.rect(at.names, 0, at.width - at.names, height);
    paper.clip();
    paper.fillStyle = colour("line");
    for (const time of ticks(0, at.shown, this.wanted())) paper.fillRect(at.names + time * at.scale, 0, 1, height);
    const half = (at.row - 3) / 2;
    [chart.planned, chart.measured].forEach((bars, track) => {
      paper.globalAlpha = track ? 1 : 0.55;
      for (const bar of bars) {
        const kind = chart.kinds[bar[1]];
        paper.fillStyle = NEUTRAL[kind] ?? shade(chart.hues[bar[4]] ?? "#888888", kind);
        const wide = Math.max(0.6, (bar[3] - bar[2]) * at.scale - 0.3);
        paper.fillRect(at.names + bar[2] * at.scale, this.y(bar[0]) + 1 + track * half, wide, half - 0.4);
      }
    });
    paper.restore();
  }

  drawAxis() {
    const { at } = this, paper = sheet(byId("chart-axis"), at.width, 22);
    const times = ticks(0, at.shown, this.wanted()), small = times[1] < 0.1;
    paper.font = '11px system-ui, "DejaVu Sans", sans-serif';
    paper.fillStyle = colour("faint");
    paper.fillText("stage, node", 2, 14, at.names - 4);
    for (const time of times) {
      const x = at.names + time * at.scale;
      paper.fillRect(x, 17, 1, 5);
      paper.textAlign = x > at.width - 40 ? "right" : "left";
      paper.fillText(small ? `${+(time * 1000).toFixed(2)} ms` : `${+time.toFixed(2)} s`, x + 2, 12);
    }
  }

  wanted() {
    return Math.max(2, (this.at.width - this.at.names) / 90);
  }

  drawLegend() {
    const swatch = (fill, words, opacity = 1) => make("span", {},
      draw("svg", { width: 18, height: 10 }, draw("rect", { width: 18, height: 10, rx: 2, fill, opacity })), words);
    const hue = "#0072B2", used = new Set([...this.chart.planned, ...this.chart.measured].map((bar) => bar[1]));
    const kinds = this.chart.kinds.filter((_, number) => used.has(number));
    const words = { head: "head and loss", weights: "weight gradients", averaging: "averaging gradients",
      optimizer: "optimizer step (measured: the one before)" };
    byId("chart-legend").replaceChildren(
      swatch(hue, "planned: upper half, paler", 0.55), swatch(hue, "measured: lower half"),
      ...kinds.map((kind) => swatch(NEUTRAL[kind] ?? shade(hue, kind), words[kind] ?? kind)),
      make("span", {}, "The hue tells at which data node a microbatch began."));
  }

  tell(event) {
    const { chart, at } = this;
    const time = (event.offsetX - at.names) / at.scale;
    const row = chart.rows.findIndex((_, number) => event.offsetY >= this.y(number) && event.offsetY < this.y(number) + at.row);
    if (row < 0 || time < 0) return;
    const found = ["planned", "measured"].map((track) => {
      const bar = chart[track].find((each) => each[0] === row && each[2] <= time && time < each[3]);
      if (!bar) return `${track}: idle`;
      const whose = bar[4] < 0 ? "" : ` of lane ${bar[4]}, microbatch ${bar[5]}`;
      return `${track}: ${chart.kinds[bar[1]]}${whose}, ${seconds(bar[2])} to ${seconds(bar[3])}`;
    });
    byId("chart-told").textContent = `${chart.rows[row].name} at ${seconds(time)} — ${found.join("; ")}`;
  }
}

function sheet(canvas, width, height) {
  const density = Math.min(2, devicePixelRatio || 1);
  canvas.width = width * density;
  canvas.height = height * density;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const paper = canvas.getContext("2d");
  paper.scale(density, density);
  return paper;
}

function shade(hue, kind) {
  const [towards, share] = SHADES[kind] ?? [255, 0];
  const base = dark.matches ? 0.3 : 0; // of white, so that dark hues stand out
  const mixed = (value, other, part) => (1 - part) * value + part * other;
  const part = (at) => Math.round(mixed(mixed(parseInt(hue.slice(at, at + 2), 16), 255, base), towards, share));
  return `rgb(${part(1)} ${part(3)} ${part(5)})`;
}

// round numbers from low to high, about as many as wanted
function ticks(low, high, wanted, least = 0) {
  const rough = Math.max(least, (high - low) / wanted, 1e-12), size = 10 ** Math.floor(Math.log10(rough));
  const step = size * ([1, 2, 5, 10].find((each) => each * size >= rough * 0.999) ?? 10);
  const from = Math.ceil(low / step - 1e-6), to = Math.floor(high / step + 1e-6);
  return Array.from({ length: Math.max(0, to - from + 1) }, (_, at) => (from + at) * step);
}

export function drawCurves(curves) {
  const shown = CURVES.filter(([name]) => curves[name].some((value) => value !== null));
  byId("curves").replaceChildren(...(shown.length ? shown.map((curve) => drawn(curves, ...curve))
    : [make("p", { class: "note" }, "No iteration is done yet.")]));
}

function drawn(curves, name, title, worded, second = null, fromZero = false) {
  const lines = [name, second].filter((each) => each && curves[each].some((value) => value !== null));
  if (lines.length > 1) title += " (dashed: promised)";
  const values = lines.flatMap((each) => curves[each]).filter((value) => value !== null);
  const low = fromZero ? 0 : Math.min(...values), high = Math.max(...values);
  const [first, last] = [curves.iteration[0], curves.iteration.at(-1)];
  const x = (iteration) => (last > first ? (1000 * (iteration - first)) / (last - first) : 500);
  const y = (value) => 100 - (high > low ? (94 * (value - low)) / (high - low) : 50) - 3;
  const heights = high > low ? ticks(low, high, 4) : [low], places = ticks(first + 1, last + 1, 5, 1);
  const svg = draw("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": title },
    ...heights.map((value) => draw("line", { x1: 0, x2: 1000, y1: y(value), y2: y(value) })),
    ...places.map((number) => draw("line", { x1: x(number - 1), x2: x(number - 1), y1: 97, y2: 100 })));
  lines.forEach((each, number) => {
    for (const points of pieces(curves.iteration, curves[each])) {
      if (points.length === 1) points.push([points[0][0] + Math.max(1, (last - first) / 200), points[0][1]]);
      svg.append(draw("polyline", {
        class: number ? "second" : "", points: points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(2)}`).join(" "),
      }));
    }
  });
  const told = make("output"), newest = curves[name].findLast((value) => value !== null);
  const rest = () => { told.textContent = newest === undefined ? "" : worded(newest); };
  rest();
  const cursor = svg.appendChild(draw("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" }));
  svg.addEventListener("mousemove", (event) => {
    const wanted = first + ((last - first) * event.offsetX) / svg.clientWidth;
    const at = curves.iteration.reduce((best, each, index) =>
      (Math.abs(each - wanted) < Math.abs(curves.iteration[best] - wanted) ? index : best), 0);
    cursor.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(curves.iteration[at]));
    const value = curves[name][at];
    told.textContent = `iteration ${curves.iteration[at] + 1}: ${value === null ? "not finite" : worded(value)}`;
  });
  svg.addEventListener("mouseleave", () => { rest(); cursor.setAttribute("visibility", "hidden"); });
  const mean = curves.mean_of > 1 ? ` (means of ${curves.mean_of})` : "";
  const plot = make("div", { class: "plot" }, svg,
    ...heights.map((value) => label("tick left", worded(value), "top", y(value))),
    ...places.map((number) => label("tick below", number.toLocaleString("en"), "left", x(number - 1) / 10)));
  return make("div", { class: "curve" }, make("h3", {}, title, " ", told), plot,
    make("div", { class: "scale" }, `iteration${mean}`));
}

function label(kind, text, side, percent) {
  const found = make("span", { class: kind }, text);
  found.style[side] = `${percent}%`;
  return found;
}

// where a value is missing the line is broken
function pieces(iterations, values) {
  const found = [[]];
  values.forEach((value, index) => {
    if (value !== null) found.at(-1).push([iterations[index], value]);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((piece) => piece.length);
}
