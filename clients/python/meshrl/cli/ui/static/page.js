// What the views share: elements, answers of the server, numbers and tables.

// An element with attributes and children; text children are text, never markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// An element of a picture, in `parent` if there is one.
export function node(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent?.append(made);
  return made;
}

export async function get(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export const number = (value, digits = 3) =>
  value === null || value === undefined ? "-" : Number(value).toLocaleString("en", Math.abs(value) < 0.01 && value !== 0 ? { maximumSignificantDigits: digits } : { maximumFractionDigits: digits });

// A labelled choice among values, which are strings or [value, words].
export function choice(label, values, chosen, change) {
  const options = values.map((one) => (Array.isArray(one) ? one : [one, one]));
  return element("label", {}, `${label} `,
    element("select", { onchange: (event) => change(event.target.value) },
      ...options.map(([value, words]) => element("option", { value, selected: value === chosen }, words))));
}

// A table; a column is [title, value of a row, "number" where it is one]. Rows that open something take the keyboard.
export function table(columns, rows, { chosen, open } = {}) {
  const head = element("tr", {}, ...columns.map(([title, , kind = ""]) => element("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((row) =>
    element(
      "tr",
      {
        class: [open ? "link" : "", chosen?.(row) ? "chosen" : ""].join(" ").trim(),
        ...(open && { tabindex: 0, onclick: () => open(row), onkeydown: (event) => event.key === "Enter" && open(row) }),
      },
      ...columns.map(([, value, kind = ""]) => {
        const shown = value(row) ?? "-";
        return element("td", { class: kind }, shown instanceof Node ? shown : String(shown));
      }),
    ),
  );
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `table of ${rows.length}: ${columns.map(([title]) => title).filter(Boolean).join(", ")}` },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
