"""The compiled module binds arguments as Python does: random signatures and forms of call, against eager mode."""
from __future__ import annotations

import copy
import functools

import pytest
import torch
from call_forms import case
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.errors import UsageError
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from tests.dist.call_forms_run import check
from tests.dist.planners import by_planner, whole_planner

FAST, ALL = 16, 200


@pytest.mark.parametrize("seeds", [range(FAST), pytest.param(range(FAST, ALL), marks=pytest.mark.slow)], ids=["few", "all"])
def test_random_calls(seeds: range) -> None:
    for seed in seeds:
        found = case(seed)
        compiled = CompiledModule(copy.deepcopy(found.model), locate("one=1"), by_planner(whole_planner, loss_fn=found.loss_fn))
        for calls in found.calls:
            before = len(compiled._steps)
            for args, kwargs in calls:
                check(f"seed {seed}", compiled, found, args, kwargs)
            assert len(compiled._steps) <= before + 1, f"seed {seed}: one call written in other ways was planned again"


class Seen(nn.Module):
    """`forward` of each kind that Python knows; what the result is made of is not symmetric in its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None, mask: torch.Tensor | None = None, **rest: torch.Tensor) -> torch.Tensor:
        y = self.last(x)
        y = y if target is None else y * target
        y = y if mask is None else y - mask
        for t in rest.values():  # in the order of the call
            y = y * 2 + t
        return y


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        y = forward(self, *args, **kwargs)
        return y * 3 if "mask" in kwargs else y  # sees how the call is written
    return wrapper


class Decorated(Seen):
    forward = decorated(Seen.forward)


class Hooked(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * len(args), *args[1:]))


def tensors(n: int) -> list[torch.Tensor]:
    torch.manual_seed(n)
    return [torch.randn(4, 8, dtype=torch.float64) for _ in range(n)]


@pytest.mark.parametrize("kind", [Seen, Decorated, Hooked])
def test_what_sees_the_form_of_a_call_is_run_in_that_form(kind: type[nn.Module]) -> None:
    model = kind()
    compiled = CompiledModule(copy.deepcopy(model), locate("one=1"), by_planner(whole_planner))
    x, t, k, a, b = tensors(5)
    for args, kwargs in (((x,), dict(target=t, mask=k)), ((x,), dict(mask=k, target=t)), ((x, t), dict(mask=k)), ((x, t, k), {}), ((x, None, k), {}),
                         ((x,), dict(mask=k)), ((x,), {}), ((x, None), {}), ((x,), dict(b=b, a=a)), ((x,), dict(a=a, mask=k, b=b))):
        assert torch.allclose(compiled(*args, **kwargs), model(*args, **kwargs), rtol=1e-12), (len(args), list(kwargs))
    if kind is Seen:
        assert len(compiled._steps) == 5


@pytest.mark.parametrize("args, kwargs", [((0,), dict(target=1, mask=2)), ((0,), dict(mask=1, target=2)), ((), dict(mask=1, x=0)), ((0, None, 1), {}),
                                          ((0,), dict(b=1, a=2))])
def test_verify_runs_the_call_as_it_is_bound(args: tuple, kwargs: dict) -> None:
    given = [t.requires_grad_() for t in tensors(3)]
    args, kwargs = tuple(given[a] if a is not None else None for a in args), {k: given[i] for k, i in kwargs.items()}
    report = autoshard.verify(Seen(), "d=2", args, kwargs, plans=("split",))
    assert report.ok, report
    checked = {c.name for p in report.plans for c in p.checks if c.kind == "gradient"}
    assert {f"input:{i}" for i in range(len([a for a in args if a is not None]) + len(kwargs))} <= checked


def test_plan_is_one_for_all_ways_to_write_a_call() -> None:
    x, t = tensors(2)
    hashes = {autoshard.plan(Seen(), "d=2", args, kwargs, cluster="cpu-gloo", loss_fn=F.mse_loss).graph_hash
              for args, kwargs in (((x, t, t), {}), ((x, t), dict(target=t)), ((t,), dict(target=t, x=x)))}
    assert len(hashes) == 1


def test_numbers_that_python_calls_equal_are_told_apart() -> None:
    class Divide(nn.Module):
        def forward(self, x: torch.Tensor, by: float = 1.0, part: slice = slice(None)) -> torch.Tensor:
            return x[part] / by

    compiled, x = CompiledModule(Divide(), locate("one=1"), by_planner(whole_planner)), torch.ones(3)
    for by, part in ((0.0, slice(0, 2)), (-0.0, slice(0, 2)), (float("nan"), slice(1)), (float("nan"), slice(1)), (2, slice(1)), (True, slice(1))):
        assert torch.equal(compiled(x, by, part).nan_to_num(7.0), (x[part] / by).nan_to_num(7.0))
    assert len(compiled._steps) == 5


def loss_of_one(out):
    return out.sum()


def loss_of_three(out, target, weight):
    return F.mse_loss(out, target) * weight


@pytest.mark.parametrize("loss_fn, message", [
    (loss_of_one, r"loss_fn loss_of_one\(out\) is called with two arguments.*too many positional arguments.*\n  at .*test_call_forms.py:\d+: def loss_of_one"),
    (loss_of_three, r"loss_fn loss_of_three\(out, target, weight\) .*missing a required argument: 'weight'.*\n  at "),
    (nn.MSELoss, r"loss_fn=MSELoss is a class; make a module of it: loss_fn=MSELoss\(\)"), ("mse", "loss_fn is the str 'mse'; give a function")])
def test_a_loss_of_another_arity_is_named(loss_fn, message: str) -> None:
    x, t = tensors(2)
    for call in (lambda: autoshard.compile(Seen(), "one=1", loss_fn=loss_fn, cluster="cpu-gloo"),
                 lambda: autoshard.plan(Seen(), "d=2", (x, t), loss_fn=loss_fn, cluster="cpu-gloo"),
                 lambda: autoshard.verify(Seen(), "d=2", (x, t), loss_fn=loss_fn)):
        with pytest.raises(UsageError, match=message):
            call()


def test_calls_that_python_would_not_take() -> None:
    x, t, k = tensors(3)
    compiled = CompiledModule(nn.Linear(8, 8).double(), locate("one=1"), by_planner(whole_planner, loss_fn=F.mse_loss))
    for args, kwargs, message in (((x, k, t), {}, r"Linear.forward\(input\) does not take this call: too many positional arguments; with loss_fn the last"),
                                  ((x, t), dict(mask=k), "unexpected keyword argument 'mask'"), ((t,), {}, r"the target is missing: this call has only what Linear.forward\(input\) takes.*'logits': logits"),
                                  ((t,), dict(mask=k), "missing a required argument: 'input'"),
                                  ((), dict(input=x), "last positional argument is the target"), ((x, t), dict(input=x), "multiple values for argument 'input'"),
                                  ((x.numpy(), t), {}, "an argument is a numpy.ndarray of shape .*, which is neither a tensor nor a plain value")):
        with pytest.raises(UsageError, match=message):
            compiled(*args, **kwargs)
    assert torch.equal(compiled(target=t, input=x), compiled(x, t))


def test_hooks_of_the_original_are_refused_and_those_of_the_compiled_model_run() -> None:
    model = nn.Linear(8, 8, dtype=torch.float64)
    for register in (model.weight.register_hook, model.weight.register_post_accumulate_grad_hook):
        handle = register(lambda g: None)
        with pytest.raises(UsageError, match="'weight' has a gradient hook .* register it on those, after compile"):
            autoshard.compile(model, "one=1", cluster="cpu-gloo")
        handle.remove()
    compiled = autoshard.compile(model, "one=1", cluster="cpu-gloo", cache=False)
    compiled.weight.register_hook(lambda g: 2 * g)
    for n in (4, 2):
        x = tensors(1)[0][:n]
        for m in (compiled, model):
            m.zero_grad()
            m(x).sum().backward()
        assert torch.allclose(compiled.weight.grad, 2 * model.weight.grad)


@pytest.mark.parametrize("mesh", ["d=1", "d=2", "dp=2,tp=2"])
@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), nn.GELU()], ids=["linear", "deep", "plain"])
def test_plans_for_inputs_that_require_gradients(model: nn.Module, mesh: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    plan = autoshard.plan(model, mesh, (x,), cluster="cpu-gloo")
    assert plan.ops["grad:input:0"].inputs == plan.ops["input:0"].outputs and plan.status == "optimal"
    assert autoshard.verify(model, mesh, (x,), plans=("searched", "split", "fully_sharded", "random:0")).ok


def test_no_gradient_where_eager_mode_has_none() -> None:
    class Detached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2

    x = torch.randn(4, 8, requires_grad=True)
    assert not CompiledModule(Detached(), locate("one=1"), by_planner(whole_planner))(x).requires_grad
