"""Table of constructs that cannot be part of one graph, and what to write instead."""
from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

aten = torch.ops.aten

READS = ("a number or truth value is read out of a tensor (.item(), .tolist(), float(), int(), `if` or `while` on a tensor, an index i without "
         "dims in x[:, i])",
         "keep it a tensor (h * h.max() instead of h * h.max().item(), x[:, i[None]] instead of x[:, i]), compute both branches and choose by "
         "torch.where, or compute it outside of the model and pass it as an input")
SELECTS = ("a selection whose length depends on data (indexing by a boolean mask, torch.nonzero, torch.where(condition), "
           "torch.masked_select)",
           "keep all elements and choose by torch.where(mask, x, 0) or x.masked_fill(~mask, 0); for a fixed number of the largest "
           "take torch.topk")
UNIQUE = ("torch.unique, whose result has a length that depends on data",
          "compute it outside of the model and pass the result as an input, or count into a tensor of a fixed length: "
          "torch.zeros(n).scatter_add(0, ids, ones)")
COUNTS = ("torch.bincount, whose result has a length that depends on data",
          "give the length as minlength=n, or count into a tensor of a fixed length: torch.zeros(n).scatter_add(0, ids, ones)")
REPEATS = ("torch.repeat_interleave by a tensor, whose result has a length that depends on data",
           "give the length: repeat_interleave(..., output_size=n)")
COMPARES = ("torch.equal or torch.allclose gives a bool of Python",
            "compare by tensor ops, as in ((a - b).abs() <= tolerance).all(), and choose by torch.where")
CTC = ("torch.nn.functional.ctc_loss, whose memory depends on the lengths of targets",
       "return the log-probabilities and compute the loss of what the compiled model returns, or make it a submodule (nn.CTCLoss as self.ctc) and "
       "pass fallback=\"replicate\"")
OTHER = ("a result depends on the data of a tensor",
         "replace Python control flow, .item(), .tolist() or boolean indexing on tensors by tensor ops such as torch.where")

ON_DATA = {
    aten._local_scalar_dense.default: READS,
    aten.is_nonzero.default: READS,
    aten.nonzero.default: SELECTS,
    aten.masked_select.default: SELECTS,
    aten._unique.default: UNIQUE,
    aten._unique2.default: UNIQUE,
    aten.unique_dim.default: UNIQUE,
    aten.unique_consecutive.default: UNIQUE,
    aten.unique_dim_consecutive.default: UNIQUE,
    aten.bincount.default: COUNTS,
    aten.repeat_interleave.Tensor: REPEATS,
    aten.equal.default: COMPARES,
    aten._ctc_loss.default: CTC,
    aten._ctc_loss.Tensor: CTC,
}
"""Op that fake tensors cannot run -> (what the user wrote, what to write instead)."""

OF_TORCH = {
    "torch/nn/modules/batchnorm.py": "BatchNorm with momentum=None divides by its counter of batches, which is data: give it a number, as in "
                                     "momentum=0.1",
}
"""Torch's own code that reads data -> what the user can do about it."""

BRANCHES = "compute both branches and choose by torch.where"
LOOPS = "write a Python loop over a fixed number of steps"
HIGHER_ORDER = {
    "cond": ("torch.cond", BRANCHES),
    "switch": ("torch.switch", BRANCHES),
    "while_loop": ("while_loop", LOOPS),
    "while_loop_stack_output": ("while_loop", LOOPS),
    "scan": ("scan", LOOPS),
    "associative_scan": ("associative_scan", "pass combine_mode=\"generic\", or write a Python loop over a fixed number of steps"),
    "map_impl": ("map", "call the function on the whole tensor, through torch.vmap or by broadcasting"),
    "flex_attention": ("flex_attention", "call torch.nn.functional.scaled_dot_product_attention with a mask"),
    "flex_attention_backward": ("flex_attention", "call torch.nn.functional.scaled_dot_product_attention with a mask"),
}
"""Ops of torch that take functions -> (their name, what to write instead)."""


def on_data(phase: str, where: str, op: Any = None, hint: str = "") -> str:
    """The message for an op whose result is the data of a tensor, or has a shape that depends on it."""
    what, way = ON_DATA.get(op, OTHER)
    at = f"\n  at {where}" if where else ""
    return (f"the {phase} pass depends on the data of a tensor, so it is not one graph: {what}{at}\n"
            f"  {hint or way}, or move that line out of the model")


def on_higher_order(name: str, where: str) -> str:
    """The message for an op that takes functions; "" for one that a trace goes through."""
    if name not in HIGHER_ORDER:
        return ""
    public, way = HIGHER_ORDER[name]
    at = f"\n  at {where}" if where else ""
    return (f"{public} is not supported: it runs functions of its own, which are not in the graph of the model{at}\n"
            f"  {way}, or move that line out of the model")


def hint_of(at: FrameType | TracebackType | None) -> str:
    """What is known of the code of torch that runs now, or that a traceback goes through."""
    return next((way for name in _files(at) for end, way in OF_TORCH.items() if name.endswith(end)), "")


def _files(at: FrameType | TracebackType | None) -> Iterator[str]:
    while at is not None:
        yield (at.tb_frame if isinstance(at, TracebackType) else at).f_code.co_filename
        at = at.tb_next if isinstance(at, TracebackType) else at.f_back
