"""Programs on so many mesh axes that not all of their strategies can be searched together, or not soon: those near known layouts are.

Strategies multiply with axes: an op of a small model has up to ten thousand on four, and a search looks at pairs of them. But axes are nearly
independent. So every op keeps the strategies that differ from known layouts on one axis or two, each op on its own. The best of these is found and
proven like any plan; that no other plan is cheaper is not. The bound of all plans is that of a smaller problem, which charges them less
(formulate/relaxed.py). Layouts come from where that bound is nearly met, and from a plan for fewer axes, which is a plan here too
(decide/walks/lift.py)."""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.graph import Graph, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan
from autoshard.base.spec import Spec
from autoshard.decide.backends import Found
from autoshard.decide.program import Program
from autoshard.formulate.relaxed import Relaxed
from autoshard.search.problem import Status
from autoshard.search.reductions import Infeasible
from autoshard.seeds.marks import calls_collectives
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, build_cost_table
from autoshard.space.layers import repeated_layers
from autoshard.space.strategies import SpecIndex, StrategySet, enumerate_strategies

FEW_AXES = 3
MANY_PAIRS = 2e6
"""Pairs of strategies, of distinct ops, from which there are many: on more than `FEW_AXES` axes not all of them are searched."""


@dataclass(frozen=True)
class Coarse:
    """A mesh with fewer axes over the same ranks, and of every axis of the mesh with more the one that it is a part of."""

    mesh: Mesh
    parts: tuple[int, ...]

    def merged(self, spec: Spec) -> Spec | None:
        """A placement on the mesh with more axes as one here; None where parts of an axis lie otherwise than each other."""
        found = tuple(spec[self.parts.index(a)] for a in range(self.mesh.ndim))
        return found if all(found[a] == p for a, p in zip(self.parts, spec, strict=True)) else None


def has_many(table: CostTable) -> bool:
    """Whether only a part of the strategies is searched."""
    return _too_many(table, FEW_AXES)


def has_some(table: CostTable) -> bool:
    """Whether the time may be up before all strategies are searched."""
    return _too_many(table, FEW_AXES - 1)


def _too_many(table: CostTable, axes: int) -> bool:
    """Whether ops on more than so many axes of more than one rank have many strategies. A collective that the model calls itself is about the axes
    as they are."""
    if sum(size > 1 for size in table.mesh.sizes) <= axes or calls_collectives(table.graph):
        return False
    return sum(len(s) ** 2 for s in {id(s): s for s in table.strategies.values()}.values()) > MANY_PAIRS


def coarse_of(table: CostTable) -> Coarse:
    """The mesh on which two neighbouring axes are one: those that fewest seeds tell apart, and of these the smallest. For axes in parts it is the
    user's mesh."""
    mesh = table.mesh
    if mesh.whole is not mesh:
        return Coarse(mesh.whole, mesh.owners)
    pairs = range(mesh.ndim - 1)
    at = min(pairs, key=lambda i: (-_said(_merged(table.seeds, _with_one(mesh, i))), mesh.sizes[i] * mesh.sizes[i + 1]))
    return _with_one(mesh, at)


def on_fewer_axes(table: CostTable, coarse: Coarse, outputs: str) -> CostTable:
    """Prices of the same program there. `outputs`: compile's mode, as of `enumerate_strategies`."""
    seeds = _merged(table.seeds, coarse)
    strategies = enumerate_strategies(table.graph, coarse.mesh, seeds, outputs=outputs)
    return replace(build_cost_table(table.graph, coarse.mesh, table.cluster, strategies, table.training), seeds=seeds)


def near(table: CostTable, parts: Sequence[int], layouts: Mapping[str, OpPlan], most: int) -> CostTable:
    """The same prices of strategies that differ from `layouts` on so many axes at `most`; where seeds leave none so near, of those that are nearest,
    and of what goes with them. Ops of repeated layers are near what any of these layers does, so that layers may be tied. `parts`: of every axis
    the one of the layouts' mesh that it is, or is a part of."""
    known: dict[tuple[int, OpPlan], np.ndarray] = {}
    away: dict[str, np.ndarray] = {}
    of_layers = _of_layers(table.graph, layouts)
    for name, found in table.strategies.items():
        for chosen in of_layers.get(name, (layouts[name],)):
            key = id(found), chosen
            if key not in known:
                known[key] = _away(found, parts, chosen)
            away[name] = np.minimum(away[name], known[key]) if name in away else known[key]
    kept = _meeting(table, away, {name: a <= max(most, a.min()) for name, a in away.items()})
    made: dict[tuple[int, bytes], StrategySet] = {}
    strategies: dict[str, StrategySet] = {}
    for name, found in table.strategies.items():
        same = id(found), kept[name].tobytes()
        if same not in made:
            made[same] = found.keep(kept[name])
        strategies[name] = made[same]
    made = build_cost_table(table.graph, table.mesh, table.cluster, strategies, table.training)
    return replace(made, seeds=table.seeds, redistribution=table.redistribution)


def least(table: CostTable) -> float:
    """Seconds of a step that no plan is below: every op as fast as it can be."""
    return float(sum(table.ops[op.name].total.min() for op in table.graph.ops))


def relaxed(table: CostTable) -> Relaxed | None:
    """What bounds all plans; None where nothing goes together: what follows says why."""
    try:
        return Relaxed(table)
    except Infeasible:
        return None


def as_near(found: Found, bound: float, known: Program | None, stopped: bool) -> Found:
    """`found` as the best of some strategies, with the bound of all plans; or a plan of `known`, where one by hand is cheaper. `stopped`: the user
    ended the search."""
    status = Status.INTERRUPTED.value if stopped else found.status
    solution = replace(found.solution, bound=min(bound, found.solution.cost), status=Status.INTERRUPTED if stopped else Status.GAP)
    by_hand = known and known.cheapest_fitting(known.starts)
    if known and by_hand and by_hand[1] < solution.cost:
        return Found(known, replace(solution, choice=by_hand[0], cost=by_hand[1]), status)
    return replace(found, solution=solution, status=status, ample=0.0)


def _of_layers(graph: Graph, layouts: Mapping[str, OpPlan]) -> dict[str, Collection[OpPlan]]:
    """Of every op of repeated layers what it and the ops that it corresponds to do."""
    classes, found = repeated_layers(graph), defaultdict(dict)
    for name, which in classes.items():
        found[which][layouts[name]] = None
    return {name: found[which] for name, which in classes.items()}


def _away(found: StrategySet, parts: Sequence[int], chosen: OpPlan) -> np.ndarray:
    """Per strategy, on how many axes it differs from the chosen one."""
    placements = np.concatenate([found.inputs, found.outputs], axis=1)
    there = np.array([[spec[a] for a in parts] for spec in (*chosen.inputs, *chosen.outputs)], dtype=np.int64).reshape(placements.shape[1:])
    return np.asarray((placements != there).any(axis=1).sum(axis=1))


def _meeting(table: CostTable, away: Mapping[str, np.ndarray], kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is kept, and for every op next to one that seeds hold away from the plan what meets it: a gradient lies as its parameter does."""
    todo = deque((name, a == a.min()) for name, a in away.items() if a.min() > 0)
    while todo:
        name, held = todo.popleft()
        for other, meets in _neighbours(table, name, held):
            if meets.any() and not (meets & kept[other]).any():
                more = meets & (away[other] == away[other][meets].min())
                kept[other] = kept[other] | more
                todo.append((other, more))
    return kept


def _neighbours(table: CostTable, name: str, held: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(op, per strategy of it whether it goes with one of those `held`): of what the op reads, who reads it, and what lies as it does."""
    graph, mine = table.graph, table.strategies[name]
    for i, ref in enumerate(graph.op(name).refs):
        src = table.strategies[ref.op].output_specs[ref.index]
        ways = table.table(ref, src, _of(mine.input_specs[i], held))
        yield ref.op, np.isfinite(ways).any(axis=1)[src.index]
    for index, made in enumerate(mine.output_specs):
        for reader, i in graph.users.get(Ref(name, index), ()):
            dst = table.strategies[reader].input_specs[i]
            yield reader, np.isfinite(table.table(Ref(name, index), _of(made, held), dst)).any(axis=0)[dst.index]
    for pair in (*graph.ties.items(), *table.seeds.ties):
        if name in pair:
            other = pair[0] if pair[1] == name else pair[1]
            specs, alike = _lies(table, other), set(_of(_lies(table, name), held).specs)
            yield other, np.array([spec in alike for spec in specs.specs])[specs.index]


def _lies(table: CostTable, name: str) -> SpecIndex:
    """How the tensor of an op lies that another one is tied to."""
    found = table.strategies[name]
    return (found.output_specs or found.input_specs)[0]


def _of(index: SpecIndex, held: np.ndarray) -> SpecIndex:
    """Specs of the strategies that are held."""
    return SpecIndex(tuple(index.specs[i] for i in np.unique(index.index[held])), np.zeros(0, dtype=np.int64))


def _with_one(mesh: Mesh, at: int) -> Coarse:
    """Axes `at` and the next one taken as one."""
    name = f"{mesh.names[at]}_{mesh.names[at + 1]}"
    while name in mesh.names:
        name += "_"
    joined = mesh.sizes[at] * mesh.sizes[at + 1]
    coarse = Mesh((*mesh.names[:at], name, *mesh.names[at + 2:]), (*mesh.sizes[:at], joined, *mesh.sizes[at + 2:]))
    return Coarse(coarse, tuple(a - (a > at) for a in range(mesh.ndim)))


def _merged(seeds: Seeds, coarse: Coarse) -> Seeds:
    """What seeds say there; nothing where they tell two axes apart that are one."""
    specs, reads = ({key: allowed for key, given in of.items() if (allowed := frozenset(_there(given, coarse)))} for of in (seeds.specs, seeds.reads))
    return replace(seeds, specs=specs, reads=reads)


def _there(given: Iterable[Spec], coarse: Coarse) -> Iterable[Spec]:
    return (spec for spec in map(coarse.merged, given) if spec is not None)


def _said(seeds: Seeds) -> int:
    return len(seeds.specs) + len(seeds.reads)
