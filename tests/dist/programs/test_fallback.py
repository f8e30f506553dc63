"""A submodule with data-dependent control flow, run whole by real processes beside sharded layers."""
import pytest
import torch
from torch import nn

import autoshard
from tests.dist.harness import assert_near, on_ranks, twins

pytestmark = pytest.mark.dist


class Router(nn.Module):
    """One expert for all, chosen by the data; counts its calls; drops some of the result."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        chosen = int(x.mean((0, 1)).argmax()) % 3
        self.calls[chosen] += 1
        return self.drop(self.experts[chosen](x)) if self.training else self.experts[chosen](x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.router, self.norm, self.down = nn.Linear(64, 64), Router(), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(self.norm(self.router(self.up(x).relu()) + x))


def build():
    return Net(), (torch.randn(8, 4, 64),)


def trains(drop: float) -> dict[str, float]:
    """Three steps beside one process. With dropout ranks must agree among each other, and gradients with their forward."""
    model, reference, (x,) = twins(build, torch.float64)
    model.router.drop.p = reference.router.drop.p = drop
    seeds = {"up.weight": ("d", None), "down.weight": (None, "d"), "input:0": ("d", ...)}
    compiled = autoshard.compile(model, "d=2", seeds=seeds, fallback="replicate", cache=False)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (compiled, reference))
    for step in range(3):
        batch = torch.roll(x, step, 2) * (step + 1)
        got, want = compiled(batch), reference(batch)
        for out, optimizer in ((got, one), (want, two)):
            optimizer.zero_grad(set_to_none=False)
            out.square().mean().backward()
        if not drop:
            assert_near("output", got, want, 1e-9)
            expected = dict(reference.named_parameters())
            for name, p in compiled.named_parameters():
                g = expected[name].grad
                assert_near(f"gradient of {name}", p.grad, torch.zeros(p.shape, dtype=p.dtype) if g is None else g, 1e-9, 1.0)
        one.step(), two.step()
    assert torch.equal(compiled.router.calls.full_tensor(), reference.router.calls) or drop
    assert sum(reference.router.calls) == 3
    placed = compiled.plan.placements
    assert placed["up.weight"] == (0,) and any("router (Router)" in note for note in compiled.plan.notes)
    return {"weights": sum(float(p.full_tensor().sum()) for p in compiled.parameters()),
            "zeros": float((compiled(x) == 0).double().mean())}


def gradient_fits_its_forward() -> tuple[float, float]:
    """With dropout inside, backward draws again what forward drew: the derivative along a direction agrees with finite
    differences under the same seed only then."""
    torch.manual_seed(0)
    model, (x,) = build()
    router = nn.Sequential(nn.Linear(64, 64), Router()).double()
    compiled = autoshard.compile(router, "d=2", seeds={"0.weight": ("d", None)}, fallback="replicate", cache=False)
    out = compiled(x.double())
    out.sum().backward()
    mask = (out != 0).double() / 0.75
    chosen = int(dict(compiled.named_buffers())["1.calls"].full_tensor().argmax())
    bias = dict(compiled.named_parameters())[f"1.experts.{chosen}.bias"].grad.full_tensor()
    return float((bias - mask.sum((0, 1))).abs().max()), float(mask.mean())


def everything() -> dict[str, object]:
    return {"exact": trains(0.0), "random": trains(0.25), "gradient": gradient_fits_its_forward()}


def test_a_submodule_with_a_branch_on_data():
    first, second = on_ranks(2, everything)
    assert first == second, "replicas chose other branches, or drew other numbers"
    error, mean = first["gradient"]
    assert error < 1e-9 and 0.7 < mean < 1.0 / 0.75
