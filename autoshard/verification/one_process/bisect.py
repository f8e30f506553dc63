"""The first value of the ranks that is not what the same graph makes on one device."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Op, Ref
from autoshard.base.spec import format_spec
from autoshard.lower.schedule import Held
from autoshard.pipeline.cutting.cut import Hop
from autoshard.rules import registry
from autoshard.verification.one_process.collectives import Ranked
from autoshard.verification.one_process.pieces import distance, joined
from autoshard.verification.one_process.program import Program
from autoshard.verification.one_process.stage_programs import StagePrograms
from autoshard.verification.references.microbatches import key_of
from autoshard.verification.report import FirstWrong

FLOOR = 1e-4
"""An output may be a small difference of large inputs: its error is measured against this part of their norm."""


class Found(Exception):
    """Ends the run at the first wrong value."""

    def __init__(self, wrong: FirstWrong) -> None:
        super().__init__(str(wrong))
        self.wrong = wrong


class Comparing:
    """A watch for `run_ranks` that raises Found at the first value that is off by more than `tolerance`. `values`: what every op makes on one
    device; ops in `skip` draw numbers. Of the stages of a pipeline it also looks at what they receive, and at what their backward begins with."""

    def __init__(self, program: Program | StagePrograms, values: Mapping[str, tuple[Any, ...]], tolerance: float, step: int,
                 skip: frozenset[str]) -> None:
        self.program, self.tolerance, self.step, self.skip = program, tolerance, step, skip
        self.values, self.whole, self.matched = _Values(values, program), program.traced.graph, Counter[int]()
        if isinstance(program, StagePrograms):
            program.arrived, program.weighed = self._arrived, self._weighed

    def __call__(self, node: torch.fx.Node, pieces: Ranked) -> None:
        for kind, mark in (("op", "held"), ("redistribution", "copy")):
            held = node.meta.get(mark)
            name = None if held is None or held.ref.op in self.skip else self.program.whole_name(held.ref.op)
            if name is not None and not _incomparable(self.whole.op(name), held.ref.index):
                error = self._error(pieces, self.program.graph.meta(held.ref), held.spec, Ref(name, held.ref.index))
                if error > self.tolerance * self._size(Ref(name, held.ref.index)):
                    raise Found(self._placed(_wrong(self.program, kind, held, error, self.step)))
                self.matched[self.program.stage] += 1

    def _arrived(self, hop: Hop, pieces: Ranked) -> None:
        if hop.value.op in self.whole.by_name and hop.value.op not in self.skip:
            error = self._error(pieces, hop.meta, self.program.plan.ops[hop.recv].outputs[0], hop.value)
            if error > self.tolerance * self._size(hop.value):
                where = self.whole.op(hop.value.op).where
                raise Found(self._placed(FirstWrong("wire", self.step, hop.name, f"stage {hop.source}", where, error=error)))

    def _weighed(self, tangent: torch.Tensor, loss: int) -> None:
        (op,) = (op for op in self.whole.of_kind("tangent") if op.target == loss)
        want = self.values[op.name][0]
        off = distance(tangent, want)
        if off > self.tolerance * norm(want):
            raise Found(self._placed(FirstWrong("weight", self.step, op.name, f"{float(tangent):.6g} instead of {float(want):.6g}", error=off)))

    def _error(self, pieces: Ranked, meta: Any, spec: Any, ref: Ref) -> float:
        found = joined(pieces, meta, spec, self.program.mesh)
        return max(distance(found.whole, self.values[ref.op][ref.index]), found.disagreement)

    def _size(self, ref: Ref) -> float:
        inputs = [norm(self.values[r.op][r.index]) for r in self.whole.op(ref.op).refs]
        return max([norm(self.values[ref.op][ref.index]), *(FLOOR * n for n in inputs)])

    def _placed(self, wrong: FirstWrong) -> FirstWrong:
        """With the stage and the micro-batch, and what was right before."""
        if not isinstance(self.program, StagePrograms):
            return wrong
        return replace(wrong, stage=self.program.stage, microbatch=self.program.microbatch, matched=tuple(sorted(self.matched.items())))


class _Values(dict[str, tuple[Any, ...]]):
    """The values of the micro-batch that the program runs."""

    def __init__(self, values: Mapping[str, tuple[Any, ...]], program: Program | StagePrograms) -> None:
        super().__init__(values)
        self.program = program

    def __missing__(self, op: str) -> tuple[Any, ...]:
        return self[key_of(self.program.graph, op, self.program.microbatch)]


def norm(t: torch.Tensor) -> float:
    """In float64; 0 for what holds no finite number."""
    t = t.detach()
    n = float((t if t.is_complex() else t.double()).nan_to_num(0.0, 0.0, 0.0).norm())
    return n if n == n else 0.0


def _incomparable(op: Op, index: int) -> bool:
    """Whether a value is unset memory, or lies as its op alone knows."""
    return "empty" in str(op.target) or op.kind == "call" and index in registry.rule_of(op.target).private


def _wrong(program: Program | StagePrograms, kind: Any, held: Held, error: float, step: int) -> FirstWrong:
    op, plan = program.graph.op(held.ref.op), program.plan
    rule = registry.origin(program.graph.calls[op.name]) if op.kind == "call" else ""
    if kind == "op":
        inputs, outputs = plan.ops[op.name].inputs, plan.ops[op.name].outputs
    else:
        inputs, outputs = (plan.ops[op.name].outputs[held.ref.index],), (held.spec,)
    return FirstWrong(kind, step, op.name, str(op.target), op.where, rule, tuple(map(format_spec, inputs)),
                      tuple(map(format_spec, outputs)), error)
