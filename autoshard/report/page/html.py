"""A plan as one HTML file that needs nothing else: `parts/` has page, style and scripts, here is the data they show.

Names come from the user's model, so they are data everywhere: JSON in which `<`, `>` and `&` are escaped, read by a script
that makes text nodes only. The page's policy allows these scripts, by the digest of their text, and no connection.
"""
from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib import resources
from math import isfinite
from string import Template
from typing import Any

from autoshard.base.files import write_atomically
from autoshard.base.plan import CATEGORIES, Plan
from autoshard.report import simulation, stages, text, what
from autoshard.report.page.tables import price_tables, tables
from autoshard.report.page.tree import tree
from autoshard.simulation.result import Simulation

SCRIPTS = ("elements.js", "table.js", "placements.js", "memory.js", "schedule.js", "simulation.js", "script.js")  # in this order, as one
ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write(path: str | os.PathLike[str], plan: Plan, comparison: Any = None, prices: Iterable[Any] = (),
          serving: Mapping[str, Any] | None = None, simulated: Simulation | None = None) -> None:
    """Write `page(...)` to a file, whole or not at all. Raises UsageError when it cannot be written."""
    write_atomically(path, page(plan, comparison, prices, serving, simulated))


def page(plan: Plan, comparison: Any = None, prices: Iterable[Any] = (), serving: Mapping[str, Any] | None = None,
         simulated: Simulation | None = None) -> str:
    """The report as HTML. `comparison`: a `compare.Comparison`, for the chart of baselines; `prices`: `explain.EdgeTable`s
    and `explain.OpTable`s, for what the plan decided against; `serving`: `report.serving.for_page` of a sweep that the plan is of;
    `simulated`: its step, played."""
    data = document(plan, comparison, tuple(prices), serving, simulated)
    script = "\n".join(map(_file, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_file("page.html")).substitute(
        title=escape(data["title"]), style=_file("style.css"), script=script, digest=digest, data=embedded(data))


def embedded(data: Any) -> str:
    """JSON that may stand inside a <script> element: no text in it can end the element or open another."""
    return json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False).translate(ESCAPED)


def document(plan: Plan, comparison: Any = None, prices: tuple[Any, ...] = (), serving: Mapping[str, Any] | None = None,
             simulated: Simulation | None = None) -> dict[str, Any]:
    """Everything the page shows, as plain data in seconds and bytes."""
    mesh, played = plan.spec_mesh, stages.playback(plan)
    return {
        "title": f"{plan.model.get('reference') or 'model'} on {plan.mesh}",
        "reading": what.reading(plan),
        "facts": [*what.header(plan), ("status", text.status(plan)), *(("memory", line) for line in what.memory_worth(plan))],
        "axes": [list(pair) for pair in zip(mesh.names, mesh.sizes, strict=True)],
        "objective": plan.objective_s, "bound": plan.bound_s, "gap": plan.gap, "bound_name": text.bound_name(plan),
        "step": [{"label": a.label, "seconds": a.value, "counts": a.counts, "beside": a.beside} for a in what.step_time(plan)],
        "memory": _memory(plan),
        "schedule": None if played is None else stages.drawing(plan, played),
        "comparison": _comparison(comparison), "serving": serving, "simulation": simulated and simulation.drawing(simulated),
        "tree": tree(plan), "whole_buffers": what.whole_buffers(plan),
        "tables": {**tables(plan, prices), **price_tables(prices), **({"serving": serving["table"]} if serving else {}),
                   **(simulation.page_tables(simulated) if simulated else {})},
        "search": what.search_facts(plan), "timings": list(plan.timings.items()), "notes": plan.notes,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    stage = plan.fullest
    peak = stage.peak
    moments = [{"window": m.window, "kind": m.kind, "op": m.op, "module": m.module, "source": m.source, "live": m.live}
               for m in stage.timeline]
    return {"rows": [(a.label, a.value) for a in what.memory(plan)], "total": stage.memory.get("total"),
            "limit": stage.memory.get("limit"), "categories": [what.MEMORY_LABELS[c] for c in CATEGORIES],
            "stage": stage.index if stages.is_pipeline(plan) else None,
            "moments": moments, "peak": None if peak is None else stage.timeline.index(peak)}


def _comparison(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = []
    for row in found.contenders:
        parts = [] if row.plan is None else [(a.label, a.value) for a in what.step_time(row.plan) if a.counts]
        step = None if row.plan is None else row.plan.objective_s
        rows.append({"name": row.name, "axes": row.axes, "step": step, "parts": parts, "memory": row.memory_bytes,
                     "moved": row.moved_bytes, "fits": row.fits, "note": row.note})
    return {"rows": rows, "limit": found.limit_bytes, "notes": found.notes}


def _finite(value: Any) -> Any:
    """JSON has no infinity; the page writes null as "-"."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


@cache
def _file(name: str) -> str:
    return resources.files("autoshard.report.page").joinpath("parts", name).read_text(encoding="utf-8")
