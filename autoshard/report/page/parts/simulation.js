// A step as it was simulated: what some ranks do when, and what the links carry meanwhile.

const WORKS = { ...WORK, op: ["compute", color(0)], copy: ["copies for collectives", color(6)], update: ["optimizer", color(2)],
  rest: ["Python and autograd", color(7)] };
const LEFT = 118, WIDE = 1000 - LEFT - 8, TALL = 20;

function streamsChart(found) {
  const x = (t) => LEFT + WIDE * t / found.step, rows = found.tracks.flatMap((track) => [[track.title], ...track.streams]);
  const kinds = [...new Set(found.tracks.flatMap((t) => t.streams.flatMap(([, spans]) => spans.map((s) => s[2]))))].filter((k) => !WORKS[k]);
  const hue = (what) => WORKS[what] ? WORKS[what][1] : color([3, 5, 4, 7, 1][kinds.indexOf(what) % 5]);
  const height = rows.length * (TALL + 4), text = (at, y, words, more = {}) => svg("text", { x: at, y, "font-size": 11, style: { fill: "var(--text)" }, ...more }, words);
  const out = svg("svg", { viewBox: `0 0 1000 ${height + 22}`, role: "img", "aria-label": `The simulated step of ${found.tracks.map((t) => t.title).join("; ")}` });
  rows.forEach(([name, spans], r) => {
    const y = r * (TALL + 4);
    if (!spans) {
      out.append(text(0, y + TALL - 4, name, { "font-weight": 600 }));
      return;
    }
    out.append(text(8, y + TALL / 2 + 4, name), svg("rect", { x: LEFT, y, width: WIDE, height: TALL, style: { fill: "var(--whole)" } }));
    for (const [begin, end, what, pass, many] of spans)
      out.append(svg("rect", { x: x(begin), y, width: Math.max(0.4, x(end) - x(begin)), height: TALL, style: { fill: hue(what) } },
        svg("title", {}, `${many > 1 ? `${many} x ` : ""}${WORKS[what] ? WORKS[what][0] : what}${pass ? `, ${pass}` : ""}: ${seconds(end - begin)} from ${seconds(begin)}`)));
  });
  for (const t of timeTicks(found.step))
    out.append(svg("line", { x1: x(t), x2: x(t), y1: 0, y2: height, style: { stroke: "var(--text)", opacity: .25 } }),
               text(x(t), height + 14, seconds(t), { "text-anchor": t ? "middle" : "start", style: { fill: "var(--quiet)" } }));
  const used = Object.entries(WORKS).filter(([what]) => found.tracks.some((t) => t.streams.some(([, spans]) => spans.some((s) => s[2] === what))));
  return [key([...used.map(([, [label, shade]]) => [label, "", shade]), ...kinds.map((kind) => [kind, "", hue(kind)]), ["waits", "", "var(--whole)"]]),
          h("div", { class: "schedule" }, scroll("The simulated step", out))];
}

function linksChart(found) {
  const tall = 70, gap = 26, height = found.traffic.length * (tall + gap), most = Math.max(1, ...found.traffic.flatMap((t) => t.used));
  const out = svg("svg", { viewBox: `0 0 1000 ${height}`, role: "img",
    "aria-label": found.traffic.map((t) => `${t.link} sends ${size(t.bytes.reduce((a, b) => a + b, 0))} in a step`).join("; ") });
  found.traffic.forEach((t, i) => {
    const top = i * (tall + gap) + 8, y = (share) => top + tall * (1 - share / most), part = WIDE / t.used.length;
    out.append(svg("text", { x: 0, y: top + 12, "font-size": 11, style: { fill: "var(--text)" } }, t.link),
               svg("rect", { x: LEFT, y: top, width: WIDE, height: tall, style: { fill: "var(--whole)" } }));
    t.used.forEach((share, k) => {
      if (share > 0) out.append(svg("rect", { x: LEFT + k * part, y: y(share), width: part, height: top + tall - y(share), style: { fill: color(i) } },
        svg("title", {}, `${t.link}, ${seconds(k * t.part)}: ${size(t.bytes[k] / t.part)}/s, ${fixed(100 * share, 1)} %`)));
    });
    out.append(svg("line", { x1: LEFT, x2: LEFT + WIDE, y1: y(1), y2: y(1), style: { stroke: "var(--text)", opacity: .4, strokeDasharray: "3 3" } }),
               svg("text", { x: LEFT - 4, y: y(1) + 4, "font-size": 10, "text-anchor": "end", style: { fill: "var(--quiet)" } }, "100 %"));
  });
  return h("div", { class: "schedule" }, scroll("Links over the step", out));
}

function simulated() {
  const found = data.simulation;
  if (!found) return;
  section("simulated", "Simulated step", facts(found.facts),
    ...(found.tracks.length ? streamsChart(found) : []),
    ...(found.traffic.length ? [h("h3", {}, "What a rank sends over the links"), quiet("Of the bandwidth that collectives reach. Above 100 %: several at once, each with all of the link."), linksChart(found)] : []),
    ...["idle", "critical", "links", "sizes"].filter((name) => data.tables[name].rows.length).flatMap((name) => [h("h3", {}, TITLES[name]), table(name)]));
}
