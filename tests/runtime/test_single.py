"""One process, no process group: the compiled model is the model."""
from __future__ import annotations

import copy
import functools
import sys
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import _torch
from autoshard.errors import MeshError, UsageError
from autoshard.runtime.execute.backends import inductor
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from models import gpt, resnet
from tests.dist.planners import by_planner, whole_planner


@pytest.mark.parametrize("module", [gpt, resnet])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trains_like_the_model(module, backend: str) -> None:
    torch.manual_seed(0)
    model, batch = module.build()
    fast = CompiledModule(copy.deepcopy(model), locate("one=1"), by_planner(whole_planner, loss_fn=module.loss, backend=backend))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (fast, model)]
    for _ in range(2):
        losses = [fast(*batch), module.loss(model(*batch[:-1]), batch[-1])]
        assert torch.allclose(*losses, rtol=1e-5)
        for loss, o in zip(losses, optimizers, strict=True):
            o.zero_grad()
            loss.backward()
            o.step()
    for (name, a), b in zip(fast.named_parameters(), model.parameters(), strict=True):
        assert type(a) is torch.nn.Parameter
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), name
    for (name, a), b in zip(fast.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name


def test_inductor_keeps_arguments_apart_that_are_one_tensor_at_first() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    with patch("torch._inductor.compile_fx.compile_fx_inner", lambda graph, fakes, **_: lambda boxed: graph(*boxed)):
        run = _torch.compile_with_inductor(torch.fx.symbolic_trace(lambda a, b: (a - 2 * b,)), [x, x], {})
    assert torch.equal(run([x, y])[0], x)


def test_inductor_scales_what_is_added_to_a_product() -> None:
    """inductor of torch 2.13 drops the factor of `x.add(a @ b, alpha=0.1)`."""
    a, b, x, y = torch.randn(4, 5), torch.randn(5, 6), torch.randn(4, 6), torch.randint(9, (4, 6))
    made = torch.fx.symbolic_trace(lambda a, b, x, y: (torch.add(x, a @ b, alpha=0.1), torch.add(a @ b, y, alpha=2), torch.add(y, y, alpha=3)))
    assert all(torch.allclose(got, want) and got.dtype == want.dtype for got, want in zip(inductor(made, "f")([a, b, x, y]), made(a, b, x, y), strict=True))


def test_dropout_draws_as_the_model_does() -> None:
    model, batch = gpt.build(dropout=0.3)
    fast = CompiledModule(copy.deepcopy(model), locate("one=1"), by_planner(whole_planner, loss_fn=gpt.loss))
    torch.manual_seed(5)
    got = fast(*batch)
    torch.manual_seed(5)
    assert torch.allclose(got, F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), rtol=1e-5)


def test_the_original_stays_usable_and_apart() -> None:
    model, batch = gpt.build()
    before = model(batch[0]).detach()
    fast = CompiledModule(model, locate("one=1"), by_planner(whole_planner, loss_fn=gpt.loss))
    optimizer = torch.optim.SGD(fast.parameters(), lr=1.0)
    fast(*batch).backward()
    optimizer.step()
    assert torch.equal(before, model(batch[0]))
    assert fast.wte.weight is fast.lm_head.weight, "tied weights stay tied"


def test_a_parameter_changed_before_backward_is_noticed() -> None:
    model, batch = gpt.build()
    fast = CompiledModule(model, locate("one=1"), by_planner(whole_planner, loss_fn=gpt.loss))
    loss = fast(*batch)
    with torch.no_grad():
        fast.lm_head.weight.mul_(2)
    with pytest.raises(UsageError, match="wte.weight was changed in place between forward and backward"):
        loss.backward()


SCALE = 1.0


class Around:
    """What a loss finds around it. `calls` is none of it."""

    scale, calls = 1.0, 0

    def __init__(self) -> None:
        self.scale, self.calls, self.by_name = 1.0, 0, {"scale": 1.0, "other": 1.0}

    def loss(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * F.cross_entropy(out, target)


def by_global(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return SCALE * F.cross_entropy(out, target)


def by_another(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return by_global(out, target)


@pytest.mark.parametrize("form", ["global", "another function", "object", "dict", "method", "module", "partial"])
def test_numbers_that_a_loss_reads_may_change(form: str) -> None:
    around, smooth = Around(), nn.CrossEntropyLoss()
    loss = {"global": by_global, "another function": by_another, "object": lambda out, target: around.scale * F.cross_entropy(out, target),
            "dict": lambda out, target: around.by_name["scale"] * F.cross_entropy(out, target), "method": around.loss, "module": smooth,
            "partial": functools.partial(around.loss)}[form]
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 5), (torch.randn(8, 6), torch.randint(5, (8,)))
    fast = CompiledModule(copy.deepcopy(model), locate("one=1"), by_planner(whole_planner, loss_fn=loss))
    with pytest.MonkeyPatch.context() as patch:
        for value in (1.0, 1.0, 0.5, 1.0):
            patch.setattr(sys.modules[__name__], "SCALE", value)
            around.scale = around.by_name["scale"] = value
            smooth.label_smoothing = 1.0 - value
            around.calls, around.by_name["other"] = around.calls + 1, 0.1 * around.calls
            assert torch.allclose(fast(*batch), loss(model(batch[0]), batch[1]), rtol=1e-6), f"{form} at {value}"
    assert len(fast._steps) == 2, "a variant for each number, none for what the loss does not read"


def test_clear_errors() -> None:
    with pytest.raises(MeshError, match="needs 4 processes"):
        locate("dp=4")
    with pytest.raises(UsageError, match="backend='fast'"):
        CompiledModule(torch.nn.Linear(2, 2), locate("one=1"), by_planner(whole_planner, backend="fast"))(torch.ones(1, 2))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def replace_scale(model: nn.Module) -> None:
    model.scale = torch.zeros(4)


def replace_weight(model: nn.Module) -> None:
    model.layer.weight = nn.Parameter(torch.zeros(4, 4))


def remove_bias(model: nn.Module) -> None:
    model.layer.bias = None


@pytest.mark.parametrize("change", [replace_scale, replace_weight, remove_bias])
def test_a_tensor_that_was_replaced_is_refused(change) -> None:
    fast = CompiledModule(Scaled(), locate("one=1"), by_planner(whole_planner))
    x = torch.randn(2, 4)
    before, held = fast(x), dict((*fast.named_parameters(), *fast.named_buffers()))
    change(fast)
    with pytest.raises(UsageError, match=r"(scale|layer\.weight|layer\.bias) of the compiled model was replaced"):
        fast(x)
    fast.scale, fast.layer.weight, fast.layer.bias = (held[n] for n in ("scale", "layer.weight", "layer.bias"))
    assert torch.equal(fast(x), before)
    with pytest.raises(UsageError, match=r"layer\.weight of the compiled model was replaced"):
        torch.func.functional_call(fast, {"layer.weight": torch.zeros(4, 4)}, (x,))
    fast.load_state_dict({"scale": torch.zeros(4)}, strict=False)
    assert not fast(x).any()


def with_a_tangent(model: nn.Module, x: torch.Tensor) -> None:
    """Its tangent was lost without a word."""
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("looks_on, who", [
    (with_a_tangent, "forward-mode AD"), (lambda m, x: torch.func.grad(lambda x: m(x).sum())(x), "transform of torch.func"),
    (lambda m, x: torch.func.vmap(m)(x), "transform of torch.func"), (lambda m, x: torch.jit.trace(m, (x,)), "torch.jit.trace")])
def test_transforms_that_cannot_see_into_a_program_are_refused(looks_on, who: str) -> None:
    fast = CompiledModule(Scaled(), locate("one=1"), by_planner(whole_planner))
    fast(torch.randn(2, 4))
    with pytest.raises(UsageError, match=f"{who}.*call the model itself"):
        looks_on(fast, torch.randn(2, 4))


def test_a_meta_tensor_has_no_numbers() -> None:
    fast = CompiledModule(Scaled(), locate("one=1"), by_planner(whole_planner))
    fast.prepare(torch.empty(2, 4, device="meta"))
    with pytest.raises(UsageError, match=r"shape \(2, 4\) is on the meta device.*pass it on cpu"):
        fast(torch.empty(2, 4, device="meta"))


def test_the_part_of_the_only_rank_is_the_whole_batch() -> None:
    """As a script of several ranks with loaders of their own is tried on one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    fast = autoshard.compile(model, "dp=1", loss_fn=F.mse_loss, inputs="local", cluster="cpu-gloo", cache=False)
    with fast.no_sync():
        fast(x, y).backward()
    fast(x, y).backward()
    (2 * F.mse_loss(model(x), y)).backward()
    for name, p in fast.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


def test_layers_are_reached_as_in_the_model() -> None:
    """By number or key, where the model has them so."""
    fast = CompiledModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), locate("one=1"), by_planner(whole_planner))
    x = torch.randn(2, 4)
    fast[1].eval()
    assert torch.equal(fast(x), fast(x)) and fast[-1].p == 0.5 and [type(m) for m in fast] == [nn.Linear, nn.Dropout] and len(fast) == 2
    with pytest.raises(TypeError, match="Scaled.* not subscriptable"):
        CompiledModule(Scaled(), locate("one=1"), by_planner(whole_planner))[0]
    assert CompiledModule(Scaled(), locate("one=1"), by_planner(whole_planner)), "a model without a length counts as one that is there"
