"""Binds the arguments of a call to `forward` and `loss_fn` as Python does, in one form for every way to write the call.

`model(x, target=t)`, `model(target=t, x=x)` and `model(x, t)` are one program. The trace, the compiled module and `verify` all
get their tensors from `Binding.flatten`, so what is verified is what runs.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.errors import UsageError
from autoshard.program.tracing.tape import describe

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PLAIN = (bool, int, str, type(None))
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Binding:
    """`forward`: the parameters of the model's forward, by name, empty where Python does not know them. `own`: whether nothing
    else sees the arguments (a decorator, a hook, another `__call__`), which may tell `f(x)` from `f(x=x)`; only then one form
    stands for all. `target`: the name of `loss_fn`'s second parameter ("" without a loss)."""

    model: str
    forward: Mapping[str, inspect.Parameter]
    own: bool
    target: str = ""

    @staticmethod
    def of(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> "Binding":
        """Raises UsageError for a loss that cannot be called with a result and a target."""
        target = "" if loss_fn is None else _target_of(loss_fn)
        found = _signature(model.forward)
        own = (found is not None and not hasattr(model.forward, "__wrapped__") and type(model).__call__ is nn.Module.__call__
               and not model._forward_pre_hooks and not model._forward_hooks)
        return Binding(type(model).__name__, {} if found is None else dict(found.parameters), own, target)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Leaves of the bound (args, kwargs) and their structure. Walking a pytree costs as much as several small ops, so the
        common call, tensors by position, goes without. Raises UsageError where Python would not take the call."""
        if not kwargs and all(isinstance(a, torch.Tensor) for a in args):
            return list(args), _positional(len(args))
        return pytree.tree_flatten(self.arguments(args, kwargs))

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The call as it is traced: the model's arguments, and last by position the target of the loss."""
        args, kwargs, target = self.split(args, kwargs)
        args, kwargs = self._bound(args, kwargs, target) if self.own else (args, self._in_order(kwargs))
        return (*args, *target), kwargs

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """What goes to the model as it was written, and the target, if there is a loss: the last positional argument, or the keyword
        argument that only `loss_fn` has."""
        kwargs = dict(kwargs)
        if not self.target:
            return tuple(args), kwargs, ()
        if self.target in kwargs and self.target not in self.forward and not self._has(inspect.Parameter.VAR_KEYWORD):
            return tuple(args), kwargs, (kwargs.pop(self.target),)
        if not args:
            raise UsageError("with loss_fn the last positional argument is the target, and there is none; pass (x, target)")
        return tuple(args[:-1]), kwargs, (args[-1],)

    def names(self, tree: Any) -> tuple[str, ...]:
        """What messages call each leaf of a call of this structure: "x", "batch['ids']"."""
        bound = pytree.tree_unflatten(range(tree.num_leaves), tree)
        return tuple(self._name(path, len(bound[0])) for path, _ in pytree.tree_flatten_with_path(bound)[0])

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: tuple[Any, ...]) -> Arguments:
        """By position as far as Python allows, the rest in the order of the signature; without what equals its default."""
        signature = inspect.Signature(list(self.forward.values()))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as e:
            raise UsageError(self._refusal(signature, e, _takes(signature, (*args, *target), kwargs))) from None
        dense = any(p.kind is inspect.Parameter.VAR_POSITIONAL and bound.arguments.get(n) for n, p in self.forward.items())
        for name, parameter in self.forward.items():
            if name in bound.arguments and parameter.kind in BY_NAME[dense:] and _is_default(bound.arguments[name], parameter):
                del bound.arguments[name]
        return bound.args, bound.kwargs

    def _refusal(self, signature: inspect.Signature, error: TypeError, without_target: bool) -> str:
        """`without_target`: the call would do, were there no loss."""
        forward = f"{self.model}.forward{_shown(signature)}"
        if not self.target:
            return f"{forward} does not take this call: {error}"
        rule = (f"with loss_fn the last positional argument is {self.target!r}, in evaluation too. What you want of the predictions comes from "
                "loss_fn then, as a dict: {'loss': loss, 'logits': logits}")
        if without_target:
            return f"the target is missing: this call has only what {forward} takes, and {rule}"
        return f"{forward} does not take this call: {error}; {rule}"

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those that `forward` names first; the others in the order of the call, which code that takes **kwargs may look at."""
        known = [name for name, p in self.forward.items() if p.kind in BY_NAME and name in kwargs]
        return {name: kwargs[name] for name in dict.fromkeys((*known, *kwargs))}

    def _has(self, kind: Any) -> bool:
        return any(p.kind is kind for p in self.forward.values())

    def _name(self, path: tuple[Any, ...], n_args: int) -> str:
        side, entry, *rest = path
        if side.idx == 1:
            return f"{entry.key}{pytree.keystr(tuple(rest))}"
        by_position = [name for name, p in self.forward.items() if p.kind in BY_POSITION]
        if self.target and entry.idx == n_args - 1:
            name = self.target
        elif entry.idx < len(by_position):
            name = by_position[entry.idx]
        else:
            name = next((f"{n}[{entry.idx - len(by_position)}]" for n, p in self.forward.items()
                         if p.kind is inspect.Parameter.VAR_POSITIONAL), f"args[{entry.idx}]")
        return f"{name}{pytree.keystr(tuple(rest))}"


@cache
def _positional(n: int) -> Any:
    return pytree.tree_structure(((0,) * n, {}))


def leaf_key(value: Any) -> Any:
    """What tells an argument that is no tensor from others: it is part of the program. Raises UsageError for what nothing can."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # 0.0 is not -0.0, and nan is nan
    if type(value) is slice:
        return slice, *map(leaf_key, (value.start, value.stop, value.step))
    if type(value).__hash__ is None:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise UsageError(f"an argument is a {type(value).__module__}.{type(value).__qualname__}{shape}, which is neither a tensor nor a plain value; "
                         "pass tensors (torch.as_tensor(array)), or register the type with torch.utils._pytree.register_pytree_node")
    return type(value), value


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    return type(value) in PLAIN and type(value) is type(parameter.default) and value == parameter.default


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    """None for what Python cannot say it of: code in C, scripted modules."""
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def _target_of(loss_fn: Callable[..., Any]) -> str:
    """The name of the parameter that gets the target. Raises UsageError for a loss of another arity."""
    if not callable(loss_fn):
        raise UsageError(f"loss_fn={loss_fn!r} cannot be called; give a function of (the model's result, the target)")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise UsageError(f"loss_fn={loss_fn.__name__} is a class; make a module of it: loss_fn={loss_fn.__name__}()")
    call = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    signature = _signature(call)
    if signature is None:
        return "target"
    try:
        bound = signature.bind(None, None)
    except TypeError as e:
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
        code = getattr(inspect.unwrap(call), "__code__", None)
        at = f"\n  at {describe(code, code.co_firstlineno)}" if code else ""
        raise UsageError(f"loss_fn {name}{_shown(signature)} is called with two arguments, the model's result and the target, and does not "
                         f"take them: {e}; give it two parameters, and defaults to any others{at}") from None
    names = [n for n in bound.arguments if signature.parameters[n].kind in BY_POSITION]
    return names[1] if len(names) > 1 else "target"


def _takes(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _shown(signature: inspect.Signature) -> str:
    """A signature without annotations, which may be long."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
