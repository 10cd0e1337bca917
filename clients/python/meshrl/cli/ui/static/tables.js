// Weights, Ledger and Compare: versions and engines, what became of every rollout, and runs beside each other.
import { chart, element, get, number, table } from "./page.js";

export async function drawWeights(box, { run }) {
  const names = ["weights/lag_s", "weights/pause_s", "policy/active_version", "off_policy/all/max", "weights/bytes", "weights/engines"];
  const { series } = await get(`/api/runs/${run}/metrics?names=${encodeURIComponent(names.join(","))}`);
  const one = (title, name) => chart(title, series[name] ? [{ label: name, steps: series[name][0], values: series[name][1] }] : []);
  const engines = element("div", {}, element("p", { class: "none" }, "asking the hub"));
  const swaps = element("div");
  box.append(engines, swaps, element("div", { class: "charts" },
    one("Lag of a version, seconds", "weights/lag_s"), one("Pause of an engine, seconds", "weights/pause_s"),
    one("Version that engines serve", "policy/active_version"), one("Oldest token trained, versions back", "off_policy/all/max")));
  get(`/api/runs/${run}/swaps`).then((found) => found.versions.length && swaps.append(element("h3", {}, "Which engine took which version: its pause, and how far it was behind the first"), matrix(found)));
  get(`/api/runs/${run}/now`).then((status) => {
    const rows = status.rows.filter((row) => row.service === "engine");
    engines.replaceChildren(rows.length
      ? table([["engine", (row) => row.detail.split(",")[0]], ["address", (row) => row.address], ["state", (row) => row.state], ["serves version", (row) => row.version, "number"], ["behind the trainer", (row) => row.lag, "number"], ["", (row) => row.detail.split(", ").slice(1).join(", ")]], rows)
      : element("p", { class: "none" }, "no hub answers: the run is over, or its services are elsewhere"));
  }, (error) => engines.replaceChildren(element("p", { class: "error" }, error.message)));
}

// Versions by engines; a version that an engine did not take is red, one that it took a second after another is orange.
function matrix({ versions, engines, cells }) {
  const words = (cell) => (cell ? `${number(cell.pause * 1e3, 1)} ms${cell.after > 0.001 ? `, +${number(cell.after, 2)} s` : ""}` : "not taken");
  const kind = (cell) => (!cell ? "missed" : cell.after > 1 ? "late" : "took");
  return element("table", { class: "matrix" },
    element("thead", {}, element("tr", {}, element("th", {}, "version"), ...engines.map((engine) => element("th", {}, engine)))),
    element("tbody", {}, ...versions.map((version, row) => element("tr", {}, element("td", {}, String(version)), ...cells[row].map((cell) => element("td", { class: kind(cell) }, words(cell)))))));
}

const LABELS = { dispatched: "in flight", finished: "ready" }; // what the ledger calls these, and what people do
const STATES = ["dispatched", "finished", "batched", "trained", "dropped", "failed", "cancelled"];

export async function drawLedger(box, { run }) {
  const rows = await get(`/api/runs/${run}/ledger`);
  if (!rows.length) {
    box.append(element("p", { class: "none" }, "this folder has no ledger, or nothing in it"));
    return;
  }
  const environments = [...new Set(rows.map((row) => row.environment))];
  const count = (environment, state) => rows.filter((row) => row.environment === environment && (!state || row.state === state)).reduce((sum, row) => sum + row.count, 0);
  const total = rows.reduce((sum, row) => sum + row.count, 0);
  const parts = STATES.map((state) => [state, rows.filter((row) => row.state === state).reduce((sum, row) => sum + row.count, 0)]).filter(([, one]) => one);
  box.append(
    element("div", { class: "funnel" }, ...[["all that were dispatched", total], ...parts].flatMap(([state, one]) => {
      const part = element("div", { class: `part ${state}` });
      part.style.width = `${(100 * one) / total}%`;
      return [element("span", {}, LABELS[state] ?? state), element("div", { class: "track" }, part), element("span", {}, `${number(one)}, ${number((100 * one) / total, 1)}%`)];
    })),
    table([["environment", (name) => name], ["dispatched", (name) => number(count(name)), "number"], ...STATES.map((state) => [LABELS[state] ?? state, (name) => number(count(name, state)), "number"])], environments),
    element("h3", {}, "Why rollouts were not trained"),
    table([["environment", (row) => row.environment], ["state", (row) => row.state], ["reason", (row) => row.reason], ["rollouts", (row) => number(row.count), "number"]],
      rows.filter((row) => row.reason).sort((one, other) => other.count - one.count)),
  );
}

export async function drawCompare(box, { runs, query, go }) {
  const name = query.get("metric") ?? "reward/all/mean";
  const metrics = await Promise.all(runs.map((_, place) => get(`/api/runs/${place}/metrics?names=${encodeURIComponent(name)}`)));
  const names = [...new Set((await Promise.all(runs.map((_, place) => get(`/api/runs/${place}/metrics`)))).flatMap((found) => found.names))].sort();
  const choice = element("select", { "aria-label": "metric", onchange: (event) => go({ metric: event.target.value }) },
    ...names.map((one) => element("option", { value: one, ...(one === name && { selected: true }) }, one)));
  const series = metrics.map(({ series }, place) => ({ label: runs[place].path, steps: series[name]?.[0], values: series[name]?.[1] }));
  box.append(element("div", { class: "bar" }, choice), chart(name, series),
    table([["run", (one) => one.label], ["steps", (one) => one.steps?.length, "number"], ["last", (one) => number(one.values?.at(-1)), "number"], ["best", (one) => (one.values ? number(Math.max(...one.values)) : "-"), "number"]], series));
}
