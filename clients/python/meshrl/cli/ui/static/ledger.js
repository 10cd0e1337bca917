// Ledger: what became of every rollout, and why some were not trained.
import { element, get, number, table } from "./page.js";

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
    element("h2", {}, "Why rollouts were not trained"),
    table([["environment", (row) => row.environment], ["state", (row) => row.state], ["reason", (row) => row.reason], ["rollouts", (row) => number(row.count), "number"]],
      rows.filter((row) => row.reason).sort((one, other) => other.count - one.count)),
  );
}
