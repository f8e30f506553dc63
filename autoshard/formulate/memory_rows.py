"""Hard memory rows for single moments of the step, added where the timeline of a plan found exceeds the limit.

A row counts, at the moment an op runs: what is stored; final gradients that exist; values that are read later, once per
buffer, in their producer's spec; copies in other specs between their first and last reader. Exact lifetimes depend on the
whole plan, so the row's limit is corrected by what the timeline of the plan found says.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.graph import FORWARD, Graph, Ref
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.base.roles import Role
from autoshard.base.windows import is_accumulator, is_hold
from autoshard.cost.memory import stored_parts
from autoshard.formulate.copies import KEPT, MADE, OWN, CopyNode, own
from autoshard.formulate.problem_of import Formulation
from autoshard.formulate.values import local_bytes, storage_root
from autoshard.program.flow import param_derived
from autoshard.recompute.rewrite import is_source
from autoshard.recompute.undecided import decided, first_run
from autoshard.rules.states import written_in_place
from autoshard.search.problem import Items, Problem, evaluate
from autoshard.space.cost_table import CostTable
from autoshard.space.strategies import SpecIndex

Amounts = tuple[int, np.ndarray]
"""A node, and bytes per strategy of it."""
Spans = tuple[tuple[float, float], ...]


def with_row(formulation: Formulation, moment: str) -> Formulation:
    """The formulation with a row for `moment` (an op's name), without a limit yet. Nothing to do where it has one."""
    return with_rows(formulation, (moment,))


def with_rows(formulation: Formulation, moments: Iterable[str]) -> Formulation:
    """`with_row` for each of `moments`, in the time of little more than one: when copies lie is found out once for all."""
    new = [moment for moment in dict.fromkeys(moments) if moment not in formulation.memory_rows]
    if not new:
        return formulation
    lives, problem = _lives(formulation), formulation.problem
    for moment in new:
        problem = with_items(problem, _amounts(formulation, moment, lives), np.inf)
    first = len(formulation.problem.row_limit)
    return replace(formulation, problem=problem, memory_rows={**formulation.memory_rows, **{m: first + i for i, m in enumerate(new)}})


def with_items(problem: Problem, amounts: Iterable[Amounts], limit: float) -> Problem:
    """The problem with one more hard row, loaded with these amounts."""
    row, found = len(problem.row_limit), list(amounts)
    items = Items(np.concatenate([problem.items.node, *(np.full(np.count_nonzero(a), n) for n, a in found)]),
                  np.concatenate([problem.items.strategy, *(np.flatnonzero(a) for _, a in found)]),
                  np.concatenate([problem.items.row, *(np.full(np.count_nonzero(a), row) for _, a in found)]),
                  np.concatenate([problem.items.amount, *(a[a != 0] for _, a in found)]))
    return replace(problem, items=items, row_limit=np.append(problem.row_limit, limit), row_price=np.append(problem.row_price, np.inf))


def without_idle(formulation: Formulation, choice: np.ndarray) -> np.ndarray:
    """`choice` with unread recompute sources switched off. A plan does not keep values that nobody reads, so row loads that are
    compared with its timeline must not count them."""
    table, units = formulation.table, formulation.units
    if table.base is None:
        return choice
    program, _ = decided(table, formulation.strategy_of(choice))
    later = program.graph.windows[program.graph.window_index[FORWARD] + 1:]
    read = {r.op for window in later for op in window.ops for r in op.refs}
    idle = {op.name for op in table.graph.ops if is_source(op) and op.name not in read and first_run(op.name) not in read}
    out = np.array(choice)
    for n, unit in enumerate(units.units):
        if not idle.isdisjoint(unit.members):
            wanted = [len(table.strategies[m]) - 1 if m in idle else int(p[choice[n]]) for m, p in zip(unit.members, unit.picked, strict=True)]
            same = np.flatnonzero(np.all(np.stack(unit.picked, axis=1) == wanted, axis=1))
            out[n] = same[0] if len(same) else choice[n]
    for i, copy in enumerate(formulation.copies, len(units.units)):
        if copy.value.op + RECOMPUTE_SUFFIX in idle and copy.states[out[i]].name == OWN:
            early = own(len(table.graph.windows), until=table.graph.window_of(copy.value.op + RECOMPUTE_SUFFIX))
            out[i] = copy.states.index(early) if early in copy.states else out[i]
    return out if np.isfinite(evaluate(formulation.problem, out)) else choice


def limited(formulation: Formulation, moment: str, limit: float) -> Formulation:
    """The formulation with a limit on the row of `moment`; a lower one stays."""
    problem, row = formulation.problem, formulation.memory_rows[moment]
    limits = problem.row_limit.copy()
    limits[row] = min(limits[row], limit)
    return replace(formulation, problem=replace(problem, row_limit=limits))


def _amounts(formulation: Formulation, moment: str, lives: Iterable[Life]) -> Iterator[Amounts]:
    now = formulation.table.graph.order[moment]
    yield from _stored(formulation, now)
    yield from _values(formulation, now)
    for life in lives:
        if life.first <= now <= life.last and any(lies := [_is_alive(spans, now) for spans in life.spans]):
            yield life.node, life.nbytes * np.array(lies, dtype=float)
    yield from _gathered(formulation, moment)
    yield from ((node, others * amounts) for node, amounts, others in formulation.saved)


def _stored(formulation: Formulation, now: int) -> Iterator[Amounts]:
    table, units = formulation.table, formulation.units
    final = {name: table.graph.order[op.refs[0].op] for name, op in table.graph.outputs(Role.GRADIENT).items() if op.refs}
    for op in table.graph.of_kind("param", "buffer"):
        optimizer = table.training.optimizer if op.name in table.trained else None
        is_final = table.graph.microbatches == 1 and final.get(op.target, now + 1) <= now  # else they are in accumulators
        counted = ("parameters", *(["gradients"] if is_final else []))
        specs = units.outputs(Ref(op.name))
        parts = [stored_parts(op.outputs[0], s, table.mesh, optimizer) for s in specs.specs]
        always = np.array([sum(p[c] for c in counted) for p in parts], dtype=float)[specs.index]
        state = np.array([p["optimizer"] for p in parts], dtype=float)[specs.index]
        yield units.index(op.name), always + state * table.strategies[op.name].on_device[units.picked(op.name)]


def _values(formulation: Formulation, now: int) -> Iterator[Amounts]:
    """Buffers that exist at `now` and are read then or later, each for the first value that lies in it. A value that a recompute
    source keeps exists from forward on."""
    table, units = formulation.table, formulation.units
    graph, last, in_place = table.graph, last_reads(table.graph), written_in_place(table.graph)
    for op in graph.ops:
        if is_accumulator(op):
            yield units.index(op.name), _bytes(table, Ref(op.name), units.outputs(Ref(op.name)))
            continue
        for i, meta in enumerate(op.outputs):
            ref = Ref(op.name, i)
            if op.kind != "call" or op.name in in_place or meta is None or storage_root(graph, ref) != ref or last.get(ref, -1) < now:
                continue
            if graph.order[op.name] <= now:
                yield units.index(op.name), _bytes(table, ref, units.outputs(ref))
            elif (first := Ref(first_run(op.name), i)) in op.kept and graph.order[first.op] <= now and last.get(first, -1) < now:
                yield units.index(op.name), _bytes(table, ref, units.inputs(op.name, op.refs.index(first)))


def _bytes(table: CostTable, ref: Ref, specs: SpecIndex) -> np.ndarray:
    return np.array([local_bytes(table, ref, s) for s in specs.specs])[specs.index]


def last_reads(graph: Graph) -> dict[Ref, int]:
    """Per buffer (its first value), the position of the last op that reads it or a view of it. A parameter's gradient that leaves
    is counted as stored, not here."""
    params = {op.target for op in graph.of_kind("param")}
    stored = {op.name for name, op in graph.outputs(Role.GRADIENT).items() if name in params}
    out: dict[Ref, int] = {}
    for op in graph.ops:
        for ref in op.refs if op.name not in stored else ():
            if ref in op.kept:  # as long as it is kept, the source stands for it
                continue
            root = storage_root(graph, ref)
            out[root] = max(out.get(root, -1), graph.order[op.name])
    return out


@dataclass(frozen=True, slots=True)
class Life:
    """When a copy node's copy, of so many bytes, lies somewhere: per state of it spans from op to op, by order; `first`, `last`: of all of them."""

    node: int
    nbytes: float
    spans: tuple[Spans, ...]
    first: float
    last: float


def _lives(formulation: Formulation) -> tuple[Life, ...]:
    found = []
    for node, copy in enumerate(formulation.copies, len(formulation.units.units)):
        spans = tuple(_spans(formulation, copy))
        ends = [end for each in spans for span in each for end in span]
        if ends:
            found.append(Life(node, local_bytes(formulation.table, copy.value, copy.spec), spans, min(ends), max(ends)))
    return tuple(found)


def _spans(formulation: Formulation, copy: CopyNode) -> Iterator[Spans]:
    """Per state: from the first reader of a window that makes the copy to its last one, or to the last of the windows it is kept for. What is held
    for the step lies there all the time."""
    graph = formulation.table.graph
    if any(is_hold(graph.op(name)) for name, _ in copy.readers):
        yield from (((-np.inf, np.inf),) if s.name == MADE else () for s in copy.states)
        return
    windows: dict[int, list[int]] = defaultdict(list)
    for name, _ in copy.readers:
        windows[graph.window_of(name)].append(graph.order[name])
    read = {w: (min(orders), max(orders)) for w, orders in windows.items()}
    for state in copy.states:
        alive: list[tuple[float, float]] = []
        for window, (first, last) in sorted(read.items()):
            if state.times[window]:
                alive.append((first, last))
            elif state.serves[window] and state.name == KEPT:
                alive[-1] = alive[-1][0], last
        yield tuple(alive)


def _is_alive(spans: Spans, now: int) -> bool:
    return any(first <= now <= last for first, last in spans)


def _gathered(formulation: Formulation, moment: str) -> Iterator[Amounts]:
    """Parameters that the op reads without a copy node: gathered for it, where it does not read them as thinly as
    they can be stored."""
    table, units, op = formulation.table, formulation.units, formulation.table.graph.op(moment)
    derived, nodes = param_derived(table.graph), {(c.value, c.spec) for c in formulation.copies}
    for i, ref in enumerate(op.refs):
        if ref in derived and ref.op != moment and units.index(ref.op) != units.index(moment):
            specs = units.inputs(moment, i)
            least = min(local_bytes(table, ref, s) for s in units.outputs(ref).specs)
            extra = np.array([0.0 if (ref, s) in nodes else local_bytes(table, ref, s) for s in specs.specs])
            yield units.index(moment), np.where(extra > least, extra, 0.0)[specs.index]
