"""`t.data = value`, as momentum encoders and clipped weights are written: torch does it without an op, so a trace would go on with the old data.

And memory that buffers share after such an assignment, or after `self.a = self.b`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.program.tracing.tape import user_line


class AssignedData(TorchFunctionMode):
    """From then on a traced tensor has the memory of the value, with all that is written there later, as in eager mode. Views of the tensor that were
    made before keep the old memory, and so do gradients.

    refuse   raises an error with a text"""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self.refuse = refuse
        self._assigned: dict[int, torch.Tensor] = {}
        self._parameters: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {}
        self._values: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func != torch.Tensor.data.__set__ or not _torch.is_traced(args[0]):
            return func(*args, **(kwargs or {}))
        return self._assign(*args)

    def is_written(self, t: torch.Tensor) -> bool:
        """Whether a traced tensor was written in place, or its data assigned."""
        return self.has(t) or _torch.was_mutated(t)

    def has(self, t: torch.Tensor) -> bool:
        """Whether the data of a traced tensor was assigned, or set."""
        return id(t) in self._assigned or _torch.was_set(t.elem)

    def watch_parameters(self, twin: nn.Module, names: Iterable[str]) -> None:
        """Before the model runs: remember what it holds for its parameters (under a precision policy casts), which are such to its code."""
        for name in names:
            path, _, key = name.rpartition(".")
            table = twin.get_submodule(path)._parameters
            self._parameters[name] = table, key, table[key]
            table[key]._is_param = True  # what isinstance(t, nn.Parameter) asks for

    def parameters(self, twin: nn.Module, stored: Mapping[str, Any]) -> Iterator[str]:
        """Those that the model wrote: averages of others, as of a momentum encoder, and those that it keeps in bounds."""
        for name, (table, key, held) in self._parameters.items():
            self._values[name] = _torch.unwrap(held)
            if (now := table.get(key)) is not None and now is not held:
                self.refuse(f"the model puts another parameter in the place of its parameter {name!r}; write the numbers of the new one instead: "
                            "with torch.no_grad(): parameter.copy_(new)")
            if held is not stored[name] and self.is_written(held):
                self.refuse(f"the model writes into its parameter {name!r}, of which it has a copy in {held.dtype} under the precision policy; the "
                            "parameter itself would stay as it is, so write it outside of the model, between steps")
            if self.is_written(stored[name]):
                if self.has(stored[name]):
                    self.refuse_shared(name, stored[name], stored, dict(twin.named_buffers()))
                yield name

    def refuse_in_backward(self) -> None:
        """A recomputation writes what forward wrote once more, and eager mode keeps that; a program writes in forward alone."""
        for name, (_, _, held) in self._parameters.items():
            if _torch.unwrap(held) is not self._values[name]:
                self.refuse(f"backward writes into the parameter {name!r} of the model (torch.utils.checkpoint around code that writes it runs it "
                            "twice, or a hook does it); write it outside of the checkpoint or the hook")

    def refuse_shared(self, name: str, now: Any, stored: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """A buffer or parameter that the model assigns must not become the memory of a trained parameter, nor of another tensor that is written in
        place: in eager mode both are one from then on, and a compiled model keeps them apart. `stored`: parameters and buffers, as they were."""
        in_place = {n: t for n, t in stored.items() if n not in buffers and n != name and (t.requires_grad or _torch.was_mutated(t))}
        in_place |= {n: t for n, t in buffers.items() if n != name and (_torch.was_mutated(t) or _torch.was_mutated(now))}
        other = next((n for n, t in in_place.items() if _torch.storage_key(t.elem) == _torch.storage_key(now.elem)), None)
        if other is not None:
            kind = "buffer" if name in buffers else "parameter"
            self.refuse(f"the model makes {kind} {name!r} share the memory of {other!r}, so that what is written to one would change the other in "
                        f"later calls; give the {kind} a copy of its own (.clone())")

    def _assign(self, t: Any, value: Any) -> None:
        if (value.shape, value.dtype) != (t.shape, t.dtype):
            return self.refuse(f"an assignment to .data changes a tensor of shape {tuple(t.shape)} and {t.dtype} to shape {tuple(value.shape)} and "
                               f"{value.dtype}{user_line()}; give the new tensor a name of its own")
        if not _torch.is_traced(value):
            return self.refuse(f"an assignment to .data makes a tensor share the memory of a constant of the model{user_line()}; write its numbers "
                               "instead: tensor.copy_(constant)")
        with torch.no_grad():
            value = value.detach() if value.stride() == t.stride() else torch.empty_like(t).copy_(value)
        t.elem = value.elem
        self._assigned[id(t)] = t
