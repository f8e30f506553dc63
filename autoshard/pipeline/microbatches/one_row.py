"""The program of a micro-batch of one row, as the batch has it: made of those of two larger batches, not traced.

At one row a trace lacks ops of others (a token that is expanded over the batch, a transposition of rows and positions that moves nothing), so not
every op of the batch's program has a partner in it. What the batch computes with one row is what the micro-batch has to compute."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from autoshard.errors import TraceError
from autoshard.pipeline.microbatches.relations import Inexact
from autoshard.pipeline.microbatches.resize import Line, Unlike
from autoshard.pipeline.microbatches.walk import partners
from autoshard.program.calling import Traced


def as_the_batch(whole: Traced, rows: int, part: Traced, traced_at: Callable[[int], Traced]) -> Traced:
    """`part`, the trace of one row of a batch of `rows`, or where it has other ops than the batch a program that has the same. `traced_at`:
    the trace of so many rows."""
    if not _differ(whole, part):
        return part
    other = 2 if rows > 2 else 3
    try:
        found = traced_at(other)
        graph = Line(Fraction(1 - rows, other - rows), rows, other).graph(whole.graph, found.graph, 1)
    except (TraceError, Unlike):
        return part
    constants = whole.calling.constants
    kept = found.calling.constants
    if constants.keys() != kept.keys() or any(t.shape != kept[name].shape for name, t in constants.items()):
        return part
    made = replace(found, graph=graph, calling=replace(found.calling, inputs=tuple(op.outputs[0] for op in graph.of_kind("input"))))
    return part if _differ(whole, made) else made


def _differ(whole: Traced, part: Traced) -> bool:
    def refuse(inexact: Inexact) -> None:
        raise inexact

    try:
        partners(whole.graph, part.graph, refuse)
    except Inexact:
        return True
    return False
