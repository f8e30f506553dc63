"""Latency against throughput: drawn in a terminal, and as data of the HTML page."""
from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.tables import report_console, section, table
from autoshard.serve.sweep import Point, Serving
from autoshard.serve.workload import Slo


def show(serving: Serving, picked: Point | None = None, console: Console | None = None) -> None:
    """A row per batch; below, what the columns say and the batch that was picked."""
    console, w = console or report_console(), serving.workload
    grid = table(">batch", "", ">first token", ">token", ">tokens/s/device", ">caches", ">memory", ">gap", "caches lie")
    for p in serving.points:
        if p.phases is None:
            grid.add_row(str(p.batch), "", "does not fit", style="dim")
            continue
        grid.add_row(str(p.batch), "*" if p.best else "", quantities.seconds(p.first_s), quantities.seconds(p.token_s), f"{p.rate:,.1f}",
                     quantities.size(p.cache_bytes), quantities.size(p.phases.memory), _percent(p.phases.gap), escape("; ".join(p.caches)),
                     style="bold" if picked is p else None)
    lines = [Text("* no other batch has a shorter token and more tokens per second. Caches, memory: of one rank. gap: by how much a joint "
                  "plan could be faster.", style="dim")]
    lines += [Text(line) for line in sentences(serving, picked)]
    title = f"{serving.model} on {serving.mesh} of {serving.cluster}: prompts of {w.prompt:,}, {w.new:,} new tokens, caches for {w.context:,}"
    console.print(section(title, Group(grid, *lines)))


def shown_point(serving: Serving, picked: Point | None) -> Point:
    """The batch whose plans a page is about: the picked one, else the one with the most tokens per second. Raises InfeasibleError."""
    return picked or serving.pick(Slo())


COLUMNS = (("batch", "count"), ("front", "word"), ("first token", "seconds"), ("token", "seconds"), ("tokens/s/device", "count"),
           ("caches", "bytes"), ("memory", "bytes"), ("gap", "word"), ("caches lie, or why not", "text"))


def for_page(serving: Serving, point: Point) -> dict[str, Any]:
    """The section of the HTML page about serving: figures of `point`, words, and a table of all batches, in seconds and bytes."""
    w = serving.workload
    return {"batch": point.batch, "largest": serving.largest, "first": point.first_s, "token": point.token_s, "rate": round(point.rate, 1),
            "cache": point.cache_bytes, "title": f"prompts of {w.prompt:,} tokens, {w.new:,} new ones, caches for {w.context:,}",
            "notes": sentences(serving, point),
            "table": {"columns": [list(c) for c in COLUMNS], "rows": [_row(p) for p in serving.points], "detail": None}}


def _row(p: Point) -> list[Any]:
    if p.phases is None:
        return [p.batch, "", *[None] * 5, "", p.why]
    return [p.batch, "best" if p.best else "", p.first_s, p.token_s, round(p.rate, 1), p.cache_bytes, p.phases.memory, _percent(p.phases.gap),
            "; ".join(p.caches)]


OTHERWISE = {"relaid_s": "caches that lie otherwise during the prompt and are redistributed once",
             "twice_s": "weights stored twice, once for each phase, and caches redistributed once"}


def sentences(serving: Serving, picked: Point | None) -> list[str]:
    """What the table does not say."""
    out = []
    if serving.planned:
        out.append(f"largest batch of these that fits: {serving.largest}; more than {serving.most} never fit")
    for p in serving.planned:
        for name, would in OTHERWISE.items():
            if (seconds := getattr(p.phases, name)) is not None and seconds < p.phases.request_s:
                out.append(f"batch {p.batch}: {would} would make a request {quantities.seconds(seconds)} instead of "
                           f"{quantities.seconds(p.phases.request_s)}")
    out += [f"why: {p.why}" for p in serving.points if p.phases is None][:1]
    if picked is not None and picked.phases is not None:
        out += [f"picked: batch {picked.batch}, {quantities.seconds(picked.token_s)} a token, first token after "
                f"{quantities.seconds(picked.first_s)}, {picked.rate:,.1f} tokens a second and device",
                f"  prompt: {picked.phases.prompt.kind}", f"  token: {picked.phases.token.kind}"]
    return out


def _percent(gap: float) -> str:
    return "0 %" if gap < 1e-9 else f"{100 * gap:.2g} %"
