"""What experts compute between their two matmuls, by name, with its gradient: a graph holds names, and kernels look them up here."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """`run(z)` of one element, and `gradient(g, z)`: g times its derivative at z."""

    run: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(functional.silu, lambda g, z: aten.silu_backward.default(g, z)),
    "gelu": Activation(functional.gelu, lambda g, z: aten.gelu_backward.default(g, z)),
    "gelu_tanh": Activation(lambda z: functional.gelu(z, approximate="tanh"),
                            lambda g, z: aten.gelu_backward.default(g, z, approximate="tanh")),
    "relu": Activation(torch.relu, lambda g, z: aten.threshold_backward.default(g, z, 0)),
    "relu_squared": Activation(lambda z: torch.relu(z).square(), lambda g, z: 2 * g * torch.relu(z)),
}


def activate(h: Tensor, name: str, gated: bool) -> Tensor:
    """[rows, f] of what the first matmul made: of [rows, 2 f], gate and up, the activated gate times up; else the activated [rows, f]."""
    if not gated:
        return ACTIVATIONS[name].run(h)
    gate, up = h.chunk(2, -1)
    return ACTIVATIONS[name].run(gate) * up


def activate_backward(grad: Tensor, h: Tensor, name: str, gated: bool) -> Tensor:
    """The gradient of `h`, from that of `activate(h)`."""
    if not gated:
        return ACTIVATIONS[name].gradient(grad, h)
    gate, up = h.chunk(2, -1)
    return torch.cat([ACTIVATIONS[name].gradient(grad * up, gate), grad * ACTIVATIONS[name].run(gate)], -1)
