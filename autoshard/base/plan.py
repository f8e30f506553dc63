"""The plan: what was chosen, in full, as data. Sorted-key JSON; the same inputs give the same bytes."""
from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from autoshard.base.checked_types import check_types
from autoshard.base.mesh import Mesh
from autoshard.base.spec import Spec, format_spec, parse_spec
from autoshard.errors import PlanError, UsageError

FORMAT = 1
INTERRUPTED = "best found before it was interrupted"
"""The status of a plan whose search was stopped by Ctrl-C, as `search.problem.Status` says it; reading a plan loads no solver."""
REQUIRED = ("copies", "collectives", "fallbacks", "notes", "stages")  # of the lists of a plan file
SHAPES: dict[str, type] = {"mesh": str, **dict.fromkeys(("ops", "placements"), dict),
                           **dict.fromkeys(("copies", "collectives", "fallbacks", "notes", "layouts", "timeline", "largest", "recompute", "offload",
                                            "stages"), list)}
"""What JSON has for a field that is read as something else."""
AGAIN = "_again"
"""Suffix of the name of a recomputed op, in backward."""
Window = str
"""Name of a window: see `base.graph.Window`."""
AT_THE_END = {"reduce_gradients": "at the end"}
"""Setting of a plan that keeps all gradients of parameters unreduced until backward is through, as ZeRO-1 does. Without it
each is reduced as soon as it is made."""


@dataclass(frozen=True)
class OpPlan:
    """Chosen specs of one op, on logical dims: one per tensor input (argument order) and per output."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


@dataclass(frozen=True)
class Copy:
    """A value held in another spec than its producer's, during one window (phase).

    Exactly one entry exists per (value, window, spec) that some consumer in that window reads and that
    differs from the producer's spec. source "made": redistributed from the producer's spec in this window;
    "kept": the forward window's copy of the same spec, saved for backward."""

    value: str
    window: Window
    spec: Spec
    source: Literal["made", "kept"]


@dataclass(frozen=True)
class Collective:
    """One planned collective call, in execution order. nbytes: see collectives/__init__.py for the convention. `axis`: the mesh axis
    it runs over, or several taken as one, in mesh order: "dp+tp".

    `hideable`: a parameter gather or a gradient reduction, which may overlap compute. `inner`: runs inside
    the op's own implementation, not on an edge."""

    kind: str
    axis: str
    nbytes: int
    seconds: float
    phase: Window
    value: str
    op: str
    reduce_op: str = ""
    dtype: str = ""
    hideable: bool = False
    inner: bool = False
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Fallback:
    """An op without a sharding rule, run replicated at the price shown."""

    op: str
    target: str
    seconds: float
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
class Layout:
    """How one tensor that a reader knows by name lies on the mesh: what reports and diffs show.

    `shape` and `spec` are on logical dims. Made by `autoshard.layouts`; execution never reads it."""

    kind: Literal["weight", "buffer", "input", "activation", "output"]
    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True)
class Plan:
    """See the field names; seconds and bytes are per rank and step.

    predicted   step_s, compute_s, blocking_s, hideable_s, hidden_s, exposed_s (hideable but not hidden),
                optimizer_s; step_s == objective_s; with `offload` host_s: the part of optimizer_s for it; bucketed_s: step_s as
                it runs, where reductions of small gradients share calls (step_s prices each by itself)
    memory      at the peak: bytes per category of `CATEGORIES`, slack (of the allocator), total, limit (or null); with
                `offload` host: bytes of it in the host's memory
    timeline    live bytes over one step: every local peak that matters, thinned out where the step is long
    largest     the largest tensors alive at the peak
    recompute   forward ops that backward recomputes (see recompute/rewrite.py); `ops` and `copies` name the recomputed ops too
    offload     parameters whose optimizer state lies on the host (see runtime/params/host_state.py)
    model       reference, batch, seq, dtype ... as the user gave them
    settings    optimizer, precision, inputs, outputs, training, loss
    placements  stored spec per parameter and buffer
    kind        what kind of plan it is, in one sentence (see kinds.py)
    layouts     weights, inputs, module outputs and user outputs with shape and spec, for reports
    """

    graph_hash: str
    mesh: Mesh
    cluster: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    ops: Mapping[str, OpPlan]
    placements: Mapping[str, Spec]
    copies: tuple[Copy, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    predicted: Mapping[str, float]
    memory: Mapping[str, float | None]
    objective_s: float
    bound_s: float
    gap: float
    status: str
    seeds: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: str = ""
    layouts: tuple[Layout, ...] = ()
    timeline: tuple[Moment, ...] = ()
    largest: tuple[Alive, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    search: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...] = ({"index": 0},)
    format: int = FORMAT
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)

    def recomputing(self, graph_hash: str) -> "Plan":
        """This plan, made for a program with recomputed ops, as a plan for the program `graph_hash` itself."""
        again = tuple(name.removesuffix(AGAIN) for name in self.ops if name.endswith(AGAIN))
        if not again:
            return self
        note = f"backward recomputes {len(again)} ops of forward to save memory"
        return replace(self, graph_hash=graph_hash, recompute=again, notes=(*self.notes, note))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended its search."""
        return self.status == INTERRUPTED

    @property
    def peak(self) -> Moment | None:
        """The fullest moment of the step; None for a plan without a timeline."""
        return max(self.timeline, key=lambda m: m.total, default=None)

    @property
    def key(self) -> str:
        """Digest of the JSON text: equal plans have equal keys on every rank."""
        import hashlib

        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Sorted-key JSON text. Run times are left out, so equal inputs give equal bytes."""
        data = {f.name: _encode(getattr(self, f.name)) for f in fields(self) if f.name != "timings"}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write atomically. Raises UsageError when the file cannot be written."""
        write_atomically(path, self.to_json())

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> "Plan":
        """Raises PlanError, naming `origin`, for text that is not a plan of this format."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise PlanError(f"{origin} is not JSON ({e}); make one with `autoshard plan MODEL --mesh ... -o plan.json`") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise PlanError(f"{origin} is not a plan of format {FORMAT} (found {found!r}); plan the model again")
        try:
            return _decode_plan(data)
        except KeyError as e:
            raise PlanError(f"{origin} is not a valid plan: {e} is missing; plan the model again") from None
        except (TypeError, ValueError, AttributeError, UsageError) as e:
            raise PlanError(f"{origin} is not a valid plan: {e}; plan the model again") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Raises PlanError when the file is missing or not a plan."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise PlanError(f"cannot read plan {path}: {e}") from None
        return Plan.from_json(text, str(path))


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises UsageError when `path` could not be written later; leaves nothing behind."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; give the name of a file")
    try:
        handle, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another folder") from None
    os.close(handle)
    os.unlink(tmp)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder where it is missing. Raises UsageError when files could not be written into it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot make folder {path}: {e.strerror or e}; choose another") from None
    check_writable(Path(path) / "plan.json")


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file or nothing. Raises UsageError naming the path."""
    path = Path(path)
    try:
        handle, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another folder") from None
    try:
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except OSError as e:
        os.unlink(tmp)
        raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another file") from None


def _encode(value: Any) -> Any:
    if isinstance(value, Mesh):
        return str(value)
    if isinstance(value, OpPlan):
        return {"in": [format_spec(s) for s in value.inputs], "out": [format_spec(s) for s in value.outputs]}
    if isinstance(value, Copy):
        return {**asdict(value), "spec": format_spec(value.spec)}
    if isinstance(value, Layout):
        return {**asdict(value), "shape": list(value.shape), "spec": format_spec(value.spec)}
    if isinstance(value, Moment):
        return {**asdict(value), "live": list(value.live)}
    if isinstance(value, (Collective, Fallback, Alive)):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, tuple) and value and all(type(v) is int for v in value):
        return format_spec(value)
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    return value


def _decode_plan(data: dict[str, Any]) -> Plan:
    from autoshard.base.mesh import parse_mesh

    known = {f.name for f in fields(Plan)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    for name, value in data.items():
        if not isinstance(value, SHAPES.get(name, object)):
            wanted = "table" if SHAPES[name] is dict else "list" if SHAPES[name] is list else "text"
            raise ValueError(f"{name} is {json.dumps(value):.60}, not a {wanted}")
    if not data["ops"]:
        raise ValueError("it has no ops")
    out = dict(data)
    out["mesh"] = parse_mesh(data["mesh"])
    out["ops"] = {k: _entry(f"ops[{k!r:.60}]", v, lambda v: OpPlan(tuple(map(parse_spec, v["in"])), tuple(map(parse_spec, v["out"]))))
                  for k, v in data["ops"].items()}
    out["placements"] = {k: _entry(f"placements[{k!r:.60}]", v, parse_spec, str) for k, v in data["placements"].items()}
    for name, make in ENTRIES.items():
        out[name] = tuple(_entry(f"{name}[{i}]", v, make) for i, v in enumerate(data[name] if name in REQUIRED else data.get(name, ())))
    for name in ("notes", "stages", "recompute", "offload"):
        out[name] = tuple(data[name] if name in REQUIRED else data.get(name, ()))
    plan = Plan(**out)
    check_types(plan)
    device = plan.cluster.get("device", {})
    if not isinstance(device, dict) or not isinstance(device.get("name", ""), str):
        raise ValueError(f"cluster['device'] is {device!r:.60}")
    return plan


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "copies": lambda c: Copy(**{**c, "spec": parse_spec(c["spec"])}),
    "collectives": lambda c: Collective(**c),
    "fallbacks": lambda c: Fallback(**c),
    "layouts": lambda x: Layout(**{**x, "shape": tuple(x["shape"]), "spec": parse_spec(x["spec"])}),
    "timeline": lambda m: Moment(**{**m, "live": tuple(m["live"])}),
    "largest": lambda a: Alive(**a),
}
"""What the lists of a plan hold, made from JSON."""


def _entry(where: str, value: Any, make: Callable[[Any], Any], shape: type = dict) -> Any:
    """`make(value)`. Raises ValueError naming the place for what cannot be made into that."""
    if not isinstance(value, shape):
        raise ValueError(f"{where} is {json.dumps(value):.60}, not a {'table' if shape is dict else 'text'}")
    try:
        return make(value)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{where} is {json.dumps(value):.80}, which has other keys or values than it must") from None
