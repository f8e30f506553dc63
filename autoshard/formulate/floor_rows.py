"""Hard memory rows that count only bytes that every plan holds while an op runs: bounds under them hold for every plan.

The rows of the turn and of the update do not see what ops need to run, nor what backward makes: recomputed values, their gradients, gradients of
parameters. A floor row is the turn's row, moved to an op. While op X runs there are

    stored tensors              as they are stored; optimizer state on the device; inputs, as ranks are given them (`FloorWeights`)
    gathered parameters         that ops behind X read and whose gathers are issued before it, or that ops before and behind it read (`FloorGathers`)
    gradients of parameters     those made before X, in the least bytes that they may have on their way to where they are stored; the last of
                                them in what its reduction sends
    results                     of forward, as the user gets them
    what X reads                in the specs in which it reads it, and what it makes and needs to make it; of parameters what it gathers
    kept values, kept copies    that forward has made before X, and backward has not begun to read: as they lie
    other values                that an op before X has made or read, and an op behind it will read: in the least bytes that they may have on the
                                way from one to the other, given what the last one reads (`FloorValues`)

A recompute source only surely gives its value to an op that is no source, for a source may be off. So a recomputed value counts between two
such readers, or from where one of its unit needs it. Where a choice loads a row of these more than its limit, its timeline exceeds the limit.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.formulate.copies import KEPT, MADE, CopyNode
from autoshard.formulate.floor_reads import FloorReads
from autoshard.formulate.floor_weights import exact_near
from autoshard.formulate.memory_rows import Amounts, with_items
from autoshard.formulate.problem_of import Formulation
from autoshard.formulate.values import storage_root
from autoshard.program.flow import gradient_bound, is_passing
from autoshard.recompute.rewrite import is_source
from autoshard.rules import registry
from autoshard.search.problem import row_loads

BEFORE, BEHIND = "while ", " runs"
"""Around the op in the name of a floor row in `Formulation.memory_rows`; further rows of the op have primes behind it."""


@dataclass(frozen=True, eq=False, slots=True)
class Copied:
    """A copy node of the formulation, by number. `made`: the order of its last reader of forward, after which it is there if it is kept; `until`: of
    the first op of backward that may read it or what shares its buffer, -1 where none does; `last`: its last reader, and the input; `needed`: the
    order of that one where it surely runs and the copy is of a parameter, else -1; `nbytes`: of the copy; `kept`: 1 for every state that keeps it."""

    node: int
    copy: CopyNode
    root: Ref
    made: int
    until: int
    last: tuple[str, int]
    needed: int
    nbytes: float
    kept: np.ndarray


@dataclass(eq=False)
class Floors(FloorReads):
    """What floor rows of one formulation have in common."""

    @property
    def possible(self) -> bool:
        """Whether rows can be made: of a step of forward and backward, of one micro-batch."""
        two = [w.name for w in self.graph.windows if w.ops] == ["forward", "backward"]
        return two and self.formulation.table.training.fullest == (1, 0) and self.formulation.table.base is not None

    @cached_property
    def moments(self) -> tuple[str, ...]:
        """The ops that may have a row, in order: they run in every plan, where they stand."""
        late = gradient_bound(self.graph)
        return tuple(op.name for op in self.graph.of_kind("call") if not is_source(op) and not registry.is_view(op)
                     and not (is_passing(op) and Ref(op.name) in late))

    def near(self, op: str, count: int) -> tuple[str, ...]:
        """The ops that may have a row nearest to one of the program with decided recomputation: behind it, and one before."""
        orders = self.memo.setdefault("orders", np.array([self.graph.order[name] for name in self.moments]))
        at = int(np.searchsorted(orders, self.graph.order.get(op, 0)))
        return self.moments[max(0, at - 1):at + count]

    def amounts(self, moment: str, plan: np.ndarray, alone: bool = False) -> Iterator[Amounts]:
        """Bytes per strategy of nodes while `moment` runs, for any choice; what is a matter of two nodes is exact for choices near `plan`. `alone`:
        only what `plan` loads is asked for, and amounts of other strategies say nothing."""
        op, now = self.graph.op(moment), self.graph.order[moment]
        gathered, read = self._gathered(op), {storage_root(self.graph, ref) for ref in op.refs}
        yield from self._stored(now, gathered, plan)
        yield from self._own(op, plan, alone)
        yield from self._handed_out(op, read)
        yield from self._under_way(op, now, plan)
        yield from ((self.formulation.units.index(moment), amounts) for _, amounts in gathered.values())
        copies, counted = self._copies_at(now, op), {}
        kept = [c for c in copies if c.kept[plan[c.node]]]
        copied = {c.root for c in kept}
        for root in self.readers if op.phase == "forward" else self.roots:
            home = self._homes[root]
            if root in read or root.op == moment or home in counted and root not in self.readers:  # the last: by what shares its buffer
                continue
            values = self._early(root, now, read) if op.phase == "forward" else self._value(root, now, None if home in copied else plan)
            for node, amounts, counted[home] in values:
                yield node, amounts
        for copy in dict.fromkeys([*kept, *self._read_by(op)]) if alone else copies:  # not of inputs: a piece of one may be a view of it
            if copy.root not in self.outputs and self.graph.op(copy.root.op).kind != "input":
                yield from self._copy(copy, now, op, read, plan, counted.get(copy.root, 0.0))

    def load(self, moment: str, choice: np.ndarray) -> float:
        """What a choice surely holds."""
        return float(sum(amounts[choice[node]] for node, amounts in self.amounts(moment, choice, alone=True)))

    # --- what the user holds ---

    def _handed_out(self, op: Op, read: set[Ref]) -> Iterator[Amounts]:
        """Results of forward, which the user holds from then on, as they are handed out. Nothing else that these are or that was made of them is
        counted, for it may be the same buffer."""
        for root, output in self.outputs.items():
            ref = output.refs[0]
            if op.phase != "forward" and root not in read and self.graph.meta(ref).numel == self.graph.meta(root).numel:
                yield self.formulation.units.index(output.name), self._bytes(ref, self.formulation.units.inputs(output.name, 0))

    # --- copies ---

    @cached_property
    def _copies(self) -> tuple[Copied, ...]:
        return tuple(self._copied(node, copy) for node, copy in enumerate(self.formulation.copies, len(self.formulation.units.units)))

    def _copied(self, node: int, copy: CopyNode) -> Copied:
        graph, root = self.graph, storage_root(self.graph, copy.value)
        forward, backward = ([r for r in copy.readers if graph.op(r[0]).phase == phase] for phase in ("forward", "backward"))
        last = max(copy.readers, key=lambda reader: graph.order[reader[0]])
        sure = graph.op(last[0]).kind == "call" and not is_source(graph.op(last[0])) and graph.op(root.op).kind == "param"
        return Copied(node, copy, root, max((graph.order[name] for name, _ in forward), default=len(graph.ops)),
                      self._family_first(copy.value, backward) if backward else -1, last, graph.order[last[0]] if sure else -1,
                      self._local(copy.value, copy.spec), np.array([s.name == KEPT for s in copy.states], dtype=float))

    def _copies_at(self, now: int, op: Op) -> list[Copied]:
        """Those that may count while the op runs."""
        made, until, needed = self._times
        lie = made < now if op.phase == "forward" else (now < until) | (now < needed)
        return list(dict.fromkeys([*(self._copies[i] for i in np.flatnonzero(lie).tolist()), *self._read_by(op)]))

    @cached_property
    def _times(self) -> np.ndarray:
        """(3, copies): `made`, `until` and `needed` of each."""
        return np.array([(c.made, c.until, c.needed) for c in self._copies]).reshape(-1, 3).T

    def _read_by(self, op: Op) -> list[Copied]:
        """Copies that the op may read."""
        return self._readings.get(op.name, [])

    @cached_property
    def _readings(self) -> Mapping[str, list[Copied]]:
        found: dict[str, list[Copied]] = defaultdict(list)
        for copied in self._copies:
            for name, _ in copied.copy.readers:
                found[name].append(copied)
        return found

    def _copy(self, copied: Copied, now: int, op: Op, read: set[Ref], plan: np.ndarray, least: float) -> Iterator[Amounts]:
        """Bytes of a copy where it surely lies there, but for the `least` that is counted of the value itself: if all that read the value read kept
        copies, it is not there. Of a parameter's copy that something that may be off reads before the op, the bytes if the last reader reads it."""
        copy, node, units = copied.copy, copied.node, self.formulation.units
        lies, nbytes = self._lies(copied, now, op, read), copied.nbytes
        if lies is not None:
            if nbytes > least:
                yield node, (nbytes - least) * lies
        elif now < copied.needed and op.phase == "backward" and copied.root not in read:
            last, i = copied.last
            specs = units.inputs(last, i)
            reads = np.array([s == copy.spec for s in specs.specs])[specs.index]
            serves = [s.serves[self.graph.window_of(last)] for s in copy.states]
            yield from exact_near(plan, (units.index(last), node), np.outer(reads, copied.kept * serves) * nbytes)

    def _lies(self, copied: Copied, now: int, op: Op, read: set[Ref]) -> np.ndarray | None:
        """Per state, whether the copy surely lies there: made in forward before the op and kept, and not read yet in backward; or, of a parameter,
        read by the op and by no other of its window. Other copies of what the op reads are counted with the op."""
        copy, root = copied.copy, copied.root
        made = copied.made < now if op.phase == "forward" else now < copied.until
        if made and root not in read:
            return copied.kept
        if self.graph.op(root.op).kind == "param" and self._reads_alone(copy, op):
            window = self.graph.window_of(op.name)
            return np.array([s.name in (MADE, KEPT) and s.serves[window] for s in copy.states], dtype=float)
        return None

    def _family_first(self, value: Ref, later: list[tuple[str, int]]) -> int:
        """The order of the first op of backward that may read the value or what shares its buffer."""
        roots = {storage_root(self.graph, self.graph.op(name).refs[i]) for name, i in later}
        orders = [r.order for root in roots for r in self.readers.get(root, ())] + [self.graph.order[name] for name, _ in later]
        return min(orders)


def with_floor(formulation: Formulation, floors: Floors, moment: str, plan: np.ndarray) -> Formulation:
    """The formulation with a floor row for an op of `floors.moments`, exact near `plan` and limited by the budget. Nothing to do where a row of the
    op says as much of that plan."""
    rows, loads = formulation.memory_rows, row_loads(formulation.problem, plan)
    name = f"{BEFORE}{moment}{BEHIND}"
    names = [row for row in rows if row.rstrip("'") == name]
    if names and max(loads[rows[row]] for row in names) >= floors.load(moment, plan) * (1.0 - 1e-9):
        return formulation
    problem = with_items(formulation.problem, floors.amounts(moment, plan), formulation.budget.peak)
    return replace(formulation, problem=problem, memory_rows={**rows, name + "'" * len(names): len(loads)})


def floored_ops(formulation: Formulation) -> dict[str, str]:
    """Per floor row of the formulation, its op."""
    return {row: row.removeprefix(BEFORE).rstrip("'").removesuffix(BEHIND) for row in formulation.memory_rows if row.startswith(BEFORE)}
