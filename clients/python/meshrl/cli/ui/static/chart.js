// Charts of metrics, drawn by uPlot: drag to zoom, double click to see all, click a point to open its step.
import { element, number } from "./page.js";

const COLORS = ["#2f6fde", "#c9372c", "#2e9e5b", "#b8860b", "#8e44ad", "#0b8793", "#d2589b", "#7a7a00"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const HEIGHT = 210;
export const ALONG = [["step", "step"], ["tokens", "trained tokens"], ["time", "seconds of training"]];

// An exponential mean that forgets a share `keep` less with each point, and begins unbiased.
export function smoothed(values, keep) {
  if (!keep) return values;
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

const short = (value) => (value === null ? "" : Math.abs(value) >= 1e4 || (Math.abs(value) < 1e-3 && value !== 0) ? value.toExponential(1) : number(value));

// The columns of a chart: x, then each series as it is and smoothed.
function columns(series, { keep, log }) {
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const parts = series.map((one) => [one.x, positive(one.values), ...(keep ? [positive(smoothed(one.values, keep))] : [])]);
  return uPlot.join(parts);
}

// uPlot's own range of an axis, but 0 to 1 for what is 0 throughout: its own would end at 100.
const range = (_, low, high) => (low === 0 && high === 0 ? [0, 1] : low === null ? [null, null] : uPlot.rangeNum(low, high, 0.1, true));

// A chart of series [{label, x, values, steps}]; `open(step)` is called for a click. Its `update(series)` draws new data.
export function chart(title, unit, series, look = {}, open) {
  const { keep = 0, log = false, along = "step" } = look;
  const box = element("section", { class: "chart", "aria-label": title }, element("h2", {}, title, ...(unit ? [element("small", {}, ` ${unit}`)] : [])));
  let drawn = series.filter((one) => one.x?.length);
  if (!drawn.length) {
    box.append(element("p", { class: "none" }, "nothing yet"));
    return Object.assign(box, { update: () => {} });
  }
  const ink = getComputedStyle(document.body).color;
  const lines = drawn.flatMap((one, place) => {
    const style = { stroke: COLORS[place % COLORS.length], dash: DASHES[Math.floor(place / COLORS.length) % DASHES.length], spanGaps: true, value: (_, value) => number(value, 4) };
    const raw = { ...style, label: one.label, width: 1.5, points: { show: one.x.length < 60, size: 4 } };
    return keep ? [{ ...raw, width: 1, alpha: 0.3, points: { show: false } }, { ...style, label: "smoothed", width: 2, points: { show: false } }] : [raw];
  });
  const axis = { stroke: ink, grid: { stroke: "#8883" }, ticks: { stroke: "#8883" }, font: "11px system-ui", labelFont: "11px system-ui", labelSize: 16 };
  const plot = new uPlot(
    {
      width: Math.min(400, innerWidth - 60), height: HEIGHT,
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
      axes: [{ ...axis, label: ALONG.find(([name]) => name === along)[1], size: 34, values: (_, ticks) => ticks.map(short) }, { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
      cursor: { sync: { key: "meshrl" }, drag: { x: true, y: false } },
      series: [{ label: ALONG.find(([name]) => name === along)[1], value: (_, value) => number(value, 0) }, ...lines],
    },
    columns(drawn, look), box,
  );
  const canvas = plot.root.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${title}: ${drawn.map((one) => `${one.label} is ${number(one.values.at(-1))}`).join(", ")}`);
  if (open) {
    let pressed = 0;
    plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    plot.over.addEventListener("mouseup", (event) => {
      if (Math.abs(event.clientX - pressed) > 2 || plot.cursor.idx === null) return; // a drag zooms
      const x = plot.data[0][plot.cursor.idx];
      const at = drawn[0].x.reduce((best, one, place) => (Math.abs(one - x) < Math.abs(drawn[0].x[best] - x) ? place : best), 0);
      open(drawn[0].steps[at]);
    });
  }
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 16), height: HEIGHT })).observe(box);
  return Object.assign(box, {
    plot,
    update: (series) => {
      const found = series.filter((one) => one.x?.length);
      if (found.length !== drawn.length) return;
      const zoomed = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1);
      drawn = found;
      plot.setData(columns(drawn, look), !zoomed);
    },
  });
}

// The controls of how charts look, in the address: smoothing, log scale, and what they run along.
export function looks(query, change) {
  const keep = Number(query.get("keep") ?? 0);
  const bar = element("div", { class: "bar" },
    element("label", {}, "smoothing ", element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: keep, onchange: (event) => change({ keep: event.target.value }) })),
    element("label", {}, element("input", { type: "checkbox", checked: query.get("log") === "1", onchange: (event) => change({ log: event.target.checked ? "1" : "" }) }), " log scale"),
    element("label", {}, "along ", element("select", { onchange: (event) => change({ along: event.target.value }) },
      ...ALONG.map(([value, words]) => element("option", { value, selected: value === query.get("along") }, words)))));
  return [bar, { keep, log: query.get("log") === "1", along: query.get("along") || "step" }];
}
