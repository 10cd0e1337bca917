// Overview: how the run is in one sentence, what is wrong with it, its programs, and the curves that tell most.
import { chart, looks } from "./chart.js";
import { element, get, number, table } from "./page.js";

const ASK_AGAIN_MS = 4000;
// A title, a unit, metrics by name or pattern.
export const CHARTS = [
  ["Reward", "", ["reward/all/mean"], /^eval\/.*\/avg@\d+$/],
  ["Parts of the reward", "", [], /^reward_parts\/.*\/mean$/],
  ["Loss", "per token", ["loss/mean"]],
  ["Gradient norm", "before clipping", ["optim/grad_norm"]],
  ["Entropy", "nats", ["entropy/all/mean"]],
  ["Mismatch of engines and trainer", "KL, nats", ["mismatch_kl/all/mean", "mismatch_kl/all/max"]],
  ["Length of completions", "tokens", ["completion_len/all/mean", "completion_len/all/max"]],
  ["Cut off", "share", ["is_truncated/all/mean", "errored_rollouts/all", "filters/zero_signal"]],
  ["Lag of what is trained", "versions", ["off_policy/all/mean", "off_policy/all/max"]],
  ["Pace", "tokens/s", ["perf/inference_tokens_per_s", "perf/throughput"]],
  ["A step", "s", ["time/step", "time/wait_for_rollouts", "time/wait_for_ckpt"]],
  ["Idle", "share", ["idle/trainer", "perf/idle_slots"]],
];
const IDLE = ["time/wait_for_batch", "time/train_step"]; // idle/trainer is their quotient

// [title, unit, series] of each chart, from the answer {metric: [x, values, steps]} to `wanted(names)`.
export function wanted(names) {
  return [...CHARTS.flatMap(([, , fixed, more]) => [...fixed, ...(more ? names.filter((name) => more.test(name)) : [])]), ...IDLE];
}

export function curves(names, series) {
  const [waits, steps] = IDLE.map((name) => series[name]);
  if (waits && steps) series["idle/trainer"] = [waits[0], waits[1].map((wait, place) => (steps[1][place] ? wait / steps[1][place] : null)), waits[2]];
  const shown = ["idle/trainer", ...names];
  return CHARTS.map(([title, unit, fixed, more]) => {
    const of = [...fixed, ...(more ? shown.filter((name) => more.test(name)) : [])].filter((name) => series[name]);
    return [title, unit, of.map((name) => ({ label: name, x: series[name][0], values: series[name][1], steps: series[name][2] }))];
  }).filter(([, , of]) => of.length);
}

export const ask = (run, names, along) => get(`/api/runs/${run}/metrics?along=${along}&names=${encodeURIComponent(names.join(","))}`);

export async function drawOverview(box, { run, query, go, open }) {
  const { names, last } = await get(`/api/runs/${run}/metrics`);
  const [bar, look] = looks(query, (values) => go({ ...Object.fromEntries(query), ...values }));
  const { series } = await ask(run, wanted(names), look.along);
  const sentence = element("p", { class: "sentence" }, last ? `step ${last.step}, reward ${number(last["reward/all/mean"])}` : "no step has ended yet");
  const [services, trouble, charts] = [element("div"), element("div"), element("div", { class: "charts" })];
  const boxes = curves(names, series).map(([title, unit, of]) => chart(title, unit, of, look, (step) => open("timeline", { step })));
  charts.append(...boxes);
  box.append(sentence, trouble, bar, charts, services);
  drawTrouble(trouble, run);
  keepAsking(box, () => get(`/api/runs/${run}/now`).then((status) => drawServices(services, sentence, status), (error) => services.replaceChildren(element("p", { class: "error" }, error.message))));
  return async () => {
    const { series, last } = await ask(run, wanted(names), look.along);
    const found = curves(names, series);
    if (found.length !== boxes.length) return false; // there are new curves: the view is drawn anew
    found.forEach(([, , of], place) => boxes[place].update(of));
    drawTrouble(trouble, run);
    if (last) sentence.textContent = `step ${last.step}, reward ${number(last["reward/all/mean"])}`;
    return true;
  };
}

async function drawTrouble(box, run) {
  const found = await get(`/api/runs/${run}/doctor`);
  if (!found.length) return box.replaceChildren();
  box.replaceChildren(element("h2", {}, "What is wrong, the cause that explains most first"),
    table([["cause", (one) => one.cause], ["what one sees", (one) => one.symptom], ["evidence", (one) => one.evidence], ["what to do", (one) => (one.key ? `${one.key}: ${one.remedy}` : one.remedy)]], found));
}

function drawServices(box, sentence, status) {
  sentence.textContent = [status.headline, status.waiting, status.ended_by].filter(Boolean).join(status.ended_by ? ". It ended by: " : ". Now: ");
  const rows = status.running ? status.rows : status.rows.filter((row) => row.state !== "not answering");
  sentence.classList.toggle("unwell", Boolean(status.ended_by) || rows.some((row) => row.state === "not answering"));
  box.replaceChildren(
    ...(status.end ? [element("h2", {}, `${status.end.program} died at ${status.end.at}`), element("pre", { class: "log", tabindex: 0 }, status.end.log)] : []),
    ...(status.running || !rows.length ? [] : [element("p", { class: "none" }, "the run is over, and so are its services")]),
    ...(rows.length ? [table([["service", (row) => row.service], ["address", (row) => row.address], ["state", (row) => row.state], ["version", (row) => row.version, "number"], ["behind", (row) => row.lag, "number"], ["what it does", (row) => row.detail]], rows)] : []),
  );
}

// Services that do not answer take seconds: the charts do not wait for them. A run that stands still grows nothing that
// would have the page drawn anew, and it is then that somebody looks: so this part asks again by itself.
function keepAsking(box, refresh) {
  let shown = false;
  refresh();
  const timer = setInterval(() => {
    if (shown && !box.isConnected) clearInterval(timer);
    else if (box.isConnected && !document.hidden) {
      shown = true;
      refresh();
    }
  }, ASK_AGAIN_MS);
}
