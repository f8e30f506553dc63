"""Random ops on many ranks: replicas must agree, shards must differ."""
from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from autoshard.base.custom_op import custom_op

DRAWING = threading.Lock()
"""Held while an op draws: threads of one process share the device's generator."""


def seeded(op: Any, seed: int, salt: int, piece: int, *args: Any, **kwargs: Any) -> Any:
    """Run random `op` under a seed of (step seed, which op, which piece of the result this rank makes), and
    leave the device's generator as it was. Ranks that make the same piece draw the same numbers."""
    generator = generator_of(args, kwargs.get("device"))
    with DRAWING:
        state = generator.get_state()
        try:
            generator.manual_seed(mix(seed, salt, piece))
            return op(*args, **kwargs)
        finally:
            generator.set_state(state)


def of_microbatch(seed: int, microbatch: int) -> int:
    """The seed of one micro-batch of a step. It depends on nothing else, so that a pipeline of any number of stages draws what one stage
    draws."""
    return mix(seed, microbatch + 1)


@cache
def seeded_op(op: Any) -> Any:
    """`seeded` for `op` as an op of its own, which compilers call and do not look into:
    (seed: a tensor, so that a new seed is no new program; salt; piece; the arguments of `op`)."""
    name = f"seeded_{op.name()}".replace("::", "_").replace(".", "_")
    takes, _, gives = str(op._schema).partition("(")[2].rpartition(") -> ")

    def run(seed: torch.Tensor, salt: int, piece: int, *args: Any, **kwargs: Any) -> Any:
        return seeded(op, int(seed), salt, piece, *args, **kwargs)

    def shape(seed: torch.Tensor, salt: int, piece: int, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return custom_op(name, f"(Tensor seed, int salt, int piece, {takes}) -> {gives}", run, shape)


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers (FNV-1a over 64-bit words, then a multiply to spread it)."""
    h = 0xCBF29CE484222325
    for n in numbers:
        h = ((h ^ (n & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 29
    return (h * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF) >> 1


def generator_of(args: Sequence[Any], device: Any = None) -> torch.Generator:
    """The default generator of the device of the first tensor; where there is none, of `device`."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device(device or "cpu")
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
