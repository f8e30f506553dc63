"""Reads of data that one graph can hold: checks raise when the program runs, clamps are chosen by data, buffers are compared with what was read."""
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.base.checked import CHECKED
from autoshard.base.spec import R
from autoshard.errors import CheckError, TraceError
from autoshard.program.interpret import run
from autoshard.program.trace import trace
from autoshard.rules import registry


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body, self.bound = nn.Linear(8, 8), body, 3.0
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("kept", torch.tensor([0.5, 1.0]))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.body(self, x)


def raises(m, x):
    if x.max() >= m.bound:
        raise ValueError(f"values must be below {m.bound}")
    return m.linear(x)


def raises_by_item(m, x):
    if x.abs().max().item() >= m.bound or not torch.isfinite(x).all():
        raise ValueError("too large")
    return m.linear(x)


def asserts(m, x):
    h = m.linear(x)
    assert x.dim() == 2 and x.amax().item() < m.bound, "too large"
    return h


def asserts_both(m, x):
    assert x.isnan().sum() == 0 and x.max() < m.bound
    return m.linear(x)


def asks_torch(m, x):
    torch._check(x.max().item() < 3)
    return m.linear(x)


def asks_torch_of_all(m, x):
    torch._check_tensor_all(x < m.bound, lambda: "too large")
    return m.linear(x)


def asserts_async(m, x):
    torch._assert_async((x < m.bound).all(), "too large")
    return m.linear(x)


def as_bool(m, x):
    if bool((x >= 3).any()):
        raise ValueError
    return m.linear(x)


def in_checkpoint(m, x):
    return checkpoint(raises, m, x, use_reentrant=False)


CHECKS = [raises, raises_by_item, asserts, asserts_both, asks_torch, asks_torch_of_all, asserts_async, as_bool, in_checkpoint]


def state_of(model):
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("body", CHECKS)
def test_a_check_holds_or_the_program_raises_with_the_users_line(body):
    model, x = Body(body), torch.rand(4, 8)
    traced = trace(model, (x,))
    assert torch.equal(run(traced, state_of(model), (x,)).users[0], model(x))
    bad = x.clone()
    bad[2, 3] = 5.0
    with pytest.raises(CheckError, match=r"(?s)does not hold.*test_data_reads.py:\d+"):
        run(traced, state_of(model), (bad,))


def test_the_error_shows_what_the_user_raises():
    traced = trace(Body(raises), (torch.rand(4, 8),))
    with pytest.raises(CheckError, match=r"if x.max\(\) >= m.bound: raise ValueError\(f'values must be below"):
        run(traced, state_of(Body(raises)), (torch.full((4, 8), 9.0),))


def test_lines_are_no_part_of_the_programs_hash():
    graph = trace(Body(raises), (torch.rand(4, 8),)).graph
    check = next(op for op in graph.ops if op.target is CHECKED)
    moved = [op.mapped(lambda leaf: "elsewhere" if isinstance(leaf, str) else leaf) if op is check else op for op in graph.ops]
    assert type(graph)(tuple(moved), graph.training, graph.in_tree, graph.out_tree, graph.tied, graph.unused).hash == type(graph)(
        graph.ops, graph.training, graph.in_tree, graph.out_tree, graph.tied, graph.unused).hash


def clamps(m, x):
    h = m.linear(x)
    if h.max() > 2:
        low = -m.bound / m.bound
        h = torch.clamp(h, min=low, max=1.0)
    return h * 2


def clamps_unless(m, x):
    h = m.linear(x)
    if not (h <= 2).all():
        h = h.clamp(-1, 1) + 1
    return h.sin()


def clamps_in_checkpoint(m, x):
    return checkpoint(clamps, m, x, use_reentrant=False)


@pytest.mark.parametrize("body", [clamps, clamps_unless, clamps_in_checkpoint])
@pytest.mark.parametrize("largest", [0.1, 50.0])
def test_a_branch_that_clamps_is_chosen_by_data_of_all_ranks(body, largest):
    torch.manual_seed(0)
    model, x = Body(body), torch.randn(8, 8) * 0.1
    x[5] *= largest / 0.1  # rows of one rank decide for all
    assert (model.linear(x).max() > 2) == (largest > 1), "the sample takes the branch that the test means"
    report = autoshard.verify(model, "d=4", (x,), plans=("split", "fully_sharded", "random:0"))
    assert report.ok, str(report)


@pytest.mark.parametrize("body", [raises, asserts_both])
def test_checks_are_part_of_plans(body):
    report = autoshard.verify(Body(body), "dp=2,tp=2", (torch.rand(8, 8),), plans=("split", "random:0", "random:1"))
    assert report.ok, str(report)


def fills(m, x):
    h, mask = m.linear(x), x[:, 0] > 0.5
    if mask.any():
        h[mask] = m.kept[0].to(h.dtype)
    return h


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_masked_write_needs_no_look_at_the_mask(shift):
    x = torch.rand(8, 8) + shift
    report = autoshard.verify(Body(fills), "d=4", (x,), plans=("split", "random:0"))
    assert report.ok, str(report)


def reads_a_buffer(m, x):
    return m.linear(x)[:, ::int(m.stride)] if m.kept.max() >= 1 else x


def test_a_buffer_that_is_read_must_stay_as_it_is():
    model, x = Body(reads_a_buffer), torch.rand(4, 8)
    traced, state = trace(model, (x,)), state_of(model)
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))
    for name, other in (("stride", torch.tensor(4)), ("kept", torch.tensor([0.5, 2.0]))):
        with pytest.raises(CheckError, match=f"the buffer '{name}' is"):
            run(traced, {**state, name: other}, (x,))
    assert autoshard.verify(model, "d=2", (x,), plans=("split",)).ok


def counts(m, x):
    m.calls = m.calls + 1
    return m.linear(x) if m.calls.item() > 3 else x


def counts_in_place(m, x):
    m.calls.add_(1)
    return m.linear(x) if m.calls > 3 else x


@pytest.mark.parametrize("body", [counts, counts_in_place])
def test_a_buffer_that_the_model_writes_is_no_setting(body):
    with pytest.raises(TraceError, match="writes buffer 'calls'|depends on the data of a tensor"):
        trace(Body(body), (torch.rand(4, 8),))


class Fake:
    def clamp(self, x):
        return x


def other_branch(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = h * 2
    return h


def other_clamp(m, x):
    h, mine = m.linear(x), Fake()
    if h.max() > 2:
        h = mine.clamp(h)
    return h


def has_an_else(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = h.clamp(0, 1)
    else:
        h = h.clamp(1, 2)
    return h


def only_both(m, x):
    if x.max() > 1 and x.min() < 0:
        raise ValueError
    return m.linear(x)


def of_another_shape(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = torch.clamp(h, min=m.linear(x)[None])
    return h


def does_more(m, x):
    if x.max() > 1:
        m.bound = 2.0
        raise ValueError
    return m.linear(x)


class ChecksGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if g.isnan().any():
            raise ValueError
        return g


@pytest.mark.parametrize("body", [other_branch, other_clamp, has_an_else, only_both, of_another_shape, does_more,
                                  lambda m, x: ChecksGradient.apply(m.linear(x))])
def test_all_else_is_refused(body):
    with pytest.raises(TraceError, match="depends on the data of a tensor|the backward pass checks data"):
        trace(Body(body), (torch.rand(4, 8),))


def test_a_check_without_a_place_is_refused():
    def nothing(m, x):
        if m.linear(x).max() > 3:
            raise ValueError
        return 3

    with pytest.raises(TraceError, match="returns no tensor"):
        trace(Body(nothing), (torch.rand(4, 8),), training=False)


def test_every_row_of_the_check_knows_its_truths_whole():
    """They may not be pieces or parts of sums: a rank must raise when the others do."""
    graph = trace(Body(asserts_both), (torch.rand(4, 8),)).graph
    rows = registry.rows(graph.calls[next(op.name for op in graph.ops if op.target is CHECKED)])
    assert len(rows) > 1 and all(set(row.inputs[1:]) == {R} and row.inputs[0] == row.outputs[0] for row in rows)
