// The page of `meshrl ui`: one view at a time, chosen by the address after #, drawn from the server's JSON.
import { drawNow } from "./now.js";
import { drawRollouts } from "./rollouts.js";
import { drawTimeline } from "./timeline.js";
import { drawWeights, drawLedger, drawCompare } from "./tables.js";
import { element, get } from "./page.js";

const VIEWS = {
  now: { title: "Now", draw: drawNow, live: true },
  rollouts: { title: "Rollouts", draw: drawRollouts },
  timeline: { title: "Timeline", draw: drawTimeline },
  weights: { title: "Weights", draw: drawWeights, live: true },
  ledger: { title: "Ledger", draw: drawLedger, live: true },
  compare: { title: "Compare", draw: drawCompare, live: true },
};

let runs = [];
let stream = null;
let drawing = 0; // counts redraws, so that a slow answer does not paint over a newer view

// #/RUN/VIEW?key=value, so that every view has an address that can be sent to somebody.
function where() {
  const [path, query] = (location.hash.slice(2) || "0/now").split("?");
  const [run, view] = path.split("/");
  return { run: Math.min(Number(run) || 0, runs.length - 1), view: VIEWS[view] ? view : "now", query: new URLSearchParams(query) };
}

async function draw() {
  const { run, view, query } = where();
  const number = ++drawing;
  document.querySelector("#run").value = String(run);
  document.querySelector("#views").replaceChildren(
    ...Object.entries(VIEWS).map(([name, { title }]) =>
      element("a", { href: `#/${run}/${name}`, class: name === view ? "here" : "" }, title),
    ),
  );
  const box = element("div");
  try {
    await VIEWS[view].draw(box, { run, runs, query, go: (values) => go(run, view, values) });
  } catch (error) {
    box.replaceChildren(element("p", { class: "error" }, String(error.message || error)));
  }
  if (number === drawing) document.querySelector("#view").replaceChildren(box);
}

function go(run, view, values) {
  location.hash = `/${run}/${view}?${new URLSearchParams(values)}`;
}

function listen() {
  const { run } = where();
  if (stream?.run === run) return;
  stream?.source.close();
  const source = new EventSource(`/api/runs/${run}/events`);
  const live = document.querySelector("#live");
  source.onmessage = () => {
    live.textContent = `seen ${new Date().toLocaleTimeString()}`;
    if (VIEWS[where().view].live) draw();
  };
  source.onerror = () => (live.textContent = "the server does not answer");
  stream = { run, source };
}

async function start() {
  runs = await get("/api/runs");
  const chooser = document.querySelector("#run");
  chooser.replaceChildren(...runs.map((run, place) => element("option", { value: place }, run.path)));
  chooser.onchange = () => go(chooser.value, where().view, {});
  addEventListener("hashchange", () => (listen(), draw()));
  listen();
  await draw();
}

start().catch((error) => document.querySelector("#view").replaceChildren(element("p", { class: "error" }, error.message)));
