"""Shared by the trace tests: an interpreted graph must give what eager autograd gives."""
import contextlib
import copy

import torch
from torch.utils import _pytree as pytree

from autoshard.program.calling import Traced
from autoshard.program.interpret import run
from autoshard.program.trace import trace


def state_of(model):
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def assert_close(got, want, what, tol=1e-12):
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype} != {want.shape} {want.dtype}"
    error = (got - want).norm() if got.dtype.is_floating_point else (got != want).sum()
    assert error <= tol * max(1.0, want.double().norm()), f"{what}: off by {error}"


def check_parity(model, args=(), kwargs=None, *, loss_fn=None, around=contextlib.nullcontext, tol=1e-12, rewrite=None, seed=3):
    """Trace, interpret and compare user outputs, gradients and mutated buffers with eager; -> Traced."""
    kwargs = kwargs or {}
    before = state_of(model)
    with around():
        traced = trace(model, args, kwargs, loss_fn=loss_fn)
    assert all(torch.equal(before[n], t) for n, t in state_of(model).items()), "trace changed the model"
    checked = Traced(rewrite(traced.graph), traced.calling) if rewrite else traced
    torch.manual_seed(seed)
    results = run(checked, before, args, kwargs)
    eager = copy.deepcopy(model)
    torch.manual_seed(seed)
    with around():
        out = eager(*args, **kwargs) if loss_fn is None else loss_fn(eager(*args[:-1], **kwargs), args[-1])
    tangents = [op.target for op in traced.graph.of_kind("tangent")]
    _compare_outputs(traced, results, out, tol)
    users = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    if tangents:
        torch.autograd.backward([users[i] for i in tangents], [torch.ones_like(users[i]) for i in tangents])
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    _compare_state(eager, inputs, results, before, tol)
    return traced


def _compare_outputs(traced, results, out, tol):
    rebuilt = traced.calling.unflatten(results.users)
    assert type(rebuilt) is type(out)
    for i, (a, b) in enumerate(zip(pytree.tree_leaves(rebuilt), pytree.tree_leaves(out), strict=True)):
        if isinstance(b, torch.Tensor):
            assert_close(a, b.detach(), f"output {i}", tol)
        else:
            assert a == b, f"output {i}"


def _compare_state(eager, inputs, results, before, tol):
    grads = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    grads |= {f"input:{i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    assert set(results.grads) == set(grads)
    for name, grad in grads.items():
        assert_close(results.grads[name], grad, f"gradient of {name}", tol)
    changed = {n for n, b in eager.named_buffers() if not torch.equal(b, before[n])}
    assert set(results.mutations) >= changed, f"not written back: {changed - set(results.mutations)}"
    for name, value in results.mutations.items():
        assert_close(value, eager.get_buffer(name), f"buffer {name}", tol)
