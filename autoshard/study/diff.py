"""What differs between two plans."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.base.mesh import Mesh
from autoshard.base.plan import PlacedTensor, Plan
from autoshard.base.spec import ShardingSpec, Spec

SAME = 1e-12  # relative difference of predicted numbers below which they are one number written twice


@dataclass(frozen=True)
class Change:
    """One thing that differs; None where a plan lacks it. `kind` is weight, buffer, input, activation, output or op for
    placements; predicted or memory for numbers; setting for the rest."""

    kind: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class CollectiveChange:
    """Collectives of one kind, axis and phase: (calls, bytes, seconds) in either plan."""

    kind: str
    axis: str
    phase: str
    before: tuple[int, int, float]
    after: tuple[int, int, float]


@dataclass(frozen=True)
class PlanDiff:
    """`equal` says that the two plans run the same program at the same price; `settings` are the differences around it
    (mesh, cluster, model, seeds, ...) that need not change the program."""

    settings: tuple[Change, ...]
    placements: tuple[Change, ...]
    collectives: tuple[CollectiveChange, ...]
    numbers: tuple[Change, ...]
    other_ops: int

    @property
    def equal(self) -> bool:
        return not (self.settings or self.placements or self.collectives or self.numbers or self.other_ops)

    def to_dict(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}


def diff(a: Plan, b: Plan) -> PlanDiff:
    """How plan `b` differs from plan `a`. Plans of different models or meshes compare by names."""
    placements = tuple(_placements(a, b))
    # ops that differ although no named tensor does: views, casts, backward
    other = 0 if a.graph_hash != b.graph_hash else sum(a.ops[n] != b.ops.get(n) for n in a.ops)
    ours, theirs = set(a.copies), set(b.copies)
    other += max(len(ours - theirs), len(theirs - ours))
    return PlanDiff(tuple(_settings(a, b)), placements, tuple(_collectives(a, b)), tuple(_numbers(a, b)), other)


def _settings(a: Plan, b: Plan):
    pairs = {"mesh": (str(a.mesh), str(b.mesh)), "cluster": (a.cluster.get("name"), b.cluster.get("name")),
             "program": (a.graph_hash, b.graph_hash), "stages": (_cuts(a), _cuts(b)), "pipeline": (a.pipeline, b.pipeline)}
    if pairs["cluster"][0] == pairs["cluster"][1] and dict(a.cluster) != dict(b.cluster):
        pairs["cluster"] = (f"{a.cluster.get('name')} as of plan a", f"{b.cluster.get('name')} as of plan b")
    for group in ("model", "settings", "seeds"):
        ours, theirs = getattr(a, group), getattr(b, group)
        pairs |= {f"{group}: {k}": (ours.get(k), theirs.get(k)) for k in dict.fromkeys((*ours, *theirs))}
    away = set(a.offload), set(b.offload)
    pairs |= {f"optimizer state of {name}": tuple("host" if name in names else "device" for names in away) for name in sorted(away[0] ^ away[1])}
    return (Change("setting", name, x, y) for name, (x, y) in pairs.items() if x != y)


def _cuts(plan: Plan) -> str:
    """Where the pipeline is cut, and how many micro-batches are alive there."""
    return ", ".join(f"{s.first or 'inputs'} to {s.last or 'outputs'} ({s.in_flight} in flight)" for s in plan.stages)


def _placements(a: Plan, b: Plan):
    ours, theirs = _layouts(a), _layouts(b)
    for key in dict.fromkeys((*ours, *theirs)):
        x, y = ours.get(key), theirs.get(key)
        if x != y:
            yield Change(key[0], key[1], x, y)


def _layouts(plan: Plan) -> Mapping[tuple[str, str], str]:
    found = {(x.kind, x.name): placement(x.spec, len(x.shape), plan.spec_mesh) for x in plan.layouts if isinstance(x, PlacedTensor)}
    known = {name for _, name in found}
    return found | {("weight", n): placement(s, max(s, default=0) + 1, plan.spec_mesh)
                    for n, s in plan.placements.items() if n not in known}


def placement(spec: Spec, ndim: int, mesh: Mesh) -> str:
    """`"[tp, -]"`: how people read a spec."""
    return str(ShardingSpec.from_spec(spec, ndim, mesh))


def _collectives(a: Plan, b: Plan):
    ours, theirs = _totals(a), _totals(b)
    for key in sorted({*ours, *theirs}):
        x, y = ours.get(key, (0, 0, 0.0)), theirs.get(key, (0, 0, 0.0))
        if x[:2] != y[:2] or not _near(x[2], y[2]):
            yield CollectiveChange(*key, x, y)


def _totals(plan: Plan) -> dict[tuple[str, str, str], tuple[int, int, float]]:
    calls: Counter = Counter()
    nbytes: Counter = Counter()
    seconds: Counter = Counter()
    for c in plan.collectives:
        key = (c.kind, c.axis, c.phase)
        calls[key] += 1
        nbytes[key] += c.nbytes
        seconds[key] += c.seconds
    return {key: (calls[key], nbytes[key], float(seconds[key])) for key in calls}


def _numbers(a: Plan, b: Plan):
    for group in ("predicted", "memory"):
        ours, theirs = ({**getattr(p, group), **_of_stages(p, group)} for p in (a, b))
        for name in dict.fromkeys((*ours, *theirs)):
            x, y = ours.get(name), theirs.get(name)
            if not _near(x, y):
                yield Change(group, name, x, y)


def _of_stages(plan: Plan, group: str) -> dict[str, float]:
    """Numbers of each stage of a pipeline."""
    stages = enumerate(plan.stages if len(plan.stages) > 1 else ())
    if group == "memory":
        return {f"stage {i}, total": s.total for i, s in stages}
    return {f"stage {i}, {name}": value for i, s in stages for name, value in (*s.windows.items(), ("once_s", s.once_s))}


def _near(x: Any, y: Any) -> bool:
    if isinstance(x, (int, float)) and isinstance(y, (int, float)):
        return abs(x - y) <= SAME * max(abs(x), abs(y))
    return x == y
