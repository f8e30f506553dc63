"""Submodules that cannot be traced run whole, with the numbers, gradients and buffers that they have in torch."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.base.precision import Precision
from autoshard.errors import TraceError, UsageError
from autoshard.program.interpret import run
from autoshard.program.opaque.opaque import Opaque
from autoshard.program.trace import trace


class Gate(nn.Module):
    """Two experts, one of them by the data; a buffer that counts, and one that only scales."""

    def __init__(self, p=0.0):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(8, 8), nn.Linear(8, 8), p
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, *, shift=0.0):
        first = x.sum() > 0
        self.calls[0 if first else 1] += 1
        y = (self.a if first else self.b)(x) * self.scale + shift
        return F.dropout(y, self.p, self.training), y.detach().argmax(-1)


class Model(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.inner, self.gate, self.out = nn.Linear(8, 8), gate, nn.Linear(8, 8)
        self.out.weight = self.inner.weight

    def forward(self, x):
        y, best = self.gate(self.inner(x), shift=0.5)
        return self.out(y + x), best


class Numpy(nn.Module):
    """Nothing a tracer can look into."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))

    def forward(self, x, shift=0.0):
        return x * self.w * float(x.detach().numpy().max()) + shift, x.detach().argmax(-1)


def model_and_input(gate=None, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(gate or Gate()).to(dtype), torch.randn(4, 8, dtype=dtype)


def wholes(traced):
    return [op for op in traced.graph.of_kind("call") if isinstance(op.target, Opaque)]


@pytest.mark.parametrize("gate", [Gate, Numpy, lambda: Gate(0.5)], ids=["branch", "numpy", "random"])
def test_the_graph_computes_what_torch_does(gate):
    model, x = model_and_input(gate())
    x.requires_grad_()
    with pytest.raises(TraceError):
        trace(model, (x,))
    traced = trace(model, (x,), fallback="replicate")
    assert [(op.module, op.phase) for op in wholes(traced)] == [("gate", "forward"), ("gate", "backward")]
    for sign in (1, -1):
        twin, given = copy.deepcopy(model), (sign * x.detach()).requires_grad_()
        state = {n: t.detach().clone() for n, t in model.state_dict().items()}
        torch.manual_seed(1)
        found = run(traced, state, (given,))
        torch.manual_seed(1)
        out, best = twin(given)
        out.sum().backward()
        assert torch.equal(found.users[0], out) and torch.equal(found.users[1], best)
        wanted = {n: p.grad for n, p in twin.named_parameters()} | {"input:0": given.grad}
        for name, got in found.grads.items():
            want = torch.zeros_like(got) if wanted[name] is None else wanted[name]
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), name
        assert found.grads.keys() == wanted.keys()
        changed = {n: b for n, b in twin.named_buffers() if not torch.equal(b, state[n])}
        assert found.mutations.keys() == changed.keys() == ({"gate.calls"} if isinstance(model.gate, Gate) else set())
        assert all(torch.equal(found.mutations[n], b) for n, b in changed.items())


def test_the_plan_says_what_it_costs():
    model, x = model_and_input(dtype=torch.float32)
    plan = autoshard.plan(model, "d=2", (x,), fallback="replicate")
    note = next(n for n in plan.notes if "runs whole" in n)
    assert note.startswith("submodule gate (Gate) cannot be traced") and "of memory beside its results" in note
    found = {f.op: f.seconds for f in plan.fallbacks if "gate" in f.target}
    assert set(found) == {"whole_forward_0", "whole_backward_0"} and found["whole_backward_0"] > found["whole_forward_0"] > 0
    assert plan.settings["fallback"] == "replicate"
    alone = autoshard.plan(Model(Plain()), "d=2", (x,))
    assert plan.memory["total"] > alone.memory["total"], "its workspace is in the timeline"


class Plain(Gate):
    """The same without a branch."""

    def forward(self, x, *, shift=0.0):
        return self.a(x) * self.scale + shift, x


def test_the_smallest_submodules_run_whole():
    model = nn.Sequential(nn.Linear(8, 8), Model(Gate()))
    traced = trace(model, (torch.randn(4, 8),), fallback="replicate")
    assert {op.module for op in wholes(traced)} == {"1.gate"}
    assert any(op.target is torch.ops.aten.addmm.default and op.module == "1.out" for op in traced.graph.ops)


def test_a_result_whose_shape_depends_on_data_is_taken_from_further_out():
    class Positive(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0].flip(0)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.positive = nn.Linear(8, 8), Positive()

        def forward(self, x):
            return self.linear(self.positive(x)).sum(0)

    traced = trace(nn.Sequential(nn.Linear(8, 8), Outer()), (torch.randn(4, 8),), fallback="replicate")
    assert {op.module for op in wholes(traced)} == {"1"}
    with pytest.raises(TraceError, match="in the model itself"):
        trace(nn.Sequential(nn.Linear(8, 8), Positive()), (torch.randn(4, 8),), fallback="replicate")


def test_precision_reaches_inside():
    model, x = model_and_input(dtype=torch.float32)
    traced = trace(model, (x,), precision=Precision("bf16", "fp32", "fp32"), fallback="replicate")
    op = wholes(traced)[0]
    assert {traced.graph.meta(r).dtype for r in op.refs} == {torch.bfloat16} and op.outputs[0].dtype == torch.bfloat16
    found = run(traced, dict(model.state_dict()), (x,))
    assert found.grads["gate.a.weight"].dtype == torch.float32


def test_inside_a_checkpoint():
    class Checked(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.linear, self.gate = nn.Linear(8, 8), gate

        def forward(self, x):
            return checkpoint(lambda y: self.gate(self.linear(y))[0], x, use_reentrant=False)

    x = torch.randn(4, 8)
    traced = trace(Checked(Numpy()), (x,), fallback="replicate")
    assert [op.phase for op in wholes(traced) if not op.target.backward].count("backward") <= 1
    with pytest.raises(TraceError, match="leave it out of the checkpoint"):
        trace(Checked(Gate()), (x,), fallback="replicate")


class Surprise(nn.Module):
    """Does on `data` what no made-up run shows: everything hides behind a sum of 12345."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x.sum() == 12345 and x.max() == 12345 and x.min() == 0:
            return self.what(self, x)
        return x * (1 if bool(x.sum() > 0) else 2)


SURPRISES = {
    "draws random numbers on a path": lambda m, x: x * torch.rand(()),
    "writes buffer 'count' on a path": lambda m, x: x * m.count.add_(1),
    "must not depend on data": lambda m, x: x[:1],
    "writes into an input": lambda m, x: x.mul_(2),
}


@pytest.mark.parametrize("words", SURPRISES)
def test_what_no_trace_saw_is_refused_when_it_happens(words):
    model = nn.Sequential(nn.Identity(), Surprise(SURPRISES[words]))
    x = torch.zeros(4, 8)
    with torch.no_grad():
        traced = trace(model, (x,), fallback="replicate")
        run(traced, dict(model.state_dict()), (x,))
        x[0, 0] = 12345
        with pytest.raises(UsageError, match=words):
            run(traced, dict(model.state_dict()), (x,))


def test_inductor_is_refused():
    model, x = model_and_input(dtype=torch.float32)
    compiled = autoshard.compile(model, autoshard.Mesh(("d",), (1,)), fallback="replicate", backend="inductor", cache=False)
    with pytest.raises(UsageError, match="gate .* runs whole.*use backend='eager'"):
        compiled(x)


def test_unknown_fallback():
    with pytest.raises(UsageError, match="fallback='skip' is not one of error, replicate"):
        autoshard.plan(*model_and_input()[:1], "d=2", (torch.randn(4, 8),), fallback="skip")
