"""CostTable -> Problem and back: the only bridge between the program and the search.

Nodes are units of ops that decide together (see space/decision_units.py) and **copy nodes**. A value read in one spec by several consumers is
redistributed once, so the redistribution is a node of its own: per (value, target spec), see formulate/copies.py.

While recomputation is undecided (recompute/undecided.py), backward reads a value through its recompute source, and a value and its source
share one copy node: state `kept` requires that the value is not recomputed; a state that serves backward from the producer's spec
requires the source.

A (value, spec) that only one consumer could read needs no node: the producer-consumer edge carries its
price. Gathers of parameters and reductions of gradients may hide behind compute; their seconds must sit on
node states to enter the overlap rows, so their copy nodes have one `made` state per distinct price.

Rows: 0 = memory at the turn from forward to backward (hard), then, where the cluster overlaps at all, 1 = forward and
2 = backward overlap with load = hideable seconds - eta * heavy compute seconds, limit 0 and price 1 - interference; in
training then memory at the optimizer's update (hard). Both memory rows count only bytes that every plan holds then, so a
bound under them is valid; `memory_rows.py` adds rows for moments at which a plan found needs more.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.base.graph import BACKWARD, FORWARD, Op, Ref
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.base.spec import NOWHERE, Spec
from autoshard.base.windows import START, is_accumulator, is_hold
from autoshard.cost.budget import Budget
from autoshard.cost.memory import stored_parts, update_workspace
from autoshard.formulate.builder import FIRST_WINDOW, MEMORY, Builder
from autoshard.formulate.copies import MADE, CopyNode, State, copy_states, producer_table, reader_table, with_source
from autoshard.formulate.repeats import added, again, signature
from autoshard.formulate.values import equality, is_saved, storage_root
from autoshard.recompute.rewrite import is_source
from autoshard.recompute.undecided import open_units, source_state
from autoshard.rules import registry
from autoshard.search.problem import Edge, Items, Problem
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import DecisionUnit, DecisionUnits, find_units
from autoshard.space.strategies import SpecIndex


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem with what is needed to read a solution: node n is unit n, or, from
    `len(units)` on, copy node `copies[n - len(units)]`. `memory_rows`: moment ("turn", "update", an op) -> its row. `budget`: what
    their limits come from. `saved`: (node, bytes per strategy, micro-batches) of what a micro-batch keeps from forward to backward, and how many
    others keep it, per strategy, when most are in flight."""

    problem: Problem
    units: DecisionUnits
    copies: tuple[CopyNode, ...]
    table: CostTable
    memory_rows: Mapping[str, int] = field(default_factory=lambda: {"turn": MEMORY})
    budget: Budget = Budget()
    saved: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()

    def strategy_of(self, choice: np.ndarray) -> dict[str, int]:
        """Chosen strategy index per op name."""
        return {m: int(p[choice[i]]) for i, u in enumerate(self.units.units) for m, p in zip(u.members, u.picked, strict=True)}

    def state_of(self, choice: np.ndarray) -> dict[tuple[Ref, Spec], State]:
        offset = len(self.units.units)
        return {(c.value, c.spec): c.states[int(choice[offset + i])] for i, c in enumerate(self.copies)}


def formulate(table: CostTable, *, memory_limit: float | None = None, layers: Mapping[str, int] | None = None,
              units: DecisionUnits | None = None, in_flight: tuple[int, int] = (1, 0)) -> Formulation:
    """Build the search problem: seconds of a step, in which every window runs `graph.runs` times. `memory_limit`: bytes per rank at any
    moment, None: unlimited. `in_flight`: micro-batches of a stage of a pipeline that are there at once, and how many of them have run a part of
    their backward.
    `layers`: op name -> class id of ops that repeat in equal layers (see layers.py). `units`: what decides together
    (see space/decision_units.py), by default as `find_units` groups the ops."""
    overlap = table.cluster.overlap
    b = Builder(table, units or default_units(table), overlap.eta, overlap.interference, in_flight)
    layers = layers or {}
    for unit in b.units.units:
        _add_unit(b, unit, layers)
    for op in table.graph.ops:
        for index in range(len(op.outputs)):
            _add_value(b, Ref(op.name, index), layers)
    tie_gradients(b)
    items = _items(b)
    rows = {"turn": MEMORY, **({"update": b.update_row} if table.graph.training else {})}
    budget = Budget.of(table.cluster.device, memory_limit)
    limits = {r: unreachable(items, r) if memory_limit is None else budget.peak for r in rows.values()}
    row_limit, row_price = [limits.pop(MEMORY)], [np.inf]
    if b.overlaps:
        row_limit += [0.0] * len(table.graph.windows)
        row_price += [1.0 - b.kappa] * len(table.graph.windows)
    row_limit += limits.values()
    row_price += [np.inf] * len(limits)
    problem = Problem(tuple(b.costs), tuple(b.edges), np.array(row_limit), np.array(row_price), items,
                      groups=np.array(b.groups, dtype=np.int64) if layers else None)
    return Formulation(problem, b.units, tuple(b.copies), table, rows, budget, tuple(b.saved))


def default_units(table: CostTable) -> DecisionUnits:
    """Decision units: groups of ops, and, while recomputation is undecided, their recompute sources with them."""
    return find_units(table) if table.base is None else open_units(find_units(table.base), table)


def unreachable(items: Items, row: int) -> float:
    """A limit that no choice can exceed: the sum of all items on the row."""
    return float(np.maximum(items.amount[items.row == row], 0.0).sum()) + 1.0


def _items(b: Builder) -> Items:
    if not b.items:
        return Items.empty()
    counts = [len(s) for _, s, _, _ in b.items]
    return Items(np.repeat(np.array([n for n, *_ in b.items], dtype=np.int64), counts),
                 np.concatenate([s for _, s, _, _ in b.items]),
                 np.repeat(np.array([r for _, _, r, _ in b.items], dtype=np.int64), counts),
                 np.concatenate([a for *_, a in b.items]))


def _add_unit(b: Builder, unit: DecisionUnit, layers: Mapping[str, int]) -> None:
    node = len(b.costs)
    costs = [b.table.ops[m] for m in unit.members]
    b.costs.append(b.shared(("cost", *map(id, costs), *map(id, unit.picked)), lambda: sum(
        c.total[p] for c, p in zip(costs, unit.picked, strict=True))))
    b.groups.append(layers.get(unit.name, -1) if all(m in layers for m in unit.members) else -1)
    for name, cost, picked in zip(unit.members, costs, unit.picked, strict=True):
        op = b.table.graph.op(name)
        if op.kind in ("param", "buffer") and b.has_bytes(name):
            _add_stored(b, node, op, picked)
        if is_accumulator(op) and b.has_bytes(name):  # all of them are there at the turn; at the update they are gradients, or gone
            specs = b.table.strategies[name].output_specs[0]
            b.add_items(node, MEMORY, np.array([b.nbytes(Ref(name), s) for s in specs.specs])[specs.index][picked])
        if b.overlaps and registry.is_heavy(op):
            b.add_items(node, b.window_row(name), -b.eta * cost.compute[picked])


def _add_stored(b: Builder, node: int, op: Op, picked: np.ndarray) -> None:
    """At the turn there are no gradients yet, at the update all of them, and what the update itself needs. Of state on the host
    one parameter's at a time comes here, before the others are updated: no byte of it is surely there."""
    t, meta = b.table, op.outputs[0]
    found, trained = t.strategies[op.name], op.name in t.trained
    index, optimizer = found.output_specs[0], t.training.optimizer
    together = t.cluster.device.updates_together and trained
    parts = [stored_parts(meta, s, t.mesh, optimizer if trained else None) for s in index.specs]

    def amounts(always: list[int], unless_on_host: list[int]) -> np.ndarray:
        a, u = (np.array(x, dtype=float)[index.index] for x in (always, unless_on_host))
        return (a + u * found.on_device)[picked]

    b.add_items(node, MEMORY, amounts([p["parameters"] for p in parts], [p["optimizer"] for p in parts]))
    if t.graph.training:
        work = [update_workspace(optimizer, [p["parameters"]], True) if together else 0 for p in parts]
        b.add_items(node, b.update_row, amounts([p["parameters"] + p["gradients"] for p in parts],
                                                [p["optimizer"] + w for p, w in zip(parts, work, strict=True)]))


@dataclass(frozen=True)
class _Reader:
    """Someone who reads a value: a unit's node, the first (op, input) that reads it there in these specs, its window."""

    node: int
    op: str
    index: int
    specs: SpecIndex
    window: int


def readers_of(b: Builder, ref: Ref) -> list[_Reader]:
    """Readers outside the value's own unit, but for a source that may keep it; inputs of one unit that always agree are one
    reader."""
    home = b.units.index(ref.op)
    found: dict[tuple, _Reader] = {}
    for name, index in b.table.graph.users.get(ref, ()):
        node = b.units.index(name)
        if node != home and ref not in b.table.graph.op(name).kept:
            specs = b.units.inputs(name, index)
            reader = _Reader(node, name, index, specs, b.table.graph.window_of(name))
            found.setdefault((node, reader.window, specs.specs, specs.index.tobytes()), reader)
    return list(found.values())


def _add_value(b: Builder, ref: Ref, layers: Mapping[str, int]) -> None:
    """Copy nodes and direct edges from a value, and from its source, to who reads them."""
    if is_source(b.table.graph.op(ref.op)):
        return  # together with the value itself
    source = _source(b, ref)
    if source is not None:
        _add_readers(b, ref, source, layers)
    elif ref in b.table.graph.users:
        _add_alike(b, ref, layers)
    _add_saved(b, ref)


def _add_alike(b: Builder, ref: Ref, layers: Mapping[str, int]) -> None:
    """As `_add_readers`, for the first of the values that are read alike; for others the same with their own nodes."""
    key, nodes = signature(b, ref)
    known = b.memo.get(("alike", key))
    if known is None:
        before = b.lengths
        _add_readers(b, ref, None, layers)
        b.memo["alike", key] = added(b, before, ref, nodes)
    else:
        again(b, known, ref, nodes, lambda copy: _copy_group(b, copy, layers))


def _add_readers(b: Builder, ref: Ref, source: Ref | None, layers: Mapping[str, int]) -> None:
    readers = readers_of(b, ref)
    later = readers_of(b, source) if source else []
    priced = b.overlaps and b.table.hideable(ref)
    held = any(is_hold(b.table.graph.op(r.op)) for r in readers)
    shared = {spec: tuple(rs) for spec, rs in _by_spec([*readers, *later]).items()
              if (priced or held or len(rs) > 1) and _costs_anything(b, ref, spec)}
    for value, rs in ((ref, readers), (source, later)):
        for reader in rs:
            _add_direct_edge(b, value, reader, frozenset(s for s, through in shared.items() if reader in through))
    for spec, rs in shared.items():
        _add_copy_node(b, ref, spec, rs, priced, layers)


def _by_spec(readers: Iterable[_Reader]) -> dict[Spec, list[_Reader]]:
    wanted: dict[Spec, list[_Reader]] = defaultdict(list)
    for reader in readers:
        for spec in reader.specs.specs:
            if NOWHERE not in spec:
                wanted[spec].append(reader)
    return wanted


def _source(b: Builder, ref: Ref) -> Ref | None:
    """The value's source, where backward reads it through one."""
    op = b.table.graph.by_name.get(ref.op + RECOMPUTE_SUFFIX)
    return Ref(op.name, ref.index) if op is not None and is_source(op) else None


def _costs_anything(b: Builder, ref: Ref, spec: Spec) -> bool:
    """Whether some producer spec pays for reaching `spec`; where all are free there is nothing to share."""
    seconds = b.table.table(ref, b.units.outputs(ref), _target(b, spec))
    return b.shared(("paid", id(seconds)), lambda: bool(np.any(np.isfinite(seconds) & (seconds > 0))))


def _target(b: Builder, spec: Spec) -> SpecIndex:
    return b.shared(("target", spec), lambda: SpecIndex((spec,), np.zeros(1, dtype=np.int64)))


def _add_direct_edge(b: Builder, ref: Ref, reader: _Reader, through_copies: frozenset[Spec]) -> None:
    """Producer-reader prices; targets served by copy nodes are free here."""
    src, dst = b.units.outputs(ref), reader.specs
    seconds = b.priced(ref, src, dst, b.table.graph.runs[reader.window])
    if all(s in through_copies or NOWHERE in s for s in dst.specs):
        return
    columns = tuple(i for i, s in enumerate(dst.specs) if s in through_copies)

    def make() -> np.ndarray:
        out = seconds.copy()
        out[:, columns] = 0.0
        return out

    table = b.shared(("direct", id(seconds), columns), make) if columns else seconds
    b.edges.append(Edge(b.units.index(ref.op), reader.node, table, src.index, dst.index))


def _add_copy_node(b: Builder, ref: Ref, spec: Spec, readers: tuple[_Reader, ...], priced: bool,
                   layers: Mapping[str, int]) -> None:
    src, source = b.units.outputs(ref), _source(b, ref)
    seconds = b.table.table(ref, src, _target(b, spec))
    windows, runs, every_window = frozenset(r.window for r in readers), b.table.graph.runs, len(b.table.graph.windows)
    through = b.table.graph.window_of(source.op) if source is not None else None
    through = through if through is not None and through <= max(windows) else None
    states = b.shared(("states", id(seconds), windows, priced, through),
                      lambda: copy_states(src, spec, seconds[:, 0], windows, every_window, priced, through))
    node = len(b.costs)
    copy = CopyNode(ref, spec, states, tuple((r.op, r.index) for r in readers))
    b.copies.append(copy)
    b.costs.append(b.shared(("copy cost", id(states)), lambda: np.array(
        [(s.price or 0.0) * s.count(runs) * b.kappa for s in states])))
    b.groups.append(_copy_group(b, copy, layers))
    producer, index = b.shared(("producer", id(states)), lambda: producer_table(src, spec, seconds[:, 0], states, runs)), src.index
    if through is not None:
        there = b.shared(("there", source, id(src)), lambda: source_state(b.units, source))
        producer = b.shared(("producer and source", id(producer)), lambda: with_source(producer, seconds[:, 0], states, through))
        index = b.shared(("producer and source", id(src), there.tobytes()), lambda: index * 3 + there)
    every = b.shared(("every", len(states)), lambda: np.arange(len(states)))
    b.edges.append(Edge(b.units.index(ref.op), node, producer, index, every))
    for r in readers:
        table = b.shared(("reader", id(states), r.specs.specs, r.window),
                         lambda r=r: reader_table(r.specs, spec, states, r.window))
        b.edges.append(Edge(node, r.node, table, every, r.specs.index))
    if priced:
        for window in range(every_window):
            b.add_items(node, FIRST_WINDOW + window, b.shared(("window", id(states), window), lambda window=window: np.array(
                [(s.price or 0.0) * s.times[window] * runs[window] for s in states])))
    if len(windows) > 1 and b.has_bytes(ref.op):
        extra = max(0.0, b.nbytes(ref, spec) - (0.0 if through is not None else _least_saved(b, ref)))
        turn, middle = (b.shared(("outlives", id(states), name), lambda name=name: np.array(
            [s.outlives(b.table.graph.window_index.get(name, every_window)) for s in states])) for name in (FORWARD, BACKWARD))
        b.add_saved(node, np.where(turn, extra, 0.0), middle)
    held = b.table.graph.op(ref.op).kind == "param" and any(is_hold(b.table.graph.op(r.op)) for r in readers)
    if held and b.has_bytes(ref.op):  # alive as long as what holds it
        b.add_items(node, MEMORY, np.array([b.nbytes(ref, spec) if s.name == MADE else 0.0 for s in states]))


def _copy_group(b: Builder, copy: CopyNode, layers: Mapping[str, int]) -> int:
    """Copies of corresponding values for corresponding readers are tied like the ops themselves."""
    names = (copy.value.op, *(r for r, _ in copy.readers))
    if any(n not in layers for n in names):
        return -1
    key = (tuple(layers[n] for n in names), copy.value.index, copy.spec, tuple(i for _, i in copy.readers), id(copy.states))
    first = b.memo.setdefault("groups", {})
    return first.setdefault(key, 1_000_000 + len(first))


def _add_saved(b: Builder, ref: Ref) -> None:
    """Memory of a forward value that backward reads, in its producer's spec, or that a source keeps. Values that may share
    a buffer, being views of one another, count once; sources keep no views."""
    root = storage_root(b.table.graph, ref)
    if not b.has_bytes(root.op):
        return
    if is_saved(b.table.graph, ref):
        if ("saved", root) not in b.memo:
            b.memo["saved", root] = True
            specs = b.units.outputs(ref)
            amounts = np.array([b.nbytes(ref, s) for s in specs.specs])
            if b.table.graph.meta(ref).numel > b.table.graph.meta(root).numel:  # expanded: no larger than what it is a view of
                amounts = np.minimum(amounts, min(b.nbytes(root, s) for s in b.units.outputs(root).specs))
            if b.table.graph.op(root.op).phase == START:
                b.add_items(b.units.index(ref.op), MEMORY, amounts[specs.index])
            else:
                b.add_saved(b.units.index(ref.op), amounts[specs.index], b.is_read_late(root))
    if (source := _source(b, ref)) and source in b.table.graph.users:
        op = b.table.graph.op(source.op)
        if ref in op.kept:
            specs = b.units.inputs(op.name, op.refs.index(ref))
            amounts = np.array([b.nbytes(ref, s) for s in specs.specs])
            b.add_saved(b.units.index(op.name), amounts[specs.index], b.is_read_late(source))


def _least_saved(b: Builder, ref: Ref) -> float:
    """What `_add_saved` counts for the value itself at least: where all of backward reads a kept copy, it is not saved."""
    return b.shared(("least saved", ref), lambda: min(
        b.nbytes(ref, s) for s in b.units.outputs(ref).specs) if is_saved(b.table.graph, ref) else 0.0)


def tie_gradients(b: Builder) -> None:
    """A gradient leaves in its parameter's stored spec, or as its input comes in, a state is written back as it lies, a tangent enters as
    the dual of its output; seeds tie what lies alike."""
    graph = b.table.graph
    for pair in graph.ties.items():
        _add_equality(b, *sorted(map(graph.op, pair), key=lambda op: op.kind == "output"))
    for one, other in b.table.seeds.ties:
        _add_equality(b, graph.op(one), graph.op(other))


def _add_equality(b: Builder, source: Op, output: Op) -> None:
    src, dst = (b.units.inputs(op.name, 0) if op.kind == "output" else b.units.outputs(Ref(op.name)) for op in (source, output))
    metas = [b.table.graph.meta(op.refs[0]) if op.kind == "output" else op.outputs[0] for op in (source, output)]
    table = b.shared(("equal", src.specs, dst.specs, *(m.factors for m in metas)), lambda: equality(*metas, src.specs, dst.specs))
    b.edges.append(Edge(b.units.index(source.name), b.units.index(output.name), table, src.index, dst.index))
