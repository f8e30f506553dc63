"""What rules' local implementations ask and emit while a window's graph is built."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.base.graph import Call, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import Spec, local_shape
from autoshard.lower.emit import Emitter


@dataclass(frozen=True)
class Context:
    """`rules.types.LocalContext` on FX proxies."""

    call: Call
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    mesh: Mesh
    emit: Emitter

    def axes(self, spec: Spec, dim: int) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(spec) if p == dim and self.mesh.sizes[i] > 1)

    def ranks(self, axes: Sequence[int]) -> int:
        out = 1
        for a in axes:
            out *= self.mesh.sizes[a]
        return out

    def index(self, axes: Sequence[int]) -> Any:
        return self.emit.index(axes)

    def local_in(self, i: int) -> tuple[int, ...]:
        return local_tensor_shape(self.call.inputs[i], self.inputs[i], self.mesh)

    def local_out(self, i: int) -> tuple[int, ...]:
        return local_tensor_shape(self.call.outputs[i], self.outputs[i], self.mesh)

    def all_reduce(self, x: Any, reduce_op: str, axes: Sequence[int]) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.emit.wait(self.emit.collective("all_reduce", x, (axis,), reduce_op))
        return x

    def all_to_all(self, x: Any, axis: int) -> Any:
        return self.emit.wait(self.emit.collective("all_to_all", x, (axis,)))

    def all_to_all_rows(self, x: Any, sends: Any, gets: Any, room: int, balanced: int, axis: int) -> Any:
        return self.emit.wait(self.emit.rows_apart(x, sends, gets, room, balanced, axis))

    def mirror(self, x: Any, axes: Sequence[int]) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.emit.wait(self.emit.collective("mirror", x, (axis,)))
        return x


def local_tensor_shape(meta: TensorMeta, spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the tensor a rank holds, flattened dims flattened."""
    return meta.unflatten(local_shape(meta.logical_shape, spec, mesh.sizes))
