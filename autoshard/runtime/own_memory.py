"""Gradients in memory of their own. A program computes equal gradients once (of the weights of `a(x) + b(x)`, of two biases of one cell), and
loops write into gradients: they clip them, and add the next ones.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from autoshard.base.graph import Graph
from autoshard.base.roles import Role
from autoshard.program.flow import passed_on


def may_share(graph: Graph) -> bool:
    """Whether two gradients, or one and what the program is given, may be one value, up to views."""
    sources = [graph.op(passed_on(graph, op.args[0])[-1].op) for op in graph.outputs(Role.GRADIENT).values()]
    return len({op.name for op in sources}) < len(sources) or any(op.kind != "call" for op in sources)


def apart(grads: Sequence[torch.Tensor], given: Collection[int] = ()) -> list[torch.Tensor]:
    """The gradients, with copies of those that lie in the memory of another one, or at the address of something that was `given`."""
    out, end = list(grads), 0
    for begin, size, i in sorted((g.data_ptr(), -g.nbytes, i) for i, g in enumerate(grads)):
        if size and (begin < end or begin in given):
            out[i] = grads[i].clone()
        else:
            end = max(end, begin - size)
    return out
