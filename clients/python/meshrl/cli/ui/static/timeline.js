// Timeline: what every program did during a step, a lane each, and what it waited for.
import { element, get, node, number } from "./page.js";

const ROW = 14;
const MOST_ROWS = 8;
const FIRST = ["trainer", "weights", "engine", "inference", "orchestrator"]; // lanes that tell most come first
const LABELS = 150;
const WIDTH = 1400;

export async function drawTimeline(box, { run, query, go, open }) {
  const step = query.get("step");
  const found = await get(`/api/runs/${run}/timeline${step ? `?step=${step}` : ""}`);
  const [first, last] = found.steps;
  box.append(
    element("div", { class: "bar" },
      element("button", { onclick: () => go({ step: Math.max(first, found.step - 1) }) }, "earlier"),
      element("label", {}, "step ", element("input", { type: "number", min: first, max: last, value: found.step, onchange: (event) => go({ step: event.target.value }) })),
      element("button", { onclick: () => go({ step: Math.min(last, found.step + 1) }) }, "later"),
      element("button", { onclick: () => open("rollouts", { step: found.step }) }, "its rollouts"),
      element("button", { onclick: () => open("weights", { version: found.step }) }, "who serves its version"),
      element("span", {}, `${number(found.seconds)} s from its first group to its end${found.left_out ? `; ${found.left_out} shorter spans are left out` : ""}`)),
    ...lanes(found),
  );
}

// What a step waited for, its spans with a lane for each program, and what their colours stand for.
export function lanes(found) {
  const about = element("div", { id: "about", "aria-live": "polite" }, "point at a span; the wheel or + and - zoom, dragging or the arrow keys move, 0 shows all");
  return [element("ul", { class: "waits" }, ...found.waits.map((words) => element("li", {}, words))), element("div", { class: "scroll" }, picture(found, about)), legend(found), about];
}

// What each colour stands for, the longest spans first.
function legend(found) {
  const sums = {};
  for (const span of Object.values(found.lanes).flat()) sums[kind(span)] = (sums[kind(span)] ?? 0) + span.seconds;
  const shown = Object.entries(sums).sort(([, one], [, other]) => other - one).slice(0, 16);
  return element("p", { class: "legend" }, ...shown.map(([name, seconds]) => {
    const mark = element("i");
    mark.style.background = color(name);
    return element("span", {}, mark, ` ${name} ${number(seconds, 2)} s`);
  }));
}

const kind = (span) => span.name.split(" ")[0];

// Spans of a lane that overlap lie in rows one below the other; those for which there is no room share the last row.
function rows(spans) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start);
    if (row < 0) row = ends.length < MOST_ROWS ? ends.push(0) - 1 : MOST_ROWS - 1;
    ends[row] = span.start + span.seconds;
    return row;
  });
}

function color(name) {
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
  return `hsl(${hash} 55% 55%)`;
}

function picture(found, about) {
  const svg = node("svg", {});
  let top = 16;
  const spans = [];
  const rank = (program) => FIRST.findIndex((name) => program.startsWith(name)) + 1 || FIRST.length + 1;
  for (const [program, lane] of Object.entries(found.lanes).sort(([one], [other]) => rank(one) - rank(other))) {
    const places = rows(lane);
    const height = (Math.max(0, ...places) + 1) * ROW;
    node("text", { x: 4, y: top + 11 }, svg, program);
    node("line", { x1: 0, x2: WIDTH, y1: top + height + 3, y2: top + height + 3 }, svg);
    lane.forEach((span, place) => {
      const drawn = node("rect", { class: "span", y: top + places[place] * ROW, height: ROW - 2, fill: color(kind(span)), "fill-opacity": 0.75 }, svg);
      drawn.addEventListener("pointerenter", () => {
        about.textContent = `${span.name}: ${number(span.seconds, 4)} s, from ${number(span.start, 3)} s\n${Object.entries(span.about).map(([key, value]) => `${key} = ${value}`).join("\n")}`;
      });
      spans.push([drawn, span, node("text", { class: "name", y: top + places[place] * ROW + 9 }, svg, kind(span))]);
    });
    top += height + 8;
  }
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${top}`);
  const ticks = node("g", {}, svg);
  const seen = { from: 0, to: found.seconds };
  function place() {
    const scale = (WIDTH - LABELS) / (seen.to - seen.from);
    for (const [drawn, span, name] of spans) {
      const from = Math.max(LABELS, LABELS + (span.start - seen.from) * scale);
      const to = Math.min(WIDTH, LABELS + (span.start + span.seconds - seen.from) * scale);
      drawn.setAttribute("visibility", to < LABELS || from > WIDTH ? "hidden" : "visible");
      drawn.setAttribute("x", from);
      drawn.setAttribute("width", Math.max(1, to - from));
      name.setAttribute("x", from + 3);
      name.setAttribute("visibility", to - from > 7 * kind(span).length && to > LABELS && from < WIDTH ? "visible" : "hidden");
    }
    ticks.replaceChildren();
    for (let part = 0; part <= 8; part++) {
      const at = seen.from + ((seen.to - seen.from) * part) / 8;
      const anchor = ["start", "end"][part / 8] ?? "middle";
      node("text", { x: LABELS + ((WIDTH - LABELS) * part) / 8, y: 11, "text-anchor": anchor }, ticks, `${number(at, 2)} s`);
    }
  }
  const at = (event) => seen.from + ((seen.to - seen.from) * Math.max(0, (event.offsetX / svg.clientWidth) * WIDTH - LABELS)) / (WIDTH - LABELS);
  const zoom = (factor, middle = (seen.from + seen.to) / 2) => {
    seen.from = middle - (middle - seen.from) * factor;
    seen.to = middle + (seen.to - middle) * factor;
    place();
  };
  const move = (share) => {
    const moved = share * (seen.to - seen.from);
    seen.from += moved;
    seen.to += moved;
    place();
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, at(event));
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => event.buttons && move((-event.movementX / svg.clientWidth) * 1.1));
  const KEYS = { "+": () => zoom(0.8), "=": () => zoom(0.8), "-": () => zoom(1.25), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => {
    [seen.from, seen.to] = [0, found.seconds];
    place();
  } };
  svg.setAttribute("tabindex", 0);
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `what each program did in step ${found.step}`);
  svg.addEventListener("keydown", (event) => {
    if (!KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  place();
  return svg;
}
