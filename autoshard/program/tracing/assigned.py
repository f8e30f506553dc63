"""Attributes that a model's forward assigns. They are Python's, and a program has tensors alone: what the trace saw holds in all calls."""
from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

log = logging.getLogger("autoshard")
COMPARED = (bool, int, float, str, type(None), torch.Tensor)
State = dict[str, Any]


def attributes(model: nn.Module) -> State:
    """Numbers, texts, None and tensors that modules have as attributes, by path; and how long lists and tables are."""
    out: State = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, (list, dict)):
                out[f"{path}.{name}".lstrip(".")] = len(value)
            elif isinstance(value, COMPARED):
                out[f"{path}.{name}".lstrip(".")] = value
    return out


def tell_of_assigned(before: State, after: State) -> None:
    """A warning with what a forward between the two assigned."""
    changed = [name for name, value in after.items() if name not in before or not _same(before[name], value)]
    if changed:
        log.warning("forward assigns %s: calls of the compiled model do not, and go on with what was there at the trace. Make what is carried "
                    "from call to call a buffer and write into it (self.count.add_(1)); return what is read outside", ", ".join(changed[:5])
                    + (f" and {len(changed) - 5} more" if len(changed) > 5 else ""))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return type(a) is type(b) and (a == b or a != a and b != b)
