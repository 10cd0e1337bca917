// Now: who waits for whom in one sentence, the services, and the six charts that tell most.
import { chart, element, get, number, table } from "./page.js";

const ASK_AGAIN_MS = 2000;
const CHARTS = [
  ["Reward", ["reward/all/mean"], /^eval\/.*\/avg@\d+$/],
  ["Seconds a step", ["time/step", "time/wait_for_rollouts", "time/wait_for_batch"]],
  ["Tokens a second", ["perf/inference_tokens_per_s", "perf/throughput"]],
  ["Mismatch KL", ["mismatch_kl/all/mean", "mismatch_kl/all/max"]],
  ["Staleness in versions", ["off_policy/all/mean", "off_policy/all/max"]],
  ["Completion length, tokens", ["completion_len/all/mean", "completion_len/all/max"]],
];

export async function drawNow(box, { run }) {
  const { names, last } = await get(`/api/runs/${run}/metrics`);
  const charts = CHARTS.map(([title, fixed, more]) => [title, [...fixed, ...(more ? names.filter((name) => more.test(name)) : [])]]);
  const { series } = await get(`/api/runs/${run}/metrics?names=${encodeURIComponent(charts.flatMap(([, wanted]) => wanted).join(","))}`);
  const sentence = element("p", { class: "sentence" }, last ? `step ${last.step}, reward ${number(last["reward/all/mean"])}` : "no step has ended yet");
  const services = element("div");
  box.append(
    sentence,
    element("div", { class: "charts" }, ...charts.map(([title, wanted]) => chart(title, wanted.filter((name) => series[name]).map((name) => ({ label: name, steps: series[name][0], values: series[name][1] }))))),
    services,
  );
  // Services that do not answer take seconds: the charts do not wait for them. A run that stands still grows nothing that
  // would have the page drawn anew, and it is then that somebody looks: so this part asks again by itself.
  let shown = false;
  const refresh = () => get(`/api/runs/${run}/now`).then((status) => {
    sentence.textContent = [status.headline, status.waiting, status.ended_by].filter(Boolean).join(status.ended_by ? ". It ended by: " : ". Now: ");
    sentence.classList.toggle("unwell", Boolean(status.ended_by) || (status.headline.includes(": running") && (status.rows.some((row) => row.state === "not answering"))));
    services.replaceChildren(
      table(
        [["service", (row) => row.service], ["address", (row) => row.address], ["state", (row) => row.state], ["version", (row) => row.version, "number"], ["behind", (row) => row.lag, "number"], ["what it does", (row) => row.detail]],
        status.rows,
      ),
    );
  }, (error) => services.replaceChildren(element("p", { class: "error" }, error.message)));
  refresh();
  const timer = setInterval(() => {
    if (shown && !box.isConnected) clearInterval(timer);
    else if (box.isConnected) {
      shown = true;
      refresh();
    }
  }, ASK_AGAIN_MS);
}
