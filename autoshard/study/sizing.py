"""One job on several machines: a plan for every batch, mesh, cluster and memory budget, with what each trains in a second."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from autoshard._torch import pytree
from autoshard.base import quantities
from autoshard.base.mesh import AnyMesh, Mesh
from autoshard.base.notebook import grid
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import ClusterError, InfeasibleError, Interrupted, MeshError
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.open_mesh import check_mesh
from autoshard.planner.workbench import Workbench

HEADINGS = ("", "batch", "devices", "cluster", "limit", "mesh", "parts", "step", "samples/s", "tokens/s", "a device", "memory", "gap")


class Job(NamedTuple):
    """A batch of a model; what plans say about the model."""

    batch: Batch
    has_loss: bool = False
    model_info: Mapping[str, Any] = {}

    @property
    def samples(self) -> int:
        """Rows of the first tensor that is passed; 0 where none has any."""
        return next((t.shape[0] for t in self._tensors if t.ndim), 0)

    @property
    def tokens(self) -> int | None:
        """Elements of the first tensor that is passed, where these are whole numbers [rows, length]; None for other models."""
        first = next((t for t in self._tensors if t.ndim), None)
        return first.numel() if first is not None and first.ndim == 2 and not first.dtype.is_floating_point else None

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves((self.batch.args, dict(self.batch.kwargs))) if isinstance(t, torch.Tensor)]


class Case(NamedTuple):
    """What a plan is asked for. `cluster`: a profile's name or file. `memory`: bytes a rank may use, None for what the device has."""

    samples: int
    tokens: int | None
    mesh: Mesh | AnyMesh
    cluster: str
    memory: float | None

    def __str__(self) -> str:
        devices = f"any mesh of {self.mesh.size} devices" if isinstance(self.mesh, AnyMesh) else str(self.mesh)
        return f"batch {self.samples}, {devices}, {self.cluster}" + (f", {quantities.size(self.memory)}" if self.memory else "")


@dataclass(frozen=True)
class Point:
    """A case with its plan, or why there is none. `best`: on its cluster no other case trains more samples a second with at most as many devices.
    Rates are of the whole mesh, a second of steps by the plan's objective."""

    case: Case
    plan: Plan | None = None
    why: str = ""
    proven: bool = False  # that nothing fits
    best: bool = False

    @property
    def samples_s(self) -> float:
        return self.case.samples / self.plan.objective_s if self.plan else 0.0

    @property
    def tokens_s(self) -> float | None:
        return self.case.tokens / self.plan.objective_s if self.plan and self.case.tokens is not None else None

    def to_dict(self) -> dict[str, Any]:
        c, p = self.case, self.plan
        out = {"batch": c.samples, "devices": c.mesh.size, "asked": str(c.mesh), "cluster": c.cluster, "memory_budget_bytes": c.memory,
               "fits": p is not None, "best": self.best, "why": self.why}
        if p is not None:
            out |= {"mesh": str(p.mesh), "microbatches": _microbatches(p), "step_s": p.objective_s, "bound_s": p.bound_s, "gap": p.gap,
                    "status": p.status, "samples_per_s": self.samples_s, "samples_per_s_and_device": self.samples_s / c.mesh.size,
                    "tokens_per_s": self.tokens_s, "tokens_per_s_and_device": None if self.tokens_s is None else self.tokens_s / c.mesh.size,
                    "memory_bytes": p.memory["total"], "kind": p.kind}
        return out

    def cells(self) -> tuple[str, ...]:
        """What tables show, under `HEADINGS`."""
        c, p = self.case, self.plan
        asked = str(c.samples), str(c.mesh.size), c.cluster, _budget(c)
        if p is None:
            return "", *asked, "any" if isinstance(c.mesh, AnyMesh) else str(c.mesh), "", "-", "", "", "", "", ""
        rate = self.samples_s if self.tokens_s is None else self.tokens_s
        return ("*" if self.best else "", *asked, str(p.mesh), str(_microbatches(p)), quantities.seconds(p.objective_s), _per_second(self.samples_s),
                "" if self.tokens_s is None else _per_second(self.tokens_s), _per_second(rate / c.mesh.size), quantities.size(p.memory["total"]),
                "0 %" if p.gap < 1e-9 else f"{100 * p.gap:.2g} %")


@dataclass(frozen=True)
class Sizing:
    """The points of a sweep, in the order in which they were planned. `interrupted`: Ctrl-C ended it before all cases."""

    points: tuple[Point, ...]
    interrupted: bool = False

    @property
    def planned(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.plan is not None)

    def to_dict(self) -> list[dict[str, Any]]:
        return [p.to_dict() for p in self.points]

    def ordered(self) -> list[Point]:
        """As tables have them: by cluster, devices, batch and budget."""
        return sorted(self.points, key=lambda p: (p.case.cluster, p.case.mesh.size, str(p.case.mesh), p.case.samples, -(p.case.memory or 1e30)))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return grid("Sweep", HEADINGS, [p.cells() for p in self.ordered()], (f"{p.case}: {p.why}" for p in self.points if p.why))


@dataclass(frozen=True)
class Cases:
    """What is varied besides the batch. `meshes`: each with the options for it. `budgets`: the largest first."""

    meshes: Sequence[tuple[Mesh | AnyMesh, Options]]
    clusters: Sequence[str]
    budgets: Sequence[float | None] = (None,)
    profiles: Mapping[str, Cluster] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ClusterError, UsageError: all profiles are read before the work."""
        object.__setattr__(self, "profiles", {name: load_cluster(name) for name in self.clusters})
        object.__setattr__(self, "budgets", sorted(self.budgets, key=lambda b: -(b or 1e30)))
        for profile in self.profiles.values():
            for _, options in self.meshes:
                options.check_offload(profile, True)


def sweep(jobs: Sequence[Job], cases: Cases, clock: PhaseTimer | None = None) -> Sizing:
    """A plan for every job in every case. A batch is traced once; strategies and starting plans go from one cluster, budget and batch to the next.
    A case that cannot be is a point with the reason. Ctrl-C ends it with the points so far. Raises what `autoshard.plan` raises but for that."""
    clock, found = clock or PhaseTimer(), list[Point]()
    asked = list(_asked(jobs, cases))
    for number, (bench, case, options) in enumerate(asked, start=1):
        clock.say("sweep", f"{number} of {len(asked)}: {case}")
        try:
            found.append(_nothing_more(case, found) or _point(bench, case, options, cases.profiles[case.cluster], clock))
        except Interrupted:
            if not found:
                raise
            return Sizing(_marked(found), interrupted=True)
        if clock.ended.is_set():
            return Sizing(_marked(found), interrupted=number < len(asked))
    return Sizing(_marked(found))


def _asked(jobs: Sequence[Job], cases: Cases) -> Iterator[tuple[Workbench, Case, Options]]:
    for mesh, options in cases.meshes:
        benches: list[Workbench] = []  # another mesh shares the traces alone
        benches += [Workbench(job.batch, job.has_loss, job.model_info, benches) for job in jobs]
        for name in cases.clusters:
            for job, bench in _ends_first(list(zip(jobs, benches, strict=True))):
                for budget in cases.budgets:
                    yield bench, Case(job.samples, job.tokens, mesh, name, budget), replace(options, cluster=name, memory_budget=budget)


def _ends_first(pairs: list[tuple[Job, Workbench]]) -> list[tuple[Job, Workbench]]:
    """The smallest and the largest batch before those between, whose programs are made of these two."""
    rising = sorted(pairs, key=lambda pair: pair[0].samples)
    return rising[:1] + rising[1:][-1:] + rising[1:-1]


def _nothing_more(case: Case, found: Sequence[Point]) -> Point | None:
    """The point of a case where nothing fits in the larger budget before it."""
    if not found or not found[-1].proven or found[-1].case._replace(memory=case.memory) != case:
        return None
    return Point(case, why=f"not even with the limit before it ({_budget(found[-1].case)})", proven=True)


def _point(bench: Workbench, case: Case, options: Options, profile: Cluster, clock: PhaseTimer) -> Point:
    try:
        check_mesh(case.mesh, options, profile)
        plan = bench.plan(case.mesh, options, profile=profile, clock=clock.quiet())
    except InfeasibleError as e:
        return Point(case, why=str(e), proven=e.proven)
    except (MeshError, ClusterError) as e:  # too few devices, or nothing divides
        return Point(case, why=str(e))
    return Point(case, replace(plan, timings={}))


def _marked(points: Sequence[Point]) -> tuple[Point, ...]:
    def beaten(p: Point) -> bool:
        def better(q: Point) -> bool:
            return q.case.cluster == p.case.cluster and q.case.mesh.size <= p.case.mesh.size and (
                (q.samples_s, -q.case.mesh.size) > (p.samples_s, -p.case.mesh.size))

        return any(better(q) for q in points)

    return tuple(replace(p, best=p.plan is not None and not beaten(p)) for p in points)


def _microbatches(plan: Plan) -> int:
    if plan.pipeline is not None:
        return int(plan.pipeline["microbatches"])
    return int((plan.settings.get("pipeline") or {}).get("microbatches", 1))


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def _budget(case: Case) -> str:
    return quantities.size(case.memory) if case.memory else "the device's"
