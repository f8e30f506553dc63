"""How every output of a model reaches its user: one mode for all, or one for each.

    replicate  whole on every rank
    dtensor    a DTensor, split as the plan has it
    local      this rank's piece of that, a plain tensor
    auto       the default: replicate; but a large tensor that a model returns beside a loss, logits for example, is a DTensor

Nobody who trains with the loss asks for the logits beside it, and to gather them may take longer than all else: 1 x 131,072 logits of a
vocabulary of 128,256 are 34 GB. A DTensor that nobody reads costs nothing, and `full_tensor()` gathers one that somebody does. What is
smaller than `LARGE` is whole: counts of right answers, logits of a few classes and of a first try come as from the model itself.
"""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.base.roles import Role
from autoshard.errors import UsageError

REPLICATE, DTENSOR, LOCAL, AUTO = "replicate", "dtensor", "local", "auto"
DEFAULT = AUTO
MODES = (AUTO, REPLICATE, DTENSOR, LOCAL)
LARGE = 2**24
"""Bytes from which "auto" leaves a tensor beside a loss split: gathering fewer takes less than a millisecond."""


def check_modes(text: str) -> None:
    """Raises UsageError for what is no mode, or no list of modes."""
    for word in text.split(","):
        if word not in MODES:
            raise UsageError(f"outputs={text!r}: {word!r} is not one of {', '.join(MODES)}; give one for all outputs, or one for each of them, "
                             "such as 'replicate,dtensor'")


def modes_of(graph: Graph, text: str) -> dict[int, str]:
    """The mode of every output by its number, "auto" decided. Of a pipeline's stage, and of micro-batches, whose results are put together, "auto" is
    "replicate". Raises UsageError where the list of modes is not as long as that of outputs."""
    outputs, words = graph.outputs(Role.USER), text.split(",")
    if len(words) == 1:
        words *= len(outputs)
    if len(words) != len(outputs) and not any(op.is_port for op in graph.ops):
        raise UsageError(f"outputs={text!r} names {len(words)} modes, and the model returns {len(outputs)} tensors; give one "
                         "for all, or one for each")
    beside = {name for name in beside_a_loss(graph) if graph.meta(outputs[name].refs[0]).nbytes >= LARGE}
    found = {name: words[name if len(words) > name else -1] for name in outputs}
    return {name: (DTENSOR if name in beside else REPLICATE) if word == AUTO else word for name, word in found.items()}


def beside_a_loss(graph: Graph) -> frozenset[int]:
    """Outputs that nothing is differentiated by, where another one is a loss."""
    differentiated = {op.target: op.outputs[0] for op in graph.of_kind("tangent")}
    if graph.microbatches > 1 or any(op.is_port for op in graph.ops) or not any(not m.shape for m in differentiated.values()):
        return frozenset()
    return frozenset(graph.outputs(Role.USER)) - differentiated.keys()
