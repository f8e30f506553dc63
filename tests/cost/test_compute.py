"""Roofline, bytes of calls, optimizer updates and stored bytes."""
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import R
from autoshard.cost.cluster import available, load_cluster
from autoshard.cost.compute import (
    call_bytes,
    call_seconds,
    compute_dtype,
    host_seconds,
    op_seconds,
    optimizer_seconds,
)
from autoshard.cost.memory import state_bytes, stored_bytes, stored_parts, value_bytes
from autoshard.cost.optimizers import OPTIMIZERS
from autoshard.errors import ClusterError, UsageError
from autoshard.rules.family import PRICED, Family

aten = torch.ops.aten
H100 = load_cluster("h100-dgx").device
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def call(target, inputs, outputs, *rest):
    return Call(target, (*(Slot(i) for i in range(len(inputs))), *rest), (), tuple(inputs), tuple(outputs))


def mm(m, k, n, dtype=BF16):
    return call(aten.mm.default, [TensorMeta((m, k), dtype), TensorMeta((k, n), dtype)], [TensorMeta((m, n), dtype)])


def test_worked_roofline():
    assert op_seconds(Family.MATMUL, 2 * 4096**3, 3 * 2 * 4096**2, BF16, H100) == pytest.approx(1.984e-4, rel=1e-3)
    assert op_seconds(Family.MATMUL, 2 * 4096**3, 3 * 2 * 4096**2, BF16, H100) == 2 * 4096**3 / (989.4e12 * 0.70)
    assert op_seconds(Family.POINTWISE, 0, 1e9, BF16, H100) == 1e9 / (3.35e12 * 0.85)
    assert op_seconds(Family.POINTWISE, 0, 16, BF16, H100) == 4.0e-6
    assert op_seconds(Family.VIEW, 0, 1e9, BF16, H100) == 0


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("family", PRICED)
def test_roofline_is_monotone_and_never_below_the_overhead(name, family):
    device = load_cluster(name).device
    grid = np.concatenate([[0], np.logspace(0, 15, 31)])
    for dtype in (torch.float64, F32, BF16):
        by_flops = op_seconds(family, grid, 1e6, dtype, device)
        by_bytes = op_seconds(family, 1e9, grid, dtype, device)
        for out in (by_flops, by_bytes):
            assert np.all(np.diff(out) >= 0) and out[0] >= device.kernel_overhead and out[-1] > 2 * out[0]


def test_a_device_made_without_a_family_says_so():
    with pytest.raises(ClusterError, match="no efficiency for op family 'norm'; give one for each of matmul"):
        op_seconds(Family.NORM, 0, 1, F32, replace(H100, efficiency={f: e for f, e in H100.efficiency.items() if f != "norm"}))


def test_call_is_priced_by_its_rule():
    c = mm(4096, 4096, 4096)
    shapes = [(4096, 4096), (4096, 4096)], [(4096, 4096)]
    assert call_bytes(c, *shapes) == 3 * 2 * 4096**2
    whole = replace(H100, multiprocessors=None)
    assert call_seconds(c, *shapes, whole) == 2 * 4096**3 / (989.4e12 * 0.70)
    halved = call_seconds(c, [(2048, 4096), (4096, 4096)], [(2048, 4096)], whole)
    assert halved == pytest.approx(call_seconds(c, *shapes, whole) / 2)
    assert call_seconds(c, *shapes, H100) == pytest.approx(2 * 4096**3 / (989.4e12 * 0.70) * (4 * 132 / 512)), "512 tiles in 4 rounds of 132"


def test_a_row_times_a_matrix_costs_the_bytes_of_the_matrix():
    """Decode of 8B: 16.06e9 bytes take 4.79 ms at the full bandwidth; at 0.85 of it, not at the 0.70 of its FLOP."""
    one = call_seconds(mm(1, 4096, 14336), [(1, 4096), (4096, 14336)], [(1, 14336)], H100)
    assert one == pytest.approx(2 * (4096 * 14336 + 4096 + 14336) / (3.35e12 * 0.85))
    as_flop = replace(H100, bandwidth_efficiency={})
    assert call_seconds(mm(1, 4096, 14336), [(1, 4096), (4096, 14336)], [(1, 14336)], as_flop) == pytest.approx(one * 0.85 / 0.70)


def test_views_are_free():
    c = call(aten.view.default, [TensorMeta((8, 16), F32)], [TensorMeta((128,), F32)], (128,))
    assert call_seconds(c, [(8, 16)], [(128,)], H100) == 0


def test_pricing_many_strategies_gives_the_bits_of_pricing_each():
    rng = np.random.default_rng(0)
    c = mm(1 << 17, 4096, 128256)
    m, k, n = ((1 << rng.integers(0, hi, 200)) * odd for hi, odd in ((18, 1), (13, 3), (8, 501)))
    many = call_seconds(c, [(m, k), (k, n)], [(m, n)], H100)
    each = [call_seconds(c, [(int(a), int(b)), (int(b), int(d))], [(int(a), int(d))], H100)
            for a, b, d in zip(m, k, n, strict=True)]
    assert many.tolist() == each and len(set(each)) > 20


def test_embedding_reads_only_the_rows_it_picks():
    c = call(aten.embedding.default, [TensorMeta((128256, 4096), BF16), TensorMeta((8, 128), I64)], [TensorMeta((8, 128, 4096), BF16)])
    rows = 8 * 128 * 4096 * 2
    assert call_bytes(c, [(128256, 4096), (8, 128)], [(8, 128, 4096)]) == rows + 8 * 128 * 8 + rows
    tiny = call_bytes(c, [(16, 4096), (8, 128)], [(8, 128, 4096)])  # a table smaller than what is picked: read once
    assert tiny == 16 * 4096 * 2 + 8 * 128 * 8 + rows


def test_slice_reads_what_it_keeps_and_like_factories_read_nothing():
    c = call(aten.slice.Tensor, [TensorMeta((1000, 8), F32)], [TensorMeta((10, 8), F32)], 0, 0, 10, 1)
    assert call_bytes(c, [(1000, 8)], [(10, 8)]) == 2 * 10 * 8 * 4
    z = call(aten.zeros_like.default, [TensorMeta((1000, 8), F32)], [TensorMeta((1000, 8), F32)])
    assert call_bytes(z, [(1000, 8)], [(1000, 8)]) == 1000 * 8 * 4


def test_absent_outputs_cost_nothing():
    c = Call(aten.native_layer_norm_backward.default, (), (), (TensorMeta((4, 8), F32),), (TensorMeta((4, 8), F32), None, None))
    assert call_bytes(c, [(4, 8)], [(4, 8), None, None]) == 2 * 4 * 8 * 4


def test_compute_dtype_is_that_of_the_first_floating_tensor():
    c = call(aten.embedding.default, [TensorMeta((4,), I64), TensorMeta((4,), torch.float64)], [TensorMeta((4,), F32)])
    assert compute_dtype(c) == torch.float64
    assert compute_dtype(call(aten.add.Tensor, [TensorMeta((4,), I64)], [TensorMeta((4,), I64)])) == F32


def test_worked_optimizer_update():
    assert optimizer_seconds("adamw", 4 * 8.03e9, H100) == pytest.approx(78.96e-3, rel=1e-4)
    assert optimizer_seconds("sgd", 4 * 8.03e9, H100) == pytest.approx(78.96e-3 * 3 / 7, rel=1e-4)
    assert optimizer_seconds("none", 1e9, H100) == 0
    assert optimizer_seconds("adam", np.array([0.0, 1e9, 2e9]), H100).tolist() == [0, *(optimizer_seconds("adam", n, H100) for n in (1e9, 2e9))]


def test_worked_update_from_the_host():
    nbytes = 4 * 4096**2
    assert host_seconds("adamw", nbytes, H100) == pytest.approx(4 * (10e-6 + nbytes / 56.7e9) + 7 * nbytes / (3.35e12 * 0.85), rel=1e-9)
    assert host_seconds("momentum", 4.0, H100) == pytest.approx(2 * (10e-6 + 4 / 56.7e9) + 5 * 4e-6, rel=1e-9), "kernels of its own"
    sizes = np.array([4.0, 1e6, 1e9])
    assert np.all(host_seconds("adam", sizes, H100) > optimizer_seconds("adam", sizes, H100))
    with pytest.raises(UsageError, match="sgd keeps no state.*use one of adadelta, adagrad, adam, "):
        host_seconds("sgd", 4.0, H100)
    with pytest.raises(UsageError, match=r"no link to its host.*device.host_link"):
        host_seconds("adam", 4.0, load_cluster("cpu-gloo").device)


def test_optimizer_state():
    assert [state_bytes(n, (3, 5), F32) for n in ("adamw", "momentum", "sgd", "none")] == [8 * 15, 4 * 15, 0, 0]
    assert state_bytes("adamw", (3, 5), BF16) == 4 * 15
    for name, row in OPTIMIZERS.items():
        lean = {"none": 0, "adafactor": 5, "adam8bit": 4, "adamw8bit": 4}  # what they keep has another size
        assert row.moved == lean.get(name, 3 + 2 * row.state)
    with pytest.raises(UsageError, match="no cost for optimizer 'adamm'; did you mean adam"):
        state_bytes("adamm", (3, 5), F32)


def test_stored_bytes():
    mesh, meta = parse_mesh("2x4"), TensorMeta((4096, 4096), F32)
    assert stored_parts(meta, (R, R), mesh, "adamw") == {"parameters": 64 << 20, "gradients": 64 << 20, "optimizer": 128 << 20}
    assert stored_bytes(meta, (0, 1), mesh, "adamw") == (256 << 20) // 8
    assert stored_parts(meta, (0, R), mesh, None) == {"parameters": 32 << 20, "gradients": 0, "optimizer": 0}
    assert value_bytes(TensorMeta((1024, 4096), BF16), (0, 1), mesh) == 1 << 20


def test_states_of_lean_optimizers():
    """4 x (1024 + 4096); two moments of a byte an element with a float32 scale per 256."""
    meta, mesh = TensorMeta((1024, 4096), F32), parse_mesh("d=2")
    assert stored_parts(meta, (-1,), mesh, "adafactor")["optimizer"] == 20480
    assert stored_parts(meta, (0,), mesh, "adafactor")["optimizer"] == 4 * (512 + 4096)
    assert stored_parts(meta, (-1,), mesh, "adamw8bit")["optimizer"] == 2 * (2**22 + 4 * 2**14)
    assert stored_parts(TensorMeta((64,), torch.float32), (-1,), mesh, "adafactor")["optimizer"] == 256
