"""A step on local processes, measured beside simulated in one trace, and a picture of it.

    torchrun --nproc-per-node 2 -m autoshard calibrate -o my.toml --seconds 45
    torchrun --nproc-per-node 2 -m benchmarks.simulation.trace_beside --cluster my.toml -o t.json --picture t.svg
    python -m benchmarks.simulation.trace_beside --picture t.svg t.json            # the picture of a trace that is there

t.json opens in https://ui.perfetto.dev. The picture has a row per stream, simulated ranks above measured ones.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from models import gpt

SIZES = {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}
WIDTH, LEFT, ROW, GAP, TOP = 1100, 190, 22, 16, 34
COLORS = {"op": "#4c78a8", "copy": "#72b7b2", "update": "#b279a2", "communication": "#f58518", "idle": "#d9d9d9"}
WORDS = {"op": "op", "copy": "copy, start of a collective", "update": "optimizer", "communication": "collective", "idle": "wait"}
LEAST = 0.4
"""Pixels: shorter spans of one category are drawn as one with the next."""


def traced(cluster: str, path: Path) -> None:
    """Fully sharded where the batch is split: gathers in forward and backward, scatters of gradients. Called by all ranks."""
    torch.manual_seed(0)
    model, batch = gpt.build("tiny", **SIZES)
    seeds = {"input:0": ("d", None), "input:1": ("d", None), "h.*.mlp.*.weight": ("d", None)}
    fast = autoshard.compile(copy.deepcopy(model), f"d={dist.get_world_size()}", batch, loss_fn=gpt.loss, cluster=cluster, seeds=seeds, cache=False,
                             check_inputs="never")
    optimizer = autoshard.local_update(torch.optim.AdamW(fast.parameters(), lr=1e-4))
    for _ in range(3):
        optimizer.zero_grad()
        fast(*batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    with autoshard.clocked(fast) as clock:
        fast(*batch).backward()
        with clock.span("optimizer"):
            optimizer.step()
    measured = clock.tracks()
    if dist.get_rank() == 0:
        found = autoshard.simulate(fast.plan, model, batch, loss_fn=gpt.loss, executed=True, ranks=range(dist.get_world_size()))
        found.write_trace(path, measured)
        print(f"{found.step_s * 1e3:.1f} ms simulated, {1e3 * max(s.end for t in measured for s in t.spans):.1f} ms measured; {path}")


Rows = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def rows_of(events: Sequence[Mapping[str, Any]]) -> Rows:
    """Spans by the names of process and thread, in the order that a viewer shows them. Raises ValueError for events that no viewer would show: without a
    name for their thread, or that overlap on it."""
    names = {(e["name"], e["pid"], e.get("tid")): next(iter(e["args"].values())) for e in events if e["ph"] == "M"}
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for e in (e for e in events if e["ph"] == "X"):
        found[e["pid"], e["tid"]].append(e)
    out: dict[tuple[str, str], Sequence[Mapping[str, Any]]] = {}
    for pid, tid in sorted(found, key=lambda k: (names["process_sort_index", k[0], None], k[1])):
        spans = sorted(found[pid, tid], key=lambda e: (e["ts"], e["dur"]))
        if any(a["ts"] + a["dur"] > b["ts"] + 1e-3 for a, b in zip(spans, spans[1:])):
            raise ValueError(f"spans overlap in process {pid}, thread {tid}")
        out[names["process_name", pid, None], names["thread_name", pid, tid]] = spans
    return out


def drawn(spans: Sequence[Mapping[str, Any]], scale: float) -> Iterator[tuple[float, float, str, str]]:
    """(x, width, category, name) of what is drawn: neighbours of one category become one where they are too narrow to see."""
    held: tuple[float, float, str, str] | None = None
    for e in spans:
        x, width = e["ts"] * scale, e["dur"] * scale
        if held and e["cat"] == held[2] and x - (held[0] + held[1]) < LEAST and min(width, held[1]) < 4 * LEAST:
            held = (held[0], x + width - held[0], held[2], f"{held[3].split(' ... ')[0]} ... {e['name']}")
            continue
        if held:
            yield held
        held = (x, width, e["cat"], e["name"])
    if held:
        yield held


def picture(rows: Rows) -> str:
    """As SVG, which browsers and viewers of Markdown show. Names of spans are tooltips."""
    end = max(e["ts"] + e["dur"] for spans in rows.values() for e in spans)
    scale, y, out, last = (WIDTH - LEFT - 40) / end, TOP, [], ""
    for (process, thread), spans in rows.items():
        if process != last:
            out.append(f'<text x="6" y="{y + 12}" font-weight="bold">{escape(process)}</text>')
            y, last = y + ROW - 4, process
        out.append(f'<text x="18" y="{y + 14}">{escape(thread)}</text><rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 40}" height="{ROW - 3}" fill="#f6f6f6"/>')
        out += [f'<rect x="{LEFT + x:.1f}" y="{y}" width="{max(width, LEAST):.1f}" height="{ROW - 3}" fill="{COLORS.get(category, "#888")}"><title>'
                f'{escape(name)}</title></rect>' for x, width, category, name in drawn(spans, scale)]
        y += ROW + (GAP if (process, thread) == [k for k in rows if k[0] == process][-1] else 0)
    tick = 10 ** floor(log10(end / 2))  # of the width: a tenth to all of it, two at least
    for i in range(1 + int(end / tick)):
        x = LEFT + i * tick * scale
        out.append(f'<line x1="{x:.0f}" y1="{TOP - 6}" x2="{x:.0f}" y2="{y}" stroke="#00000022"/>'
                   f'<text x="{x:.0f}" y="{TOP - 10}" text-anchor="middle">{i * tick / 1e3:g} ms</text>')
    x = float(LEFT)
    for category, words in WORDS.items():
        out.append(f'<rect x="{x:.0f}" y="{y + 6}" width="12" height="12" fill="{COLORS[category]}"/><text x="{x + 17:.0f}" y="{y + 16}">{words}</text>')
        x += 40 + 6.6 * len(words)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 30}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
            f'fill="white"/>\n' + "\n".join(out) + "\n</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="a trace to draw; without it one is made")
    parser.add_argument("--cluster", default="cpu-gloo", help="a calibrated profile, a .toml file")
    parser.add_argument("-o", "--output", type=Path, default=Path("t.json"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    lead = options.trace is not None
    if not lead:
        if "RANK" not in os.environ:
            parser.error("start it with: torchrun --nproc-per-node 2 -m benchmarks.simulation.trace_beside ..., or give a trace to draw")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        lead = dist.get_rank() == 0
        traced(options.cluster, options.output)
        dist.barrier()
        dist.destroy_process_group()
    if lead and options.picture:
        events = json.loads((options.trace or options.output).read_text())["traceEvents"]
        options.picture.write_text(picture(rows_of(events)))
        print(options.picture)


if __name__ == "__main__":
    main()
