"use strict";
// Elements, and numbers for people. Text from the plan becomes text nodes and nothing else.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.setAttribute("class", value);
    else if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const color = (i) => `var(--c${i % 8})`;
const axisColor = (axis) => color([5, 0, 2, 3, 1, 4, 6, 7][axis % 8]); // neighbouring axes far apart in hue

// -- numbers: the same as base/quantities.py

// As Python rounds: a tie, which only a multiple of a power of two can be, goes to the even digit; toFixed takes the upper.
function fixed(x, digits) {
  const scaled = x * 10 ** digits, tie = Number.isInteger(x * 2 ** (digits + 1)) && Math.abs(scaled % 1) === 0.5;
  return (tie ? 2 * Math.round(scaled / 2) / 10 ** digits : x).toFixed(digits);
}
const three = (x) => fixed(x, Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2);

function seconds(x) {
  if (x === null || x === undefined) return "-";
  if (x === 0) return "0";
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
    if (Math.abs(x) >= scale * 0.9995) return `${three(x / scale)} ${unit}`;
  return `${three(x / 1e-9)} ns`;
}

function size(x) {
  if (x === null || x === undefined) return "-";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(x) < 1023.95) return unit === "B" ? `${fixed(x, 0)} B` : `${three(x)} ${unit}`;
    x /= 1024;
  }
  return `${three(x)} TiB`;
}

const share = (part, whole) => (whole > 0 ? `${fixed(100 * part / whole, 1)} %` : "");
const count = (x) => (x === null ? "-" : String(x));
const FORMATS = { seconds, bytes: size, count };

const SHORT = { baselines: "Baselines", layers: "Layouts", memory: "Memory", changes: "Changes", prices: "Alternatives", fallbacks: "Without a rule" };

function section(id, title, ...children) {
  document.getElementById("sections").append(h("li", {}, h("a", { href: `#${id}` }, SHORT[id] || title)));
  document.getElementById("content").append(
    h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), ...children));
}
// A dotted name, which may break after a dot.
const dotted = (text) => text.split(/(?<=[.:/])/).flatMap((part) => [part, h("wbr")]).slice(0, -1);
const quiet = (text) => h("p", { class: "quiet" }, text);
const facts = (pairs) => h("dl", { class: "facts" }, ...pairs.flatMap(([label, text]) => [h("dt", {}, label), h("dd", {}, text)]));
const big = (pairs) => h("dl", { class: "big" }, ...pairs.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text))));

function key(items) { // items: [label, text, color, hatched]
  return h("ul", { class: "key" }, ...items.map(([label, text, hue, hatched]) =>
    h("li", {}, h("i", { class: hatched ? "hatched" : "", style: { backgroundColor: hue } }), `${label} `, h("b", {}, text))));
}
