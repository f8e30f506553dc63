"""The oracle itself: it must refuse wrong rows, and see missing ones."""
import pytest
import torch

from autoshard.base.mesh import Mesh
from autoshard.base.spec import PMAX, PMIN, PSUM, R
from autoshard.rules.check import oracle
from autoshard.rules.check.oracle import check_rows, join, missing_rows, split
from autoshard.rules.check.samples import T, build, sample
from autoshard.rules.types import Row

aten = torch.ops.aten


@pytest.mark.parametrize("s, row, why", [
    (sample(aten.relu.default, T(4, 6)), Row((PSUM,), (PSUM,)), "values differ"),
    (sample(aten.mul.Tensor, T(4, 6), T(4, 6)), Row((PSUM, PSUM), (PSUM,)), "values differ"),
    (sample(aten.mm.default, T(4, 8), T(8, 6)), Row((0, R), (1,)), "local output has shape"),
    (sample(aten.mm.default, T(4, 8), T(8, 6)), Row((1, 0), (R,)), "disagree"),
    (sample(aten.mm.default, T(4, 8), T(8, 6)), Row((1, R), (PSUM,)), "RuntimeError"),
    (sample(aten.sum.dim_IntList, T(4, 4), (0,), True), Row((0,), (R,)), "disagree"),
    (sample(aten.add.Tensor, T(4), T(4)), Row((PSUM, R), (PSUM,)), "values differ"),
    (sample(aten.cumsum.default, T(4, 6), 0), Row((0,), (0,)), "values differ"),
    (sample(aten.amax.default, T(4, 6), (0,)), Row((0,), (PSUM,)), "values differ"),
])
def test_wrong_rows_are_refused(s, row, why):
    verdict = check_rows(*build(s), [row])
    assert verdict is not None and why in str(verdict)


def test_shapes_are_compared_before_values():
    """Equal values that broadcast are not the same tensor."""
    call, tensors = build(sample(aten.clone.default, T(4, 1)))
    meta = call.outputs[0]
    assert "shape" in join([tensors[0].reshape(4)], meta, (R,), Mesh(("a",), (1,)))


@pytest.mark.parametrize("spec", [(0, 0), (0, 1), (PSUM, 0), (0, PSUM), (PSUM, PSUM), (PMAX, 1), (PMIN, PMIN), (R, 2)])
def test_split_and_join_are_inverse(spec):
    mesh, call, tensors = Mesh(("a", "b"), (2, 2)), *build(sample(aten.clone.default, T((4, 2), 6)))
    parts = split(tensors[0], call.inputs[0], spec, mesh, torch.Generator().manual_seed(0))
    assert torch.allclose(join(parts, call.inputs[0], spec, mesh), tensors[0])
    if any(p < R for p in spec):
        assert not torch.allclose(parts[0], parts[-1])


def test_missing_rows_are_seen(monkeypatch):
    call, tensors = build(sample(aten.mm.default, T(4, 8), T(8, 6)))
    poor = (Row((R, R), (R,)), Row((0, R), (0,)))
    monkeypatch.setattr(oracle.registry, "rows", lambda c: poor)
    assert set(missing_rows(call, tensors)) == {
        Row((1, 0), (PSUM,)), Row((R, 1), (1,)), Row((PSUM, R), (PSUM,)), Row((R, PSUM), (PSUM,))}


def test_rows_that_do_not_divide_are_skipped():
    call, tensors = build(sample(aten.relu.default, T(3, 6)))
    assert check_rows(call, tensors, [Row((0,), (0,))]) is None
