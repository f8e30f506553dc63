"""Reads of data that one graph can hold: checks that raise, and branches that clamp.

    if labels.max() >= vocabulary:            assert lengths.max().item() <= n        if not torch.isfinite(x).all():
        raise ValueError(...)                                                             x = torch.clamp(x, -bound, bound)

A check goes on as if it held, and its truth value becomes part of the program, which raises where it does not (base/checked.py). Of a branch that only
clamps local values both sides are computed, and each value is chosen by torch.where, before the line after it runs. All else is refused as before.
"""
from __future__ import annotations

import ast
import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.program.reads.conditions import Condition, condition_of
from autoshard.base.checked import CHECKED
from autoshard.program.tracing.tape import Tape, describe, is_user_file

READS = (Tensor.__bool__, Tensor.item)
NUMBERS = (0, 1, -1, 2, 10 ** 9, -10 ** 9)
"""What a read may answer inside of a comparison: one of them makes it hold, or fail, as wanted."""

UNBOUND = object()
"""Stands for a local name without a value."""


class DataReads(TorchFunctionMode):
    """Answers reads of data while a model is traced. `strictly`: a context in which no data is made up; `checks`: truth values that the
    program must find true, with what it says where they are not."""

    def __init__(self, tape: Tape, strictly: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.tape, self.strictly = tape, strictly
        self.checks: list[tuple[Tensor, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func not in READS:
            return func(*args, **(kwargs or {}))
        try:
            with self.strictly():
                return func(*args)
        except _torch.DATA_DEPENDENT:
            frame, is_item = sys._getframe(1), func is Tensor.item
            if frame.f_code.co_name == "__bool__":  # torch's own, of the tensors that it traces with
                frame, is_item = frame.f_back, False
            answer = self._answer(frame, args[0], is_item)
        return func(*args) if answer is None else answer

    def _answer(self, frame: FrameType, value: Tensor, is_item: bool) -> Any:
        found = condition_of(frame, is_item) if is_user_file(frame.f_code.co_filename) else None
        if found is None:
            return None
        if found.raises is not None:
            return self._checked(frame, found, value, is_item)
        return self._clamped(frame, found, value) if found.clamped and found.decides and not is_item else None

    def _checked(self, frame: FrameType, found: Condition, value: Tensor, is_item: bool) -> Any:
        """What lets the statement pass; its condition is noted."""
        wanted = found.wanted(not found.raises)
        if wanted is None:
            return None
        truth, answer = (value, wanted) if not is_item else _of_item(frame, found, value, wanted)
        if truth is None or truth.numel() != 1:
            return None
        if self.tape.phase == "forward":  # a recomputation repeats it
            truth = truth.detach().reshape(()).bool()
            self.checks.append((truth if wanted else truth.logical_not(), describe(frame.f_code, frame.f_lineno)))
        return answer

    def _clamped(self, frame: FrameType, found: Condition, truth: Tensor) -> bool | None:
        """Leaves the statement out: its names have their values by torch.where already."""
        before, names = dict(frame.f_locals), found.clamped
        after = dict(before)
        exec(compile(ast.Module(found.statement.body, []), "<branch>", "exec"), frame.f_globals, after)
        if any(not _are_alike(before.get(n, UNBOUND), after[n]) for n in names):
            return None
        taken, skips = truth.reshape(()).bool(), bool(found.wanted(False))
        chosen = {n: after[n] if not isinstance(after[n], Tensor) else torch.where(taken, before[n], after[n]) if skips
                  else torch.where(taken, after[n], before[n]) for n in names}
        _set_locals(frame, chosen)
        return skips

    def guarded(self, value: Tensor) -> Tensor:
        """An output of the model that the program has only if all checks hold."""
        with torch.no_grad():
            return CHECKED(value.detach(), [truth for truth, _ in self.checks], [text for _, text in self.checks])


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


def _are_alike(before: Any, after: Any) -> bool:
    """Whether one graph can hold both: tensors of one shape and dtype, or names that only the branch reads."""
    if not isinstance(after, Tensor):
        return before is UNBOUND or (type(before) is type(after) and isinstance(after, (int, float)) and before == after)
    return isinstance(before, Tensor) and before.shape == after.shape and before.dtype == after.dtype


def _set_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give local names of a running function new values, as debuggers do."""
    frame.f_locals.update(values)
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))  # needed before Python 3.13
