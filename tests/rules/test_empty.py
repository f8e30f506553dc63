"""Tensors of size 0: every rule's samples with each of their sizes made 0, wherever torch itself takes that."""
import math
from collections import defaultdict

import pytest
import torch

from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, divides
from autoshard.lower.context import Context
from autoshard.lower.emit import Emitter
from autoshard.rules import registry
from autoshard.rules.check import oracle
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import SAMPLES, T, build, emptied, sample
from autoshard.rules.check.samples_special import SPECIAL

aten = torch.ops.aten
BY_OP = defaultdict(list)
for each in (*SAMPLES, *SPECIAL):
    BY_OP[each.op] += emptied(each)


def built(op):
    """The calls that torch takes, and whether their values are set."""
    for s in BY_OP[op]:
        try:
            call, tensors = build(s)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        yield call, tensors, s.values


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [op for op, found in BY_OP.items() if found], ids=str)
def test_rows_are_true(op):
    wrong = [w for call, tensors, values in built(op) for w in wrong_rows(call, tensors, pairs=6, values=values)]
    assert not wrong, "\n".join(map(str, wrong))


def test_most_rules_are_tried():
    tried = [op for op in BY_OP if next(built(op), None)]
    assert len(tried) > 150, len(tried)


def test_flops_are_finite():
    for op in BY_OP:
        flops = registry.rule_of(op).flops
        for call, _, _ in built(op) if flops else ():
            shapes = [[m and m.logical_shape for m in metas] for metas in (call.inputs, call.outputs)]
            assert 0 <= flops(call, *shapes) < math.inf, call


@pytest.mark.parametrize("s", [sample(aten.sum.dim_IntList, T(4, 0, 6), (0,)), sample(aten.mm.default, T(4, 0), T(0, 6)),
                               sample(aten.nll_loss_forward.default, T(0, 6), T(0, high=6), None, 1, -100)], ids=str)
def test_nothing_is_sent_of_nothing(s):
    """The lowering writes no collective for a tensor of size 0, whatever placement it goes from and to."""
    call, _ = build(s)
    mesh = Mesh(("a",), (2,))
    for row in registry.rows(call):
        specs = [tuple((p,) for p in placed) for placed in (row.inputs, row.outputs)]
        if all(m is None or divides(m.logical_shape, spec, mesh.sizes)
               for m, spec in zip((*call.inputs, *call.outputs), (*specs[0], *specs[1]), strict=True)):
            emit = Emitter(mesh)
            context = Context(call, *specs, mesh, emit, "an op")
            proxies = [emit.placeholder(f"in{i}", context.local_in(i), m.dtype) for i, m in enumerate(call.inputs)]
            args, kwargs = oracle._arguments(call, proxies)
            registry.run_local(context, *args, **kwargs)
    assert registry.rows(call)[0].inputs == (R,) * len(call.inputs)
