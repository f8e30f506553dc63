"""Indices outside of a table that is split are refused as on one device. They read zeros, or wrote nothing, without an error."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoshard.base.graph import Call
from autoshard.base.mesh import Mesh
from autoshard.base.spec import divides
from autoshard.rules import registry
from autoshard.rules.check.oracle import run_sharded, run_whole
from autoshard.rules.check.samples import build
from autoshard.rules.check.samples_special import SPECIAL
from autoshard.rules.types import Row

aten = torch.ops.aten
REFUSED = (IndexError, RuntimeError)
OPS = (aten.embedding.default, aten.gather.default, aten.index_select.default, aten.index.Tensor, aten.index_put.default, aten.index_add.default,
       aten.index_copy.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_fill.int_Scalar,
       aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def outside(op) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Calls of the samples with one index outside of the table, which the op refuses on whole tensors."""
    for sample in SPECIAL:
        if sample.op is not op:
            continue
        call, tensors = build(sample)
        for i, ids in enumerate(tensors):
            for value in (1000, -1000) if i and ids.dtype == torch.int64 and ids.numel() else ():
                wrong = ids.clone()
                wrong.view(-1)[0] = value
                given = [*tensors[:i], wrong, *tensors[i + 1:]]
                try:
                    run_whole(call, given)
                except REFUSED:
                    yield call, given


def rows_of_two(call: Call) -> Iterator[Row]:
    """The rows that divide on two ranks."""
    for row in registry.rows(call):
        inputs = tuple((p,) for p in row.inputs)
        metas = (*zip(call.inputs, inputs, strict=True), *zip(call.outputs, ((p,) for p in row.outputs), strict=True))
        if all(m is None or divides(m.logical_shape, s, (2,)) for m, s in metas) and registry.takes_pieces(call, inputs, (2,)):
            yield row


@pytest.mark.parametrize("op", OPS, ids=str)
def test_an_index_outside_of_a_split_table_is_refused(op) -> None:
    tables_split = 0
    for call, tensors in outside(op):
        for row in rows_of_two(call):
            tables_split += row.inputs[0] >= 0
            with pytest.raises(REFUSED):
                run_sharded(call, tensors, tuple((p,) for p in row.inputs), tuple((p,) for p in row.outputs), Mesh(("a",), (2,)),
                            torch.Generator().manual_seed(1))
    assert tables_split, "no sample splits the table"
