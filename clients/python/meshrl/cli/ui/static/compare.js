// Compare: any metrics of several runs in one chart each, and where their configurations differ. And the list of runs.
import { chart, looks } from "./chart.js";
import { ask } from "./overview.js";
import { element, get, number, table } from "./page.js";

export async function drawCompare(box, { runs, query, go }) {
  const now = Object.fromEntries(query);
  const names = (now.metric || "reward/all/mean").split(",").filter(Boolean);
  const left = new Set((now.without || "").split(",").filter(Boolean));
  const shown = runs.map((run, place) => ({ ...run, place })).filter(({ place }) => !left.has(String(place)));
  const change = (values) => go({ ...now, ...values });
  const [bar, look] = looks(query, change);
  const [known, differences, ...found] = await Promise.all([
    Promise.all(shown.map(({ place }) => get(`/api/runs/${place}/metrics`))),
    get(`/api/differences?runs=${shown.map(({ place }) => place).join(",")}`),
    ...shown.map(({ place }) => ask(place, names, look.along)),
  ]);
  const all = [...new Set(known.flatMap((one) => one.names))].sort();
  const more = element("input", { list: "metrics", placeholder: "add a metric", "aria-label": "add a metric", onchange: (event) => all.includes(event.target.value) && change({ metric: [...new Set([...names, event.target.value])].join(",") }) });
  bar.append(more, element("datalist", { id: "metrics" }, ...all.map((name) => element("option", { value: name }))),
    ...names.map((name) => element("button", { title: "leave it out", onclick: () => change({ metric: names.filter((one) => one !== name).join(",") }) }, `${name} \u00d7`)));
  const tick = (run, place) => element("label", {}, element("input", { type: "checkbox", checked: !left.has(String(place)), onchange: (event) => {
    left[event.target.checked ? "delete" : "add"](String(place));
    change({ without: [...left].join(",") });
  } }), ` ${run.path}`);
  const series = (name) => shown.map(({ path }, at) => ({ label: path, x: found[at].series[name]?.[0], values: found[at].series[name]?.[1], steps: found[at].series[name]?.[2] }));
  const scores = names.flatMap((name) => series(name).map((one) => ({ ...one, name })));
  box.append(
    bar, element("div", { class: "bar" }, ...runs.map(tick)),
    element("div", { class: "charts wide" }, ...names.map((name) => chart(name, "", series(name), look))),
    table([["run", (one) => one.label], ["metric", (one) => one.name], ["points", (one) => one.x?.length, "number"], ["last", (one) => number(one.values?.at(-1)), "number"], ["best", (one) => (one.values ? number(Math.max(...one.values)) : "-"), "number"]], scores),
    element("h2", {}, "Where the configurations differ"),
    differences.length ? table([["key", (one) => one.key], ...shown.map(({ path }, at) => [path, (one) => one.values[at]])], differences) : element("p", { class: "none" }, "nowhere"),
  );
}

export async function drawRuns(box, { run, open }) {
  const runs = await get("/api/runs");
  box.append(table(
    [["run", (one) => one.path], ["state", (one) => (one.live ? "running" : one.ended_by ? `died: ${one.ended_by}` : "over")], ["step", (one) => one.step, "number"], ["of", (one) => one.max_steps, "number"], ["reward", (one) => number(one.reward), "number"], ["seconds a step", (one) => number(one.step_s), "number"], ["rollouts/s", (one) => number(one.rollouts_per_s), "number"], ["failed", (one) => number(one.errored), "number"], ["environments", (one) => one.environments.join(", ")]],
    runs, { open: (one) => open("overview", {}, runs.indexOf(one)) },
  ));
  const mesh = element("div", { class: "asking" });
  box.append(mesh);
  get(`/api/runs/${run}/now`).then(({ rows }) => drawMesh(mesh, rows)).catch((error) => mesh.append(element("p", { class: "error" }, error.message))).finally(() => mesh.classList.remove("asking"));
}

// All runs of the trainer that this run names, wherever their folders are.
function drawMesh(box, rows) {
  const found = rows.filter((row) => row.service === "trainer" && row.figures.run_id).map((row) => row.figures);
  const engines = rows.filter((row) => row.service === "engine");
  const held = (engine, run_id) => engine.figures.serves[run_id] ?? (found.length === 1 ? engine.version : null); // of one run, engines name no runs
  const served = ({ run_id }) => engines.filter((engine) => held(engine, run_id) !== null).map((engine) => `${engine.figures.engine_id}: ${held(engine, run_id)}`).join(", ");
  if (found.length) box.append(element("h2", {}, "Runs at this run's trainer"), table(
    [["run", (one) => one.run_id], ["phase", (one) => one.suspension ? `${one.phase}: ${one.suspension.message ?? ""}` : one.phase], ["step", (one) => one.step, "number"], ["version", (one) => one.version, "number"], ["versions at engines", served],
      ["checkpoint", (one) => one.durable_step || "none", "number"], ["batches that wait", (one) => one.queued_batches, "number"], ["tokens trained", (one) => number(one.tokens), "number"], ["share of the trainer", (one) => (one.used_share === null ? "-" : `${number(100 * one.used_share, 1)}%`), "number"]],
    found));
}
