// Timeline: what every program did during a step, a lane each; the wheel zooms, dragging moves.
import { element, get, number } from "./page.js";

const ROW = 14;
const MOST_ROWS = 8;
const FIRST = ["trainer", "weights", "inference", "orchestrator"]; // lanes that tell most come first
const LABELS = 130;
const WIDTH = 1400;
const NS = "http://www.w3.org/2000/svg";

export async function drawTimeline(box, { run, query, go }) {
  const step = query.get("step");
  const found = await get(`/api/runs/${run}/timeline${step ? `?step=${step}` : ""}`);
  const [first, last] = found.steps;
  const about = element("div", { id: "about" }, "point at a span");
  box.append(
    element("div", { class: "bar" },
      element("button", { onclick: () => go({ step: Math.max(first, found.step - 1) }) }, "earlier"),
      element("label", {}, "step ", element("input", { type: "number", min: first, max: last, value: found.step, onchange: (event) => go({ step: event.target.value }) })),
      element("button", { onclick: () => go({ step: Math.min(last, found.step + 1) }) }, "later"),
      element("span", {}, `${number(found.seconds)} s${found.left_out ? `; ${found.left_out} shorter spans are left out` : ""}`)),
    picture(found, about), about,
  );
}

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
  for (const letter of name.split(" ")[0]) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
  return `hsl(${hash} 55% 55%)`;
}

function node(name, attributes, parent, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function picture(found, about) {
  const svg = document.createElementNS(NS, "svg");
  let top = 16;
  const spans = [];
  const rank = (program) => (FIRST.includes(program) ? FIRST.indexOf(program) : FIRST.length);
  for (const [program, lane] of Object.entries(found.lanes).sort(([one], [other]) => rank(one) - rank(other))) {
    const places = rows(lane);
    const height = (Math.max(0, ...places) + 1) * ROW;
    node("text", { x: 4, y: top + 11 }, svg, program);
    node("line", { x1: 0, x2: WIDTH, y1: top + height + 3, y2: top + height + 3 }, svg);
    lane.forEach((span, place) => {
      const drawn = node("rect", { class: "span", y: top + places[place] * ROW, height: ROW - 2, fill: color(span.name), "fill-opacity": 0.75 }, svg);
      drawn.addEventListener("pointerenter", () => {
        about.textContent = `${span.name}: ${number(span.seconds, 4)} s, from ${number(span.start, 3)} s\n${Object.entries(span.about).map(([key, value]) => `${key} = ${value}`).join("\n")}`;
      });
      spans.push([drawn, span]);
    });
    top += height + 8;
  }
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${top}`);
  const ticks = node("g", {}, svg);
  const seen = { from: 0, to: found.seconds };
  function place() {
    const scale = (WIDTH - LABELS) / (seen.to - seen.from);
    for (const [drawn, span] of spans) {
      const from = Math.max(LABELS, LABELS + (span.start - seen.from) * scale);
      const to = Math.min(WIDTH, LABELS + (span.start + span.seconds - seen.from) * scale);
      drawn.setAttribute("visibility", to < LABELS || from > WIDTH ? "hidden" : "visible");
      drawn.setAttribute("x", from);
      drawn.setAttribute("width", Math.max(1, to - from));
    }
    ticks.replaceChildren();
    for (let part = 0; part <= 8; part++) {
      const at = seen.from + ((seen.to - seen.from) * part) / 8;
      const anchor = ["start", "end"][part / 8] ?? "middle";
      node("text", { x: LABELS + ((WIDTH - LABELS) * part) / 8, y: 11, "text-anchor": anchor }, ticks, `${number(at, 2)} s`);
    }
  }
  const at = (event) => seen.from + ((seen.to - seen.from) * Math.max(0, (event.offsetX / svg.clientWidth) * WIDTH - LABELS)) / (WIDTH - LABELS);
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const middle = at(event);
    const factor = event.deltaY < 0 ? 0.8 : 1.25;
    seen.from = middle - (middle - seen.from) * factor;
    seen.to = middle + (seen.to - middle) * factor;
    place();
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    const moved = (-event.movementX / svg.clientWidth) * (seen.to - seen.from) * 1.1;
    seen.from += moved;
    seen.to += moved;
    place();
  });
  place();
  return svg;
}
