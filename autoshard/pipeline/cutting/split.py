"""Backward of a stage in two windows: what other stages wait for, and what they do not.

`BACKWARD` makes the gradients that are sent to earlier stages (I in schedules), `WEIGHT` the rest, the gradients of parameters above
all (W). What the second reads of the first is saved between them as what forward makes is."""
from __future__ import annotations

from dataclasses import replace

from autoshard.base.graph import BACKWARD, WEIGHT, Graph, Op
from autoshard.pipeline.cutting.cut import WINDOWS, Cut, Stage


def split_backward(made: Cut) -> Cut:
    """The cut with every stage's backward in two windows. A stage that sends no gradient has all of it in `WEIGHT`."""
    return replace(made, stages=tuple(map(split_stage, made.stages)))


def split_stage(stage: Stage) -> Stage:
    """One stage of `split_backward`."""
    return replace(stage, graph=_split(stage.graph, stage))


def _split(graph: Graph, stage: Stage) -> Graph:
    sent = {h.send for h in stage.sends if h.window == BACKWARD}
    needed = _ancestors(graph, sent)
    arrives = bool(sent)

    def phase(op: Op) -> str:
        if op.phase != BACKWARD or op.name in needed:
            return op.phase
        if op.kind == "tangent" and arrives:
            return BACKWARD  # it comes before the first of the two windows
        if op.kind == "output" and op.refs and op.refs[0].op in needed and graph.op(op.refs[0].op).phase == BACKWARD:
            return BACKWARD  # handed out as soon as it is there
        return WEIGHT

    ops = [replace(op, phase=phase(op)) for op in graph.ops]
    return replace(graph, ops=tuple(sorted(ops, key=lambda op: WINDOWS.index(op.phase))))


def _ancestors(graph: Graph, names: set[str]) -> set[str]:
    """Backward ops that these read, and the ops themselves."""
    found: set[str] = set()
    todo = [n for n in names if graph.op(n).phase == BACKWARD]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [r.op for r in graph.op(name).refs if graph.op(r.op).phase == BACKWARD]
    return found
