// Now: who waits for whom in one sentence, the services, and the six charts that tell most.
import { chart, element, get, number, table } from "./page.js";

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
  // Services that do not answer take seconds: the charts do not wait for them.
  get(`/api/runs/${run}/now`).then((status) => {
    sentence.textContent = [status.headline, status.waiting].filter(Boolean).join(". Now: ");
    sentence.classList.toggle("unwell", status.rows.some((row) => row.state === "not answering") && status.headline.includes(": running"));
    services.replaceChildren(
      table(
        [["service", (row) => row.service], ["address", (row) => row.address], ["state", (row) => row.state], ["version", (row) => row.version, "number"], ["behind", (row) => row.lag, "number"], ["what it does", (row) => row.detail]],
        status.rows,
      ),
    );
  }, (error) => services.replaceChildren(element("p", { class: "error" }, error.message)));
}
