// Weights: who serves what now, and how each engine took the newest ones.
import { chart } from "./chart.js";
import { ask } from "./overview.js";
import { element, get, number, table } from "./page.js";

const CHARTS = [
  ["Lag of a version", "s", "weights/lag_s"], ["Pause of an engine", "s", "weights/pause_s"], ["Bytes of a version", "bytes", "weights/bytes"],
  ["Version that engines serve", "version", "policy/active_version"], ["Oldest token trained", "versions back", "off_policy/all/max"],
];

export async function drawWeights(box, { run, open }) {
  const { series } = await ask(run, CHARTS.map(([, , name]) => name), "step");
  const [engines, swaps] = [element("div", {}, element("p", { class: "none" }, "asking the hub")), element("div")];
  const shown = CHARTS.filter(([, , name]) => series[name]).map(([title, unit, name]) =>
    chart(title, unit, [{ label: name, x: series[name][0], values: series[name][1], steps: series[name][2] }], {}, (step) => open("rollouts", { step })));
  box.append(engines, swaps, element("div", { class: "charts" }, ...shown));
  get(`/api/runs/${run}/swaps`).then((found) => found.versions.length && swaps.append(element("h2", {}, "Which engine took which version: its pause, and how far it was behind the first"), matrix(found)));
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
