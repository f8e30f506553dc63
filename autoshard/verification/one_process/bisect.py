"""The first value of the ranks that is not what the same graph makes on one device."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.base.graph import Op
from autoshard.base.spec import format_spec
from autoshard.lower.schedule import Held
from autoshard.rules import registry
from autoshard.verification.one_process.collectives import Ranked
from autoshard.verification.one_process.pieces import distance, joined
from autoshard.verification.one_process.program import Program
from autoshard.verification.references.microbatches import key_of
from autoshard.verification.report import FirstWrong

FLOOR = 1e-4
"""An output may be a small difference of large inputs: its error is measured against this part of their norm."""


class Found(Exception):
    """Ends the run at the first wrong value."""

    def __init__(self, wrong: FirstWrong) -> None:
        super().__init__(str(wrong))
        self.wrong = wrong


def comparing(program: Program, values: Mapping[str, tuple[Any, ...]], tolerance: float, step: int,
              skip: frozenset[str]) -> Callable[[torch.fx.Node, Ranked], None]:
    """A watch for `run_ranks` that raises Found. `values`: what every op makes on one device; ops in `skip` draw numbers."""
    def watch(node: torch.fx.Node, pieces: Ranked) -> None:
        for kind, mark in (("op", "held"), ("redistribution", "copy")):
            held = node.meta.get(mark)
            if held is not None and held.ref.op not in skip and not _leaves_unset(program.graph.op(held.ref.op)):
                there = _Values(values, program)
                error = _error(program, there, held, pieces)
                if error > tolerance * _size(program, there, held):
                    raise Found(_wrong(program, kind, held, error, step))

    return watch


class _Values(dict[str, tuple[Any, ...]]):
    """The values of the micro-batch that the program runs."""

    def __init__(self, values: Mapping[str, tuple[Any, ...]], program: Program) -> None:
        super().__init__(values)
        self.program = program

    def __missing__(self, op: str) -> tuple[Any, ...]:
        return self[key_of(self.program.graph, op, self.program.microbatch)]


def _error(program: Program, values: Mapping[str, tuple[Any, ...]], held: Held, pieces: Ranked) -> float:
    found = joined(pieces, program.graph.meta(held.ref), held.spec, program.mesh)
    return max(distance(found.whole, values[held.ref.op][held.ref.index]), found.disagreement)


def _size(program: Program, values: Mapping[str, tuple[Any, ...]], held: Held) -> float:
    op = program.graph.op(held.ref.op)
    inputs = [norm(values[r.op][r.index]) for r in op.refs]
    return max([norm(values[held.ref.op][held.ref.index]), *(FLOOR * n for n in inputs)])


def norm(t: torch.Tensor) -> float:
    """In float64; 0 for what holds no finite number."""
    t = t.detach()
    n = float((t if t.is_complex() else t.double()).nan_to_num(0.0, 0.0, 0.0).norm())
    return n if n == n else 0.0


def _leaves_unset(op: Op) -> bool:
    return "empty" in str(op.target)


def _wrong(program: Program, kind: Any, held: Held, error: float, step: int) -> FirstWrong:
    op, plan = program.graph.op(held.ref.op), program.plan
    rule = registry.origin(program.graph.calls[op.name]) if op.kind == "call" else ""
    if kind == "op":
        inputs, outputs = plan.ops[op.name].inputs, plan.ops[op.name].outputs
    else:
        inputs, outputs = (plan.ops[op.name].outputs[held.ref.index],), (held.spec,)
    return FirstWrong(kind, step, op.name, str(op.target), op.where, rule, tuple(map(format_spec, inputs)),
                      tuple(map(format_spec, outputs)), error)
