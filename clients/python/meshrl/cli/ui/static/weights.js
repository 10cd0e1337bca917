// Weights: who serves what now, the versions as a graph, and how each engine took them.
import { chart } from "./chart.js";
import { ask } from "./overview.js";
import { element, get, node, number, table } from "./page.js";

const CURVES = [
  ["Lag of a version", "s", "weights/lag_s"], ["Pause of an engine", "s", "weights/pause_s"], ["Bytes of a version", "bytes", "weights/bytes"],
  ["Version that engines serve", "version", "policy/active_version"], ["Oldest token trained", "versions back", "off_policy/all/max"],
];
const RAIL = 14; // a run's line in the graph, and a row's height
const HIGH = 28;

export async function drawWeights(box, { run, query, open }) {
  const { series } = await ask(run, CURVES.map(([, , name]) => name), "step");
  const [engines, graph] = [element("div", {}, element("p", { class: "none" }, "asking the hub")), element("div")];
  const shown = CURVES.filter(([, , name]) => series[name]).map(([title, unit, name]) =>
    chart(title, unit, [{ label: name, x: series[name][0], values: series[name][1], steps: series[name][2] }], {}, (step) => open("rollouts", { step })));
  box.append(engines, graph, element("div", { class: "charts" }, ...shown));
  const draw = (found, rows) => graph.replaceChildren(...(found.versions.length ? [element("h2", {}, "Versions, and which engine took them"), versions(found, rows, query.get("version"), open)] : []));
  const asked = get(`/api/runs/${run}/versions`);
  asked.then((found) => draw(found, []));
  get(`/api/runs/${run}/now`).then(async (status) => {
    const rows = status.rows.filter((row) => row.service === "engine");
    engines.replaceChildren(rows.length
      ? table([["engine", (row) => row.figures.engine_id], ["address", (row) => row.address], ["state", (row) => row.state], ["serves version", (row) => row.version, "number"], ["behind the trainer", (row) => row.lag, "number"], ["", (row) => row.detail.split(", ").slice(1).join(", ")]], rows)
      : element("p", { class: "none" }, "no hub answers: the run is over, or its services are elsewhere"));
    draw(await asked, rows);
  }, (error) => engines.replaceChildren(element("p", { class: "error" }, error.message)));
}

// A row a version, the newest first: squares are full versions (anchors), circles deltas, which hang on their base.
export function versions({ versions, engines }, rows, wanted, open) {
  const runs = [...new Set(versions.map((one) => one.run_id ?? ""))].sort();
  const serves = (one, engine) => rows.some(({ figures, version }) => figures.engine_id === engine && (figures.serves?.[one.run_id] ?? version) === one.version);
  // When each engine took its first and its last version; one that another came after was gone by then.
  const stays = Object.fromEntries(engines.map((engine) => [engine, versions.filter((one) => one.engines[engine]).map((one) => one.sealed)]));
  const first = (engine) => Math.min(...stays[engine]);
  const last = (engine) => Math.max(...stays[engine]);
  const absent = (one, engine) => one.sealed < first(engine) || engines.some((other) => first(other) > last(engine) && one.sealed >= first(other));
  const columns = [
    ["", (one) => rails(versions, one, runs)], ["version", (one) => one.version, "number"], ...(runs.length > 1 ? [["run", (one) => one.run_id]] : []),
    ["kind", (one) => (one.kind === "delta" ? `delta of ${one.base}` : one.kind === "adapter" ? "adapter" : "full")],
    ["MB", (one) => number(one.bytes / 1e6), "number"], ["of its weights", (one) => (one.full_bytes ? `${number((100 * one.bytes) / one.full_bytes, 2)}%` : "-"), "number"],
    ["by", (one) => one.transport], ["lag, s", (one) => number(one.lag), "number"],
    ...engines.map((engine) => [`pause at ${engine}`, (one) => taken(one.engines[engine], serves(one, engine), absent(one, engine))]),
  ];
  const chosen = (one) => String(one.version) === wanted;
  return table(columns, versions, { chosen, open: open && ((one) => open("timeline", { step: one.version })) });
}

function taken(cell, serves, absent) {
  if (!cell && absent) return "-";
  const words = cell ? `${number(cell.pause * 1e3, 1)} ms${cell.after > 0.01 ? `, ${number(cell.after, 2)} s after the first` : ""}` : "not taken";
  return element("span", { class: `took ${!cell ? "missed" : cell.after > 1 ? "late" : ""}` }, words, ...(serves ? [element("b", {}, " serves now")] : []));
}

// The part of the graph in the row of a version: a line for each run, which a delta above it may pass on the way to its base.
function rails(versions, one, runs) {
  const svg = node("svg", { class: "rails", width: RAIL * runs.length, height: HIGH, "aria-hidden": true });
  runs.forEach((run, place) => {
    const x = RAIL * (place + 0.5);
    const [row, line] = [versions.indexOf(one), versions.map((other) => (other.run_id ?? "") === run && other)];
    const own = line[row];
    const above = line.slice(0, row).some((other) => other && other.kind === "delta" && other.base <= one.version && !line.slice(0, row).some((base) => base && base.version === other.base));
    if (above) node("line", { x1: x, x2: x, y1: 0, y2: own ? HIGH / 2 : HIGH }, svg);
    if (!own) return;
    if (one.kind === "delta") node("line", { x1: x, x2: x, y1: HIGH / 2, y2: HIGH }, svg);
    if (one.kind === "delta") node("circle", { cx: x, cy: HIGH / 2, r: 4 }, svg);
    else node("rect", { x: x - 5, y: HIGH / 2 - 5, width: 10, height: 10 }, svg);
  });
  return svg;
}
