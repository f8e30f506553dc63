"""Layers of experts under the oracle: every way to run the forward together with the gradient that takes what it saved."""
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import PSUM, R, divides
from autoshard.cost.cluster import load_cluster
from autoshard.cost.compute import call_seconds
from autoshard.errors import CapacityError
from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.rules import registry
from autoshard.rules.check import oracle
from autoshard.rules.ops import experts as rule

NAMES = ("x", "ids", "weights", "up", "down")


def layer(tokens=(4, 6), k=2, experts=4, d=6, f=4, gated=True, capacity=2.0, skewed=False, dtype=torch.float64):
    """(forward call, backward call, tensors by name) of a layer whose tokens are a merged dim. `skewed`: all tokens go to the first experts."""
    g = torch.Generator().manual_seed(0)
    t, a = tokens[0] * tokens[1], f * (1 + gated)
    chosen = range(k) if skewed else None
    ids = torch.stack([torch.tensor(chosen) if skewed else torch.randperm(experts, generator=g)[:k] for _ in range(t)])
    have = {"x": torch.randn(t, d, generator=g, dtype=dtype), "ids": ids, "weights": torch.rand(t, k, generator=g, dtype=dtype),
            "up": torch.randn(experts, a, d, generator=g, dtype=dtype), "down": torch.randn(experts, d, f, generator=g, dtype=dtype)}
    options = ("silu", gated, capacity)
    merged = {n: TensorMeta(tuple(have[n].shape), have[n].dtype, (tokens, (have[n].shape[1],))) for n in ("x", "ids", "weights")}
    up = TensorMeta((experts, a, d), dtype, ((experts,), (2, f) if gated else (f,), (d,)), (1,) if gated else ())
    metas = [merged["x"], merged["ids"], merged["weights"], up, TensorMeta(tuple(have["down"].shape), dtype)]
    wholes = EXPERTS(*(have[n] for n in NAMES), *options)
    have |= {"saved": wholes[1], "held": wholes[2], "order": wholes[3], "grad": torch.randn(t, d, generator=g, dtype=dtype)}
    outs = [TensorMeta(tuple(o.shape), o.dtype) for o in wholes]
    forward = Call(EXPERTS, (*map(Slot, range(5)), *options), (), tuple(metas), tuple(outs))
    outs = [TensorMeta(o.shape, o.dtype, fs) for o, fs in zip(outs, registry.factors(forward), strict=True)]
    forward = replace(forward, outputs=tuple(outs))
    ins = (metas[0], *metas, *outs[1:])
    backward = Call(EXPERTS_BACKWARD, (*map(Slot, range(9)), *options), (), ins, (metas[0], metas[2], up, metas[4]))
    return forward, backward, have


def specs(rows, side):
    return tuple(zip(*(getattr(row, side) for row in rows), strict=True))


def partner(call, row):
    """The gradient's row that takes what a forward's row saves: one alone, and it goes the same way."""
    found = [b for b in registry.rows(call) if b.inputs[6:] == row.outputs[1:]]
    assert len(found) == 1 and found[0].inputs[1:6] == row.inputs, f"{found} follow {row}"
    return found[0]


def wrong(forward, backward, have, rows, sizes):
    """What is wrong with one strategy of the layer, forward and backward; None where it does not divide."""
    mesh = Mesh(tuple(f"d{i}" for i in range(len(sizes))), sizes)
    backs = tuple(partner(backward, row) for row in rows)
    ins, outs, gins, gouts = specs(rows, "inputs"), specs(rows, "outputs"), specs(backs, "inputs"), specs(backs, "outputs")
    metas = (*zip(forward.inputs, ins), *zip(forward.outputs, outs), *zip(backward.outputs, gouts))
    if not all(divides(m.logical_shape, s, sizes) for m, s in metas) or not registry.takes_pieces(forward, ins, sizes):
        return None
    rng = torch.Generator().manual_seed(1)
    pieces = {n: oracle.split(have[n], m, s, mesh, rng) for n, m, s in zip(NAMES, forward.inputs, ins, strict=True)}
    made = oracle.run_pieces(forward, [pieces[n] for n in NAMES], ins, outs, mesh)
    out = oracle.join([m[0] for m in made], forward.outputs[0], outs[0], mesh)
    grads = oracle.split(have["grad"], backward.inputs[0], gins[0], mesh, rng)
    saved = [[m[i] for m in made] for i in (1, 2, 3)]
    given = oracle.run_pieces(backward, [grads, *(pieces[n] for n in NAMES), *saved], gins, gouts, mesh)
    found = [out, *(oracle.join([g[i] for g in given], backward.outputs[i], gouts[i], mesh) for i in range(4))]
    wanted = [EXPERTS(*(have[n] for n in NAMES), *forward.args[5:])[0],
              *EXPERTS_BACKWARD(*(have[n] for n in ("grad", *NAMES, "saved", "held", "order")), *forward.args[5:])]
    return [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if isinstance(a, str) or not torch.allclose(a, b, 1e-9, 1e-9)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_every_row_is_true_with_its_gradient(gated, sizes):
    forward, backward, have = layer(gated=gated, experts=8 if len(sizes) > 1 else 4)
    checked = set()
    for rows in product(registry.rows(forward), repeat=len(sizes)):
        found = wrong(forward, backward, have, rows, sizes)
        assert not found, (rows, found)
        checked |= {rows} if found is not None else set()
    assert any(row.inner for rows in checked for row in rows) and any(PSUM in row.outputs for rows in checked for row in rows)


def test_rows_saved_in_an_uneven_load_are_those_there_is_room_for():
    """All tokens go to the first rank, which saves half of the first matmul's rows and computes the others again."""
    forward, backward, have = layer(skewed=True)
    travel = next(row for row in registry.rows(forward) if row.inner)
    assert wrong(forward, backward, have, (travel,), (2,)) == []
    gathered = next(row for row in registry.rows(forward) if row.uneven and not row.inner)
    assert wrong(forward, backward, have, (gathered,), (2,)) == []


def test_a_load_above_the_capacity_is_refused(monkeypatch):
    monkeypatch.setattr(rule, "FEWEST", 1)
    forward, backward, have = layer(skewed=True, capacity=1.5)
    travel = next(row for row in registry.rows(forward) if row.inner)
    with pytest.raises(CapacityError, match="48 rows of tokens go to the experts of this rank, which has room for 36"):
        wrong(forward, backward, have, (travel,), (2,))


def test_the_ways_are_those_of_the_page():
    forward, _, _ = layer()
    ways = {(row.inputs[0], row.inputs[3], row.outputs) for row in registry.rows(forward)}
    assert ways == {(R, R, (R, R, R, R)), (R, 2, (PSUM, 2, R, R)), (R, 0, (PSUM, 0, 0, R)),
                    *((t, R, (t, 0, PSUM, t)) for t in (0, 1)), *((t, 0, (t, 0, 0, t)) for t in (0, 1))}
    plain = replace(forward, inputs=(*forward.inputs[:3], TensorMeta((4, 8, 6), torch.float64), forward.inputs[4]))
    assert all(row.outputs[1] != 2 for row in registry.rows(plain)), "gate and up as one dim must not be split as it stands"


def test_rows_of_all_tokens_have_a_price_where_few_are_computed():
    """A rank that has all tokens and an eighth of the experts puts all rows in order, though it computes an eighth of them."""
    forward, backward, _ = layer()
    device = load_cluster("h100-dgx").device
    for call, first in ((forward, 0), (backward, 1)):
        shapes = [list(m.logical_shape) for m in call.inputs]
        ids, down = shapes[first + 1], shapes[first + 4]
        ids[1] *= 2**16
        seconds = call_seconds(call, shapes, [m.logical_shape for m in call.outputs], device)
        assert seconds > 4 * prod(ids) * down[1] * call.inputs[first + 4].dtype.itemsize / device.memory_bandwidth, call.target


def test_experts_that_do_not_divide_stay_whole():
    forward, backward, have = layer(experts=7)
    found = [row for row in registry.rows(forward) if wrong(forward, backward, have, (row,), (2,)) == []]
    assert {row.inputs[3] for row in found} == {R, 2} and {row.inputs[0] for row in found} == {R, 0, 1}


def test_tokens_travel_along_one_axis_alone():
    forward, _, _ = layer(experts=8)
    travel = [row for row in registry.rows(forward) if row.inner]
    assert not registry.takes_pieces(forward, specs((travel[0], travel[1]), "inputs"), (2, 2))
