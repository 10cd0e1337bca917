// Rollouts: those that are kept of a step, a group side by side, and one as a conversation or token by token.
import { choice, element, get, number, table } from "./page.js";

export async function drawRollouts(box, { run, query, go }) {
  const now = Object.fromEntries(query);
  const found = await get(`/api/runs/${run}/rollouts?${new URLSearchParams({ ...(now.step && { step: now.step }), ...(now.words && { words: now.words }) })}`);
  if (!found.steps.length) {
    box.append(element("p", { class: "none" }, "no rollouts are kept; orchestrator.rollout_samples keeps some of every step"));
    return;
  }
  const choose = (values) => go({ ...now, step: found.step, ...values });
  const shown = found.rollouts.filter(
    (row) => (!now.env || row.environment === now.env) && (!now.picked || row.picked === now.picked) && (!now.group || row.group_id === now.group)
      && (!now.least || row.reward >= Number(now.least)) && (!now.most || row.reward <= Number(now.most)),
  );
  const list = table(
    [["picked", (row) => row.picked], ["environment", (row) => row.environment], ["reward", (row) => number(row.reward), "number"], ["advantage", (row) => number(row.advantage), "number"], ["turns", (row) => row.num_turns, "number"], ["ended by", (row) => row.finish_reason ?? row.reason], ["it says", (row) => row.says || row.message]],
    shown,
    { chosen: (row) => row.rollout_id === now.id, open: (row) => row.rollout_id && choose({ id: row.rollout_id }) },
  );
  const id = now.id ?? shown.find((row) => row.rollout_id)?.rollout_id;
  const place = (step, rollout) => `/api/runs/${run}/rollouts/${step}/${encodeURIComponent(rollout)}`;
  // Rollouts beside each other: the group of the one that is looked at, or one that was kept aside, of any step.
  const [asideStep, named] = (now.aside ?? "").split("/");
  const asideId = named === "best" ? await bestOf(run, asideStep, now.env) : named;
  const beside = now.group ? shown.filter((row) => row.rollout_id && row.rollout_id !== id).map((row) => [found.step, row.rollout_id]) : asideId ? [[asideStep, asideId]] : [];
  const columns = element("div", { class: beside.length ? "beside" : "" });
  box.append(filters(found, now, choose), element("div", { class: now.group ? "" : "two" }, list, columns));
  keys(box, shown.filter((row) => row.rollout_id).map((row) => row.rollout_id), id, found, choose);
  if (!id) return;
  if (named && !asideId) columns.append(element("p", { class: "none" }, `step ${asideStep} has no rollout to show beside it`));
  for (const [step, rollout] of [[found.step, id], ...beside]) {
    const column = element("article", {});
    columns.append(column);
    drawRollout(column, await get(place(step, rollout)), now, choose, place(step, rollout), step);
  }
}

async function bestOf(run, step, environment) {
  const { rollouts } = await get(`/api/runs/${run}/rollouts?step=${step}`);
  const played = rollouts.filter((row) => row.rollout_id && (!environment || row.environment === environment));
  return played.sort((one, other) => other.reward - one.reward)[0]?.rollout_id;
}

// j and k go through the list, [ and ] through the steps; not while somebody types.
function keys(box, ids, id, found, choose) {
  const listen = (event) => {
    if (!box.isConnected) return removeEventListener("keydown", listen);
    if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const moved = { j: 1, k: -1 }[event.key];
    const stepped = { "]": 1, "[": -1 }[event.key];
    if (moved && ids[ids.indexOf(id) + moved]) choose({ id: ids[ids.indexOf(id) + moved] });
    const step = stepped && found.steps[found.steps.indexOf(found.step) + stepped];
    if (step !== undefined && stepped) choose({ step, id: "", group: "" });
  };
  setTimeout(() => addEventListener("keydown", listen)); // once the box is in the page
}

function filters(found, now, choose) {
  const select = (name, words, values) => choice(words, [["", "all"], ...values.map((value) => [value, value])], now[name] ?? "", (value) => choose({ [name]: value, id: "" }));
  const bound = (name, words) => element("input", { type: "number", step: "any", placeholder: words, "aria-label": words, value: now[name] ?? "", onchange: (event) => choose({ [name]: event.target.value, id: "" }) });
  const steps = found.steps;
  const nearest = (wanted) => steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
  const place = steps.indexOf(found.step);
  return element("div", { class: "bar" },
    element("button", { onclick: () => choose({ step: steps[Math.max(0, place - 1)], id: "" }) }, "earlier"),
    element("label", {}, "step ", element("input", { type: "number", min: steps[0], max: steps.at(-1), value: found.step, onchange: (event) => choose({ step: nearest(Number(event.target.value)), id: "" }) })),
    element("button", { onclick: () => choose({ step: steps[Math.min(steps.length - 1, place + 1)], id: "" }) }, "later"),
    element("input", { type: "search", placeholder: "words in its messages", "aria-label": "words in its messages", value: now.words ?? "", onchange: (event) => choose({ words: event.target.value, id: "" }) }),
    select("env", "environment", [...new Set(found.rollouts.map((row) => row.environment))]),
    select("picked", "kept as", [...new Set(found.rollouts.map((row) => row.picked))]),
    bound("least", "reward from"), bound("most", "reward to"),
    element("input", { type: "number", min: steps[0], max: steps.at(-1), placeholder: "beside the best of step", "aria-label": "beside the best of step", onchange: (event) => choose({ aside: event.target.value && `${nearest(Number(event.target.value))}/best` }) }),
    ...(now.group ? [element("button", { onclick: () => choose({ group: "" }) }, "all groups")] : []),
    ...(now.aside ? [element("button", { onclick: () => choose({ aside: "" }) }, "nothing beside it")] : []),
    element("span", { class: "none" }, "keys: j k, [ ]"),
  );
}

function drawRollout(box, rollout, now, choose, place, step) {
  const parts = Object.entries(rollout.reward_parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  box.append(
    element("h2", {}, `${rollout.environment}: reward ${number(rollout.reward)}${parts ? ` (${parts})` : ""}, advantage ${number(rollout.advantage)}`),
    element("p", { class: "none" }, `rollout ${rollout.rollout_id} of step ${step}${rollout.trace_id ? `, trace ${rollout.trace_id}` : ""}`),
  );
  if (!rollout.samples) {
    box.append(element("p", { class: "error" }, `${rollout.reason}: ${rollout.message}`));
    return;
  }
  const compared = rollout.samples.some((sample) => sample.compared);
  const looks = ["conversation", "logprobs", ...(compared ? ["gap"] : []), "versions", "mask"];
  const look = looks.includes(now.look) ? now.look : "conversation";
  box.append(element("div", { class: "bar" }, ...looks.map((one) => element("button", { ...(one === look && { "aria-pressed": "true" }), onclick: () => choose({ look: one, id: rollout.rollout_id }) }, one)),
    element("button", { onclick: () => choose({ group: rollout.group_id, id: rollout.rollout_id }) }, "its group"),
    element("button", { onclick: () => choose({ aside: `${step}/${rollout.rollout_id}` }) }, "keep it aside")));
  if (look !== "conversation") box.append(legend(look, rollout.samples));
  for (const [number, sample] of rollout.samples.entries()) {
    sample.size = rollout.window;
    sample.windows = number ? [] : [rollout.first]; // tokens come when they are looked at
    sample.fetch = (window) => get(`${place}/tokens?sample=${number}&window=${window}`);
    for (const message of sample.messages) {
      const [first, end] = message.tokens;
      const body = look === "conversation" ? element("pre", {}, message.text) : tokens(sample, first, end, look);
      box.append(element("div", { class: `message ${message.role}` }, element("h3", {}, `${message.role}, tokens ${first} to ${end}`), body));
    }
  }
}

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (character) => ESCAPES[character]);
const BLOCK = 256; // tokens that are made at once, when they come near to what is seen

// The tokens, by what they say where the model's vocabulary is known and else by id, coloured by how unlikely each was
// when it was sampled, by how far the trainer's logprob is from the engine's, or by the version that sampled it. Tokens
// that were not sampled, which no loss looks at, are pale.
// Blocks that are far away stay empty, and their tokens unread: 32,000 elements take a browser a second.
function tokens(sample, first, end, look) {
  const box = element("div", { class: "tokens" });
  const fill = (block) => {
    const [from, to] = [Number(block.dataset.from), Number(block.dataset.to)];
    const window = Math.floor(from / sample.size);
    const draw = (tokens) => {
      sample.windows[window] = tokens;
      block.style.minHeight = "";
      block.innerHTML = markup(sample, tokens, from, to, look); // escaped there
    };
    const held = (sample.windows[window] ??= sample.fetch(window));
    if (held instanceof Promise) held.then(draw, () => delete sample.windows[window]);
    else draw(held);
  };
  const watch = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach(({ target }) => {
    watch.unobserve(target);
    fill(target);
  }), { rootMargin: "300px" });
  for (let from = first, to; from < end; from = to) {
    to = Math.min(end, from + BLOCK, (Math.floor(from / sample.size) + 1) * sample.size); // of one window
    const block = element("div", { class: "block", "data-from": from, "data-to": to });
    box.append(block);
    if (from === first) {
      fill(block); // at once, not with the next frame
      continue;
    }
    if (to - from === BLOCK) block.style.minHeight = "8rem";
    watch.observe(block);
  }
  return box;
}

const GAPS = [0.01, 0.1, 0.5]; // nats; both sides are rounded to 0.00001

function gapShade(gap) {
  const size = GAPS.filter((bound) => Math.abs(gap) > bound).length;
  return size === 0 ? "g0" : `${gap > 0 ? "p" : "n"}${size}`;
}

// Shade and words of a token that was sampled.
function shadeOf(sample, tokens, at, place, look) {
  const logprob = tokens.logprobs[at];
  if (look === "versions") {
    const found = sample.versions.findIndex(([from, to]) => from <= place && place < to);
    return [`v${Math.max(0, found) % 4}`, `version ${Number(sample.versions[found]?.[2])}`];
  }
  if (look === "logprobs") return [`t${logprob > -0.1 ? 1 : logprob > -1 ? 2 : logprob > -3 ? 3 : 4}`, `logprob ${Number(logprob)}`];
  const trained = tokens.trainer_logprobs?.[at] ?? null;
  if (look === "mask") return trained === null ? ["t3", "sampled; its loss is masked, or the trainer's logprob was not kept"] : ["t1", "sampled and trained"];
  if (trained === null) return ["untrained", `not trained, engine ${Number(logprob)}`];
  const gap = trained - logprob;
  return [gapShade(gap), `gap ${gap > 0 ? "+" : ""}${gap.toFixed(5)}: trainer ${Number(trained)}, engine ${Number(logprob)}`];
}

function markup(sample, tokens, first, end, look) {
  let html = "";
  for (let place = first; place < end; place++) {
    const at = place % sample.size;
    const [shade, about] = tokens.logprobs[at] === null ? ["t0", "not sampled"] : shadeOf(sample, tokens, at, place, look);
    const id = Number(tokens.token_ids[at]);
    const piece = tokens.pieces?.[at];
    const text = piece === undefined || piece === "" ? id : escape(piece).replace(/\n/g, "\u23ce\n");
    html += `<i class="${shade}" title="${about}, token ${id}">${text}</i>`;
  }
  return html;
}

const LEGENDS = {
  logprobs: [["t0", "not sampled, no loss"], ["t1", "logprob above -0.1"], ["t2", "above -1"], ["t3", "above -3"], ["t4", "below"]],
  gap: [
    ["t0", "not sampled, no loss"], ["untrained", "not trained"], ["n3", "trainer's logprob lower by more than 0.5"], ["n2", "0.1"], ["n1", "0.01"],
    ["g0", "the same within 0.01"], ["p1", "higher by more than 0.01"], ["p2", "0.1"], ["p3", "0.5"],
  ],
  versions: [["t0", "not sampled, no loss"]],
  mask: [["t0", "not sampled, no loss"], ["t1", "sampled and trained"], ["t3", "sampled; masked, or the trainer's logprob was not kept"]],
};

function legend(look, samples) {
  const versions = look === "versions" ? samples.flatMap((sample) => sample.versions.map(([, , version], place) => [`v${place % 4}`, `version ${version}`])) : [];
  const shown = [...new Map([...LEGENDS[look], ...versions].map((one) => [one.join(), one])).values()];
  return element("p", { class: "tokens" }, ...shown.flatMap(([shade, words]) => [element("i", { class: shade }, words), " "]));
}
