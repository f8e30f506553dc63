"""Notes of a plan about submodules that run as one op, because they cannot be traced."""
from __future__ import annotations

from autoshard.base import quantities
from autoshard.base.graph import Graph, Op
from autoshard.base.plan import Plan
from autoshard.program.opaque.opaque import Opaque


def whole_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line per submodule: which, seconds of the step, bytes gathered for it, memory while it runs."""
    ops: dict[str, list[Op]] = {}
    for op in graph.of_kind("call"):
        if isinstance(op.target, Opaque):
            ops.setdefault(op.target.shared.label, []).append(op)
    return tuple(_note(label, found, plan) for label, found in ops.items())


def _note(label: str, ops: list[Op], plan: Plan) -> str:
    names = {op.name for op in ops}
    seconds = sum(f.seconds for f in plan.fallbacks if f.op in names)
    gathered = sum(c.nbytes for c in plan.collectives if c.op in names)
    priced = all(op.target.inside for op in ops)
    step = f"{quantities.seconds(seconds)} a step"
    cost = f"about {step}" if priced else f"at least {step} (its inside could not be priced)"
    memory = quantities.size(max(op.target.workspace for op in ops)) if priced else "an unknown amount"
    return (f"{label} cannot be traced and runs whole on every rank, in backward once more: {cost}, {quantities.size(gathered)} "
            f"communicated for it, and {memory} of memory beside its results while it runs; all estimates of runs on made-up values")
