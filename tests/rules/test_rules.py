"""Every general rule against the numeric oracle, in both directions."""
from functools import cache, reduce

import pytest
import torch

from autoshard.base.mesh import Mesh
from autoshard.base.spec import PSUM, R, divides
from autoshard.lower.context import Context
from autoshard.lower.emit import Emitter
from autoshard.rules import registry
from autoshard.rules.check import oracle
from autoshard.rules.check.oracle import check_rows, missing_rows, wrong_rows
from autoshard.rules.check.samples import SAMPLES as GENERAL
from autoshard.rules.check.samples import build
from autoshard.rules.check.samples_images import IMAGES, SEARCHED
from autoshard.rules.check.samples_special import SPECIAL
from autoshard.rules.ops import contraction, distance, factory, images, pointwise, reduction, view

aten = torch.ops.aten
SAMPLES = GENERAL + IMAGES
IDS = [f"{i}-{s}" for i, s in enumerate(SAMPLES)]

# Rows the oracle accepts and the rules lack on purpose: op -> inputs of the row.
LEFT_OUT = {
    aten._to_copy.default: {(PSUM,)},                   # a narrowing cast would round each part
    aten.copy.default: {(PSUM, PSUM)},                  # what is overwritten may as well be whole
    aten.fill.Tensor: {(PSUM, PSUM)},                   # likewise
    aten.hardsigmoid_backward.default: {(PSUM, PSUM)},  # true only on the middle branch, where samples lie
    aten.im2col.default: {(2,), (3,)},                  # windows that do not overlap
    aten.all.default: {(0,), (1,)},                     # one shard has the False by chance; bool is never Partial
    aten.slice.Tensor: {(1,)},                          # one block of a dim with factors: no row goes onto another factor
}


@cache
def built(s):
    return build(s)


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_rows_are_true(s):
    call, tensors = built(s)
    assert registry.origin(call) == "own", "the notation does not fit its own sample"
    wrong = wrong_rows(call, tensors, values=s.values)
    assert not wrong, "\n".join(map(str, wrong))


VALUED = [s for s in SAMPLES + SPECIAL if s.values]


@pytest.mark.parametrize("s", VALUED, ids=[f"{i}-{s.op}" for i, s in enumerate(VALUED)])
def test_rows_are_true_for_pieces_that_are_not_contiguous(s):
    """Some kernels take the memory of their inputs for contiguous, and are silently wrong where it is not."""
    call, tensors = built(s)
    wrong = [w for row in registry.rows(call) if (w := check_rows(call, tensors, (row,), (2,), strided=True))]
    assert not wrong, "\n".join(map(str, wrong))


def backwards(x):
    """Equal to `x`, its first dim innermost in memory."""
    order = list(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def with_gaps(x):
    """Equal to `x`, every second element of a larger tensor."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


ANYHOW = [s for s in VALUED if registry.rule_of(s.op).family.any_strides]


@pytest.mark.parametrize("s", ANYHOW, ids=[f"{i}-{s.op}" for i, s in enumerate(ANYHOW)])
def test_families_that_take_any_strides_do(s, monkeypatch):
    """The lowering hands them whatever a view made."""
    call, tensors = built(s)
    for stored in (backwards, with_gaps):
        monkeypatch.setattr(oracle, "_reordered", stored)
        wrong = [w for row in registry.rows(call) if (w := check_rows(call, tensors, (row,), (2,), strided=True))]
        assert not wrong, "\n".join(map(str, wrong))


def wider(x):
    """Equal to `x`, the first part of longer rows, and of more of them."""
    return reduce(lambda y, dim: torch.cat([y, torch.full_like(y, 3)], dim), range(x.ndim), x)[tuple(map(slice, x.shape))]


def other_order(x):
    """Equal to `x`, the first part of a tensor whose second dim lies behind the third in memory, as tokens do before heads."""
    return wider(x.transpose(1, 2)).transpose(1, 2) if x.ndim > 3 else wider(x)


ROWS = [s for s in VALUED if registry.rule_of(s.op).family.any_rows]


@pytest.mark.parametrize("stored", (wider, other_order))
@pytest.mark.parametrize("s", ROWS, ids=[f"{i}-{s.op}" for i, s in enumerate(ROWS)])
def test_families_that_take_any_rows_do(s, stored, monkeypatch):
    """q, k and v are parts of one tensor."""
    call, tensors = built(s)
    monkeypatch.setattr(oracle, "_reordered", stored)
    wrong = [w for row in registry.rows(call) if (w := check_rows(call, tensors, (row,), (2,), strided=True))]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("s", [s for s in GENERAL + SEARCHED if s.values], ids=[str(s) for s in GENERAL + SEARCHED if s.values])
def test_no_row_is_missing(s):
    call, tensors = built(s)
    missing = {row.inputs: row for row in missing_rows(call, tensors)}
    assert set(missing) <= LEFT_OUT.get(s.op, set()), missing


def test_left_out_rows_are_still_found():
    """The list above is not stale."""
    found = {s.op: set() for s in SAMPLES if s.op in LEFT_OUT}
    for s in SAMPLES:
        if s.op in LEFT_OUT:
            found[s.op] |= {row.inputs for row in missing_rows(*built(s))}
    assert found == LEFT_OUT


def test_every_general_rule_has_a_sample():
    tables = (contraction, distance, factory, images, pointwise, reduction, view)
    sampled_rules = {id(registry.rule_of(s.op)) for s in SAMPLES}
    bare = [str(op) for t in tables for op, rule in t.RULES.items() if id(rule) not in sampled_rules]
    assert not bare


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_rows_are_clean(s):
    """All-Replicate first, none twice, no Partial int, no shard of a dim of size 1."""
    call, _ = built(s)
    rows = registry.rows(call)
    assert {*rows[0].inputs, *rows[0].outputs} <= {R}
    assert len(set(rows)) == len(rows)
    for row in rows:
        for p, m in zip((*row.inputs, *row.outputs), (*call.inputs, *call.outputs), strict=True):
            if m is None:
                assert p == R
                continue
            assert p < 0 or m.logical_shape[p] > 1
            assert p >= R or m.dtype.is_floating_point or m.dtype.is_complex


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_local_runs_lower_to_nodes(s):
    """The same code on FX proxies, where nobody may look at values or at the rank."""
    call, _ = built(s)
    mesh = Mesh(("a", "b"), (2, 1))
    for row in registry.rows(call):
        inputs, outputs = (tuple((p, R) for p in placed) for placed in (row.inputs, row.outputs))
        if not all(m is None or divides(m.logical_shape, spec, mesh.sizes)
                   for m, spec in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)):
            continue
        emit = Emitter(mesh)
        emit.placeholder("some_weight", (1,), torch.float32)
        context = Context(call, inputs, outputs, mesh, emit, "an op")
        proxies = [emit.placeholder(f"in{i}", context.local_in(i), m.dtype) for i, m in enumerate(call.inputs)]
        args, kwargs = oracle._arguments(call, proxies)
        found = emit.value(registry.run_local(context, *args, **kwargs))
        found = found if isinstance(found, (tuple, list)) else (found,)
        shapes = [None if v is None else tuple(v.shape) for v in found]
        assert shapes == [None if m is None else context.local_out(i) for i, m in enumerate(call.outputs)], row
