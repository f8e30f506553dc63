"""What a rule is: the types every rule file shares."""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.base.graph import Call
from autoshard.base.mesh import Mesh
from autoshard.base.spec import Placement, Spec, local_tensor_shape
from autoshard.rules.family import Family

Origin = Literal["own", "dtensor", "replicate"]


@dataclass(frozen=True)
class InnerCollective:
    """A collective that runs inside an op's local implementation, over the row's own mesh axis.

    Its buffer is `copies` times the local shape of `tensor` ("in0", "out1", ...) without the logical dims
    `drop`, and with half (rounded down) of those in `halved`, in `dtype` (default: that tensor's). `kind`: a name in `collectives.RUN`."""

    kind: str
    tensor: str
    reduce_op: str = "sum"
    drop: tuple[int, ...] = ()
    dtype: Any = None
    copies: int = 1
    halved: tuple[int, ...] = ()

    def numel(self, local: Sequence[Any]) -> Any:
        """Elements of the buffer; `local`: the tensor's local logical shape, whose entries may be arrays."""
        out: Any = self.copies
        for dim, n in enumerate(local):
            out = out * (1 if dim in self.drop else n // 2 if dim in self.halved else n)
        return out


@dataclass(frozen=True)
class Row:
    """One way to run an op over ONE mesh axis: a placement per tensor input and per tensor output
    (R for outputs that are None). The strategies on a mesh are the product of rows over axes. `uneven`: what a rank computes and
    sends depends on the data, and is priced with the profile's `imbalance`."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    inner: tuple[InnerCollective, ...] = ()
    uneven: bool = False


@dataclass(frozen=True)
class LocalContext(ABC):
    """What a local implementation may ask of the rank it runs on. The numeric oracle and the lowering each complete it; tensors are real
    tensors or FX proxies, so implementations call `torch.ops.aten.*` overloads and methods of this class only."""

    call: Call
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    mesh: Mesh

    def axes(self, spec: Spec, dim: int) -> tuple[int, ...]:
        """Mesh axis indices that split logical `dim` under `spec`, major first."""
        return tuple(i for i, p in enumerate(spec) if p == dim and self.mesh.sizes[i] > 1)

    def ranks(self, axes: Sequence[int]) -> int:
        """Product of the sizes of mesh axes."""
        return math.prod(self.mesh.sizes[a] for a in axes)

    def local_in(self, i: int) -> tuple[int, ...]:
        """Local tensor shape (flattened dims, as torch sees it) of input `i`."""
        return local_tensor_shape(self.call.inputs[i], self.inputs[i], self.mesh)

    def local_out(self, i: int) -> tuple[int, ...]:
        """Local tensor shape of output `i`."""
        return local_tensor_shape(self.call.output(i), self.outputs[i], self.mesh)

    @abstractmethod
    def index(self, axes: Sequence[int]) -> Any:
        """Which piece this rank holds over `axes` (major first): an int, or a 0-dim int64 tensor."""

    @abstractmethod
    def all_reduce(self, x: Any, reduce_op: str, axes: Sequence[int]) -> Any:
        """All-reduce `x` over each of `axes` in turn, minor first; waits for the result."""

    @abstractmethod
    def all_to_all(self, x: Any, axis: int) -> Any:
        """Chunk r of dim 0 to rank r of mesh axis `axis`; waits for what came, in order of ranks."""

    @abstractmethod
    def all_to_all_rows(self, x: Any, sends: Any, gets: Any, room: int, balanced: int, axis: int) -> Any:
        """Rows of `x` to the ranks of mesh axis `axis`, one after another: as many as the r-th equal part of `sends` adds up to go to rank
        r, and as many as that of `gets` come from it. Waits for a tensor of `room` rows, those that came first and zeros after them;
        `balanced`: how many travel in an even load."""

    @abstractmethod
    def mirror(self, x: Any, axes: Sequence[int]) -> Any:
        """`x` of the rank that is as far from the last one over `axes` as this one is from the first; waits for it. Runs over each of `axes` in
        turn, minor first."""


LocalImpl = Callable[..., Any]
"""`impl(ctx, *args, **kwargs)`: the op's own arguments with local tensors in place; returns its outputs."""


@dataclass(frozen=True)
class Rule:
    """Everything autoshard knows about an op.

    rows     (call) -> rows for one mesh axis; the all-Replicate row first. Divisibility is checked later.
    factors  (call) -> factors of each output (see TensorMeta), from those of the inputs; None: plain dims.
    local    local implementation; None runs the op itself with `sizes` localised.
    sizes    schema argument name -> "out0" / "in1": that argument is replaced by the local tensor shape.
    flops    (call, local input shapes, local output shapes) -> FLOP; shapes are per logical dim and may
             hold numpy arrays (one entry per strategy); None: 0.
    moved    (call, local input shapes, local output shapes) -> bytes that kernels of the local implementation read and write beside the op's own
             inputs and outputs, one kernel after the other; None: 0.
    kernels  (call, local input shapes, local output shapes) -> small kernels of the local implementation beside those, each of which costs what a
             kernel does at least; None: 0.
    private  outputs that only mean something to the gradient of the op, on the rank that made them: they are never redistributed.
    grain    (call) -> per tensor input, {logical dim: n}: a piece of that dim has a multiple of n elements, where the kernel wants its
             rows so long. Applies to sharded dims only: whole ones are as the model has them. None: any size.
    looks_up the tensor input in which the op finds positions by their numbers, and (call) -> the dims it counts them along; None: in none.
    takes    (call, specs of the inputs, mesh sizes) -> whether the op can run on inputs that are split so over all axes together; None: always.
    family   what kind of work the op does (see family.py).
    """

    rows: Callable[[Call], tuple[Row, ...]]
    factors: Callable[[Call], tuple[tuple[tuple[int, ...], ...] | None, ...]] | None = None
    local: LocalImpl | None = None
    sizes: tuple[tuple[str, str], ...] = ()
    flops: Callable[[Call, Sequence[Any], Sequence[Any]], Any] | None = None
    moved: Callable[[Call, Sequence[Any], Sequence[Any]], Any] | None = None
    kernels: Callable[[Call, Sequence[Any], Sequence[Any]], Any] | None = None
    grain: Callable[[Call], Sequence[Mapping[int, int]]] | None = None
    private: tuple[int, ...] = ()
    looks_up: tuple[int, Callable[[Call], Sequence[int]]] | None = None
    takes: Callable[[Call, Sequence[Spec], tuple[int, ...]], bool] | None = None
    family: Family = Family.POINTWISE
    origin: Origin = "own"
    notation: str = field(default="", compare=False)
