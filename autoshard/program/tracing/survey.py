"""Collects every place where a model cannot be one graph, not only the first.

After a trace has failed, the model is traced once more without stopping: reads of a tensor's data get a made-up
value, ops that the recorder refuses are noted, and for a submodule that raises only the result is determined. Nothing of that
trace is used but its list of places.
"""
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch

from autoshard import _torch
from autoshard.errors import AutoshardError, TraceError
from autoshard.program.tracing.tape import ONLY_TAKEN, describe, innermost_user_line, user_frames
from autoshard.program.tracing.ways_out import hint_of, on_data

aten = torch.ops.aten
MOST_ANSWERS = 1000
"""Made-up values in one trace: a loop that ends on none of them must end."""


@dataclass(eq=False)
class Answers:
    """Made-up values for ops whose result is the data of a tensor, or has a shape that depends on it.

    Numbers and lengths differ between variants. Truth values take turns at each line of code, so that a loop on one ends."""

    variant: int = 0
    note: Callable[[Any, str, str], None] = lambda op, where, hint: None
    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, op: Any, args: tuple[Any, ...]) -> Any:
        """A result of `op`, or NotImplemented where none can be made up. Runs inside the fake mode."""
        place = user_line()
        self.note(op, place, hint_of(sys._getframe()))
        turn = self.seen[place] + self.variant
        self.seen[place] += 1
        if self.seen.total() > MOST_ANSWERS:
            raise TraceError(f"the forward pass asks for the data of tensors again and again at {place}")
        if op is aten.equal.default:
            return turn % 2 == 0
        if op is aten._local_scalar_dense.default:
            return turn % 2 == 0 if args[0].dtype is torch.bool else (1.0 if args[0].is_floating_point() else 1) + self.variant
        return self._of_a_length(op, args)

    def _of_a_length(self, op: Any, args: tuple[Any, ...]) -> Any:
        n, x = 2 + self.variant, args[0]
        if op is aten.nonzero.default:
            return torch.empty((n, x.ndim), dtype=torch.int64)
        if op in (aten.masked_select.default, aten._unique.default):
            return torch.empty(n, dtype=x.dtype)
        if op in (aten._unique2.default, aten.unique_consecutive.default):
            return torch.empty(n, dtype=x.dtype), torch.empty(x.shape, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
        if op is aten.repeat_interleave.Tensor:
            return torch.empty(n, dtype=torch.int64)
        return NotImplemented


class ReadsData(TraceError):
    """The trace asked for a tensor's data."""


class Stopped(TraceError):
    """A submodule raised, and nothing is known of its result."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the trace could not go on after {path}")
        self.path = path


@dataclass(eq=False)
class Survey:
    """What the second trace finds. `problems`: what keeps the model from being one graph, in words that name the user's line
    and what to do, with the paths of the submodules that ran ("": the model itself, or the loss); `stopped`: what it could not
    look beyond; `broken`: submodules that do not run whole either."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    stopped: str = ""
    broken: set[str] = field(default_factory=set)
    is_backward: bool = False

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(module for found in self.problems.values() for module in found)

    def watched(self, path: str, forward: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a submodule: where it raises, that is noted, and its result is what `whole` gives."""
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except Stopped as e:
                stopped = e
            except Exception as e:
                self.add(explain(e, "forward"), path)
                stopped = Stopped(path)
            try:
                return whole(*args, **kwargs)
            except TraceError:
                self.broken.add(path)
                raise stopped from None

        return run

    def end(self, last: TraceError) -> None:
        """Note what ended the trace. After trouble in forward, that of backward may come of what was made up."""
        if isinstance(last, Stopped):
            self.stopped = repr(last.path)
        elif self.is_backward and self.problems:
            self.stopped = "the forward pass"
        elif str(last) not in self.problems:
            self.add(str(last), "")

    def add(self, text: str, module: str) -> None:
        found = self.problems.setdefault(text, [])
        if module not in found:
            found.append(module)

    def message(self, first: TraceError) -> str:
        """All places as a list; the first error as it is where there is no other."""
        submodules, hint = sorted(self.modules - self.broken), ""
        if submodules and "" not in submodules:
            hint = (f'\n  or let {_listed(submodules)} run whole on every rank: fallback="replicate" (--fallback replicate)')
        lines = [str(first)]
        if len(self.problems) > 1:
            lines = [f"the model is not one graph; {len(self.problems)} places to change:"]
            for i, (text, found) in enumerate(self.problems.items(), 1):
                lines.append(f"{i}. " + (f"in {_listed(found)}: " if any(found) else "") + text)
        if self.stopped:
            lines.append(f"what comes after {self.stopped} was not looked at in full")
        return "\n".join(lines) + hint


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def user_line() -> str:
    """"file:line: code" of the user's code that runs now; "" outside of any."""
    frame = next(user_frames(sys._getframe(1)), None)
    return "" if frame is None else describe(frame.f_code, frame.f_lineno)


@contextmanager
def user_errors(phase: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Turn what goes wrong under the user's code into a TraceError that names the user's line. `hint`: what may be the cause."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as e:
        kind = ReadsData if _reads_data(e) else TraceError
        raise kind(explain(e, phase) + hint()) from None


def loss_of(loss_fn: Callable[..., Any], output: Any, target: Any) -> Any:
    """A call whose frame names the loss and what it gets, for `in_module`."""
    return loss_fn(output, target)


def without_gradient(users: Sequence[torch.Tensor], loss_fn: Callable[..., Any] | None) -> str:
    """Why no output has a gradient, and what to do. `users`: the tensors that the call returns."""
    if users:
        return "no output depends on a trainable parameter; pass training=False, or set requires_grad on the parameters to train"
    returns = "the model" if loss_fn is None else f"loss_fn {_named(loss_fn)}"
    return f"{returns} returns no tensor; let it return the tensors that the loop needs (a function without `return` returns None)"


def explain(e: BaseException, phase: str) -> str:
    """An exception of a trace in the user's terms, with their line."""
    where = innermost_user_line(e.__traceback__)
    at = f"\n  at {where}" if where else ""
    if isinstance(e, AutoshardError):
        return str(e)
    if _reads_data(e):
        op = getattr(e, "func", None) if isinstance(e, _torch.DATA_DEPENDENT) else aten._local_scalar_dense.default
        return on_data(phase, where, op, hint_of(e.__traceback__))
    if "c10d." in str(e):
        return f"the model calls a collective in place{at}\n  {ONLY_TAKEN}"
    if "use_reentrant=True" in str(e):
        return f"torch.utils.checkpoint is used with use_reentrant=True{at}\n  pass use_reentrant=False"
    return f"the model's {phase} pass raised {short(e)}{at}{in_module(e.__traceback__)}"


def in_module(tb: TracebackType | None) -> str:
    """Which module raised, or the loss, with which tensors as its arguments: of a model made of torch's modules no line is the user's."""
    found = ""
    for frame, _ in walk_tb(tb):
        if frame.f_code is loss_of.__code__:
            given = {name: frame.f_locals[name] for name in ("output", "target")}
            found = f"\n  in loss_fn {_named(frame.f_locals['loss_fn'])}, with {', '.join(f'{n} {_said(v)}' for n, v in given.items())}"
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, torch.nn.Module):
            names = frame.f_code.co_varnames[1:frame.f_code.co_argcount]
            tensors = [f"{name} {_said(t)}" for name in names if isinstance(t := frame.f_locals.get(name), torch.Tensor)]
            own = type(module).__module__.startswith("torch.nn.")  # a user's extra_repr may read data, which is not there
            said = f"({module.extra_repr()[:80]})" if own else ""
            found = f"\n  in {type(module).__name__}{said}" + (f", with {', '.join(tensors)}" if tensors else "")
    return found


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _named(loss_fn: Callable[..., Any]) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)


def _reads_data(e: BaseException) -> bool:
    """Also where C++ code reads it, as indexing by a list of numbers that are tensors does."""
    return isinstance(e, _torch.DATA_DEPENDENT) or any(said in str(e) for said in ("its data is not allocated yet", ".numpy() is not supported"))


def short(e: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200]}" if lines else type(e).__name__
