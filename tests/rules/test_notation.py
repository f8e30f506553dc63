"""The notation: what a line says, and what it refuses."""
import numpy as np
import pytest
import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.spec import PSUM, R
from autoshard.rules import notation, registry
from autoshard.rules.notation import NotationMismatch, parse, rule

aten = torch.ops.aten


def meta(*factors, dtype=torch.float32):
    factors = tuple(f if isinstance(f, tuple) else (f,) for f in factors)
    return TensorMeta(tuple(int(np.prod(f)) for f in factors), dtype, factors)


def mm(a, b, out):
    return Call(aten.mm.default, (Slot(0), Slot(1)), (), (a, b), (out,))


def pairs(rows):
    return {(r.inputs, r.outputs) for r in rows}


def test_matmul_line():
    call = mm(meta(4, 8), meta(8, 6), meta(4, 6))
    assert pairs(rule("m k, k n -> m n", partial="each").rows(call)) == {
        ((R, R), (R,)), ((0, R), (0,)), ((R, 1), (1,)), ((1, 0), (PSUM,)), ((PSUM, R), (PSUM,)), ((R, PSUM), (PSUM,))}
    assert pairs(rule("m! k!, k! n! -> m! n!").rows(call)) == {((R, R), (R,))}


def test_flat_dims_pass_each_factor_and_disagreeing_ones_the_major():
    flat = mm(meta((2, 4), 8), meta(8, 6), meta((2, 4), 6))
    assert {((0, R), (0,)), ((1, R), (1,)), ((2, 0), (PSUM,))} <= pairs(registry.rows(flat))
    mixed = mm(meta((2, 4), 8), meta(8, 6), meta(8, 6))
    assert ((0, R), (0,)) in pairs(registry.rows(mixed))
    assert not any(r.inputs[0] == 1 for r in registry.rows(mixed))


def test_flops_of_local_shapes_may_be_arrays():
    call = mm(meta((2, 4), 8), meta(8, 6), meta((2, 4), 6))
    flops = registry.rule_of(aten.mm.default).flops
    m = np.array([2, 1])
    assert list(flops(call, ((m, 4, 8), (8, 6)), ((m, 4, 6),))) == [2 * 8 * 8 * 6, 2 * 4 * 8 * 6]


def test_sum_needs_a_partial_in_every_addend():
    call = Call(aten.add.Tensor, (Slot(0), Slot(1)), (), (meta(4), meta(4)), (meta(4),))
    assert [r for r in registry.rows(call) if PSUM in r.inputs] == [registry.Row((PSUM, PSUM), (PSUM,))]
    number = Call(aten.add.Tensor, (Slot(0), 1.0), (), (meta(4),), (meta(4),))
    assert not any(PSUM in r.inputs for r in registry.rows(number))


def test_absent_operand_is_skipped():
    text = "n ..., c ..., ~c -> n"
    call = Call(aten.native_layer_norm.default, (Slot(0), (8,), None, None, 1e-5), (), (meta(4, 8),),
                (meta(4, 8), meta(4, 1), meta(4, 1)))
    line = rule("m n!, n!, n! -> m n!, m 1, m 1")
    assert ((0,), (0, 0, 0)) in pairs(line.rows(call))
    assert len(parse(text).inputs) == 3


def test_malformed_lines():
    with pytest.raises(ValueError, match="lacks '->'"):
        rule("m k, k n")
    with pytest.raises(ValueError, match="repeats a letter"):
        rule("m m -> m")


def test_mismatch_becomes_replicate(monkeypatch):
    call = mm(meta(4, 8), meta(8, 6), meta(4, 6))
    with pytest.raises(NotationMismatch, match="wants dims"):
        rule("b m k, k n -> m n").rows(call)
    with pytest.raises(NotationMismatch, match="takes 2 tensors"):
        rule("m k -> m k").rows(call)
    assert notation.REDUCE["sum"] == PSUM
