"""The module tree a user sees: same names, same tensors, but only the root can be called."""
from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from autoshard.errors import UsageError

HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
         "register_full_backward_pre_hook")


class Refusal:
    """Stands for something that a part of a compiled model does not do."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(self.message)


def shell(module: nn.Module, path: str = "", seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """A twin of `module` that shares its parameter and buffer tables and refuses to run. Modules that occur
    twice have one twin."""
    seen = {} if seen is None else seen
    if id(module) in seen:
        return seen[id(module)]
    twin = object.__new__(type(module))
    seen[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {name: None if child is None else shell(child, f"{path}.{name}".lstrip("."), seen)
                                 for name, child in module._modules.items()}
    twin.__dict__["forward"] = Refusal(
        f"submodule {path!r} of a compiled model cannot be called: its ops are part of one graph. Call the whole model, or "
        "keep the original model for that")
    for hook in HOOKS:
        twin.__dict__[hook] = Refusal(f"{hook} on {path!r}: submodules of a compiled model are never called, so the hook would "
                                      "never run. Register it on the compiled model or before compile()")
    return twin


Plain = tuple[tuple[Mapping[str, Any], str, int], ...]
"""Attributes of the modules that a user sees: where each is, its name, and the module's place in `modules()`."""
PLAIN = (bool, int, float, str, type(None))


def plain_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Names and values of its attributes that are numbers, texts or None."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, PLAIN) and not name.startswith("_")]


def plain_attributes(compiled: nn.Module, root: nn.Module) -> Plain:
    """Every attribute of a module that is a number, a text or None, as a dropout's `p`: a trace may depend on it, and a user may change
    it between two calls. Those of the root may be set on the compiled model, which has names of its own."""
    own = {*vars(compiled), "training", "call_super_init"}
    out: list[tuple[Mapping[str, Any], str, int]] = []
    for i, module in enumerate(root.modules()):
        values: Mapping[str, Any] = vars(module) if i else ChainMap(vars(compiled), vars(root))
        out += [(values, name, i) for name, _ in plain_of(module) if not (name in own and i == 0) and name != "training"]
    return tuple(out)


def hand_on(plain: Plain, program: nn.Module) -> None:
    """Give the modules of `program`, which is traced, the attributes that the user's have by now."""
    modules = list(program.modules())
    for values, name, i in plain:
        modules[i].__dict__[name] = values.get(name)
