"""`autoshard.Pipeline`: how a step's batch is cut into micro-batches, and its model into stages."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.base.mesh import Mesh
from autoshard.errors import UsageError

AUTO = "auto"
SCHEDULES = (AUTO, "gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv")
"""Names of schedules; a file in torch's CSV format may stand in place of one."""
INEXACT = ("error", "accept")


@dataclass(frozen=True)
class Pipeline:
    """Micro-batches and pipeline stages. Without an axis named `axis` in the mesh there is one stage, and micro-batches are
    gradient accumulation inside the step.

    microbatches  parts of the batch, which run one after the other; gradients are added up. It must divide the batch
    schedule      "auto", "gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", or a file in torch's CSV format
    cuts          paths of the modules that begin a stage (all but the first); "auto": searched
    pinned        {glob over modules: stage that has them}; seeds say it too, {"layers.0*": autoshard.stage(0)}. The rest is searched
    layout        in place of cuts, as Megatron-LM writes them: "Et*2|(t*2|)*3t*2L" (E: what is before the layers, t: a layer, L: what is
                  behind them)
    chunks        stages per rank; "auto": what the schedule wants
    axis          the mesh axis that is the pipeline
    batch_dims    {name or "input:i" of an input: its batch dim, or None where all micro-batches read it whole}; dim 0 of the others
    inexact       "error": refuse a model that computes something else on micro-batches than on the batch (batch norm in
                  training), naming the op; "accept": run it"""

    microbatches: int | Literal["auto"] = 1
    schedule: str = AUTO
    cuts: Literal["auto"] | tuple[str, ...] = AUTO
    chunks: int | Literal["auto"] = AUTO
    pinned: tuple[tuple[str, int], ...] = ()
    layout: str = ""
    axis: str = "pp"
    batch_dims: tuple[tuple[str, int | None], ...] = ()
    inexact: str = "error"

    def __post_init__(self) -> None:
        if self.inexact not in INEXACT:
            raise UsageError(f"inexact={self.inexact!r} is not one of {', '.join(INEXACT)}")
        _check_count("microbatches", self.microbatches)
        _check_count("chunks", self.chunks)
        if not (isinstance(self.schedule, str) and (self.schedule in SCHEDULES or self.schedule.endswith(".csv"))):
            raise UsageError(f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}, nor a .csv file")
        if not (isinstance(self.axis, str) and self.axis):
            raise UsageError(f"axis={self.axis!r}: give the name of the mesh axis that is the pipeline, such as 'pp'")
        object.__setattr__(self, "cuts", _cuts(self.cuts))
        object.__setattr__(self, "pinned", _pinned(self.pinned))
        if self.layout and self.cuts != AUTO:
            raise UsageError(f"layout={self.layout!r} and cuts={list(self.cuts)} both say where stages begin; give one of them")
        object.__setattr__(self, "batch_dims", _dims(self.batch_dims))

    @property
    def count(self) -> int:
        """The number of micro-batches. Raises UsageError where it is not given."""
        if self.microbatches == AUTO:
            raise UsageError("microbatches='auto' is chosen by `plan` and `compile`; give a number here")
        return int(self.microbatches)

    def stages(self, mesh: Mesh) -> int:
        """Ranks along the pipeline's axis; 1 without one. Raises UsageError for options of a pipeline that is not there."""
        if self.axis in mesh.names:
            return mesh.sizes[mesh.index(self.axis)]
        given = [f"{name}={value!r}" for name, value in asdict(self).items()
                 if name in ("schedule", "cuts", "chunks") and value != AUTO or name in ("pinned", "layout") and value]
        if given:
            raise UsageError(f"{', '.join(given)}: the mesh {mesh} has no axis {self.axis!r}, so there are no stages; "
                             f"give a mesh such as '{self.axis}=2,{mesh}', or leave it out")
        return 1

    def as_data(self) -> dict[str, Any]:
        """What differs from the defaults, for a plan file."""
        default = asdict(Pipeline())
        said = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {**said, **({"batch_dims": dict(self.batch_dims)} if self.batch_dims else {}),
                **({"cuts": list(self.cuts)} if self.cuts != AUTO else {}), **({"pinned": dict(self.pinned)} if self.pinned else {})}

    @staticmethod
    def from_data(data: Any) -> Pipeline:
        """Raises UsageError for what is none."""
        if not isinstance(data, Mapping) or not data.keys() <= asdict(Pipeline()).keys():
            raise UsageError(f"{data!r:.80} are no options of a pipeline")
        return Pipeline(**data)


def _check_count(name: str, value: Any) -> None:
    if value != AUTO and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise UsageError(f"{name}={value!r}: give a positive whole number, or 'auto'")


def _cuts(value: Any) -> Any:
    if value == AUTO:
        return AUTO
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise UsageError(f"cuts={value!r:.80}: give a list of module paths, ['layers.10', 'layers.20'], or 'auto'")
    twice = [v for i, v in enumerate(value) if v in value[:i]]
    if twice:
        raise UsageError(f"cuts name {twice[0]!r} twice; every stage begins at another module")
    return tuple(value)


def _pinned(value: Any) -> tuple[tuple[str, int], ...]:
    pairs = tuple(value.items() if isinstance(value, Mapping) else value)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int and pair[1] >= 0):
            raise UsageError(f"pinned={value!r:.80}: give a mapping from globs over modules to numbers of stages, {{'layers.0*': 0}}")
    return pairs


def _dims(value: Any) -> tuple[tuple[str, int | None], ...]:
    pairs = value.items() if isinstance(value, Mapping) else () if value is None else value
    try:
        found = tuple(sorted(((str(name), dim) for name, dim in pairs), key=lambda pair: pair[0]))
    except (TypeError, ValueError):
        found = (("", ""),)  # neither a mapping nor pairs
    if any(not name or not (dim is None or isinstance(dim, int) and not isinstance(dim, bool)) for name, dim in found):
        raise UsageError(f"batch_dims={value!r:.80}: give a mapping from names of inputs to dims, {{'input:2': None, 'mask': 1}}")
    return found
