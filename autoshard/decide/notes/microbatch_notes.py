"""Notes of a plan about its micro-batches: how many, how large, and what runs once a step."""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.base.plan import Plan
from autoshard.base.spec import is_partial
from autoshard.base.windows import batch_dim_of, is_accumulator, is_hold


def microbatch_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Empty without micro-batches."""
    if graph.microbatches == 1:
        return ()
    rows = next((op.outputs[0].shape[d] for op in graph.of_kind("input") if (d := batch_dim_of(op)) is not None), 0)
    parts = [f"{graph.microbatches} micro-batches of {rows} row{'s' * (rows > 1)}", *_reductions(graph, plan), *_gathers(graph, plan)]
    return ("; ".join(parts), *(f"micro-batches compute something else than the batch: {note}" for note in graph.notes))


def _reductions(graph: Graph, plan: Plan) -> list[str]:
    """When gradients that are sums over ranks are reduced."""
    late = [op.name for op in filter(is_accumulator, graph.ops) if any(map(is_partial, plan.ops[op.name].outputs[0]))]
    moved = {c.value for c in plan.copies}
    each = [op.name for op in filter(is_accumulator, graph.ops) if op.name not in late and str(op.refs[0]) in moved]
    if late and each:
        return [f"{len(late)} gradients are reduced once a step, {len(each)} in every micro-batch"]
    return ["gradients are reduced once a step"] if late else ["gradients are reduced in every micro-batch"] if each else []


def _gathers(graph: Graph, plan: Plan) -> list[str]:
    """How many parameters are brought elsewhere once for all micro-batches."""
    held = sum(plan.ops[op.name].inputs[0] != plan.ops[op.refs[0].op].outputs[0] for op in filter(is_hold, graph.ops))
    return [f"{held} parameter{'s are' if held > 1 else ' is'} gathered once a step"] if held else []
