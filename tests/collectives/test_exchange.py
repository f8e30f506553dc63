"""What every kind that plans run means, on tensors of all ranks in one process."""
import pytest
import torch

from autoshard.collectives import KIND_OF, KINDS, RUN, all_to_all_rows
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.reduce_ops import COMBINE, combine_into, combined
from autoshard.errors import CapacityError, LoweringError

N, ROWS = 3, 6
WANTED = {
    "all_gather": lambda xs, op: [torch.cat(xs)] * N,
    "all_to_all": lambda xs, op: [torch.cat([x[2 * r:2 * r + 2] for x in xs]) for r in range(N)],
    "all_reduce": lambda xs, op: [combined(xs, op)] * N,
    "reduce_scatter": lambda xs, op: [combined(xs, op)[2 * r:2 * r + 2] for r in range(N)],
    "mirror": lambda xs, op: xs[::-1],
}


EVEN = [name for name, c in RUN.items() if not c.runs.sized]


@pytest.mark.parametrize("kind", EVEN)
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


def test_rows_go_where_counts_say():
    """Rank r sends r + q rows to rank q, counted in two halves."""
    rows = [[torch.full((r + q, 2), 10.0 * r + q) for q in range(N)] for r in range(N)]
    halves = [[(n // 2, n - n // 2) for n in (r + q for q in range(N))] for r in range(N)]
    sends = [torch.tensor(h).flatten() for h in halves]
    gets = [torch.tensor([halves[r][q] for r in range(N)]).flatten() for q in range(N)]
    got = all_to_all_rows.reference([torch.cat([*x, torch.ones(1, 2)]) for x in rows], sends, gets, room=10)
    for q in range(N):
        came = torch.cat([rows[r][q] for r in range(N)])
        assert torch.equal(got[q][:len(came)], came) and got[q].shape == (10, 2) and not got[q][len(came):].any()
    with pytest.raises(CapacityError, match="9 rows of tokens go to the experts of this rank, which has room for 8"):
        all_to_all_rows.reference([torch.cat(x) for x in rows], sends, gets, room=8)


def test_a_call_of_rows_counts_those_of_an_even_load():
    kind = RUN["all_to_all_rows"]
    assert kind.call_bytes((None, None, 20, "layer", 7, "group"), torch.zeros(9, 3), torch.zeros(20, 3)) == 7 * 3 * 4
    assert RUN["all_to_all"].call_bytes((), torch.zeros(9, 3), torch.zeros(9, 3)) == 9 * 3 * 4


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
