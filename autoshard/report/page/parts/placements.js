// The tree of modules, and how a tensor lies on the mesh as a small drawing.

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
  addEventListener("beforeprint", all(true)); // paper has nothing to click
  section("layers", "What was chosen",
    h("div", { class: "tools" }, h("button", { type: "button", onclick: all(true) }, "Expand all"), h("button", { type: "button", onclick: all(false) }, "Collapse all")),
    key(data.axes.map(([name, n], axis) => [`mesh axis ${name}`, `${n} ranks`, axisColor(axis)])),
    quiet(`Beside a module is what it returns; inside are its weights. A drawing has a strip per dim, a matrix is a grid (rows are dim 0): `
          + `lines are cuts in the colour of their mesh axis, the dark part is what the first rank holds, a dashed frame is a partial sum. `
          + data.reading),
    root,
    data.whole_buffers ? quiet(`${data.whole_buffers} buffer${data.whole_buffers > 1 ? "s" : ""} held whole by every rank.`) : null);
}
