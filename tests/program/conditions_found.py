"""What `condition_of` finds of many tests of truth, as JSON. A program of its own, without torch, that other versions of Python run too."""
from __future__ import annotations

import ast
import json
import linecache
import sys
import tempfile
import textwrap
import types
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "autoshard"
FORMS = """
if x > 0: raise ValueError
---
if not x > 0: raise ValueError
---
if x.any(): y = x.clamp(0, 1)
---
if not x.any(): y = x.clamp(0, 1)
---
if x.all() or x.any(): y = x.clamp(0)
---
if x.all() and x.any(): y = x.clamp(0)
---
if flag and x > 1: raise ValueError
---
if not (flag and x.any()): raise ValueError
---
if not (not flag or not x.any()): raise ValueError
---
if not not x.any(): raise ValueError
---
assert x > 0
---
assert not x.all(), f"text {1}"
---
assert flag and x.all()
---
assert not x.any() and not x > 3
---
if bool(x.all()): raise ValueError
---
if not bool(x > 0): raise ValueError
---
if x.item() > 0: raise ValueError
---
if not x.any().item(): raise ValueError
---
if flag and x.item() < 2: raise ValueError
---
while x > 0: break
---
y = 1 if x > 0 else 2
---
y = x and 3
---
y = not x
---
y = [i for i in range(2) if x > i]
---
if any([x > 0, x > 1]): raise ValueError
---
if max(x, x) > 0: y = x.clamp(0)
---
if x in [x, x]: y = 1
---
if 0 < x < 1: raise ValueError
---
if (z := x > 0): raise ValueError
---
if x > 0 if flag else x > 1: raise ValueError
---
mask = x > 0
if mask.any():
    x[mask] = 0
---
if not x.any(): raise ValueError
elif x > 1: y = x.clamp(0)
---
if (x
    > 0) \\
   and x.any():
    raise ValueError
---
for i in range(3):
    if x > i:
        y = x.clamp(0)
---
if x.any() == True: y = x.clamp(0)
---
try:
    if x > 0: raise ValueError
finally:
    y = 2
---
if (lambda q: q > 0)(x): raise ValueError
""".strip().split("\n---\n")
HOT = 20
"""Calls after which Python has put faster instructions in place of those of a function."""


class Value:
    """Stands for a tensor. Its methods are called from C, as those of tensors are: no frame of Python lies between the test and what looks."""

    def __init__(self, truth: bool, log: list[Any]) -> None:
        self.truth, self.log = truth, log

    def __bool__(self) -> bool:
        self.look(sys._getframe(1), False)
        return self.truth

    def look(self, frame: types.FrameType, is_item: bool) -> None:
        from autoshard.program.reads.conditions import condition_of

        found = condition_of(frame, is_item)
        self.log.append(None if found is None else [type(found.statement).__name__, ast.unparse(found.part), found.wanted(True), found.wanted(False),
                                                    found.decides, found.raises, found.clamped, found.fills])

    def _item(self, _: int) -> int:
        self.look(sys._getframe(1), True)
        return 1

    def _same(self, *_: Any) -> Value:
        return Value(self.truth, self.log)

    @property
    def item(self) -> Any:
        return partial(self._item, 0)

    def __setitem__(self, *_: Any) -> None:
        pass

    any = all = clamp = __gt__ = __lt__ = __eq__ = _same
    __hash__ = None


def found() -> list[list[Any]]:
    """Per form and truth: what is found in its first call, and in one when it is hot."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for i, form in enumerate(FORMS):
            file, made = str(Path(folder, f"form_{i}.py")), {}
            Path(file).write_text(f"def f(x, flag=True):\n    y = None\n{textwrap.indent(form, '    ')}\n")
            exec(compile(linecache.getline(file, 1) and Path(file).read_text(), file, "exec"), made)
            for truth in (True, False):
                calls = [_called(made["f"], truth) for _ in range(HOT)]
                out.append([form, truth, calls[0], calls[-1]])
    return out


def _called(function: Any, truth: bool) -> list[Any]:
    log: list[Any] = []
    try:
        function(Value(truth, log))
    except (ValueError, AssertionError):
        log.append("raises")
    return log


if __name__ == "__main__":
    for room in ("autoshard", "autoshard.program", "autoshard.program.reads"):  # what they import needs torch
        module = types.ModuleType(room)
        module.__path__ = [str(PACKAGE.joinpath(*room.split(".")[1:]))]
        sys.modules[room] = module
    print(json.dumps(found()))
