"""The tables of the HTML report, as data: columns with what they hold, rows, and which rows of other tables explain a row."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

from autoshard.base import quantities
from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Ref
from autoshard.base.plan import Copy, Plan
from autoshard.base.spec import Spec, format_spec
from autoshard.report import stages, what
from autoshard.report.collapse import collapse
from autoshard.study.explain import EdgeTable, OpTable

Table = dict[str, Any]
Detail = list[tuple[str, Sequence[int] | None]]
"""(table, its rows; None: all), one after another."""

CALLS, CHANGES, COPIES, PRICES = "calls", "changes", "copies", "prices"
WINDOWS = ("start", "forward", "backward", "end")


def tables(plan: Plan, prices: Sequence[Any] = ()) -> dict[str, Table]:
    """All tables of a plan by name. Cells are text, or plain numbers whose kind the column says."""
    return {"collectives": _collectives(plan), CALLS: _calls(plan), CHANGES: _changes(plan), COPIES: _copies(plan),
            "ops": _ops(plan, prices), "fallbacks": _fallbacks(plan), "largest": _largest(plan), "stages": _stages(plan),
            "ranks": _ranks(plan)}


def price_tables(prices: Sequence[Any]) -> dict[str, Table]:
    """An overview, and a table per edge and op."""
    if not prices:
        return {}
    priced = [_priced(found) for found in prices]
    overview = page_table("what:name where:text ways:count chosen:seconds", [row for _, row, _ in priced],
                      [[(_price_name(i), None)] for i in range(len(priced))])
    return {PRICES: overview, **{_price_name(i): table for i, (_, _, table) in enumerate(priced)}}


def page_table(columns: str, rows: Iterable[Sequence[Any]], detail: list[Detail] | None = None) -> Table:
    """`columns`: words "title:kind", `_` for a blank in the title."""
    pairs = [c.split(":") for c in columns.split()]
    return {"columns": [[title.replace("_", " "), kind] for title, kind in pairs], "rows": [list(r) for r in rows],
            "detail": detail}


def _price_name(i: int) -> str:
    return f"price {i}"


def _collectives(plan: Plan) -> Table:
    found = what.collectives(plan, by_source=True)
    rows = [(r.kind, r.axis, r.where, r.phase, r.count, r.nbytes, r.total_bytes, r.seconds, "yes" if r.hideable else "", r.source)
            for r in found]
    return page_table("collective:word axis:word module:name pass:word calls:count each:bytes total:bytes time:seconds "
                  "may_overlap:word source:source", rows, [[(CALLS, r.calls)] for r in found])


def _calls(plan: Plan) -> Table:
    rows = [(c.kind, c.axis, c.phase, c.value, c.op, c.module, c.dtype, c.nbytes, c.seconds, c.source) for c in plan.collectives]
    return page_table("collective:word axis:word pass:word value:name read_by:name module:name dtype:word bytes:bytes time:seconds "
                  "source:source", rows)


def _changes(plan: Plan) -> Table:
    """Values held in two layouts, equal ones of repeated layers folded, the costliest first."""
    calls, specs = _calls_by_value(plan), _made_specs(plan)

    def key(copy: Copy) -> tuple:
        kinds = ", ".join(dict.fromkeys(f"{c.kind} over {c.axis}" for c in _of(plan, calls, copy)))
        return (copy.window, _text(specs.get(copy.value)), format_spec(copy.spec), copy.source, kinds,
                sum(c.nbytes for c in _of(plan, calls, copy)), sum(c.seconds for c in _of(plan, calls, copy)))

    folded = sorted(collapse((_place(plan, calls, c), key(c)) for c in plan.copies), key=lambda r: -r.payload[-1] * r.copies)
    rows = [(r.name, *r.payload[:3], r.payload[3], r.payload[4], r.copies, r.payload[5] * r.copies, r.payload[6] * r.copies)
            for r in folded]
    detail: list[Detail] = [[(COPIES, r.rows), (CALLS, [i for k in r.rows for i in calls[plan.copies[k].value, plan.copies[k].window]])]
                            for r in folded]
    return page_table("where:name pass:word from:word to:word copy:word by:text alike:count bytes:bytes time:seconds", rows, detail)


def _copies(plan: Plan) -> Table:
    specs = _made_specs(plan)
    rows = [(c.value, c.window, _text(specs.get(c.value)), format_spec(c.spec), c.source) for c in plan.copies]
    return page_table("value:name pass:word from:word to:word copy:word", rows)


def _ops(plan: Plan, prices: Sequence[Any]) -> Table:
    calls, places = _calls_by_value(plan), _places(plan)
    copies, priced = defaultdict(list), defaultdict(list)
    for i, copy in enumerate(plan.copies):
        copies[copy.value].append(i)
    for i, found in enumerate(prices):
        priced[_priced(found)[0]].append(i)
    rows, detail = [], []
    more = {name: sum(len(copies[str(Ref(name, i))]) for i in range(len(op.outputs))) for name, op in plan.ops.items()}
    for name, op in sorted(plan.ops.items(), key=lambda item: -more[item[0]]):
        values = [str(Ref(name, i)) for i in range(len(op.outputs))]
        rows.append((name, " | ".join(map(format_spec, op.inputs)), " | ".join(map(format_spec, op.outputs)),
                     more[name], *places.get(name, ("", ""))))
        moved = [(COPIES, [i for v in values for i in copies[v]]), (CALLS, [i for v in values for w in WINDOWS for i in calls[v, w]])]
        detail.append([x for x in moved if x[1]] + [(_price_name(i), None) for v in values for i in priced[v]])
    return page_table("op:name inputs:text outputs:text other_layouts:count module:name source:source", rows, detail)


def _fallbacks(plan: Plan) -> Table:
    return page_table("op:name module:name count:count time:seconds source:source",
                  [(r.target, r.where, r.count, r.seconds, r.source) for r in what.fallbacks(plan)])


def _stages(plan: Plan) -> Table:
    return page_table("stage:count rank:count blocks:name ops:count parameters:count forward:seconds backward:seconds weights:seconds "
                  "once_a_step:seconds in_flight:count memory:bytes sends:text",
                  [(r.index, r.rank, r.blocks, r.ops or None, r.parameters or None, *(r.windows.get(w) for w in (FORWARD, BACKWARD, WEIGHT)),
                    r.once_s, r.in_flight, r.nbytes, r.sent) for r in stages.stage_rows(plan)])


def _ranks(plan: Plan) -> Table:
    played = stages.playback(plan)
    rows = () if played is None else stages.rank_rows(plan, played)
    return page_table("rank:count stages:text computes:seconds waits:seconds of_the_step:text end_of_the_step:seconds",
                  [(r.rank, ", ".join(map(str, r.stages)), r.busy_s, r.idle_s, quantities.share(r.idle_s, plan.objective_s), r.end_s) for r in rows])


def _largest(plan: Plan) -> Table:
    return page_table("tensor:name category:word bytes:bytes module:name source:source",
                  [(a.name, what.MEMORY_LABELS[a.category], a.nbytes, a.module, a.source) for a in plan.fullest.largest])


def _made_specs(plan: Plan) -> dict[str, Spec]:
    return {str(Ref(name, i)): spec for name, op in plan.ops.items() for i, spec in enumerate(op.outputs)}


def _calls_by_value(plan: Plan) -> dict[tuple[str, str], list[int]]:
    out: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, c in enumerate(plan.collectives):
        if not c.inner:
            out[c.value, c.phase].append(i)
    return out


def _of(plan: Plan, calls: dict, copy: Copy) -> list:
    """The collectives that make a copy; one kept from forward has none of its own."""
    return [plan.collectives[i] for i in calls[copy.value, copy.window]] if copy.source == "made" else []


def _place(plan: Plan, calls: dict, copy: Copy) -> str:
    found = [plan.collectives[i].module for w in (copy.window, *WINDOWS) for i in calls[copy.value, w]]
    return next(filter(None, found), copy.value.removeprefix("param:"))


def _places(plan: Plan) -> dict[str, tuple[str, str]]:
    """(module, source) of the ops of which the plan says it: it keeps no graph."""
    said = [*((m.op, m) for s in plan.stages for m in s.timeline if m.kind == "compute"), *((f.op, f) for f in plan.fallbacks),
            *((c.op, c) for c in plan.collectives)]
    return {op: (x.module, x.source) for op, x in said}


def _text(spec: Spec | None) -> str:
    return "" if spec is None else format_spec(spec)


@singledispatch
def _priced(found: Any) -> tuple[str, tuple, Table]:
    """(value or op it is about, row of the overview, the table itself)."""
    raise TypeError(f"no table for {type(found).__name__}")


@_priced.register
def _(found: EdgeTable) -> tuple[str, tuple, Table]:
    chosen = min((r.seconds for r in found.rows if r.chosen), default=None)
    rows = [(_mark(r), r.source, ", ".join(r.targets), r.words, r.nbytes, r.seconds, r.compute_s) for r in found.rows]
    return (found.value, (f"edge: {found.value}", f"{found.maker} to {found.reader}", len(rows) + found.left_out, chosen),
            page_table("chosen:word source:text target:text redistribution:text bytes:bytes cost:seconds op:seconds", rows))


@_priced.register
def _(found: OpTable) -> tuple[str, tuple, Table]:
    chosen = min((r.compute_s + r.inner_s + r.update_s for r in found.rows if r.chosen), default=None)
    rows = [(_mark(r), ", ".join(r.inputs), ", ".join(r.outputs), r.compute_s + r.update_s, r.inner_s, r.moved_s, r.nbytes, r.regret_s)
            for r in found.rows]
    return (found.op, (f"op: {found.op}", found.where, len(rows) + found.left_out, chosen),
            page_table("chosen:word inputs:text outputs:text op:seconds inside:seconds moving_inputs:seconds output:bytes regret:seconds", rows))


def _mark(row: Any) -> str:
    return "chosen" if row.chosen else ""
