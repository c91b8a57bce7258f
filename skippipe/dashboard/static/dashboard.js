// The page: hears of panels that have changed, and has them drawn. Names and texts that come from a run go in as text
// nodes and attributes, never as markup.
import { Chart, drawCurves } from "./dashboard-charts.js";
import { RunMap } from "./dashboard-map.js";
import { bytes, byId, count, make, seconds } from "./dashboard-words.js";

const SILENT_S = 60; // without news, at least, before a run counts as silent
// colours of events, which have the same names on the terminal and in files
const MOODS = {
  lost: "bad", restarted: "warn", replanned: "good", joined: "good", recovered: "good", paused: "bad", slow: "warn",
  "link-down": "warn", "not-finite": "warn", refused: "bad", checkpoint: "warn", checkpointed: "good", validation: "warn",
  "coordinator-restarted": "good", drill: "warn", ending: "warn", storage: "bad",
  grown: "good",
};

const map = new RunMap();
const chart = new Chart();
const panels = {};
let connected = false;

const drawn = {
  run: (run) => { drawRun(run); drawStatus(); },
  map: (found) => { map.show(found); drawRun(panels.run); },
  load: (found) => map.load(found),
  chart: (found) => { chart.show(found); map.record(found); },
  curves: drawCurves,
  events: drawEvents,
};

function connect() {
  const stream = new EventSource("stream");
  for (const [name, draw] of Object.entries(drawn)) {
    stream.addEventListener(name, (message) => {
      panels[name] = JSON.parse(message.data);
      draw(panels[name]);
      document.body.dataset[name] = Number(document.body.dataset[name] ?? 0) + 1;
    });
  }
  stream.addEventListener("open", () => { connected = true; drawStatus(); });
  stream.addEventListener("error", () => {
    connected = false;
    drawStatus();
    if (stream.readyState === EventSource.CLOSED) {
      stream.close();
      setTimeout(connect, 3000);
    }
  });
}

function drawRun(run) {
  if (!run) return;
  document.title = `${run.folder} · SkipPipe`;
  byId("folder").textContent = run.folder;
  byId("about").textContent = run.model
    ? `${run.model}, ${count(run.parameters)} weights, on ${run.nodes} nodes of “${run.cluster}”; ${run.stages} stages, `
      + `${run.visited} of them on a path; plan: ${run.strategy}`
    : "no plan yet";
  const lost = (panels.map?.nodes ?? []).filter((node) => node.status === "lost").length;
  const late = run.seconds && run.promised_s ? ` promised ${seconds(run.promised_s)}` : "";
  byId("tiles").replaceChildren(
    tile("iterations done", run.iterations.toLocaleString("en"), run.total ? ` of ${run.total.toLocaleString("en")}` : ""),
    tile("loss", run.loss === null ? "–" : run.loss.toFixed(4), run.validation_loss ? ` held out ${run.validation_loss.toFixed(4)}` : ""),
    tile("learning rate", run.learning_rate === null ? "–" : run.learning_rate.toPrecision(2)),
    tile("time so far", run.elapsed_s === null ? "–" : long(run.elapsed_s), run.left_s && !run.done ? ` ${long(run.left_s)} left` : ""),
    tile("tokens a second", run.tokens_per_s === null ? "–" : count(run.tokens_per_s)),
    tile("an iteration takes", run.seconds === null ? "–" : seconds(run.seconds), late),
    tile("sent in an iteration", run.sent_bytes === null ? "–" : bytes(run.sent_bytes)),
    tile("tokens so far", run.tokens === null ? "–" : count(run.tokens)),
    tile("nodes at work", run.nodes === undefined ? "–" : String(run.nodes), lost ? ` ${lost} lost` : ""),
  );
  const unread = Object.entries(run.unread).map(([file, lines]) => `${file}: ${lines}`);
  byId("unread").hidden = !unread.length;
  byId("unread").textContent = `Lines that could not be read were passed over (${unread.join(", ")}).`;
}

function tile(name, value, more = "") {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, more)));
}

function drawStatus() {
  const run = panels.run, status = byId("status");
  const age = run?.time ? Date.now() / 1000 - run.time : null;
  const patience = Math.max(SILENT_S, 5 * Math.max(run?.seconds ?? 0, run?.promised_s ?? 0));
  let [kind, text] = ["silent", "waiting for the first iteration"];
  if (!connected) [kind, text] = ["cut", "no connection to the page's server; trying again"];
  else if (run?.stopped) [kind, text] = ["done", run.resumable ? "stopped on request; train --resume goes on" : "stopped on request"];
  else if (run?.done) [kind, text] = ["done", "finished"];
  else if (age !== null && age > patience) [kind, text] = ["silent", `no news for ${long(age)}`];
  else if (age !== null) [kind, text] = ["training", `training; last iteration ${long(Math.max(0, age))} ago`];
  if (status.textContent !== text) status.textContent = text;
  status.className = kind;
}

function long(age) {
  if (age < 120) return `${Math.round(age)} s`;
  if (age < 7200) return `${Math.round(age / 60)} min`;
  return age < 172800 ? `${Math.round(age / 3600)} h` : `${Math.round(age / 86400)} days`;
}

function drawEvents(found) {
  byId("event-count").textContent = found.in_all > found.events.length
    ? `the newest ${found.events.length} of ${found.in_all}` : String(found.in_all);
  byId("events").replaceChildren(...found.events.map((event) => {
    const when = new Date(event.time * 1000);
    return make("li", { class: `event ${MOODS[event.kind] ?? ""}` },
      make("time", { title: when.toLocaleString() }, when.toLocaleTimeString()), " ",
      make("b", {}, event.kind), event.node ? ` ${event.node}` : "", `: ${event.text} `,
      make("i", {}, `iteration ${event.iteration + 1}`));
  }));
  if (!found.events.length) byId("events").append(make("li", {}, "Nothing so far: all goes as planned."));
}

setInterval(drawStatus, 1000);
connect();
