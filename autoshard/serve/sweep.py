"""Latency against throughput: the joint plan of prompt and token for each of several batches."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.base import quantities
from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.plan import INTERRUPTED, Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.serve.phases import Phases, plan_phases, states_of, stored
from autoshard.serve.workload import Slo, Workload


class Decoder(NamedTuple):
    """A module with its caches as buffers, and its inputs for `new` tokens after `start` others."""

    model: nn.Module
    inputs: Callable[[int, int], tuple[Any, ...]]


MakeDecoder = Callable[[int, int], Decoder]
"""(batch, context) -> a decoder for so many sequences, with caches for so many tokens."""


@dataclass(frozen=True)
class Point:
    """A batch with its plans, or why there are none. Seconds and bytes of one rank.

    cache_bytes   of the caches that a rank holds; `whole_bytes`: of all of them
    caches        how they lie: distinct specs of the states
    best          no other batch has a shorter token and more tokens per second"""

    batch: int
    devices: int
    new: int
    phases: Phases | None = None
    why: str = ""
    cache_bytes: int = 0
    whole_bytes: int = 0
    caches: tuple[str, ...] = ()
    best: bool = False

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self._planned.prompt.objective_s

    @property
    def token_s(self) -> float:
        """Seconds per later token."""
        return self._planned.token.objective_s

    @property
    def rate(self) -> float:
        """New tokens per second and device, prompts included in the time."""
        return self.batch * self.new / self._planned.request_s / self.devices

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended one of its searches."""
        return self._planned.prompt.interrupted or self._planned.token.interrupted

    @property
    def _planned(self) -> Phases:
        if self.phases is None:
            raise UsageError(f"batch {self.batch} has no plan: {self.why}")
        return self.phases

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"batch": self.batch, "fits": self.phases is not None, "why": self.why}
        if (p := self.phases) is not None:
            out |= {"first_token_s": self.first_s, "token_s": self.token_s, "request_s": p.request_s, "bound_s": p.bound_s, "gap": p.gap,
                    "tokens_per_s_and_device": self.rate, "cache_bytes": self.cache_bytes, "whole_cache_bytes": self.whole_bytes,
                    "memory_bytes": p.memory, "caches": list(self.caches), "decides": p.decides, "best": self.best, "relaid_s": p.relaid_s,
                    "twice_s": p.twice_s, "prompt": p.prompt.kind, "token": p.token.kind, "status": [p.prompt.status, p.token.status]}
        return out


@dataclass(frozen=True)
class Serving:
    """A sweep. `most`: no batch above it fits, whatever the plan: weights and caches alone need more memory."""

    model: str
    mesh: str
    cluster: str
    workload: Workload
    points: tuple[Point, ...]
    most: int

    @property
    def planned(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.phases is not None)

    @property
    def largest(self) -> int:
        """The largest batch of the sweep that fits; 0 where none does."""
        return max((p.batch for p in self.planned), default=0)

    def pick(self, slo: Slo) -> Point:
        """The most tokens per second that meet the levels. Raises UsageError, which says what is possible."""
        if not self.planned:
            raise InfeasibleError(f"no batch fits: {self.points[0].why}")
        met = [p for p in self.planned if slo.met_by(p.token_s, p.first_s)]
        if not met:
            raise UsageError(_missed(self.planned, slo))
        return max(met, key=lambda p: p.rate)

    def to_dict(self) -> dict[str, Any]:
        w = self.workload
        return {"model": self.model, "mesh": self.mesh, "cluster": self.cluster, "prompt": w.prompt, "new": w.new, "context": w.context,
                "points": [p.to_dict() for p in self.points], "largest_batch": self.largest, "no_batch_above": self.most}


def _missed(points: Sequence[Point], slo: Slo) -> str:
    parts = []
    for name, wanted, of in (("tpot", slo.tpot, lambda p: p.token_s), ("ttft", slo.ttft, lambda p: p.first_s)):
        if wanted is not None:
            best = min(points, key=of)
            parts.append(f"{name} is {wanted * 1e3:.4g} ms, and the least is {of(best) * 1e3:.4g} ms, at batch {best.batch}")
    return (f"no batch that was tried meets the service level: {'; '.join(parts)}. Give more devices, a shorter prompt, a faster cluster, other "
            "batches, or a level that can be met")


def sweep(make: MakeDecoder, mesh: Mesh, options: Options, workload: Workload, batches: Sequence[int], *, model: str = "",
          clock: PhaseTimer | None = None) -> Serving:
    """Joint plans for all `batches`, in rising order; after one that does not fit, larger ones are not tried."""
    if options.pipeline.stages(mesh) > 1:
        raise UsageError(f"mesh {mesh}: weights and caches for inference are not divided into pipeline stages; give that axis another name, tp say")
    profile, clock = load_cluster(options.cluster), clock or PhaseTimer()
    limit, most, points, why = options.memory_limit(profile), 0, list[Point](), ""
    for batch in sorted(batches):
        if not why:
            decoder = make(batch, workload.context)
            most = most or most_sequences(decoder.model, batch, mesh.size, limit)
            why = f"weights and caches need more than {quantities.size(limit)} a rank, however they are split; at most {most} sequences fit" \
                if batch > most else ""
        if why:
            points.append(Point(batch, mesh.size, workload.new, why=why))
            continue
        try:
            points.append(plan_point(decoder, batch, mesh, options, workload, profile, clock))
            why = INTERRUPTED if points[-1].interrupted else ""
        except InfeasibleError as e:
            why = str(e)
            points.append(Point(batch, mesh.size, workload.new, why=why))
    return Serving(model, str(mesh), profile.name, workload, tuple(_with_front(points)), most)


def plan_point(decoder: Decoder, batch: int, mesh: Mesh, options: Options, workload: Workload, profile: Cluster, clock: PhaseTimer) -> Point:
    """The joint plan of one batch. Raises InfeasibleError."""
    phases, states = plan_decoder(decoder, mesh, options, workload, profile, clock)
    placed = stored(phases.token)
    ways = {name: prod(ranks for ranks, p in zip(mesh.sizes, placed[name], strict=True) if p >= 0) for name in states}
    return Point(batch, mesh.size, workload.new, phases, "", sum(meta.nbytes // ways[name] for name, meta in states.items()),
                 sum(meta.nbytes for meta in states.values()), tuple(sorted({_lies(placed[name], mesh, meta.ndim) for name, meta in states.items()})))


def plan_decoder(decoder: Decoder, mesh: Mesh, options: Options, workload: Workload, profile: Cluster,
                 clock: PhaseTimer) -> tuple[Phases, dict[str, TensorMeta]]:
    """Prompt and token of one decoder together, and its states. Raises InfeasibleError."""
    prompt, token = (_traced(decoder, mesh, options, clock, new, start) for new, start in ((workload.prompt, 0), (1, workload.prompt)))

    def plan_one(traced: Traced, fixed: Mapping[str, Spec]) -> Plan:
        return plan_traced(traced, mesh, options, clock=clock, fixed=fixed, profile=profile)

    return plan_phases(prompt, token, workload.steps, plan_one, mesh=mesh, profile=profile), states_of(token.graph)


def most_sequences(model: nn.Module, batch: int, devices: int, limit: float) -> int:
    """More sequences do not fit: weights and caches, cut into as many parts as there are devices, take more than `limit` bytes."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    caches = sum(b.numel() * b.element_size() for b in model.buffers() if b.ndim > 1 and b.shape[0] == batch)
    return max(0, int((limit * devices - weights) * batch // caches)) if caches else batch


def _traced(decoder: Decoder, mesh: Mesh, options: Options, clock: PhaseTimer, new: int, start: int) -> Traced:
    with clock("trace"), torch.no_grad():
        return Batch(decoder.model, decoder.inputs(new, start), {}, options.tracing(None, False)).on(mesh, options.pipeline)


def _lies(spec: Sequence[int], mesh: Mesh, ndim: int) -> str:
    """In the grammar of seeds: an axis or `-` per dim."""
    return ",".join("*".join(name for name, p in zip(mesh.names, spec, strict=True) if p == dim) or "-" for dim in range(ndim))


def _with_front(points: Sequence[Point]) -> list[Point]:
    """Points with `best` set."""
    planned = [p for p in points if p.phases is not None]

    def beaten(p: Point) -> bool:
        return any(q.token_s <= p.token_s and q.rate >= p.rate and (q.token_s < p.token_s or q.rate > p.rate) for q in planned)

    return [Point(**{**vars(p), "best": p.phases is not None and not beaten(p)}) for p in points]
