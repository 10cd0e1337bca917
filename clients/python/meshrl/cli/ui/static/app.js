// The page of `meshrl ui`: one view at a time, chosen by the address after #, drawn from the server's JSON.
import { drawCompare, drawRuns } from "./compare.js";
import { drawEnvironments } from "./environments.js";
import { drawHosts } from "./hosts.js";
import { drawOverview } from "./overview.js";
import { element, get } from "./page.js";
import { drawRollouts } from "./rollouts.js";
import { drawTimeline } from "./timeline.js";
import { drawWeights } from "./weights.js";

// A view that is `live` is drawn anew when the run goes on, or refreshes itself by the function that its `draw` returns.
const VIEWS = {
  overview: { title: "Overview", draw: drawOverview, live: true },
  rollouts: { title: "Rollouts", draw: drawRollouts },
  timeline: { title: "Timeline", draw: drawTimeline },
  weights: { title: "Weights", draw: drawWeights, live: true },
  environments: { title: "Environments", draw: drawEnvironments, live: true },
  hosts: { title: "Hosts", draw: drawHosts, live: true },
  compare: { title: "Compare", draw: drawCompare },
  runs: { title: "Runs", draw: drawRuns, live: true },
};

const OLDER = { ledger: "environments" }; // names of views in addresses that somebody may have kept

let runs = [];
let stream = null;
let drawing = 0; // counts redraws, so that a slow answer does not paint over a newer view
let refresh = null;

// #/RUN/VIEW?key=value, so that every view has an address that can be sent to somebody.
function where() {
  const [path, query] = (location.hash.slice(2) || "0/overview").split("?");
  const [run, named] = path.split("/");
  const view = OLDER[named] ?? named;
  return { run: Math.min(Number(run) || 0, runs.length - 1), view: VIEWS[view] ? view : "overview", query: new URLSearchParams(query) };
}

async function draw() {
  const { run, view, query } = where();
  const number = ++drawing;
  refresh = null;
  document.querySelector("#run").value = String(run);
  document.title = `${VIEWS[view].title} - meshrl`;
  document.querySelector("#views").replaceChildren(
    ...Object.entries(VIEWS).map(([name, { title }]) =>
      element("a", { href: `#/${run}/${name}`, class: name === view ? "here" : "", "aria-current": name === view && "page" }, title),
    ),
  );
  const box = element("div");
  let again = null;
  try {
    again = await VIEWS[view].draw(box, { run, runs, query, go: (values) => go(run, view, values), open: (other, values, of = run) => go(of, other, values) });
  } catch (error) {
    box.replaceChildren(element("p", { class: "error" }, String(error.message || error)));
  }
  if (number !== drawing) return;
  document.querySelector("#view").replaceChildren(box);
  refresh = again ?? null;
}

function go(run, view, values) {
  const given = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "" && value !== undefined));
  location.hash = `/${run}/${view}?${new URLSearchParams(given)}`;
}

async function follow() {
  if (!VIEWS[where().view].live) return;
  if (!refresh || !(await refresh())) await draw();
}

function listen() {
  const { run } = where();
  if (stream?.run === run) return;
  stream?.source.close();
  const source = new EventSource(`/api/runs/${run}/events`);
  const live = document.querySelector("#live");
  let first = true; // of what the view shows already
  source.onmessage = () => {
    live.textContent = `seen ${new Date().toLocaleTimeString()}`;
    if (!first) follow();
    first = false;
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
