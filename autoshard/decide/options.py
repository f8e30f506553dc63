"""What a user may set, in one frozen place, built once by `plan`, `compile`, `verify` and the command line.

A new option is a field here, and its help text where users meet it: the docstring of `plan` or `compile`, whose keyword of the same
name fills the field, and cli/request.py, likewise."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.base.fine_mesh import NEVER, parse_parts
from autoshard.base.mesh import AnyMesh, Mesh, mesh_or_any
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.cost.optimizers import optimizer_name
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import PlanError, UsageError
from autoshard.experts.capacity import EXPERT_CAPACITY
from autoshard.program.output_modes import DEFAULT, check_modes

if TYPE_CHECKING:
    from autoshard.cost.cluster import Cluster

UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

LONGEST = 1e9
"""Seconds, 30 years: what an infinite time limit means. Solvers take none that does not fit into their numbers."""
PROPAGATE = "propagate"
"""In place of a search backend: spread the seeds, search nothing."""

Progress = Callable[[str, str], None]


def one_of(*choices: str, recorded: bool = False) -> Any:
    """A field that takes one of some words, the first by default. `recorded`: a plan file says it where it is another."""
    return field(default=choices[0], metadata={"choices": choices, "recorded": recorded})


class _Checked:
    """A part of the options whose words are checked. Raises UsageError."""

    def __post_init__(self) -> None:
        for name, choices in choices_of(type(self)).items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")


def choices_of(part: type) -> dict[str, tuple[str, ...]]:
    """The words that fields of a part of the options may take."""
    return {f.name: f.metadata["choices"] for f in fields(part) if "choices" in f.metadata}


@dataclass(frozen=True)
class Passing(_Checked):
    """How tensors cross the border. With inputs "local" every rank passes its piece of dim 0, split over
    `batch_axes` (major first in mesh order; none: the first mesh axis); DTensor inputs always bring their own placement.
    `outputs`: a mode for all, or one for each with commas (program/output_modes.py)."""

    inputs: str = one_of("global", "local")
    outputs: str = DEFAULT
    batch_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_modes(self.outputs)


@dataclass(frozen=True)
class Running(_Checked):
    """How a compiled model runs; nothing here changes what a search finds. `cache`: folder of plans; `checkpoint`: folder to fill a meta model
    from; `timeout`: seconds that ranks wait for the leading one; `check_inputs`: when ranks compare the numbers of their inputs;
    `variants`: how many are kept; `keep_within`: share by which a plan kept for other shapes may be dearer than one searched, see
    decide/kept.py."""

    backend: str = "eager"
    check_inputs: str = one_of("first", "always", "never")
    checkpoint: str | None = None
    cache: Path | None = None
    timeout: float = 3600.0
    variants: int = 32
    keep_within: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (type(self.variants) is int and self.variants >= 1):
            raise UsageError(f"variants={self.variants!r}: give a number of variants to keep, at least 1")
        if not (isinstance(self.keep_within, (int, float)) and self.keep_within >= 0):
            raise UsageError(f"keep_within={self.keep_within!r}: give a share such as 0.1; 0 searches for every new shape")


@dataclass(frozen=True)
class Options(_Checked):
    """See `autoshard.plan` and `autoshard.compile` for their meaning; bytes, seconds. `memory_budget` may be given as text ("70GiB") and is kept in
    bytes. Raises UsageError for unusable values."""

    optimizer: str = "adamw"
    precision: Precision | None = None
    seeds: Mapping[str, Any] = field(default_factory=dict)
    passing: Passing = Passing()
    memory_budget: float | None = None
    cluster: str | Cluster = "h100-dgx"
    time_limit: float = 60.0
    search: str = "auto"
    fallback: str = one_of("error", "replicate", recorded=True)
    offload: str = one_of("none", "optimizer", recorded=True)
    expert_capacity: float = field(default=EXPERT_CAPACITY, metadata={"recorded": True})
    pad: str = one_of("weights", "all", recorded=True)
    pipeline: Pipeline = Pipeline()
    refine_axes: str = field(default=NEVER, metadata={"recorded": True})
    thorough: bool = False
    running: Running = Running()

    @classmethod
    def of(cls, given: Mapping[str, Any], **instead: Any) -> Options:
        """From arguments of `plan`, `compile` or `verify` as the user gave them: those whose names are fields. `instead` comes
        before `given`. Raises UsageError."""
        named = {**given, **instead}
        if "optimizer" in named:
            named["optimizer"] = optimizer_name(named["optimizer"])
        axes = named.get("batch_axes", ())
        named["batch_axes"] = tuple(a.strip() for a in axes.split(",") if a.strip()) if isinstance(axes, str) else tuple(axes)
        if isinstance(named.get("outputs", ""), (list, tuple)):
            named["outputs"] = ",".join(map(str, named["outputs"]))
        named["seeds"], named["pipeline"] = _stages_apart(named.get("seeds") or {}, named.get("pipeline") or Pipeline())

        def part(kind: type) -> dict[str, Any]:
            return {f.name: named[f.name] for f in fields(kind) if f.name in named}

        return cls(**{"passing": Passing(**part(Passing)), "running": Running(**part(Running)), **part(cls)})

    def __post_init__(self) -> None:
        from autoshard.search import BACKENDS  # loads the solvers

        if self.search not in (known := (*BACKENDS, PROPAGATE)):
            raise UsageError(f"no search backend {self.search!r}; there are {', '.join(known)}")
        super().__post_init__()
        if not isinstance(self.refine_axes, str):
            raise UsageError(f"refine_axes={self.refine_axes!r}: write never, auto, or the parts of axes as tp=4x2")
        parse_parts(self.refine_axes)
        object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget))
        if not (_is_number(self.time_limit) and self.time_limit > 0):
            raise UsageError(f"time_limit={self.time_limit!r}: give a positive number of seconds")
        object.__setattr__(self, "time_limit", min(self.time_limit, LONGEST))
        if not (isinstance(self.expert_capacity, (int, float)) and 1 <= self.expert_capacity < inf):
            raise UsageError(f"expert_capacity={self.expert_capacity!r}: give the rows of tokens that a rank has room for over those of an even "
                             "load, at least 1")
        if self.memory_budget is not None and not self.memory_budget > 0:
            raise UsageError(f"memory_budget={self.memory_budget!r}: give a positive number of bytes")

    @property
    def marks(self) -> dict[str, str]:
        """The seeds as text by key; `trace` takes those that name modules."""
        from autoshard.seeds.grammar import seed_text

        return {key: seed_text(value) for key, value in self.seeds.items()}

    @property
    def text(self) -> str:
        """All that may change a plan, but for the cluster, whose numbers count and not its name; equal for equal options in every
        process."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("cluster", "seeds", "running")}
        return f"{values}, seeds {sorted(self.marks.items())}"

    def tracing(self, loss_fn: Callable | None, training: bool | None) -> dict[str, Any]:
        """What `program.trace.trace` is told besides the call."""
        return {"loss_fn": loss_fn, "training": training, "precision": self.precision, "marks": self.marks, "fallback": self.fallback,
                "expert_capacity": self.expert_capacity, "pad": self.pad}

    def memory_limit(self, cluster: Cluster) -> float:
        """Bytes a rank may use: the budget, else what the device has."""
        return self.memory_budget or cluster.device.memory_capacity

    def check_offload(self, cluster: Cluster, training: bool) -> None:
        """Raises UsageError where optimizer state is to lie on the host, and there is none, or no link to the host."""
        if self.offload == "none":
            return
        if not training:
            raise UsageError("offload='optimizer': inference has no optimizer state; leave offload out")
        from autoshard.cost.compute import host_link

        host_link(self.optimizer, cluster.device)

    def check_microbatches(self, mesh: Mesh | AnyMesh, training: bool) -> None:
        """Raises UsageError for micro-batches of an inference program without stages: they are there to add gradients up."""
        count = self.pipeline.microbatches
        if not training and isinstance(mesh, Mesh) and count not in (1, AUTO) and self.pipeline.stages(mesh) == 1:
            raise UsageError(f"microbatches={count}: inference on mesh {mesh} has neither gradients to add up nor pipeline stages to fill; leave "
                             "micro-batches out, or give a smaller batch")

    def settings(self, training: bool, has_loss: bool) -> dict[str, Any]:
        """The part that belongs to a plan; `planned_under` reads it."""
        own, p = self if training else replace(self, optimizer="none", offload="none"), self.precision
        said = {f.name: getattr(own, f.name) for f in fields(own) if f.metadata.get("recorded") and getattr(own, f.name) != f.default}
        said |= {"pipeline": self.pipeline.as_data()} if training and self.pipeline != Pipeline() else {}
        return {**said, "optimizer": own.optimizer, "training": training, "loss_in_graph": has_loss,
                "inputs": self.passing.inputs, "outputs": self.passing.outputs,
                "precision": None if p is None else {"param": p.param, "master": p.master, "reduce": p.reduce}}

    def filled(self, plan: Plan | None, *names: str) -> Options:
        """Options that are as by default, of those named, as they were for `plan`. Raises PlanError."""
        if plan is None:
            return self
        default, said = Options(), planned_under(plan)
        return replace(self, **{name: said[name] for name in names if getattr(self, name) == getattr(default, name)})


def _stages_apart(seeds: Mapping[str, Any], pipeline: Pipeline) -> tuple[Mapping[str, Any], Pipeline]:
    """Seeds that put modules into stages belong to the pipeline; the others are layouts."""
    from autoshard.seeds.grammar import stage_of

    stages = {key: stage for key, value in seeds.items() if (stage := stage_of(value)) is not None}
    if not stages:
        return seeds, pipeline
    return {k: v for k, v in seeds.items() if k not in stages}, replace(pipeline, pinned={**dict(pipeline.pinned), **stages})


def planned_under(plan: Plan) -> dict[str, Any]:
    """What a plan says about the options it was made under, by field. Raises PlanError for what is no precision policy or pipeline."""
    said, policy = plan.settings, plan.settings.get("precision")
    if policy and not (isinstance(policy, dict) and policy.keys() <= {"param", "master", "reduce"}):
        raise PlanError(f"the plan's precision {policy!r:.60} is none; plan the model again")
    try:
        pipeline = Pipeline.from_data(said.get("pipeline", {}))
    except UsageError as e:
        raise PlanError(f"the plan's pipeline: {e}; plan the model again") from None
    return {**{f.name: said.get(f.name, f.default) for f in fields(Options) if f.metadata.get("recorded")},
            "optimizer": said.get("optimizer", Options.optimizer), "precision": Precision(**policy) if policy else None,
            "seeds": dict(plan.seeds), "pipeline": pipeline, "passing": Passing(said.get("inputs", "global"), said.get("outputs", "replicate"))}


def default_cluster(device_type: str) -> str:
    """The profile to assume for devices of a type when the user names none."""
    return "cpu-gloo" if device_type == "cpu" else "h100-dgx"


def default_pipeline(mesh: Any) -> Pipeline:
    """What a user who says nothing of micro-batches means: none, or, where the mesh is open, any number."""
    return Pipeline(microbatches=AUTO) if isinstance(mesh_or_any(mesh), AnyMesh) else Pipeline()


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def parse_bytes(text: str | float | None) -> float | None:
    """`"70GiB"`, `"80e9"`, `12345` to bytes. Raises UsageError."""
    if text is None or _is_number(text):
        return None if text is None else float(text)
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    if not match or match[2].lower() not in UNITS:
        raise UsageError(f"cannot read the amount of memory {text!r}; write for example 70GiB or 80e9")
    try:
        amount = float(match[1]) * UNITS[match[2].lower()]
    except ValueError:
        raise UsageError(f"cannot read the amount of memory {text!r}; write for example 70GiB or 80e9") from None
    if amount == inf:
        raise UsageError(f"the amount of memory {text!r} is too large to count; write for example 70GiB or 80e9")
    return amount
