"""Variants between two that are there: the numbers and the program of a fresh one, or a fresh one."""
from __future__ import annotations

import copy
import gc
import linecache
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.program.trace import trace
from autoshard.runtime.between.line import Line, NoLine
from autoshard.runtime.between.shapes import Calls, Laid
from autoshard.runtime.between.step import Between
from autoshard.runtime.check_plan import check_fits
from models import gpt


class Branches(nn.Module):
    """Computes something else at some lengths."""

    def __init__(self, branch) -> None:
        super().__init__()
        self.inner, self.branch = nn.Linear(6, 6), branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean() * self.branch(x)


def compiled(model: nn.Module, **options):
    return autoshard.compile(copy.deepcopy(model), "one=1", cluster="cpu-gloo", cache=False, keep_within=9.0, **options)


def rows(n: int) -> torch.Tensor:
    return torch.rand(n, 6, generator=torch.Generator().manual_seed(n))


def same(fast, model: nn.Module, *batch: torch.Tensor) -> type:
    """Loss and gradients of a step are those of the model at this size; what kind of variant ran."""
    grads = []
    for m in (fast, model):
        m.zero_grad()
        loss = m(*batch)
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in m.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    return type(fast._current)


def test_a_length_between_two_runs_as_a_fresh_one():
    torch.manual_seed(0)
    model, _ = gpt.build(layers=1)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = model

        def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return gpt.loss(self.gpt(ids), target)

    whole = WithLoss()
    fast = compiled(whole)
    kinds = {}
    for length in (6, 16, 11, 8, 11):
        ids, target = (torch.randint(200, (2, length), generator=torch.Generator().manual_seed(length + s)) for s in (0, 1))
        kinds[length] = same(fast, whole, ids, target)
        if length == 11:
            between = fast._current
            fresh = trace(whole, (ids, target), training=True, hooks_run=True).graph
            assert between.graph.hash == fresh.hash and [op.outputs for op in between.graph.ops] == [op.outputs for op in fresh.ops]
            check_fits(between.plan, fresh, fast.place.mesh)
            assert between.plan.status == "kept from another shape"
    assert [length for length, kind in kinds.items() if kind is Between] == [11, 8]
    twin = copy.deepcopy(fast)
    assert same(twin, whole, ids, target) is Between


@pytest.mark.parametrize("branch", [lambda x: 2.0 if x.shape[0] % 2 else 1.0, lambda x: 3.0 if x.shape[0] == 9 else 1.0,
                                    lambda x: float(x.shape[0]), lambda x: torch.tensor(float(int(x.shape[0])))])
def test_where_python_looks_at_the_length_it_is_traced(branch):
    model = Branches(branch)
    fast = compiled(model)
    kinds = [same(fast, model, rows(n)) for n in (4, 16, 9, 10)]
    assert kinds[2] is not Between


def test_a_number_that_is_no_line_is_traced():
    model = Branches(lambda x: (x[: x.shape[0] // 2].sum() + x.shape[0] ** 2) * 0.5)
    fast = compiled(model)
    assert Between not in [same(fast, model, rows(n)) for n in (4, 16, 10, 9)]


def test_two_sizes_at_once_are_traced_and_no_sync_works_between():
    model = Branches(lambda x: 1.0)
    fast = compiled(model)
    for n in (4, 16):
        same(fast, model, rows(n))
    fast.zero_grad(), model.zero_grad()
    with fast.no_sync():
        fast(rows(8)).backward()
    fast(rows(12)).backward()
    for n in (8, 12):
        model(rows(n)).backward()
    assert type(fast._current) is Between
    for a, b in zip(fast.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5)


def test_many_lengths_leave_nothing_behind():
    model = Branches(lambda x: 1.0)
    fast = compiled(model, variants=4)
    files = []
    for n in (4, 64, *range(5, 17)):
        same(fast, model, rows(n))
        files.append(sum(name.startswith("<autoshard") for name in linecache.cache))
    assert len(fast._steps) == 4 == len(fast._recipes) and type(fast._current) is Between
    del fast
    gc.collect()
    assert files[-1] == files[4] > sum(name.startswith("<autoshard") for name in linecache.cache), "the lines of a program go with it"


def test_a_line_and_what_is_none():
    line = Line(4, 8, 6)
    assert line((4, [8, "a"]), (8, [16, "a"])) == (6, [12, "a"])
    for a, b in ((3, 4), (1.0, 2.0), ("a", "b"), ((1,), (1, 2)), (True, False), (torch.ones(2), torch.zeros(2))):
        with pytest.raises(NoLine):
            line(a, b)


def test_the_check_of_shapes_can_fail():
    model = Branches(lambda x: 1.0)
    fast = compiled(model)
    for n in (4, 16):
        same(fast, model, rows(n))
    a, b = (step.lowered for step in fast._steps.values())
    calls = Calls.of(a, b)
    calls.check(Line(4, 16, 9))
    assert any(isinstance(two.result, Laid) and two.result.shape for _, two in calls.quick)
    for i, (one, two) in enumerate(calls.quick):
        if isinstance(two.result, Laid) and two.result.shape:
            wrong = replace(two, result=replace(two.result, shape=tuple(n + 12 for n in two.result.shape)))
            broken = replace(calls, quick=(*calls.quick[:i], (one, wrong), *calls.quick[i + 1:]))
            with pytest.raises(NoLine):
                broken.check(Line(4, 16, 10))


def test_what_holds_with_one_size_open_is_proved_for_each_of_the_others():
    """With 8 columns the model has another program at 32 rows; with 2 it has not, and that is proved first."""
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x).mean()
            return out * 3 if x.numel() == 8 * 32 * 6 else out

    model = Wide()
    fast = compiled(model)

    def batch(columns: int, n: int) -> torch.Tensor:
        return torch.rand(columns, n, 6, generator=torch.Generator().manual_seed(columns * n))

    kinds = {at: same(fast, model, batch(*at)) for at in ((2, 16), (2, 64), (8, 16), (8, 64), (2, 32), (8, 32), (8, 20))}
    assert kinds[2, 32] is Between is kinds[8, 20] is not kinds[8, 32]
