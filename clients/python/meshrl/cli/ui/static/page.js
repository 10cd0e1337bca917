// What the views share: elements, answers of the server, charts and tables.

// An element with attributes and children; text children are text, never markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export async function get(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export const number = (value, digits = 3) =>
  value === null || value === undefined ? "-" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });

const COLORS = ["#2f6fde", "#c9372c", "#2e9e5b", "#b8860b", "#8e44ad", "#0b8793"];

// A chart of series [{label, steps, values}] over steps.
export function chart(title, series) {
  const box = element("div", { class: "chart" }, element("h3", {}, title));
  const drawn = series.filter((one) => one.steps?.length);
  if (!drawn.length) {
    box.append(element("p", { class: "none" }, "nothing yet"));
    return box;
  }
  const data = uPlot.join(drawn.map((one) => [one.steps, one.values]));
  const plot = new uPlot(
    {
      width: 400,
      height: 190,
      scales: { x: { time: false } },
      axes: [{ stroke: "gray", grid: { stroke: "#8883" } }, { stroke: "gray", grid: { stroke: "#8883" }, size: 60 }],
      series: [
        { label: "step" },
        ...drawn.map((one, place) => ({ label: one.label, stroke: COLORS[place % COLORS.length], width: 1.5, spanGaps: true, points: { show: one.steps.length < 60, size: 4 } })),
      ],
    },
    data,
    box,
  );
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 16), height: 190 })).observe(box);
  return box;
}

// A table; a column is [title, value of a row, "number" where it is one].
export function table(columns, rows, { chosen, open } = {}) {
  const head = element("tr", {}, ...columns.map(([title, , kind = ""]) => element("th", { class: kind }, title)));
  const body = rows.map((row) =>
    element(
      "tr",
      { class: [open ? "link" : "", chosen?.(row) ? "chosen" : ""].join(" ").trim(), ...(open && { onclick: () => open(row) }) },
      ...columns.map(([, value, kind = ""]) => element("td", { class: kind }, String(value(row) ?? "-"))),
    ),
  );
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}
