"""What a model's forward does in Python: attributes that it assigns, numbers that it draws. A program has tensors alone: what the trace saw holds in
all calls."""
from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch import nn

log = logging.getLogger("autoshard")
COMPARED = (bool, int, float, str, type(None), torch.Tensor)
MADE_FROM = ("_orig", "_g")
"""What torch's spectral_norm, prune and weight_norm append to the name of the parameter that they make an attribute from, before every call."""
State = dict[str, Any]


def state_of(model: nn.Module) -> tuple[State, State]:
    """Attributes of the modules, and generators."""
    return _attributes(model), _generators()


def tell_of_changes(before: tuple[State, State], after: tuple[State, State]) -> None:
    """A warning for each kind of what a forward between the two changed."""
    _tell_of_assigned(before[0], after[0])
    _tell_of_draws(before[1], after[1])


def _attributes(model: nn.Module) -> State:
    """Numbers, texts, None and tensors that modules have as attributes, by path; and how long lists and tables are."""
    out: State = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training" or any(name + end in module._parameters for end in MADE_FROM):
                continue
            if isinstance(value, (list, dict)):
                out[f"{path}.{name}".lstrip(".")] = len(value)
            elif isinstance(value, COMPARED):
                out[f"{path}.{name}".lstrip(".")] = value
    return out


def _tell_of_assigned(before: State, after: State) -> None:
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


def _generators() -> State:
    """States of the generators that are not torch's."""
    _, numbers, at, *_ = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (numbers.tobytes(), at)}


def _tell_of_draws(before: State, after: State) -> None:
    """A warning where a forward between the two drew numbers."""
    drawn = [name for name, state in after.items() if state != before[name]]
    if drawn:
        log.warning("forward draws from %s: calls of the compiled model do not, and go on with what was drawn at the trace, as with the same layers "
                    "dropped in every step. Draw with torch what is applied to tensors (torch.rand(()), dropout); draw before the call what decides "
                    "which layers run, and pass it to the model: each value is then a program of its own", " and ".join(drawn))
