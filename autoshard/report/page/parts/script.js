// The report from top to bottom.

const STEP_COLORS = { "compute": color(0), "blocking communication": color(5), "exposed communication": color(1),
                      "slowdown by hidden": color(6), "optimizer update": color(2), "hidden communication": color(3),
                      "waiting in the pipeline": color(7) };

function bar(parts, whole, label, thin = false) { // parts: [label, value]
  return h("div", { class: thin ? "bar thin" : "bar", role: "img", "aria-label": label }, ...parts.filter(([, value]) => value > 0).map(
    ([name, value]) => h("i", { class: thin ? "hatched" : "", title: `${name}: ${seconds(value)}`,
                                style: { width: `${100 * value / whole}%`, backgroundColor: STEP_COLORS[name] || color(7) } })));
}

function summary() {
  const counted = data.step.filter((part) => part.counts), hidden = data.step.filter((part) => part.beside && part.seconds > 0);
  const total = counted.reduce((sum, part) => sum + part.seconds, 0);
  const words = data.step.map((part) => `${part.label} ${seconds(part.seconds)}`).join(", ");
  section("summary", "Summary",
    big([["step", seconds(data.objective)], [data.bound_name.replace("lower ", ""), data.bound > 0 ? seconds(data.bound) : "none"],
         ["gap", data.bound > 0 ? (data.gap <= 1e-9 ? "0 %" : `${Number((100 * data.gap).toPrecision(3))} %`) : "-"],
         ["memory a rank", size(data.memory.total)],
         ["of its limit", data.memory.limit ? share(data.memory.total, data.memory.limit) : "no limit"]]),
    bar(counted.map((p) => [p.label, p.seconds]), total, `Step time: ${words}`),
    hidden.length ? bar(hidden.map((p) => [p.label, p.seconds]), total, `Beside compute: ${words}`, true) : null,
    key([...counted, ...hidden].filter((p) => p.seconds > 0).map((p) =>
      [p.label, p.counts ? `${seconds(p.seconds)} (${share(p.seconds, total)})` : `${seconds(p.seconds)} (not added)`,
       STEP_COLORS[p.label] || color(7), !p.counts])),
    facts([...data.facts, ...data.step.filter((p) => !p.counts && !p.beside).map((p) => [p.label, seconds(p.seconds)])]));
}

function serving() {
  const found = data.serving;
  if (!found) return;
  section("serving", "Serving",
    big([["batch", count(found.batch)], ["first token", seconds(found.first)], ["token", seconds(found.token)], ["tokens/s/device", count(found.rate)],
         ["caches a rank", size(found.cache)], ["largest batch that fits", found.largest ? count(found.largest) : "none"]]),
    quiet(`The plan below is that of a single token. Of all batches: ${found.title}. On the front: no other batch has a shorter token and more tokens per second.`),
    table("serving"), ...found.notes.map(quiet));
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
    h("td", { class: "number" }, row.step === null ? "" : seconds(row.step)),
    h("td", { class: "number" }, row.step === null || !best ? "" : `${(row.step / best).toFixed(2)} x`),
    h("td", { class: "number" }, row.step === null ? "" : size(row.memory)),
    h("td", {}, row.step === null ? "" : row.fits ? "fits" : "does not fit")));
  const heads = [["plan", ""], ["predicted step", ""], ["", "number"], ["of the chosen", "number"], ["memory", "number"], ["", ""]];
  section("baselines", "Beside plans made by hand",
    key(labels.map((label) => [label, "", STEP_COLORS[label] || color(7)])),
    scroll("Baselines", h("table", { class: "baselines" }, h("thead", {}, h("tr", {}, ...heads.map(([t, c]) => h("th", { class: c, scope: "col" }, t)))),
                          h("tbody", {}, ...rows))),
    ...found.notes.map(quiet));
}

function tables() {
  const { collectives, changes, ops, fallbacks, prices } = data.tables;
  const sum = (column) => collectives.rows.reduce((total, row) => total + row[column], 0);
  const axes = data.axes.map(([name]) => name).join(", ");
  section("collectives", "Collectives", ...(collectives.rows.length
    ? [quiet(`${sum(4)} calls a step${data.tables.stages.rows.length ? ", of one rank of every stage" : ""}, ${size(sum(6))}, ${seconds(sum(7))}. Equal calls of repeated layers are one row; + shows each. `
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

function end() {
  if (data.notes.length) section("notes", "Notes", h("ul", { class: "notes" }, ...data.notes.map((note) => h("li", {}, note))));
  const took = data.timings.map(([phase, s]) => [phase, `${s.toFixed(2)} s`]);
  section("search", "Search", h("div", { class: "columns" },
    facts([["objective", seconds(data.objective)], [data.bound_name, data.bound > 0 ? seconds(data.bound) : "none"], ...data.search]),
    took.length ? h("div", {}, h("h3", { style: { marginTop: "0" } }, "Planning took"), facts([...took, ["total", `${data.timings.reduce((a, [, s]) => a + s, 0).toFixed(2)} s`]])) : null));
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
simulated();
serving();
comparison();
stages();
tree();
memory();
tables();
end();
