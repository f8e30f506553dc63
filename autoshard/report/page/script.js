"use strict";
// Draws the report from the JSON in #data. Text from the plan becomes text nodes and nothing else.

const data = JSON.parse(document.getElementById("data").textContent);
const ROWS = 60; // rows of a table before its "Show all" button

// -- elements ----------------------------------------------------------------------------------------

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

// -- numbers for people: the same as report/units.py ---------------------------------------------------

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

// -- sections ------------------------------------------------------------------------------------------

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

const STEP_COLORS = { "compute": color(0), "blocking communication": color(5), "exposed communication": color(1),
                      "slowdown by hidden": color(6), "optimizer update": color(2), "hidden communication": color(3) };

function bar(parts, whole, label, thin = false) { // parts: [label, value]
  return h("div", { class: thin ? "bar thin" : "bar", role: "img", "aria-label": label }, ...parts.filter(([, value]) => value > 0).map(
    ([name, value]) => h("i", { class: thin ? "hatched" : "", title: `${name}: ${seconds(value)}`,
                                style: { width: `${100 * value / whole}%`, backgroundColor: STEP_COLORS[name] || color(7) } })));
}

function summary() {
  const counted = data.step.filter((part) => part.counts), hidden = data.step.filter((part) => !part.counts && part.seconds > 0);
  const total = counted.reduce((sum, part) => sum + part.seconds, 0);
  const words = data.step.map((part) => `${part.label} ${seconds(part.seconds)}`).join(", ");
  section("summary", "Summary",
    big([["step", seconds(data.objective)], [data.tied ? "bound of tied plans" : "proven bound", data.bound > 0 ? seconds(data.bound) : "none"],
         ["gap", data.bound > 0 ? (data.gap <= 1e-9 ? "0 %" : `${Number((100 * data.gap).toPrecision(3))} %`) : "-"],
         ["memory a rank", size(data.memory.total)],
         ["of its limit", data.memory.limit ? share(data.memory.total, data.memory.limit) : "no limit"]]),
    bar(counted.map((p) => [p.label, p.seconds]), total, `Step time: ${words}`),
    hidden.length ? bar(hidden.map((p) => [p.label, p.seconds]), total, `Beside compute: ${words}`, true) : null,
    key(data.step.filter((p) => p.seconds > 0).map((p) =>
      [p.label, p.counts ? `${seconds(p.seconds)} (${share(p.seconds, total)})` : `${seconds(p.seconds)} (not added)`,
       STEP_COLORS[p.label] || color(7), !p.counts])),
    facts(data.facts));
}

function comparison() {
  const found = data.comparison;
  if (!found) return;
  const longest = Math.max(...found.rows.map((row) => row.step || 0));
  const best = found.rows[0].step;
  const labels = [...new Set(found.rows.flatMap((row) => row.parts.filter(([, value]) => value > 0).map(([label]) => label)))];
  const rows = found.rows.map((row, i) => h("tr", { class: i ? "" : "first" },
    h("td", {}, h("b", {}, row.name), row.axes ? h("div", { class: "quiet" }, row.axes) : null,
      row.note ? h("div", { class: "quiet" }, row.note) : null),
    h("td", { class: "chart" }, row.step === null ? "" :
      bar(row.parts, longest, row.parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", "))),
    h("td", { class: "number" }, seconds(row.step)),
    h("td", { class: "number" }, row.step === null || !best ? "" : `${(row.step / best).toFixed(2)} x`),
    h("td", { class: "number" }, size(row.memory)),
    h("td", {}, row.step === null ? "" : row.fits ? "fits" : "does not fit")));
  const heads = [["plan", ""], ["predicted step", ""], ["", "number"], ["of the chosen", "number"], ["memory", "number"], ["", ""]];
  section("baselines", "Beside plans made by hand",
    key(labels.map((label) => [label, "", STEP_COLORS[label] || color(7)])),
    scroll("Baselines", h("table", { class: "baselines" }, h("thead", {}, h("tr", {}, ...heads.map(([t, c]) => h("th", { class: c, scope: "col" }, t)))),
                          h("tbody", {}, ...rows))),
    ...found.notes.map(quiet));
}

// -- tables --------------------------------------------------------------------------------------------

const scroll = (label, node) => h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, node);

// Rows `only` (default: all) of a named table: sortable; a row opens the rows of other tables that explain it.
// Columns are left out that are empty, or that only repeat what is `known`: title -> text of the row that was opened.
function table(name, only = null, known = {}) {
  const source = data.tables[name], kinds = source.columns.map(([, kind]) => kind), explained = source.detail !== null;
  let order = only ? [...only] : source.rows.map((_, i) => i), sorted = null, ascending = true, all = false, wanted = "";
  const used = source.columns.map((_, c) => c).filter((c) => order.some(
    (i) => source.rows[i][c] !== "" && source.rows[i][c] !== null && source.rows[i][c] !== known[source.columns[c][0]]));

  const body = h("tbody"), left = h("p", { class: "quiet" });
  const heads = used.map((c) => {
    const numeric = kinds[c] in FORMATS;
    return h("th", { scope: "col", class: numeric ? "number" : "", "aria-sort": "none" },
      h("button", { type: "button", onclick: () => sort(c) }, source.columns[c][0]));
  });
  const head = h("thead", {}, h("tr", {}, explained ? h("th", { class: "more" }) : null, ...heads));

  function sort(c) {
    ascending = sorted === c ? !ascending : !(kinds[c] in FORMATS); // the largest numbers first
    sorted = c;
    const of = (i) => source.rows[i][c];
    const compare = (a, b) => of(a) === of(b) ? a - b : of(a) === null ? 1 : of(b) === null ? -1
      : (typeof of(a) === "number" ? of(a) - of(b) : of(a).localeCompare(of(b), "en", { numeric: true })) * (ascending ? 1 : -1);
    order.sort(compare);
    heads.forEach((th, k) => th.setAttribute("aria-sort", used[k] !== c ? "none" : ascending ? "ascending" : "descending"));
    draw();
  }

  function cell(value, kind) {
    if (kind in FORMATS) return h("td", { class: "number" }, FORMATS[kind](value));
    const text = value === null ? "-" : value;
    if (kind === "name") return h("td", { class: kind }, ...dotted(text));
    if (kind !== "source") return h("td", { class: kind }, text);
    return h("td", { class: "name source", title: text }, text.split("/").slice(-2).join("/"));
  }

  function row(i) {
    const cells = used.map((c) => cell(source.rows[i][c], kinds[c]));
    const chosen = source.columns[0][0] === "chosen" && source.rows[i][0] !== "";
    const detail = explained ? source.detail[i].filter(([, rows]) => rows === null || rows.length) : [];
    if (!explained) return [h("tr", { class: chosen ? "chosen" : "" }, ...cells)];
    if (!detail.length) return [h("tr", {}, h("td", { class: "more" }), ...cells)];
    const button = h("button", { type: "button", "aria-expanded": "false", "aria-label": `Details of ${source.rows[i][0]}`, onclick: toggle }, "+");
    const first = h("tr", {}, h("td", { class: "more" }, button), ...cells);
    const known = Object.fromEntries(source.columns.map(([title], c) => [title, source.rows[i][c]]));
    function toggle() {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      button.textContent = open ? "+" : "\u2212";
      if (open) first.nextSibling.remove();
      else first.after(h("tr", { class: "inner" }, h("td", { colspan: used.length + 1 },
        ...detail.flatMap(([other, rows]) => [h("h3", {}, TITLES[other] || "Alternatives"), table(other, rows, known)]))));
    }
    return [first];
  }

  function draw() {
    const found = wanted ? order.filter((i) => source.rows[i].some((v) => String(v).toLowerCase().includes(wanted))) : order;
    const shown = all ? found : found.slice(0, ROWS);
    body.replaceChildren(...shown.flatMap(row));
    left.replaceChildren(`${found.length} row${found.length === 1 ? "" : "s"}`);
    if (shown.length < found.length)
      left.append(`, ${shown.length} shown `, h("button", { type: "button", onclick: () => { all = true; draw(); } }, `Show all ${found.length}`));
  }

  draw();
  const filter = order.length > 12 ? h("div", { class: "tools" }, h("input", {
    type: "search", placeholder: "Filter", "aria-label": `Filter ${TITLES[name] || "rows"}`,
    oninput: (event) => { wanted = event.target.value.toLowerCase(); draw(); } })) : null;
  return h("div", { class: "table" }, filter, scroll(TITLES[name] || "Table", h("table", {}, head, body)), order.length > 12 ? left : null);
}

const TITLES = { collectives: "Collectives", calls: "Calls", changes: "Changes of layout", copies: "Values", ops: "Ops",
                 fallbacks: "Ops without a sharding rule", largest: "Largest tensors at the peak", prices: "What the plan decided against" };

function tables() {
  const { collectives, changes, ops, fallbacks, prices } = data.tables;
  const sum = (column) => collectives.rows.reduce((total, row) => total + row[column], 0);
  const axes = data.axes.map(([name]) => name).join(", ");
  section("collectives", "Collectives", ...(collectives.rows.length
    ? [quiet(`${sum(4)} calls a step, ${size(sum(6))}, ${seconds(sum(7))}. Equal calls of repeated layers are one row; + shows each. `
             + "May overlap: a parameter gather or a gradient reduction, which can run beside compute."), table("collectives")]
    : [quiet("none: no rank talks to another")]));
  if (changes.rows.length)
    section("changes", "Changes of layout",
      quiet(`Values that are read in another layout than they are made in. A layout has a placement per mesh axis (${axes}): `
            + "S0 splits dim 0, R is a whole copy, P a partial sum. Kept: backward uses forward's copy."), table("changes"));
  if (prices) section("prices", "What the plan decided against",
    quiet("Edges where the layout changes and the heaviest ops, one for all repeated layers, with the prices of the other choices. "
          + "Of an edge: the layouts it may be read in, the cost of getting there, and the reader's own time (op). Of an op: its own time, "
          + "collectives inside it, moving its inputs, and how much longer a step takes if only this op changes (regret)."), table("prices"));
  section("ops", "Ops", lazily(`All ${ops.rows.length} ops`, () => [
    quiet(`Layouts of inputs and outputs on mesh axes ${axes}; inputs are parted by |. Other layouts: in how many the outputs are held too; + shows them.`),
    table("ops")]));
  section("fallbacks", "Ops without a sharding rule", ...(fallbacks.rows.length
    ? [quiet("These run whole on every rank, at the price shown."), table("fallbacks")] : [quiet("none")]));
}

function lazily(title, make) {
  const details = h("details", {}, h("summary", {}, title));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(...make()); });
  return details;
}

// -- placements ----------------------------------------------------------------------------------------

// Pieces a dim is cut into and the axes that cut it, major first.
const cuts = (spec, dim) => spec.flatMap((p, axis) => (p === dim ? [axis] : []));
const pieces = (axes) => axes.reduce((n, axis) => n * data.axes[axis][1], 1);

// One strip per dim, in two dims a grid: lines are cuts in the colour of their axis, the dark piece is what rank 0 holds.
function drawing(tensor) {
  const dims = tensor.shape.length, partial = tensor.spec.flatMap((p, axis) => (p <= -2 ? [axis] : []));
  const [w, t, gap] = [52, 9, 3];
  const height = dims === 2 ? 34 : Math.max(1, dims) * (t + gap) - gap;
  const out = svg("svg", { width: w + 2, height: height + 2, viewBox: `-1 -1 ${w + 2} ${height + 2}`, role: "img",
    "aria-label": `${tensor.shape.join(" x ") || "scalar"}, ${tensor.placement}` });
  const box = (x, y, width, tall, fillColor, extra = {}) => out.append(svg("rect", { x, y, width, height: tall, style: { fill: fillColor }, ...extra }));
  const line = (x1, y1, x2, y2, axis) => out.append(svg("line", { x1, y1, x2, y2, "stroke-width": 2, style: { stroke: axisColor(axis) } }));
  const lines = (dim, x, y, width, tall, down) => {
    let n = 1;
    for (const axis of cuts(tensor.spec, dim)) {
      const before = n;
      n *= data.axes[axis][1];
      if (n > 16) continue; // finer than can be seen
      for (let i = 1; i < n; i++) {
        if (i % (n / before) === 0) continue; // drawn by the axis before
        if (down) line(x, y + tall * i / n, x + width, y + tall * i / n, axis);
        else line(x + width * i / n, y, x + width * i / n, y + tall, axis);
      }
    }
  };
  const part = (dim) => 1 / pieces(cuts(tensor.spec, dim));
  if (dims === 2) {
    box(0, 0, w, height, "var(--whole)");
    box(0, 0, w * part(1), height * part(0), "var(--held)");
    lines(0, 0, 0, w, height, true);
    lines(1, 0, 0, w, height, false);
  } else {
    for (let dim = 0; dim < Math.max(1, dims); dim++) {
      box(0, dim * (t + gap), w, t, "var(--whole)");
      box(0, dim * (t + gap), dims ? w * part(dim) : w, t, "var(--held)");
      if (dims) lines(dim, 0, dim * (t + gap), w, t, false);
    }
  }
  for (const axis of partial)
    box(0.5, 0.5, w - 1, height - 1, "none", { "stroke-width": 2, "stroke-dasharray": "4 3", class: "partial", stroke: axisColor(axis) });
  return out;
}

function placement(tensor) {
  const shape = tensor.shape.length ? tensor.shape.join(" \u00d7 ") : "scalar";
  return h("span", { class: "drawing" }, drawing(tensor),
    h("span", {}, h("span", { class: "name" }, tensor.placement), " ", h("span", { class: "quiet" }, `${shape} ${tensor.dtype}`)));
}

const copies = (n) => (n > 1 ? h("span", { class: "copies" }, `\u00d7 ${n}`) : null);

function leaf(tensor) {
  return h("li", { class: "leaf" }, h("span", { class: "row" }, h("span", { class: "name" }, tensor.name), placement(tensor), copies(tensor.copies)));
}

function module(node, depth) {
  const label = h("span", { class: "row" }, h("b", { class: "name" }, node.name), copies(node.copies),
    node.output ? placement(node.output) : null);
  if (!node.tensors.length && !node.children.length) return h("li", { class: "leaf" }, label);
  return h("li", {}, h("details", { open: depth === 0 }, h("summary", {}, label),
    h("ul", {}, ...node.tensors.map(leaf), ...node.children.map((child) => module(child, depth + 1)))));
}

function tree() {
  if (!data.tree.length) return;
  const root = h("ul", { class: "tree" }, ...data.tree.map((node) => module(node, 0)));
  const all = (open) => () => root.querySelectorAll("details").forEach((node) => { node.open = open; });
  const example = data.axes[data.axes.length - 1][0];
  section("layers", "What was chosen",
    h("div", { class: "tools" }, h("button", { type: "button", onclick: all(true) }, "Expand all"), h("button", { type: "button", onclick: all(false) }, "Collapse all")),
    key(data.axes.map(([name, n], axis) => [`mesh axis ${name}`, `${n} ranks`, axisColor(axis)])),
    quiet(`Beside a module is what it returns; inside are its weights. A drawing has a strip per dim, a matrix is a grid (rows are dim 0): `
          + `lines are cuts in the colour of their mesh axis, the dark part is what the first rank holds, a dashed frame is a partial sum. `
          + `[${example}, -]: dim 0 is split over ${example}, dim 1 is whole.`),
    root,
    data.whole_buffers ? quiet(`${data.whole_buffers} buffer${data.whole_buffers > 1 ? "s" : ""} held whole by every rank.`) : null);
}

// -- memory --------------------------------------------------------------------------------------------

const total = (moment) => moment.live.reduce((a, b) => a + b, 0);

function ticks(most) { // four or so round numbers of bytes
  const step = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].flatMap((n) => [1, 1024, 1024 ** 2, 1024 ** 3, 1024 ** 4].map((unit) => n * unit))
    .sort((a, b) => a - b).find((x) => most / x <= 4.5) || most;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function chart(moments, peak) {
  const [w, tall, foot] = [1000, 240, 20], most = total(moments[peak]) * 1.06;
  const x = (i) => w * i / moments.length, y = (bytes) => tall - (tall - 8) * bytes / most;
  const out = svg("svg", { viewBox: `0 0 ${w} ${tall + foot}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const base = moments.map(() => 0);
  data.memory.categories.forEach((_, c) => {
    if (!moments.some((m) => m.live[c])) return;
    const top = [], under = [];
    moments.forEach((m, i) => {
      under.unshift(`${x(i + 1)},${y(base[i])} ${x(i)},${y(base[i])}`);
      base[i] += m.live[c];
      top.push(`${x(i)},${y(base[i])} ${x(i + 1)},${y(base[i])}`);
    });
    out.append(svg("polygon", { points: `${top.join(" ")} ${under.join(" ")}`, style: { fill: color(c) } }));
  });
  const line = (attributes, style) => out.append(svg("line", { "vector-effect": "non-scaling-stroke", ...attributes, style }));
  for (const t of ticks(most)) line({ x1: 0, x2: w, y1: y(t), y2: y(t) }, { stroke: "var(--line)", opacity: .7 });
  moments.forEach((m, i) => {
    if (i && m.window !== moments[i - 1].window) line({ x1: x(i), x2: x(i), y1: 0, y2: tall + foot }, { stroke: "var(--text)", strokeDasharray: "3 3" });
  });
  const marker = (style) => svg("line", { "vector-effect": "non-scaling-stroke", style: { stroke: "var(--text)", ...style } });
  const above = marker({ strokeWidth: 2 }), below = marker({ opacity: .4 }); // the stack itself stays visible
  out.append(above, below);
  const labels = [
    ...ticks(most).slice(1).map((t) => h("span", { style: { left: 0, bottom: `${100 - 100 * y(t) / (tall + foot)}%` } }, size(t))),
    ...moments.flatMap((m, i) => (i === 0 || m.window !== moments[i - 1].window)
      ? [h("span", { class: m.window === "update" ? "last" : "", style: m.window === "update" ? { right: 0, bottom: 0 } : { left: `${100 * i / moments.length}%`, bottom: 0 } }, m.window)] : [])];
  function show(i) {
    const at = y(total(moments[i]));
    for (const [line, from, to] of [[above, 0, at], [below, at, tall]])
      for (const [name, value] of [["x1", x(i + .5)], ["x2", x(i + .5)], ["y1", from], ["y2", to]]) line.setAttribute(name, value);
  }
  return { area: h("div", { class: "chart", "aria-hidden": "true" }, out, ...labels), out, show };
}

function memory() {
  const { moments, peak, rows, categories } = data.memory;
  const line = (label, bytes, part) => h("tr", {}, h("td", {}, label), h("td", { class: "number" }, size(bytes)), h("td", { class: "number" }, part));
  const amounts = h("table", { class: "sum" },
    h("tbody", {}, ...rows.filter(([, bytes]) => bytes).map(([label, bytes]) => line(label, bytes, share(bytes, data.memory.total)))),
    h("tfoot", {}, line("total", data.memory.total, ""),
      data.memory.limit ? line("limit", data.memory.limit, `${share(data.memory.total, data.memory.limit)} used`) : null));
  if (peak === null) {
    section("memory", "Memory", amounts);
    return;
  }
  const drawn = chart(moments, peak), detail = h("div", { class: "moment", "aria-live": "polite" });
  const range = h("input", { type: "range", min: 0, max: moments.length - 1, value: peak, "aria-label": "Moment of the step", oninput: () => show(Number(range.value)) });
  const where = (m) => (m.kind === "compute" ? `${m.window}: computes ${m.op}` : m.kind === "redistribute" ? `${m.window}: changes the layout of ${m.op}` : `${m.window}: ${m.op}`)
    + (m.module ? ` in ${m.module}` : "") + (m.source ? ` (${m.source.split("/").slice(-2).join("/")})` : "");
  function show(i) {
    drawn.show(i);
    range.value = i;
    range.setAttribute("aria-valuetext", `${where(moments[i])}, ${size(total(moments[i]))}`);
    detail.replaceChildren(h("p", {}, h("b", {}, i === peak ? `Peak: ${size(total(moments[i]))}` : size(total(moments[i]))), ` ${where(moments[i])}`),
      key(categories.map((label, c) => [label, moments[i].live[c], c]).filter(([, bytes]) => bytes).map(([label, bytes, c]) => [label, size(bytes), color(c)])));
  }
  const at = (event) => {
    const area = drawn.out.getBoundingClientRect();
    show(Math.max(0, Math.min(moments.length - 1, Math.floor(moments.length * (event.clientX - area.left) / area.width))));
  };
  drawn.out.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse" || event.buttons) at(event); });
  drawn.out.addEventListener("pointerdown", at);
  show(peak);
  section("memory", "Memory over one step",
    h("div", { class: "memory" }, drawn.area, range, h("div", { class: "tools" },
      h("button", { type: "button", onclick: () => show(peak) }, "Go to the peak"), h("span", { class: "quiet" }, "Move the slider, or point at the chart.")), detail),
    h("h3", {}, "At the peak"), amounts,
    h("h3", {}, TITLES.largest), table("largest"));
}

// -- the rest ------------------------------------------------------------------------------------------

function end() {
  if (data.notes.length) section("notes", "Notes", h("ul", { class: "notes" }, ...data.notes.map((note) => h("li", {}, note))));
  const took = data.timings.map(([phase, s]) => [phase, `${s.toFixed(2)} s`]);
  section("search", "Search", h("div", { class: "columns" },
    facts([["objective", seconds(data.objective)], [data.tied ? "lower bound of tied plans" : "proven lower bound", data.bound > 0 ? seconds(data.bound) : "none"], ...data.search]),
    took.length ? h("div", {}, h("h3", {}, "Planning took"), facts([...took, ["total", `${data.timings.reduce((a, [, s]) => a + s, 0).toFixed(2)} s`]])) : null));
}

function theme() {
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  let dark = system.matches;
  const show = () => { button.textContent = dark ? "Light" : "Dark"; button.setAttribute("aria-label", `Use the ${dark ? "light" : "dark"} colours`); };
  button.addEventListener("click", () => { dark = !dark; document.documentElement.style.colorScheme = dark ? "dark" : "light"; show(); });
  system.addEventListener("change", () => { if (!document.documentElement.style.colorScheme) { dark = system.matches; show(); } });
  show();
}

theme();
summary();
comparison();
tree();
memory();
tables();
end();
