// Hosts: where the programs of a run are, who plays rollouts and how that goes, workers that dialled in among them.
import { element, get, number, table } from "./page.js";

const kinds = (failures) => Object.entries(failures ?? {}).sort(([, one], [, other]) => other - one).map(([kind, count]) => `${kind} ${number(count)}`).join(", ");
const PLAYS = [
  ["rollouts at", (row) => row.address], ["state", (row) => row.state], ["environments", (row) => row.figures.environments?.join(", ")],
  ...["running", "queued", "finished"].map((name) => [name, (row) => number(row.figures[name]), "number"]),
  ["rollouts/s", (row) => number(row.figures.rollouts_per_s), "number"], ["failures by kind", (row) => kinds(row.figures.failures)],
  ["not heard of for, s", (row) => number(row.figures.silent_s, 1), "number"], ["", (row) => (row.state === "serving" && row.service === "rollout" ? "" : row.detail)],
];
const ENGINES = [["engine", (row) => row.figures.engine_id], ["host", (row) => row.figures.host], ["address", (row) => row.address], ["state", (row) => row.state], ["version", (row) => row.version, "number"]];
const PROGRAMS = [
  ["program", (one) => one.program], ["host", (one) => one.host], ["process", (one) => one.pid, "number"], ["serves", (one) => one.serves.join(", ")],
  ["waits for", (one) => one.waits.map((wait) => `${wait.what}, ${number(wait.seconds, 0)} s`).join("; ")], ["event loop late, s", (one) => number(one.loop_lag_s), "number"],
];

export async function drawHosts(box, { run }) {
  const status = await get(`/api/runs/${run}/now`);
  const of = (...services) => status.rows.filter((row) => services.includes(row.service) && (status.running || row.state !== "not answering"));
  const parts = [["Who plays rollouts", PLAYS, of("rollout", "exchange")], ["Engines", ENGINES, of("engine")], ["Programs", PROGRAMS, status.programs]];
  box.append(...parts.filter(([, , rows]) => rows.length).flatMap(([title, columns, rows]) => [element("h2", {}, title), table(columns, rows)]));
  if (!status.running) box.prepend(element("p", { class: "none" }, "the run is over: no service answers"));
}
