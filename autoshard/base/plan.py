"""The plan: what was chosen, in full, as data. `plan_file.py` writes it as JSON and reads it by the types of the fields below."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from autoshard.base import quantities
from autoshard.base.files import write_atomically
from autoshard.base.fine_mesh import refined
from autoshard.base.notebook import facts
from autoshard.base.typed_data import MeshText, Number, SpecText
from autoshard.base.worth import MemoryWorth
from autoshard.errors import PlanError

FORMAT = 2
INTERRUPTED = "best found before it was interrupted"
"""The status of a plan whose search was stopped by Ctrl-C, as `search.problem.Status` says it; reading a plan loads no solver."""
TIED = "optimal among tied plans"
"""The status of a plan that is proven optimal with its repeated layers tied, likewise."""
REFINED = ", refined op by op"
"""The end of the status of a plan whose layouts change inside decision units, so that its bound, one of plans over units, is not one of all."""
OPTIMAL_REFINED = f"optimal over decision units{REFINED}"
"""The status where no plan over decision units is cheaper: proven."""
NEARBY = ", near a plan for mesh "
"""Before a mesh, at the end of the status of a plan that was searched near one for fewer axes (planner/many_axes.py). Its bound is one of all."""
AROUND = ", of the plans near it"
"""At the end of the status of a plan near which others were searched, of all strategies of a program with many (planner/descent.py), likewise."""
RECOMPUTE_SUFFIX = "_again"
"""Suffix of the name of a recomputed op, in backward."""
Window = str
"""Name of a window: see `base.graph.Window`."""
LATE_REDUCTION = {"reduce_gradients": "at the end"}
"""Setting of a plan that keeps all gradients of parameters unreduced until backward is through, as ZeRO-1 does. Without it
each is reduced as soon as it is made."""
IN_FLIGHT = 64 << 20
"""Bytes of gradients on their way to other ranks at once. A collective keeps what it sends, so without a bound every rank would
hold all gradients unreduced at the end of backward."""
GRADIENTS_IN_FLIGHT = "gradients_in_flight"
"""Setting of a plan in which fewer bytes are: it was made for little memory."""


def in_flight(settings: Mapping[str, Any]) -> int:
    """Bytes of gradients that may be on their way at once in a plan of these settings. Raises PlanError for what is no number of bytes."""
    most = settings.get(GRADIENTS_IN_FLIGHT, IN_FLIGHT)
    if not isinstance(most, int) or most < 1:
        raise PlanError(f"the plan's {GRADIENTS_IN_FLIGHT} {most!r:.60} is no number of bytes; plan the model again")
    return most


@dataclass(frozen=True)
class OpPlan:
    """Chosen specs of one op, on logical dims: one per tensor input (argument order) and per output."""

    inputs: tuple[SpecText, ...]
    outputs: tuple[SpecText, ...]


@dataclass(frozen=True)
class Copy:
    """A value held in another spec than its producer's, during one window (phase).

    Exactly one entry exists per (value, window, spec) that some consumer in that window reads and that
    differs from the producer's spec. source "made": redistributed from the producer's spec in this window;
    "kept": the forward window's copy of the same spec, saved for backward."""

    value: str
    window: Window
    spec: SpecText
    source: Literal["made", "kept"]


@dataclass(frozen=True)
class Collective:
    """One planned collective call, in execution order. nbytes: see collectives/__init__.py for the convention. `axis`: the mesh axis
    it runs over, or several taken as one, in mesh order: "dp+tp". `stage`: index of the stage that runs it.

    `hideable`: a parameter gather or a gradient reduction, which may overlap compute. `inner`: runs inside
    the op's own implementation, not on an edge."""

    kind: str
    axis: str
    nbytes: int
    seconds: Number
    phase: Window
    value: str
    op: str
    reduce_op: str = ""
    dtype: str = ""
    hideable: bool = False
    inner: bool = False
    module: str = ""
    source: str = ""
    stage: int = 0


@dataclass(frozen=True)
class Fallback:
    """An op without a sharding rule, run replicated at the price shown."""

    op: str
    target: str
    seconds: Number
    module: str = ""
    source: str = ""


CATEGORIES = ("parameters", "gradients", "optimizer", "buffers", "inputs", "saved", "outputs", "temporaries")
"""What memory is used for. saved: what forward keeps for backward; temporaries: everything else that ops and
redistributions make (gathered weights, communication buffers, values on their way)."""


@dataclass(frozen=True)
class Moment:
    """Live bytes of one rank while one instruction of the step runs, at its fullest.

    `index` counts the instructions of the whole step, `window` says which part it is in. `op` is the op computed, or
    the value redistributed (`kind` says which). `live`: bytes per category, in the order of `CATEGORIES`."""

    index: int
    window: Window  # or "update"
    kind: str
    op: str
    module: str
    source: str
    live: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.live)

    @property
    def by_category(self) -> dict[str, int]:
        return dict(zip(CATEGORIES, self.live, strict=True))


@dataclass(frozen=True)
class Alive:
    """A tensor that is alive at the peak: what it is called, its bytes on one rank, and where it comes from."""

    name: str
    category: str
    nbytes: int
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class PlacedTensor:
    """How one tensor that a reader knows by name lies on the mesh: what reports and diffs show.

    `shape` and `spec` are on logical dims. Made by `autoshard.layouts`; execution never reads it."""

    kind: Literal["weight", "buffer", "input", "activation", "output"]
    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    spec: SpecText


@dataclass(frozen=True)
class StagePlan:
    """What the ranks of one pipeline stage do, in seconds and bytes of one of these ranks. A plan without a pipeline is one stage.

    index       position in the order in which a micro-batch passes the stages
    rank        coordinate on the pipeline's mesh axis; stages of one coordinate share their devices
    first, last module paths of its first and last block; "": from the model's inputs, to its outputs
    submesh     mesh of the ranks that run it; None: the plan's mesh
    windows     seconds of one micro-batch by name of the window; empty in files of format 1, which do not say
    once_s      seconds once a step, whatever the number of micro-batches: the optimizer's update
    in_flight   micro-batches whose saved values are alive at once, at most
    memory      at the peak: bytes per category of `CATEGORIES`, slack (of the allocator), total, limit (or null); with the plan's
                `offload` host: bytes of it in the host's memory
    timeline    live bytes over one step: every local peak that matters, thinned out where the step is long
    largest     the largest tensors alive at the peak
    ops         how many ops of forward and backward it has; 0 where that is not said
    parameters  elements of the parameters that it reads, on all its ranks together; 0 likewise
    """

    index: int = 0
    rank: int = 0
    first: str = ""
    last: str = ""
    submesh: MeshText | None = None
    windows: Mapping[str, Number] = field(default_factory=dict)
    once_s: Number = 0.0
    in_flight: int = 1
    memory: Mapping[str, Number | None] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    largest: tuple[Alive, ...] = ()
    ops: int = 0
    parameters: int = 0

    @property
    def peak(self) -> Moment | None:
        """The fullest moment of the step; None without a timeline."""
        return max(self.timeline, key=lambda m: m.total, default=None)

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return self.memory.get("total") or 0.0


NOT_FOUND = "no way to fit was found (no proof)"
"""How `TriedShape.why` begins for a shape none of whose stages fit at prices of blocks."""


@dataclass(frozen=True)
class TriedShape:
    """A mesh with a number of micro-batches and a schedule, where these were to be chosen. Seconds of a step, bytes of the fullest rank.

    bound_s   no plan of it is faster; None: none fits
    step_s    that of its plan, where it was planned
    about_s   at prices of blocks, where it was searched; `why` says more, or why it was not
    memory    of its plan, else at prices of blocks"""

    mesh: str
    microbatches: int
    schedule: str = ""
    chunks: int = 1
    bound_s: Number | None = None
    step_s: Number | None = None
    about_s: Number | None = None
    memory: Number | None = None
    why: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Plan:
    """See the field names; seconds and bytes are per rank and step.

    predicted   step_s, compute_s, blocking_s, hideable_s, hidden_s, exposed_s (hideable but not hidden),
                optimizer_s; step_s == objective_s; with `offload` host_s: the part of optimizer_s for it; bucketed_s: step_s as
                it runs, where reductions of small gradients share calls (step_s prices each by itself). Of a pipeline all this is
                of its busiest rank, without bucketed_s, and with idle_s: the seconds that this rank waits; exchange_s, where it shares
                parameters with other stages: the exchange of their gradients, once a step
    stages      what belongs to a pipeline stage: one without a pipeline. Names of ops are unique in the program, so `ops`, `copies` and
                `placements` are about all stages
    pipeline    how the stages work together; None: one stage
    shapes      where the mesh, or the number of micro-batches, was chosen: what was tried; bound and gap are for all of it
    recompute   forward ops that backward recomputes (see recompute/rewrite.py); `ops` and `copies` name the recomputed ops too
    offload     parameters whose optimizer state lies on the host (see runtime/params/host_state.py)
    model       reference, batch, seq, dtype ... as the user gave them
    settings    optimizer, precision, inputs, outputs, training, loss
    placements  stored spec per parameter and buffer
    kind        what kind of plan it is, in one sentence (see kinds.py)
    layouts     weights, inputs, module outputs and user outputs with shape and spec, for reports
    worth       what memory is worth to it (see base/worth.py); None: nothing is known
    finer       sizes of the parts of mesh axes that are several inside of the program (see base/fine_mesh.py). Specs of `ops`, `copies` and `layouts`
                are about the mesh with these parts, `spec_mesh`; `placements` are about the mesh as the user wrote it
    """

    graph_hash: str
    mesh: MeshText
    cluster: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    ops: Mapping[str, OpPlan]
    placements: Mapping[str, SpecText]
    copies: tuple[Copy, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    predicted: Mapping[str, Number]
    stages: tuple[StagePlan, ...]
    objective_s: Number
    bound_s: Number
    gap: Number
    status: str
    seeds: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: str = ""
    layouts: tuple[PlacedTensor, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None
    shapes: tuple[TriedShape, ...] = ()
    search: Mapping[str, Any] = field(default_factory=dict)
    worth: MemoryWorth | None = None
    finer: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    format: int = FORMAT
    timings: Mapping[str, Number] = field(default_factory=dict, compare=False)

    def recomputing(self, graph_hash: str) -> "Plan":
        """This plan, made for a program with recomputed ops, as a plan for the program `graph_hash` itself."""
        again = tuple(name.removesuffix(RECOMPUTE_SUFFIX) for name in self.ops if name.endswith(RECOMPUTE_SUFFIX))
        if not again:
            return self
        note = f"backward recomputes {len(again)} ops of forward to save memory"
        return replace(self, graph_hash=graph_hash, recompute=again, notes=(*self.notes, note))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended its search."""
        return self.status.startswith(INTERRUPTED)

    @property
    def tied(self) -> bool:
        """Whether it is proven optimal only among plans that treat repeated layers alike; its bound is one of all plans."""
        return self.status == TIED

    @property
    def refined(self) -> bool:
        """Whether its layouts change inside decision units. Its bound says only how cheap plans over these units can be."""
        return self.status.endswith(REFINED)

    @cached_property
    def spec_mesh(self) -> MeshText:
        """The mesh whose axes the specs are about: that of the stages, which are all alike, where there are stages, with axes in their parts. Raises
        MeshError for parts that are none."""
        return refined(self.mesh if self.pipeline is None else self.stages[0].submesh or self.mesh, self.finer)

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda s: s.total)

    @property
    def memory(self) -> Mapping[str, float | None]:
        """Bytes of the fullest stage: what a device must have."""
        return self.fullest.memory

    @property
    def key(self) -> str:
        """Digest of the JSON text: equal plans have equal keys on every rank."""
        import hashlib

        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def _repr_html_(self) -> str:
        """What a notebook shows; the whole report is `autoshard report plan.json --html report.html`."""
        moved = sum(c.nbytes for c in self.collectives)
        total, limit = self.memory.get("total"), self.memory.get("limit")
        return facts(f"Plan for {self.model.get('reference') or 'a model'} on {self.mesh}", (
            ("kind", self.kind), ("cluster", self.cluster.get("name")), ("step, predicted", quantities.seconds(self.objective_s)),
            ("status", f"{self.status}, gap {self.gap:.2%}" if self.bound_s else self.status),
            ("memory of a rank", total and quantities.size(total) + (f" of {quantities.size(limit)}" if limit else "")),
            ("collectives", f"{len(self.collectives)}, {quantities.size(moved)} a rank and step"),
            ("run whole, no rule", ", ".join(sorted({f.target for f in self.fallbacks})))), self.notes)

    def to_json(self) -> str:
        """Sorted-key JSON text. Run times are left out, so equal inputs give equal bytes."""
        from autoshard.base.plan_file import write_plan

        return write_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write atomically. Raises UsageError when the file cannot be written."""
        write_atomically(path, self.to_json())

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> "Plan":
        """Raises PlanError, naming `origin`, for text that is not a plan."""
        from autoshard.base.plan_file import read_plan

        try:
            return read_plan(text)
        except ValueError as e:
            raise PlanError(f"{origin} is not a valid plan: {e}; plan the model again (autoshard plan MODEL --mesh ... -o plan.json)") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Raises PlanError when the file is missing or not a plan."""
        try:
            text = Path(path).read_text()
        except OSError as e:
            raise PlanError(f"cannot read plan {path}: {e.strerror}; autoshard plan MODEL --mesh ... -o {path} makes one") from None
        except UnicodeDecodeError as e:
            raise PlanError(f"cannot read plan {path}: it is not text ({e})") from None
        return Plan.from_json(text, str(path))
