"""Decision units: groups of ops that share one choice, because no redistribution between them could pay.

An anchor (contraction, attention, convolution, lookup, parameter, input, output, collective of the model) decides for itself. A cheap op joins the
unit of its producers when

* they all hang on the same sources, so that one layout fits them all (parameters, constants, graph inputs and, in
  backward, saved forward values are side inputs and do not count), and
* what it reads can not be Partial, or it is a view that passes Partial on, and
* being a view, it accepts every shard its producer may have, and
* it is no norm, which needs a dim whole that its producer may leave split, no expand behind an anchor, whose new dim may be split, and
  no view of a value for a contraction that reads the value too (`x @ x.T`).

On a mesh of one axis, where choices are few, a reduction begins a unit, and so does what reads a sum over a dim that may be split: the
statistics of a norm made of cheap ops are reduced by themselves. So does a cast to a wider dtype, before which less is moved. A view
that begins a unit passes Partial on. Where communication does not overlap compute, a transpose of what a contraction reads joins the
contraction that reads the transpose (`views_of_readers.py`): both readers then share one gather. On two axes these made the search's
bound too loose to close. Nor do norms of ranks that hold a part of the features there: the refinement op by op has them.

So every place where a reduction or a gather may be wanted stays an edge between units: before contractions, at
residual joins, at outputs. Inside a unit all ops run in matching layouts and nothing is communicated.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from autoshard.base.graph import LATE, Graph, Op, Ref
from autoshard.base.spec import PSUM, Placement, is_partial
from autoshard.base.windows import START, is_accumulator
from autoshard.program import flow
from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.rules.types import Row
from autoshard.seeds.marks import is_user_collective
from autoshard.space.cost_table import CostTable
from autoshard.space.strategies import SpecIndex, Strategies, StrategySet
from autoshard.space.views_of_readers import views_of_contractions

MAX_ROWS = 48  # joint rows per mesh axis above which a unit is not worth its size


@dataclass(frozen=True, eq=False)
class DecisionUnit:
    """`members` in execution order; unit strategy s runs member m with its own strategy `picked[m][s]`. `name`: the first of them, or
    the contraction that the others are views for."""

    name: str
    members: tuple[str, ...]
    picked: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.picked[0])

    def of(self, member: str) -> np.ndarray:
        return self.picked[self.members.index(member)]


@dataclass(frozen=True, eq=False)
class DecisionUnits:
    """All units in execution order of their first member, and where every op is."""

    units: tuple[DecisionUnit, ...]
    table: CostTable
    _shared: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared["where"] = {m: i for i, u in enumerate(self.units) for m in u.members}

    def index(self, op: str) -> int:
        return self._shared["where"][op]

    def picked(self, op: str) -> np.ndarray:
        """Strategy of `op` per strategy of its unit."""
        return self.units[self.index(op)].of(op)

    def outputs(self, ref: Ref) -> SpecIndex:
        """Specs of a value over its unit's strategies."""
        return self._compose(self.table.strategies[ref.op].output_specs[ref.index], self.picked(ref.op))

    def inputs(self, op: str, index: int) -> SpecIndex:
        """Specs in which input `index` of `op` is read, over its unit's strategies."""
        return self._compose(self.table.strategies[op].input_specs[index], self.picked(op))

    def _compose(self, specs: SpecIndex, picked: np.ndarray) -> SpecIndex:
        """Only the specs that the unit really uses; equal arguments give the same object."""
        key = (id(specs), id(picked))
        if key not in self._shared:
            used, index = np.unique(specs.index[picked], return_inverse=True)
            self._shared[key] = SpecIndex(tuple(specs.specs[i] for i in used), index)
        return self._shared[key]


def singletons(table: CostTable) -> DecisionUnits:
    """Every op a unit of its own, with all its strategies."""
    memo: dict = {}
    return DecisionUnits(tuple(_single(op.name, table.strategies[op.name], True, memo) for op in table.graph.ops), table)


def _single(name: str, found: StrategySet, passing: bool, memo: dict, fine: bool = True) -> DecisionUnit:
    """An op for itself; one that must not read Partial loses those strategies."""
    key = (id(found), passing)
    if key not in memo:
        keep = np.ones(len(found), bool) if passing else ~np.any(found.inputs <= PSUM, axis=(1, 2))
        if barred := () if fine else _in_parts(found):
            keep &= ~np.isin(found.picked, barred).any(axis=1)
        memo[key] = np.flatnonzero(keep)
    return DecisionUnit(name, (name,), (memo[key],))


def _in_parts(found: StrategySet) -> list[int]:
    """Rows of a norm whose features are split, and whose ranks add up what they know of each row."""
    if found.call is None or registry.rule_of(found.call.target).family is not Family.NORM:
        return []
    return [i for i, row in enumerate(found.rows) if row.inner and row.inputs[0] not in found.call.inputs[0].logical_dims(0)]


def are_coarse(table: CostTable) -> bool:
    """Whether units leave out more than they do on a mesh of one axis."""
    return sum(size > 1 for size in table.mesh.sizes) > 1


def find_units(table: CostTable) -> DecisionUnits:
    """Group the ops as described above and enumerate every unit's strategies; equal units share their arrays."""
    graph, memo = table.graph, {}
    one_axis = sum(size > 1 for size in table.mesh.sizes) == 1
    views = views_of_contractions(graph) if one_axis and table.cluster.overlap.eta == 0 else {}
    walk = _Walk(graph, flow.casts_after_sums(graph), flow.casts_of_parts(graph), views, one_axis)
    for op in graph.ops:
        walk.visit(op)
    units: list[DecisionUnit] = []
    for group in walk.members:
        members = tuple(sorted(group, key=graph.order.__getitem__))
        picked = _joint(graph, table.strategies, members, walk.passing, memo, one_axis) if len(members) > 1 else None
        if picked is None:
            units += [_single(m, table.strategies[m], m in walk.passing, memo, one_axis) for m in members]
        else:
            units.append(DecisionUnit(walk.views.get(members[0], members[0]), members, picked))
    return DecisionUnits(tuple(units), table)


@dataclass
class _Walk:
    """State of the walk over the ops that groups them.

    unit_of   op -> unit;  members, sources per unit (sources: what its ops read from outside, side inputs aside)
    joinable  sources -> the cheap unit on exactly these sources
    partial   values that may be Partial;  passing: ops that may read Partial
    after_sums  casts of gradients that are summed over ranks before: layouts change between units only, so they begin one
    of_parts    casts of gradients that are summed over ranks after them
    views       view -> contraction it decides with;  waiting: such views per contraction;  looked_at: what they look at
    fine        whether choices are few: then reductions and casts to wider dtypes begin a unit, what reads a sum over a split dim
                does, and views that begin one pass Partial on"""

    graph: Graph
    after_sums: frozenset[str] = frozenset()
    of_parts: frozenset[str] = frozenset()
    views: Mapping[str, str] = field(default_factory=dict)
    fine: bool = False
    waiting: dict[str, list[str]] = field(default_factory=dict)
    looked_at: dict[Ref, Ref] = field(default_factory=dict)
    unit_of: dict[str, int] = field(default_factory=dict)
    members: list[list[str]] = field(default_factory=list)
    sources: list[frozenset[Ref]] = field(default_factory=list)
    joinable: dict[frozenset[Ref], int] = field(default_factory=dict)
    constant: set[str] = field(default_factory=set)
    partial: set[Ref] = field(default_factory=set)
    passing: set[str] = field(default_factory=set)

    def visit(self, op: Op) -> None:
        main = [r for r in op.refs if not self._is_side(op, r)]
        cheap = _is_cheap(op) and not is_user_collective(op) and not is_accumulator(op)
        if op.kind == "call" and not main and self._is_constant(op):
            self.constant.add(op.name)
        if op.name in self.views and main:
            self._wait(op, main[0])
            return
        home = self._home(op, main) if cheap and main else None
        joined = home is not None
        if home is None:
            home = len(self.members)
            self.members.append(self.waiting.pop(op.name, []))
            self.sources.append(frozenset(self.looked_at.get(r, r) for r in main))
            if cheap and main:
                self.joinable[frozenset(main)] = home
        self.unit_of[op.name] = home
        self.members[home].append(op.name)
        self._note_partial(op, main, cheap, joined)

    def _wait(self, view: Op, ref: Ref) -> None:
        """For its contraction, in whose unit it will be."""
        value = Ref(view.name)
        self.waiting.setdefault(self.views[view.name], []).append(view.name)
        self.looked_at[value] = self.looked_at.get(ref, ref)
        self.passing.add(view.name)
        self.partial |= {value} if ref in self.partial else set()

    def _is_side(self, op: Op, ref: Ref) -> bool:
        producer = self.graph.op(ref.op)
        return (producer.kind in ("param", "buffer", "input") or producer.name in self.constant or self._is_stored(producer)
                or (op.phase in LATE and producer.phase == "forward"))

    def _is_stored(self, op: Op) -> bool:
        """The cast of a parameter by a precision policy stands for the parameter, and so does what holds it for a step."""
        return op.phase == START or registry.is_cast(op) and all(self.graph.op(r.op).kind == "param" for r in op.refs)

    def _is_constant(self, op: Op) -> bool:
        """Made of constants alone, or in backward of values that forward saved (not of parameters: those are stored)."""
        kinds = {self.graph.op(r.op).kind for r in op.refs}
        return all(r.op in self.constant for r in op.refs) or (op.phase in LATE and kinds == {"call"})

    def _home(self, op: Op, main: Sequence[Ref]) -> int | None:
        """The unit `op` joins, or None for one of its own."""
        family = registry.family_of(op)
        if op.name in self.after_sums or self.fine and (family is Family.REDUCTION or self._widens_dtype(op)):
            return None
        blocked = [r for r in main if r in self.partial and not self._is_free(op)]
        if family is Family.NORM or registry.is_view(op) and (
                not _accepts_all(self.graph, op) or self._widens(op) or self._is_operand_again(op)):
            blocked = list(main)
        open_units = {self.unit_of[r.op] for r in main if r not in blocked and self.graph.op(r.op).kind == "call"}
        if not open_units:
            return None if self._is_cut_result(op) else self.joinable.get(frozenset(main))
        found = {self.sources[u] for u in open_units}
        if len(found) != 1 and len(open_units) > 1:
            return None
        known = next(iter(found))
        if any(r not in known and self.unit_of[r.op] not in open_units for r in main):
            return None
        return self._merge(sorted(open_units)) if not blocked or set(blocked) <= known else None

    def _widens(self, op: Op) -> bool:
        """An expand of what an anchor made, seen through views: the dim that it makes may be split."""
        maker = self.graph.op(op.refs[0].op)
        while registry.is_view(maker) and len(maker.refs) == 1:
            maker = self.graph.op(maker.refs[0].op)
        return "expand" in str(op.target) and maker.kind == "call" and not _is_cheap(maker)

    def _is_cut_result(self, op: Op) -> bool:
        """A view for the user alone that needs a dim whole, as logits without their pad do: nobody who reads the value besides has to."""
        readers = self.graph.users.get(Ref(op.name), ())
        return registry.is_view(op) and bool(readers) and all(self.graph.op(name).kind == "output" for name, _ in readers)

    def _widens_dtype(self, op: Op) -> bool:
        """A cast to a wider dtype: what it reads moves for less than what it makes."""
        return registry.is_cast(op) and op.outputs[0].dtype.itemsize > self.graph.meta(op.refs[0]).dtype.itemsize

    def _is_operand_again(self, view: Op) -> bool:
        """A view of a value for a contraction that reads the value too, as `x @ x.T` does: of the two only one may be split along a
        dim of the result."""
        readers = self.graph.users.get(Ref(view.name), ())
        return len(view.refs) == 1 and any(view.refs[0] in self.graph.op(name).refs for name, _ in readers)

    def _merge(self, units: list[int]) -> int:
        first, *others = units
        for other in others:
            for name in self.members[other]:
                self.unit_of[name] = first
            self.members[first] += self.members[other]
            self.members[other] = []
        return first

    def _note_partial(self, op: Op, main: Sequence[Ref], cheap: bool, joined: bool) -> None:
        rows = flow.rows_of(self.graph, op, self.of_parts) if op.kind == "call" else ()
        reads = any(r in self.partial for r in op.refs)
        sums = op.phase in LATE and str(op.target) == "aten.add.Tensor" and all(r in self.partial for r in main)
        if not cheap or (self._is_free(op) and (joined or not reads or self.fine)) or sums or registry.is_cast(op):
            self.passing.add(op.name)
        makes = not cheap or (reads and op.name in self.passing) or any(
            (self.fine or self._is_of_tokens(op, r)) and any(map(is_partial, r.outputs)) and PSUM not in r.inputs for r in rows)
        if op.kind == "call" and makes:
            self.partial |= {Ref(op.name, i) for i in range(len(op.outputs)) if any(is_partial(r.outputs[i]) for r in rows)}

    def _is_of_tokens(self, op: Op, row: Row) -> bool:
        """Whether it sums over the first dim of what the op reads, as gradients of weights do. With a batch of one that is the sequence; the
        last dim is features, which are not split for the sake of a sum."""
        return any(p == 0 or p >= 0 and p < len(shape) - 1 and max(shape[:p]) == 1
                   for p, shape in ((p, self.graph.meta(r).logical_shape) for p, r in zip(row.inputs, op.refs, strict=True)))

    def _is_free(self, op: Op) -> bool:
        """Views cost nothing on Partial values. Other ops wait for the reduction, casts too: it is cheaper in the
        narrow dtype, or wanted in the wide one."""
        return registry.is_view(op) and any(is_partial(r.inputs[0]) for r in registry.rows(self.graph.calls[op.name]))


def _is_cheap(op: Op) -> bool:
    return op.kind == "call" and registry.rule_of(op.target).family.cheap


def _accepts_all(graph: Graph, op: Op) -> bool:
    """Whether a view has a row for every shard of its input, onto a dim that divides as far."""
    rows = registry.rows(graph.calls[op.name])
    for i, ref in enumerate(op.refs):
        shape, parts = graph.meta(ref).logical_shape, graph.meta(ref).part_dims
        if {d for d, n in enumerate(shape) if n > 1 and d not in parts} - {r.inputs[i] for r in rows}:
            return False
        narrowed = (meta.logical_shape[p] < shape[row.inputs[i]] for row in rows if row.inputs[i] >= 0
                    for meta, p in zip(op.outputs, row.outputs, strict=True) if meta is not None and p >= 0)
        if any(narrowed):
            return False
    return True


def _joint(graph: Graph, strategies: Strategies, members: tuple[str, ...], passing: set[str],
           memo: dict, fine: bool) -> tuple[np.ndarray, ...] | None:
    """Strategy index of every member per joint strategy; None when there are none or too many."""
    key = _signature(graph, strategies, members, passing)
    if key not in memo:
        rows = _joint_rows(graph, strategies, members, passing, fine)
        memo[key] = None if rows is None else _over_axes(strategies, members, rows)
    return memo[key]


def _signature(graph: Graph, strategies: Strategies, members: tuple[str, ...], passing: set[str]) -> tuple:
    """Equal for units of equal ops wired equally."""
    place = {m: i for i, m in enumerate(members)}
    outside: dict[Ref, int] = {}
    wires = tuple((id(strategies[m]), m in passing, tuple(
        (place[r.op], r.index) if r.op in place else (-1, outside.setdefault(r, len(outside))) for r in graph.op(m).refs))
        for m in members)
    return wires


def _joint_rows(graph: Graph, strategies: Strategies, members: tuple[str, ...],
                passing: set[str], fine: bool) -> list[tuple[int, ...]] | None:
    """One-axis rows of all members that agree on every inner edge and read an outside value in one placement."""
    found: list[tuple[tuple[int, ...], dict[Ref, Placement]]] = [((), {})]
    for name in members:
        refs, rows = graph.op(name).refs, strategies[name].rows
        barred = () if fine else _in_parts(strategies[name])
        grown = []
        for chosen, placed in found:
            for n, row in enumerate(rows):
                if n in barred or name not in passing and any(map(is_partial, row.inputs)):
                    continue
                if all(placed.get(r, p) == p for r, p in zip(refs, row.inputs, strict=True)):
                    made = {Ref(name, o): p for o, p in enumerate(row.outputs)}
                    grown.append(((*chosen, n), {**placed, **dict(zip(refs, row.inputs, strict=True)), **made}))
        if len(grown) > MAX_ROWS:
            return None
        found = grown
    return [chosen for chosen, _ in found]


def _over_axes(strategies: Strategies, members: tuple[str, ...], rows: list[tuple[int, ...]]) -> tuple[np.ndarray, ...] | None:
    """The product of joint rows over the mesh axes, as strategy indices of the members."""
    axes = strategies[members[0]].picked.shape[1]
    lookup: list[dict[tuple[int, ...], int]] = [{} for _ in members]
    for found, m in zip(lookup, members, strict=True):
        for s, p in enumerate(strategies[m].picked.tolist()):
            found.setdefault(tuple(p), s)  # the first: later ones of the same rows nest axes otherwise
    picked = []
    for combination in product(rows, repeat=axes):
        at = [lookup[k].get(tuple(row[k] for row in combination)) for k in range(len(members))]
        if None not in at:
            picked.append(at)
    return tuple(np.array(column, dtype=np.int64) for column in zip(*picked, strict=True)) if picked else None
