"""Graph + chosen specs -> the tensors that reports show, with their placements.

Weights and buffers as stored, the model's inputs and outputs, and of the activations those that leave
the module that made them (a layer's output), plus the outputs of attention ops, where heads are split.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.plan import OpPlan, PlacedTensor
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.base.windows import WEIGHTS, join_of


def layouts(graph: Graph, ops: Mapping[str, OpPlan], placements: Mapping[str, Spec]) -> tuple[PlacedTensor, ...]:
    """Inputs, stored tensors, activations and outputs, each in execution order.

    `ops` are the chosen specs per op, `placements` has the parameters and buffers that are shown."""
    rows = [*_inputs(graph, ops), *_stored(graph, ops, placements), *_activations(graph, ops), *_outputs(graph, ops)]
    return tuple(rows)


def _stored(graph: Graph, ops: Mapping[str, OpPlan], placements: Mapping[str, Spec]) -> Iterator[PlacedTensor]:
    for op in graph.of_kind("param", "buffer"):
        if op.target in placements:
            kind = "weight" if op.kind == "param" else "buffer"
            yield _layout(graph, kind, op.target, op.target.rpartition(".")[0], Ref(op.name), ops[op.name].outputs[0])


def _inputs(graph: Graph, ops: Mapping[str, OpPlan]) -> Iterator[PlacedTensor]:
    for op in graph.of_kind("input"):
        if op.name in ops and op.outputs and op.outputs[0] is not None:
            yield _layout(graph, "input", str(op.target), "", Ref(op.name), ops[op.name].outputs[0])


def _outputs(graph: Graph, ops: Mapping[str, OpPlan]) -> Iterator[PlacedTensor]:
    for op in graph.outputs(Role.USER).values():
        if op.name in ops and op.refs and join_of(op) != WEIGHTS:
            yield _layout(graph, "output", str(op.target), "", op.refs[0], ops[op.name].inputs[0])


def _activations(graph: Graph, ops: Mapping[str, OpPlan]) -> Iterator[PlacedTensor]:
    """Of a module the value that leaves it last: others are views of its input that a sibling shares."""
    last: dict[str, PlacedTensor] = {}
    for layout in _leaving(graph, ops):
        last.pop(layout.name, None)
        last[layout.name] = layout
    yield from last.values()


def _leaving(graph: Graph, ops: Mapping[str, OpPlan]) -> Iterator[PlacedTensor]:
    for op in graph.of_kind("call"):
        if op.phase != "forward" or op.name not in ops:
            continue
        name = _attention_name(op)
        for index, meta in enumerate(op.outputs):
            ref = Ref(op.name, index)
            if meta is None or not meta.dtype.is_floating_point:
                continue
            if _leaves_module(graph, op, ref) or (name and index == 0):
                yield _layout(graph, "activation", name or op.module, op.module, ref, ops[op.name].outputs[index])


def _attention_name(op: Op) -> str:
    return f"{op.module}.attention".lstrip(".") if "scaled_dot_product" in str(op.target) else ""


def _leaves_module(graph: Graph, op: Op, ref: Ref) -> bool:
    """Whether a forward op outside the module that made the value reads it."""
    if not op.module:
        return False
    users = (graph.op(name) for name, _ in graph.users.get(ref, ()))
    return any(u.phase == "forward" and not _within(u.module, op.module) for u in users)


def _within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def _layout(graph: Graph, kind: str, name: str, module: str, ref: Ref, spec: Spec) -> PlacedTensor:
    meta = graph.meta(ref)
    return PlacedTensor(kind, name, module, meta.logical_shape, str(meta.dtype).removeprefix("torch."), spec)
