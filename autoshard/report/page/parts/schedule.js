// The schedule of a pipeline over one step: a row per rank, what it computes when, and when it waits.

const WORK = { F: ["forward", color(0)], B: ["backward", color(1)], I: ["backward, what it sends", color(1)], W: ["backward, weights", color(2)] };
const AT_END = ["end of the step: reductions, update", color(7)];

function timeTicks(most) { // up to six round numbers of seconds
  const power = 10 ** Math.floor(Math.log10(most / 6));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => most / s <= 6.5);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

function scheduleChart(found) {
  const [left, w, tall, gap, foot] = [58, 1000, 26, 5, 22], until = found.shown, wide = w - left - 8;
  const x = (t) => left + wide * t / until, height = found.rows.length * (tall + gap);
  const words = found.rows.map((row) => `rank ${row.rank}: busy ${seconds(row.busy)}, waits ${seconds(row.idle)}`).join("; ");
  const out = svg("svg", { viewBox: `0 0 ${w} ${height + foot}`, role: "img", "aria-label": `Schedule of the pipeline. ${words}` });
  const text = (at, y, words, more = {}) => svg("text", { x: at, y, "font-size": 11, style: { fill: "var(--text)" }, ...more }, words);
  const box = (from, to, y, hue, title) => svg("rect", { x: x(from), y, width: Math.max(0.2, x(Math.min(to, until)) - x(from)), height: tall, class: "work",
    style: { fill: hue } }, svg("title", {}, title));
  found.rows.forEach((row, r) => {
    const y = r * (tall + gap);
    out.append(text(0, y + tall / 2 + 4, `rank ${row.rank}`),
               svg("rect", { x: left, y, width: wide, height: tall, style: { fill: "var(--whole)" } }, svg("title", {}, `rank ${row.rank} waits`)));
    for (const [kind, stage, micro, start] of row.events) {
      const lasts = found.lasts[kind][stage], [word, hue] = WORK[kind], number = String(micro);
      if (!lasts) continue;
      out.append(box(start, start + lasts, y, hue, `stage ${stage}, micro-batch ${micro}: ${word}, ${seconds(lasts)} from ${seconds(start)}`));
      if (x(lasts) - left >= 6.5 * number.length + 4)
        out.append(text(x(start + lasts / 2), y + tall / 2 + 4, number, { "text-anchor": "middle", class: "number", style: { fill: "#fff" } }));
    }
    if (row.end && found.makespan < until) out.append(box(found.makespan, found.makespan + row.end, y, AT_END[1], `${AT_END[0]}, ${seconds(row.end)}`));
  });
  for (const t of timeTicks(until)) {
    out.append(svg("line", { x1: x(t), x2: x(t), y1: 0, y2: height, style: { stroke: "var(--text)", opacity: .25 } }),
               text(x(t), height + 14, seconds(t), { "text-anchor": t ? "middle" : "start", style: { fill: "var(--quiet)" } }));
  }
  return out;
}

function stages() {
  const { stages: rows } = data.tables, found = data.schedule;
  if (!rows.rows.length) return;
  const parts = [quiet("Windows are seconds of one micro-batch, bytes those of one rank: memory at its peak, and what is sent for each micro-batch."),
                 table("stages")];
  if (found) {
    const kinds = ["F", "B", "I", "W"].filter((kind) => found.lasts[kind]), ends = found.rows.some((row) => row.end);
    const legend = [...kinds.map((kind) => [kind === "I" ? "backward, what it sends" : WORK[kind][0], "", WORK[kind][1]]),
                    ...(ends ? [[AT_END[0], "", AT_END[1]]] : []), ["waits", "", "var(--whole)"]];
    parts.push(h("h3", {}, "Schedule of one step"), key(legend), h("div", { class: "schedule" }, scroll("Schedule of one step", scheduleChart(found))),
               found.shown < found.step ? quiet(`The first ${seconds(found.shown)} of ${seconds(found.step)}.`) : null,
               h("h3", {}, TITLES.ranks), table("ranks"));
  }
  section("stages", "Stages of the pipeline", ...parts);
}
