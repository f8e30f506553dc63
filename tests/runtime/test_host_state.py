"""Updates of parameters whose state lies on the host: numbers, memory, loading, and optimizers that do not know of it."""
from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from autoshard import local_update
from autoshard.cost.memory import host_workspace, state_bytes, update_workspace
from autoshard.cost.optimizers import verified
from autoshard.errors import UsageError
from autoshard.runtime.params.host_state import HOST, is_marked, keep_on_host
from tests.dist.live_bytes import LiveBytes

SHAPES = ((96, 128), (8, 64, 32), (128,), (64, 64), ())
AWAY = ("0", "2", "3")
OPTIMIZERS = {name: partial(getattr(torch.optim, row.torch), **{k: v for k, v in row.verified_with.items() if k != "lr"})
              for name, row in verified().items() if row.state}


def parameters() -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return {str(i): nn.Parameter(torch.randn(s, generator=g)) for i, s in enumerate(SHAPES)}


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=g)


def states(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], names) -> list[torch.Tensor]:
    return [t for n in names for t in optimizer.state[params[n]].values() if torch.is_tensor(t) and t.ndim]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers_in_the_memory_that_is_counted(name: str, together: bool) -> None:
    ours, theirs = parameters(), parameters()
    keep_on_host(ours, AWAY, afresh=False)
    one, two = (OPTIMIZERS[name](list(p.values()), lr=1e-2, foreach=together) for p in (ours, theirs))
    local_update(one)
    here = [n for n in ours if n not in AWAY]
    for step in range(8):  # RAdam adapts from the sixth step on
        set_gradients(ours, step)
        set_gradients(theirs, step)
        host = states(one, ours, AWAY)
        with LiveBytes() as seen:  # the last step counts
            seen.ignore(host)
            seen.track(list(ours.values()), [p.grad for p in ours.values()], states(one, ours, here))
            before = seen.live
            one.step()
        two.step()
        assert step == 0 or [t.data_ptr() for t in host] == [t.data_ptr() for t in states(one, ours, AWAY)], "the host's memory stays"
    for n in ours:
        assert torch.equal(ours[n], theirs[n]), n
        for key, value in two.state[theirs[n]].items():
            assert torch.equal(torch.as_tensor(one.state[ours[n]][key]), torch.as_tensor(value)), (n, key)
    size = {n: p.numel() * p.itemsize for n, p in ours.items()}
    parts = [{"parameters": size[n], "optimizer": state_bytes(name, SHAPES[int(n)], torch.float32)} for n in AWAY]
    wanted = max(host_workspace(name, parts, together), update_workspace(name, [size[n] for n in here], together))
    assert seen.peak - before == pytest.approx(wanted, abs=0.02 * max(size.values()))


def test_an_optimizer_alone_is_refused_at_its_first_step() -> None:
    params = parameters()
    keep_on_host(params, AWAY, afresh=False)
    optimizer = torch.optim.AdamW(list(params.values()))
    set_gradients(params, 0)
    with pytest.raises(UsageError, match=r"state of 3 parameters on the host, and AdamW by itself.*autoshard.local_update\(optimizer\)"):
        optimizer.step()
    assert not optimizer.state
    others = parameters()
    set_gradients(others, 0)
    torch.optim.AdamW(list(others.values())).step()  # of another model: none of our business


def test_a_closure_is_refused() -> None:
    params = parameters()
    keep_on_host(params, AWAY, afresh=False)
    with pytest.raises(UsageError, match="a step with a closure cannot keep"):
        local_update(torch.optim.AdamW(list(params.values()))).step(lambda: 0.0)


def test_state_comes_back_when_a_new_plan_keeps_it_here() -> None:
    ours, theirs = parameters(), parameters()
    keep_on_host(ours, AWAY, afresh=False)
    one, two = (torch.optim.AdamW(list(p.values()), lr=1e-2) for p in (ours, theirs))
    local_update(one)
    for step in range(4):
        if step == 2:
            keep_on_host(ours, ("2",), afresh=True)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        one.step()
        two.step()
    assert [n for n, p in ours.items() if is_marked(p)] == ["2"] and getattr(ours["2"], HOST)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_state_dicts_load_and_go_on() -> None:
    ours = parameters()
    keep_on_host(ours, AWAY, afresh=False)
    one = local_update(torch.optim.AdamW(list(ours.values()), lr=1e-2))
    set_gradients(ours, 0)
    one.step()
    theirs = copy.deepcopy(ours)  # marks are attributes of a parameter, which copies leave out
    assert not any(is_marked(p) for p in theirs.values())
    two = torch.optim.AdamW(list(theirs.values()), lr=1e-2)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    back = local_update(torch.optim.AdamW(list(ours.values()), lr=1e-2))
    back.load_state_dict(one.state_dict())
    for params, optimizer in ((ours, back), (theirs, two)):
        set_gradients(params, 1)
        optimizer.step()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_host_memory_is_pinned_and_state_leaves_the_device() -> None:
    params = {n: nn.Parameter(p.detach().cuda()) for n, p in parameters().items()}
    keep_on_host(params, AWAY, afresh=False)
    optimizer = local_update(torch.optim.AdamW(list(params.values()), lr=1e-2))
    for _ in range(2):
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(t.device.type == "cpu" and t.is_pinned() for t in states(optimizer, params, AWAY))
    assert all(t.is_cuda for t in states(optimizer, params, ("1",)))
