"""Dropout between the layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`.

torch's decomposition of these ops (torch 2.13, `_rnn_helper`) asks for `num_layers < i - 1`, which no layer is, and so drops nothing: a trace would
train without dropout. While a model is traced, such a call therefore becomes a call for each layer, with a dropout between, in the order in which
torch draws.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RecurrentDropout(TorchFunctionMode):
    """Calls recurrent layers one by one where dropout stands between them."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in RECURRENT and not kwargs and len(args) == 9 and _drops(*args):
            return _layers(func, *args)
        return func(*args, **(kwargs or {}))


def _drops(input: Tensor, start: Any, weights: Any, biases: Any, layers: Any, p: Any, training: Any, *rest: Any) -> bool:
    """Of packed sequences, which a trace refuses, the second argument is a tensor and the third their state."""
    plain = isinstance(weights, Sequence) and all(isinstance(w, Tensor) for w in weights)
    return plain and isinstance(layers, int) and layers > 1 and bool(p) and bool(training)


def _layers(func: Any, x: Tensor, start: Any, weights: Sequence[Tensor], biases: bool, layers: int, p: float, training: bool,
            both_ways: bool, batch_first: bool) -> tuple[Tensor, ...]:
    several = isinstance(start, Sequence)
    states, rows, count, ends = start if several else (start,), 2 if both_ways else 1, len(weights) // layers, []
    x = x.transpose(0, 1) if batch_first else x
    for i in range(layers):
        own = tuple(s.narrow(0, i * rows, rows) for s in states)
        x, *end = func(x, own if several else own[0], weights[i * count:(i + 1) * count], biases, 1, 0.0, training, both_ways, False)
        ends.append(end)
        x = torch.dropout(x, p, True) if i < layers - 1 else x
    return x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*ends, strict=True))
