"""Every row of the special rules against the numeric oracle, and what it says about its collectives."""

import pytest
import torch

from autoshard.mesh import Mesh
from autoshard.rules import oracle, registry
from autoshard.rules.oracle import wrong_rows
from autoshard.rules.samples import build
from autoshard.rules.samples_special import SPECIAL
from autoshard.spec import local_shape


@pytest.mark.parametrize("s", SPECIAL, ids=[f"{i}-{s.op}" for i, s in enumerate(SPECIAL)])
def test_rows_are_true(s):
    call, tensors = build(s)
    assert registry.origin(call) == "own", f"{call.target} has no own rule for this sample"
    wrong = wrong_rows(call, tensors, values=s.values)
    assert not wrong, "\n".join(map(str, wrong))


def declared(call, rows, mesh):
    """The all-reduces the rows promise on a mesh: (axis, reduce op, bytes)."""
    out = []
    for axis, row in enumerate(rows):
        for c in row.inner:
            metas, specs = (call.inputs, "inputs") if c.tensor.startswith("in") else (call.outputs, "outputs")
            i = int(c.tensor.lstrip("inout"))
            spec = tuple(getattr(r, specs)[i] for r in rows)
            shape = local_shape(metas[i].logical_shape, spec, mesh.sizes)
            n = torch.Size(m for d, m in enumerate(shape) if d not in c.drop).numel()
            out.append((axis, c.reduce_op, n * (c.dtype or metas[i].dtype).itemsize))
    return sorted(out)


COMMUNICATING = [s for s in SPECIAL if any(row.inner for row in registry.rows(build(s)[0]))]


@pytest.mark.parametrize("s", COMMUNICATING, ids=[f"{i}-{s.op}" for i, s in enumerate(COMMUNICATING)])
def test_inner_collectives_are_those_declared(s, monkeypatch):
    call, tensors = build(s)
    rows, seen, original = registry.rows(call), [], oracle._Exchange.all_reduce

    def record(self, rank, x, reduce_op, axis):
        if rank == 0:
            seen.append((axis, reduce_op, x.numel() * x.itemsize))
        return original(self, rank, x, reduce_op, axis)

    monkeypatch.setattr(oracle._Exchange, "all_reduce", record)
    mesh, checked = Mesh(("a", "b"), (2, 2)), 0
    for pair in [(a, b) for a in rows for b in rows if a.inner or b.inner]:
        seen.clear()
        assert oracle.check_rows(call, tensors, pair, mesh.sizes) is None
        if seen:
            checked += 1
            assert sorted(seen) == declared(call, pair, mesh), pair
    assert checked, "no pair of rows with collectives divides on 2 x 2: enlarge the sample"


def test_samples_cover_every_special_rule():
    from autoshard.rules import attention, conv, embedding, loss, norm
    families = (attention, conv, embedding, loss, norm)
    only_elsewhere = {t for t in map(str, (k for f in families for k in f.RULES))} - {str(s.op) for s in SPECIAL}
    print(sorted(only_elsewhere))
