// Environments: the reward, the pace and the failures of each, and what became of every rollout.
import { chart } from "./chart.js";
import { ask } from "./overview.js";
import { element, get, number, table } from "./page.js";

const LABELS = { dispatched: "in flight", finished: "ready" }; // what the ledger calls these, and what people do
const STATES = ["dispatched", "finished", "batched", "trained", "dropped", "failed", "cancelled"];
const CHARTS = [["Reward", "", "reward/*/mean"], ["Length of completions", "tokens", "completion_len/*/mean"], ["Time of a group", "s", "time/group/*/mean"], ["Failed", "share", "errored_rollouts/*"]];

export async function drawEnvironments(box, { run, open }) {
  const [{ rows, over_s }, { names, last }] = await Promise.all([get(`/api/runs/${run}/ledger`), get(`/api/runs/${run}/metrics`)]);
  const scored = names.map((name) => name.match(/^reward\/(.+)\/mean$/)?.[1]).filter((name) => name && name !== "all");
  const environments = [...new Set([...rows.map((row) => row.environment), ...scored])].sort();
  if (!environments.length) {
    box.append(element("p", { class: "none" }, "no environment has a rollout yet"));
    return;
  }
  const sum = (found, key = "count") => found.reduce((total, row) => total + row[key], 0);
  const of = (environment, state) => rows.filter((row) => row.environment === environment && (!state || row.state === state));
  const pace = (environment) => over_s && sum(of(environment).filter((row) => row.state !== "dispatched"), "lately") / over_s;
  const metric = (pattern) => (environment) => number(last?.[pattern.replace("*", environment)]);
  const columns = [["environment", (name) => name], ...CHARTS.map(([title, unit, pattern]) => [`${title.toLowerCase()}${unit ? `, ${unit}` : ""}`, metric(pattern), "number"]), ["turns", metric("num_turns/*/mean"), "number"]];
  box.append(table([...columns, ["rollouts/s", (name) => number(pace(name)), "number"], ...STATES.map((state) => [LABELS[state] ?? state, (name) => number(sum(of(name, state))), "number"])], environments));
  const { series } = await ask(run, CHARTS.flatMap(([, , pattern]) => environments.map((name) => pattern.replace("*", name))), "step");
  box.append(element("div", { class: "charts" }, ...CHARTS.map(([title, unit, pattern]) => chart(title, unit, environments.map((name) => {
    const [x, values, steps] = series[pattern.replace("*", name)] ?? [];
    return { label: name, x, values, steps };
  }), {}, (step) => open("rollouts", { step })))));
  if (rows.length) box.append(element("h2", {}, "What became of them"), funnel(rows, sum), element("h2", {}, "Why rollouts were not trained"),
    table([["environment", (row) => row.environment], ["state", (row) => row.state], ["reason", (row) => row.reason], ["rollouts", (row) => number(row.count), "number"], ["of them lately", (row) => number(row.lately), "number"]],
      rows.filter((row) => row.reason).sort((one, other) => other.count - one.count)));
}

function funnel(rows, sum) {
  const total = sum(rows);
  const parts = STATES.map((state) => [state, sum(rows.filter((row) => row.state === state))]).filter(([, one]) => one);
  return element("div", { class: "funnel" }, ...[["all that were dispatched", total], ...parts].flatMap(([state, one]) => {
    const part = element("div", { class: `part ${state}` });
    part.style.width = `${(100 * one) / total}%`;
    return [element("span", {}, LABELS[state] ?? state), element("div", { class: "track" }, part), element("span", {}, `${number(one)}, ${number((100 * one) / total, 1)}%`)];
  }));
}
