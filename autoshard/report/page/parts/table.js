// Tables that sort, filter, and open rows into the rows that explain them.

const ROWS = 60; // rows of a table before its "Show all" button

const TITLES = { stages: "Stages of the pipeline", ranks: "What the ranks do in a step", collectives: "Collectives", calls: "Calls", changes: "Changes of layout", copies: "Values", ops: "Ops",
                 fallbacks: "Ops without a sharding rule", largest: "Largest tensors at the peak", prices: "What the plan decided against", serving: "Serving",
                 idle: "Where the time of a rank goes", critical: "Critical path", links: "Links, per rank", sizes: "Sizes of transfers, per rank and step" };

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
