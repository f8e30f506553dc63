"""Reads of data that one graph can hold: checks that raise, and branches that clamp.

    if labels.max() >= vocabulary:            assert lengths.max().item() <= n        if not torch.isfinite(x).all():
        raise ValueError(...)                                                             x = torch.clamp(x, -bound, bound)

A check goes on as if it held, and its truth value becomes part of the program, which raises where it does not (base/checked.py). Of a branch
that only clamps local values both sides are computed, and each value is chosen by torch.where, before the line after it runs.
`if mask.any(): x[mask] = value` is taken: it writes nothing where the mask is empty. `torch.bincount(ids, minlength=n)` is as long as n, and the
program checks that it is. Small buffers that the model reads and does not write are read
as they are (tracing/known_values.py), and the program raises where they have changed. All else is refused as before.
"""
from __future__ import annotations

import ast
import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.base.checked import CHECKED
from autoshard.program.reads.conditions import Condition, condition_of
from autoshard.program.tracing.known_values import Constants
from autoshard.program.tracing.survey import user_line
from autoshard.program.tracing.tape import Tape, checkpoint_around, describe, is_user_file, user_frames

READS = (Tensor.__bool__, Tensor.item)
COUNTS = (Tensor.bincount, torch.bincount)
NUMBERS = (0, 1, -1, 2, 10 ** 9, -10 ** 9)
"""What a read may answer inside of a comparison: one of them makes it hold, or fail, as wanted."""

DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
"""Code of torch that checks what it is given as users' code does."""

OF_SYMMETRIC = {
    type(torch.distributions.constraints.positive_definite): lambda matrix: torch.linalg.cholesky_ex(matrix).info.eq(0),
    type(torch.distributions.constraints.positive_semidefinite): lambda matrix: torch.linalg.eigvalsh(matrix).ge(0).all(-1),
}
"""Constraints of distributions that look whether a matrix is symmetric, and at nothing else where it is not -> what else they look at."""

LAYERS = torch.nn.modules.transformer.__file__
"""Layers of torch that look whether a mask, which they take as it is, is the causal one: a hint to a kernel, which changes no number."""

FAILS = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""What the user's code may raise. (A checkpoint ends its recomputation with an exception of another kind.)"""

UNBOUND = object()
"""Stands for a local name without a value."""


class DataReads(TorchFunctionMode):
    """Answers reads of data while a model is traced. `constants`: what is known of data; `checks`: truth values that the program must find
    true, with what it says where they are not."""

    def __init__(self, tape: Tape, constants: Constants) -> None:
        super().__init__()
        self.tape, self.constants = tape, constants
        self.checks: list[tuple[Tensor, str]] = []
        self._kept: list[tuple[Any, str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch._assert_async:
            return self.note(args[0], " ".join((user_line(), *args[1:])))
        if func in COUNTS:
            return self._counted(func, *args, **(kwargs or {}))
        if func not in READS:
            return func(*args, **(kwargs or {}))
        try:
            with self.constants.strictly():
                return func(*args)
        except _torch.DATA_DEPENDENT:
            frame, is_item = sys._getframe(1), func is Tensor.item
            if frame.f_code.co_name == "__bool__":  # torch's own, of the tensors that it traces with
                frame, is_item = frame.f_back, False
            answer = self._answer(frame, args[0], is_item)
        return func(*args) if answer is None else answer

    def _counted(self, func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """How often each id is there. The result is as long as `minlength` if no id is larger, which the program checks. Arguments are named as
        torch names them."""
        if minlength == 0 or input.ndim != 1 or weights is not None and weights.shape != input.shape:
            return func(input, weights, minlength)
        with torch.no_grad():
            self.note((input >= 0) & (input < minlength), f"{user_line()}: an id is not in [0, {minlength})")
            dtype = torch.int64 if weights is None else weights.dtype if weights.dtype is torch.float32 else torch.float64
            each = torch.ones_like(input, dtype=dtype) if weights is None else weights.to(dtype)
            return torch.zeros(minlength, dtype=dtype, device=input.device).scatter_add(0, input.long().clamp(0, minlength - 1), each)

    def _answer(self, frame: FrameType, value: Tensor, is_item: bool) -> Any:
        file = frame.f_code.co_filename
        if file == LAYERS and not is_item:
            return False
        found = condition_of(frame, is_item) if is_user_file(file) or file.startswith(DISTRIBUTIONS) else None
        try:
            return None if found is None else self._of_condition(frame, found, value, is_item)
        except FAILS:  # the code of a branch or condition does not run by itself: it is refused as a read of data
            return None

    def _of_condition(self, frame: FrameType, found: Condition, value: Tensor, is_item: bool) -> Any:
        if found.raises is not None:
            return self._checked(frame, found, value, is_item)
        if found.fills:
            mask, *written = (frame.f_locals.get(name) for name in found.fills)
            return True if all(isinstance(t, Tensor) for t in (mask, *written)) and mask.dtype is torch.bool else None
        return self._clamped(frame, found, value) if found.clamped and found.decides and not is_item else None

    def note(self, truth: Tensor, text: str) -> None:
        """The program must find `truth` true everywhere, or raise with `text`. A recomputation repeats what is noted in the forward pass."""
        if self.tape.phase == "forward":
            with torch.no_grad():
                self.checks.append((truth.detach().bool().all(), text))
        elif checkpoint_around(sys._getframe())[0] is None:
            self.tape.refuse(f"the backward pass checks data\n  at {text}\n  check it in the forward pass")

    def __enter__(self) -> DataReads:
        """`torch._check_tensor_all` and its like, Python that looks at data, note what they are called with; constraints look at all they may."""
        instead = {(torch, name): self._note_all for name in vars(torch) if name.startswith("_check_tensor_all")}
        instead |= {(kind, "check"): _of_symmetric(kind, test) for kind, test in OF_SYMMETRIC.items()}
        self._kept = [(owner, name, getattr(owner, name)) for owner, name in instead]
        for (owner, name), check in instead.items():
            setattr(owner, name, check)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, name, check in self._kept:
            setattr(owner, name, check)

    def _note_all(self, *args: Any, **kwargs: Any) -> None:
        """Libraries wrap these functions, so the line around the call is told too."""
        lines = [describe(frame.f_code, frame.f_lineno) for frame in islice(user_frames(sys._getframe(1)), 2)]
        self.note(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), " < ".join(lines))

    def _checked(self, frame: FrameType, found: Condition, value: Tensor, is_item: bool) -> Any:
        """What lets the statement pass; its condition is noted."""
        wanted = found.wanted(not found.raises)
        if wanted is None:
            return None
        truth, answer = (value, wanted) if not is_item else _of_item(frame, found, value, wanted)
        if truth is None or truth.numel() != 1:
            return None
        with torch.no_grad():
            self.note(truth.bool() if wanted else truth.bool().logical_not(), _says(frame, found))
        return answer

    def _clamped(self, frame: FrameType, found: Condition, truth: Tensor) -> bool | None:
        """Leaves the statement out: its names have their values by torch.where already."""
        before, names = dict(frame.f_locals), found.clamped
        if not _calls_torch(frame, found.statement):
            return None
        after = dict(before)
        exec(compile(ast.Module(found.statement.body, []), "<branch>", "exec"), frame.f_globals, after)
        if any(not _are_alike(before.get(n, UNBOUND), after[n]) for n in names):
            return None
        taken, skips = truth.reshape(()).bool(), bool(found.wanted(False))
        chosen = {n: after[n] if not isinstance(after[n], Tensor) else torch.where(taken, before[n], after[n]) if skips
                  else torch.where(taken, after[n], before[n]) for n in names}
        _set_locals(frame, chosen)
        return skips

    def guarded(self, users: Sequence[Tensor], stored: Mapping[str, Tensor]) -> list[Tensor]:
        """What the model returns, the smallest tensor only if all checks hold. `stored`: the values of buffers in the graph."""
        for name in sorted(self.constants.assumed):
            with _torch.no_modes():
                value = self.constants.stored(name)
            with torch.no_grad():
                self.note(stored[name] == value, f"the buffer {name!r} is {value.tolist()}, as it was when the program was made; "
                                                 "call autoshard again after it has changed")
        if self.checks and not users:
            self.tape.refuse("the model checks data and returns no tensor, so its program has no place for the check; return a tensor")
        carrier = min(range(len(users)), key=lambda i: users[i].numel(), default=None) if self.checks else None
        return [self._checked_value(value) if i == carrier else value for i, value in enumerate(users)]

    def _checked_value(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            return CHECKED(value.detach(), [truth for truth, _ in self.checks], [text for _, text in self.checks])


def _of_symmetric(kind: type, test: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda constraint, matrix: super(kind, constraint).check(matrix) & test(matrix)


def _says(frame: FrameType, found: Condition) -> str:
    """The user's line, and what it raises."""
    if not frame.f_code.co_filename.startswith(DISTRIBUTIONS):
        return f"{describe(frame.f_code, frame.f_lineno)} {found.error}".rstrip()
    names = frame.f_locals
    what, bound = names.get("param", "a value"), names.get("constraint", names.get("support", "as it has to"))
    known = type(bound).__name__ if "Tensor" in str(bound) else bound  # a bound that is a tensor has no numbers here
    return f"{user_line().removeprefix(' at ')}: {what} of {type(names.get('self')).__name__} is not {known}"


def _of_item(frame: FrameType, found: Condition, value: Tensor, wanted: bool) -> tuple[Tensor | None, Any]:
    """The condition as a tensor, and a number to read that makes it `wanted`; (None, None) where there is none."""
    part = found.as_tensor()
    if part is None:
        return None, None
    for number in (False, True) if value.dtype is torch.bool else NUMBERS:
        if bool(_computed(frame, found.as_tensor(ast.Constant(number)))) is wanted:
            truth = _computed(frame, part)
            return (truth, number) if isinstance(truth, Tensor) else (None, None)
    return None, None


def _computed(frame: FrameType, part: ast.expr) -> Any:
    return eval(compile(ast.fix_missing_locations(ast.Expression(part)), "<condition>", "eval"), frame.f_globals, dict(frame.f_locals))


def _calls_torch(frame: FrameType, statement: ast.stmt) -> bool:
    """Whether all calls are of torch's functions and of methods of tensors, not of others by such names. What only the branch itself names is made by
    calls that were looked at."""
    owners = [n.func.value for s in statement.body for n in ast.walk(s) if isinstance(n, ast.Call) and not isinstance(n.func.value, ast.Call)]
    known = {**frame.f_globals, **frame.f_locals}
    found = [_computed(frame, owner) for owner in owners if {n.id for n in ast.walk(owner) if isinstance(n, ast.Name)} <= known.keys()]
    return all(isinstance(value, Tensor) or value is torch or value is F for value in found)


def _are_alike(before: Any, after: Any) -> bool:
    """Whether one graph can hold both: tensors of one shape and dtype, or names that only the branch reads."""
    if not isinstance(after, Tensor):
        return before is UNBOUND or (type(before) is type(after) and isinstance(after, (int, float)) and before == after)
    return isinstance(before, Tensor) and before.shape == after.shape and before.dtype == after.dtype


def _set_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give local names of a running function new values, as debuggers do."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # from then on they are the names themselves
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
