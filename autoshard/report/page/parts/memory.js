// Memory over one step: live bytes by category, stacked.

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
  const amounts = ticks(most).slice(1).map((t) => h("span", { style: { left: 0, bottom: `${100 - 100 * y(t) / (tall + foot)}%` } }, size(t)));
  const windows = moments.flatMap((m, i) => (i === 0 || m.window !== moments[i - 1].window) ? [{ name: m.window, at: `${100 * i / moments.length}%` }] : [])
    .map(({ name, at }) => ({ at, label: h("span", { class: "window" }, name) }));
  const area = h("div", { class: "chart", "aria-hidden": "true" }, out, ...amounts, ...windows.map(({ label }) => label));
  function settle() { // windows may be narrower than their names: none leaves the chart, and one that would cover another moves up
    const edge = area.getBoundingClientRect().right, placed = [];
    for (const { label, at } of windows) {
      Object.assign(label.style, { left: at, right: "auto", bottom: 0 });
      if (label.getBoundingClientRect().right > edge) Object.assign(label.style, { left: "auto", right: 0 });
      const own = label.getBoundingClientRect();
      let row = 0;
      while (placed.some((p) => p.row === row && own.left < p.right && p.left < own.right)) row += 1;
      label.style.bottom = `${1.25 * row}em`;
      placed.push({ row, left: own.left, right: own.right });
    }
  }
  function show(i) {
    const at = y(total(moments[i]));
    for (const [line, from, to] of [[above, 0, at], [below, at, tall]])
      for (const [name, value] of [["x1", x(i + .5)], ["x2", x(i + .5)], ["y1", from], ["y2", to]]) line.setAttribute(name, value);
  }
  return { area, out, show, settle };
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
  section("memory", `Memory over one step${data.memory.stage === null ? "" : `, stage ${data.memory.stage}, the fullest`}`,
    h("div", { class: "memory" }, drawn.area, range, h("div", { class: "tools" },
      h("button", { type: "button", onclick: () => show(peak) }, "Go to the peak"), h("span", { class: "quiet" }, "Move the slider, or point at the chart.")), detail),
    h("h3", {}, "At the peak"), amounts,
    h("h3", {}, TITLES.largest), table("largest"));
  drawn.settle();
  addEventListener("resize", drawn.settle);
}
