"""Why a plan is what it is: the prices of one edge, the strategies of one op, and what a forced choice would cost."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from autoshard.base.graph import Op, Ref, TensorMeta
from autoshard.base.plan import Copy, Plan
from autoshard.base.spec import ShardingSpec, Spec, shard_counts
from autoshard.collectives import RUN
from autoshard.cost.redistribute import SLICE
from autoshard.decide.make_plan import Chosen, copied_before, price
from autoshard.errors import PlanError
from autoshard.formulate.values import local_bytes
from autoshard.recompute.undecided import program_with
from autoshard.space.cost_table import CostTable
from autoshard.space.strategies import StrategySet
from autoshard.study.diff import PlanDiff

MOST = 24
COLLECTIVE_WORDS = {SLICE: "Slice"} | {name: kind.words for name, kind in RUN.items()}


@dataclass(frozen=True)
class EdgeRow:
    """A value made as `source` and read by an op that runs with inputs `targets`: what changing the layout takes.

    splits      pieces per dim of the source, then of every input of the reader
    steps       the redistribution, in order: "AllToAll over tp"; empty where nothing changes
    nbytes      bytes of its collectives (docs/costs.md); seconds its price; compute_s the reader's own time
    chosen      whether this is what the plan does"""

    source: str
    targets: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...]
    steps: tuple[str, ...]
    nbytes: int
    seconds: float
    compute_s: float
    chosen: bool

    @property
    def words(self) -> str:
        """The steps as one phrase, `"0"` where nothing moves."""
        return ", ".join(self.steps) or "0"


@dataclass(frozen=True)
class EdgeTable:
    """Rows in order of price; `left_out` more exist. `input`: which tensor input of `reader` the value is."""

    value: str
    maker: str
    reader: str
    input: int
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[EdgeRow, ...]
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OpRow:
    """One strategy of an op. Seconds: `compute_s` on local shapes, `inner_s` collectives inside it, `update_s` of the
    optimizer; `moved_s` redistributing its inputs from where they are. `nbytes`: its outputs on one rank. `regret_s`: how
    much longer a step takes if this op alone changes and everything else stays (0 for the chosen one, None: impossible)."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute_s: float
    inner_s: float
    update_s: float
    moved_s: float | None
    nbytes: float
    chosen: bool
    regret_s: float | None


@dataclass(frozen=True)
class OpTable:
    """The strategies of an op in order of regret; `left_out` dearer ones exist."""

    op: str
    where: str
    rows: tuple[OpRow, ...]
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WhyNot:
    """The forced choice `key` = `layout`, the step with and without it, and how the plans differ (before: free, after: forced).
    `seed`: what a seed of the user said about `key` before, and did not after; "" where there was none."""

    key: str
    layout: str
    before_s: float
    after_s: float
    difference: PlanDiff
    statuses: tuple[str, str]
    seed: str = ""

    @property
    def freed(self) -> bool:
        """Whether the seed was taken away with nothing in its place."""
        return bool(self.seed) and self.layout.replace(" ", "").strip("[]") == self.seed

    @property
    def regret_s(self) -> float:
        return self.after_s - self.before_s

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "layout": self.layout, "before_s": self.before_s, "after_s": self.after_s,
                "regret_s": self.regret_s, "seed": self.seed, "statuses": list(self.statuses), "difference": self.difference.to_dict()}


def edge_table(table: CostTable, edge: tuple[Ref, str, int], chosen: Chosen | None = None, *,
               sources: Iterable[Spec] | None = None, most: int | None = MOST) -> EdgeTable:
    """The prices of one edge: `edge` is (value, op that reads it, which input), as `naming.find_edge` gives.

    `sources`: specs the value may come in; default the chosen one, or all where nothing is chosen. Every strategy of
    the reader is a target; of strategies that differ in outputs only the cheapest is listed."""
    value, reader, index = edge
    graph, meta = table.graph, table.graph.meta(value)
    made = chosen.out_spec(value) if chosen else None
    wanted = tuple(chosen.in_spec(reader, i) for i in range(len(graph.op(reader).refs))) if chosen else None
    known = table.strategies[value.op].output_specs[value.index].specs
    targets = _targets(table, reader)
    rows = [_edge_row(table, value, source, inputs, index, graph.op(reader), compute, (source, inputs) == (made, wanted))
            for source in (sources or ([made] if made else known)) for inputs, compute in targets.items()]
    possible = sorted((r for r in rows if r is not None), key=lambda r: (r.seconds, r.compute_s, r.source, r.targets))
    shown = _with_chosen(possible, most)
    return EdgeTable(str(value), graph.op(value.op).where, graph.op(reader).where, index, meta.logical_shape,
                     str(meta.dtype).removeprefix("torch."), shown, len(possible) - len(shown))


def _targets(table: CostTable, reader: str) -> dict[tuple[Spec, ...], float]:
    """Input specs of every strategy -> the least time of the op itself with these."""
    found, seconds = table.strategies[reader], table.ops[reader].total
    out: dict[tuple[Spec, ...], float] = {}
    for s, inputs in enumerate(found.inputs.tolist()):
        key = tuple(map(tuple, inputs))
        out[key] = min(out.get(key, np.inf), float(seconds[s]))
    return out


def _edge_row(table: CostTable, value: Ref, source: Spec, inputs: tuple[Spec, ...], index: int, op: Op,
              compute: float, chosen: bool) -> EdgeRow | None:
    seconds, meta = float(table.ways(value, (source,), (inputs[index],))[0, 0]), table.graph.meta(value)
    if not isfinite(seconds):
        return None
    steps = table.steps(meta, source, inputs[index])
    metas = [table.graph.meta(r) for r in op.refs]
    mesh = table.mesh
    splits = [shard_counts(m.ndim, s, mesh.sizes) for m, s in zip((meta, *metas), (source, *inputs), strict=True)]
    words = tuple(f"{COLLECTIVE_WORDS[s.kind]} over {mesh.label(s.axes)}" for s in steps)
    return EdgeRow(text(source, meta, mesh), tuple(text(s, m, mesh) for s, m in zip(inputs, metas, strict=True)), tuple(splits),
                   words, sum(s.nbytes for s in steps), seconds, compute, chosen)


def _with_chosen(rows: list, most: int | None) -> tuple:
    """The first `most`, the chosen one among them."""
    if most is None or len(rows) <= most:
        return tuple(rows)
    late = [r for r in rows[most:] if r.chosen]
    return (*rows[:most - len(late)], *late)


def text(spec: Spec, meta: TensorMeta, mesh) -> str:
    """A spec as people read it: `"[dp, (tp*sp)] partial sum over pp"`."""
    return str(ShardingSpec.from_spec(spec, meta.ndim, mesh))


def op_table(chosen: Chosen, name: str, *, most: int | None = MOST) -> OpTable:
    """The strategies of an op beside the chosen one. Regrets are exact by the plan's own prices, with everything but this
    op as it is; what a solve around a forced choice gives is never more (`explain --why-not`)."""
    table, op = chosen.table, chosen.table.graph.op(name)
    moved = _moved(chosen, op)
    order = np.argsort(table.ops[name].total + moved, kind="stable").tolist()
    now = chosen.strategies[name]
    tried = [now, *(s for s in order if s != now)][:most]
    base = price(chosen)["step_s"]
    rows = [_op_row(chosen, op, s, float(moved[s]), base) for s in tried]
    rows.sort(key=lambda r: (not r.chosen, np.inf if r.regret_s is None else r.regret_s))
    return OpTable(name, op.where, tuple(rows), len(order) - len(rows))


def _moved(chosen: Chosen, op: Op) -> np.ndarray:
    """Per strategy, seconds of bringing the inputs there from where they are; inf where that is impossible."""
    total = np.zeros(len(chosen.table.strategies[op.name]))
    for i, ref in enumerate(op.refs):
        specs = chosen.table.strategies[op.name].input_specs[i]
        total += chosen.table.ways(ref, (chosen.out_spec(ref),), specs.specs)[0, specs.index]
    return total


def _op_row(chosen: Chosen, op: Op, s: int, moved: float, base: float) -> OpRow:
    table = chosen.table
    inputs, outputs = table.strategies[op.name].strategy(s)
    metas = [m for m in op.outputs if m is not None]
    made = [(Ref(op.name, i), spec) for i, spec in enumerate(outputs) if op.outputs[i] is not None]
    cost, is_chosen = table.ops[op.name], s == chosen.strategies[op.name]
    away = () if table.strategies[op.name].on_device[s] else ("optimizer state on the host",)
    return OpRow(tuple(text(x, table.graph.meta(r), table.mesh) for x, r in zip(inputs, op.refs, strict=True)),
                 (*(text(x, m, table.mesh) for (_, x), m in zip(made, metas, strict=True)), *away),
                 float(cost.compute[s]), float(cost.inner[s]), float(cost.update[s]), moved if isfinite(moved) else None,
                 sum(local_bytes(table, ref, x) for ref, x in made), is_chosen,
                 0.0 if is_chosen else _regret(chosen, op, s, base))


def _regret(chosen: Chosen, op: Op, s: int, base: float) -> float | None:
    together = _together(chosen, op, s)
    if together is None:
        return None
    other = with_strategies(chosen, {**chosen.strategies, op.name: s, **together})
    if any(not isfinite(other.table.ways(ref, (source,), (copy.spec,))[0, 0]) for ref, source, copy in other.copies):
        return None
    return price(other)["step_s"] - base


def _together(chosen: Chosen, op: Op, s: int) -> dict[str, int] | None:
    """Strategies of what lies as `op` does (`Graph.ties`): a gradient leaves in the spec its parameter is stored in, a new buffer in that of the old
    one. None where they have no such strategy."""
    ties = chosen.table.graph.ties
    owner = ties.get(op.name, op.name)
    found: dict[str, int] = {}
    for name in (owner, *(tied for tied, to in ties.items() if to == owner)):
        if name == op.name:
            continue
        sets, spec = chosen.table.strategies[name], _lies(chosen.table.strategies[op.name], s)
        same = sets.on_device == sets.on_device[chosen.strategies[name]]
        fits = [t for t in range(len(sets)) if same[t] and _lies(sets, t) == spec]
        if not fits:
            return None
        found[name] = fits[0]
    return found


def _lies(strategies: StrategySet, s: int) -> Spec:
    """How the one tensor of a parameter, buffer, input or output lies."""
    inputs, outputs = strategies.strategy(s)
    return (outputs or inputs)[0]


def with_strategies(chosen: Chosen, strategies: Mapping[str, int]) -> Chosen:
    """The choice with other strategies: copies follow; what was kept for backward still is where both windows read it."""
    kept = {(ref, c.spec) for ref, _, c in chosen.copies if c.source == "kept"}
    bare = replace(chosen, strategies=strategies, copies=())
    copies: dict = {}
    for op in chosen.table.graph.ops:
        for i, ref in enumerate(op.refs):
            source, wanted = bare.out_spec(ref), bare.in_spec(op.name, i)
            key = (ref, op.phase, wanted)
            if source != wanted and key not in copies:
                again = (ref, wanted) in kept and copied_before(chosen.table.graph, key, copies)
                copies[key] = (ref, source, Copy(str(ref), op.phase, wanted, "kept" if again else "made"))
    return replace(bare, copies=tuple(copies.values()))


def chosen_by(plan: Plan, table: CostTable) -> Chosen:
    """The choice a plan made, on the tables of its model, recomputed ops included. Raises PlanError where the plan
    is of another program."""
    graph = table.graph
    if plan.graph_hash != graph.hash or plan.spec_mesh != table.mesh:
        raise PlanError(f"the plan is for another program (graph {plan.graph_hash} on {plan.spec_mesh}, the model as it is now gives "
                        f"{graph.hash} on {table.mesh}); plan the model again")
    if plan.recompute:
        table = program_with(table, frozenset(plan.recompute))
    strategies: dict[str, int] = {}
    away = frozenset(plan.offload)
    for op in table.graph.ops:
        found, wanted = table.strategies[op.name], plan.ops[op.name]
        same = found.on_device != (op.target in away)
        for placed, specs in ((found.inputs, wanted.inputs), (found.outputs, wanted.outputs)):
            if specs:
                same &= np.all(placed == np.array(specs, dtype=placed.dtype), axis=(1, 2))
        if not same.any():
            raise PlanError(f"the plan runs {op.where} in a way that no rule has now; plan the model again")
        strategies[op.name] = min(np.flatnonzero(same).tolist(), key=lambda s: float(table.ops[op.name].total[s]))
    names = {str(Ref(op.name, i)): Ref(op.name, i) for op in table.graph.ops for i in range(len(op.outputs))}
    bare = Chosen(table, strategies, ())
    return replace(bare, copies=tuple((names[c.value], bare.out_spec(names[c.value]), c) for c in plan.copies))
