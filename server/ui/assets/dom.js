// Elements, made without markup: text stays text, whatever a job is called.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null));
  return element;
}

/** Makes an HTML element. Attributes that begin with `on` are listeners. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Makes a table. A column is `{title, number, cell(row)}`; the first one names the row. `caption` may be a node. */
export function table(caption, columns, rows) {
  const line = (row) =>
    el("tr", {}, columns.map((column, n) => {
      const cell = column.cell(row);
      const kind = column.number ? "number" : undefined;
      return n === 0 ? el("th", { scope: "row", class: kind }, cell) : el("td", { class: kind }, cell);
    }));
  const heads = columns.map((column) =>
    el("th", { scope: "col", class: column.number ? "number" : undefined }, column.title));
  return el("div", { class: "scroll" },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows.map(line))));
}

/** Makes a list of terms and what they are. */
export function terms(pairs) {
  return el("dl", {}, pairs.map(([term, what]) => [el("dt", {}, term), el("dd", {}, what)]));
}

/** Makes a strip of parts `[kind, size]`, with its words for those who do not see it. */
export function strip(parts, words, kind = "strip") {
  const all = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  let at = 0;
  const rects = parts.map(([part, size]) => {
    const rect = svg("rect", { class: part, x: (at / all) * 1000, y: 0, width: (size / all) * 1000, height: 10 });
    at += size;
    return rect;
  });
  return svg("svg", { class: kind, viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": words }, rects);
}
