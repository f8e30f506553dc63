"""What every kind that plans run means, on tensors of all ranks in one process."""
import pytest
import torch

from autoshard.collectives import KIND_OF, KINDS, RUN
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.reduce_ops import COMBINE, combine_into, combined
from autoshard.errors import LoweringError

N, ROWS = 3, 6
WANTED = {
    "all_gather": lambda xs, op: [torch.cat(xs)] * N,
    "all_to_all": lambda xs, op: [torch.cat([x[2 * r:2 * r + 2] for x in xs]) for r in range(N)],
    "all_reduce": lambda xs, op: [combined(xs, op)] * N,
    "reduce_scatter": lambda xs, op: [combined(xs, op)[2 * r:2 * r + 2] for r in range(N)],
    "mirror": lambda xs, op: xs[::-1],
}


@pytest.mark.parametrize("kind", RUN)
def test_results_of_all_ranks(kind):
    xs = [torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(r)) for r in range(N)]
    for op in COMBINE if RUN[kind].runs.reduces else ("",):
        got = RUN[kind].runs.reference(xs, op)
        assert all(torch.equal(a, b) for a, b in zip(got, WANTED[kind](xs, op), strict=True))
        assert {len(t) for t in got} == {RUN[kind].runs.rows(ROWS, N)}
        arguments = (*RUN[kind].arguments(ROWS, N, op), "group")
        assert RUN[kind].reduce_op(arguments) == op


def test_ops_that_programs_call_lead_to_their_kind():
    assert {op: kind.name for op, kind in KIND_OF.items()} == {
        **{c.target: name for name, c in RUN.items()}, torch.ops._c10d_functional.all_reduce_.default: "all_reduce"}
    assert {c.runs for c in RUN.values()} == set(Exchange) and not RUN["all_reduce"].holds_input


def test_a_kind_that_is_priced_only_does_not_run():
    with pytest.raises(AssertionError, match="broadcast is priced only"):
        _ = KINDS["broadcast"].runs


@pytest.mark.parametrize("op", COMBINE)
def test_into_a_tensor_is_as_into_a_new_one(op):
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])
    want = combined([a, b], op)
    assert combine_into(a, b, op) is a and torch.equal(a, want)


def test_an_unknown_reduction_is_named():
    with pytest.raises(LoweringError, match="no reduction 'prod'; known are sum, max, min"):
        combined([torch.ones(1)] * 2, "prod")
