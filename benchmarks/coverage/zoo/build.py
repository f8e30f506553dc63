"""A candidate as a small model with inputs on which one eager training step runs."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError
from autoshard.program.calling import Traced
from autoshard.program.trace import trace
from benchmarks.coverage.zoo.families import Candidate
from benchmarks.coverage.zoo.inputs import labels, proposals
from benchmarks.coverage.zoo.shrink import SCHEMES, Scheme, small_config

MOST_PARAMETERS = 60_000_000
UNCLEAR = "not an error of autoshard:"


class CannotBuild(Exception):
    """No small model, or none that runs one step by itself."""


@dataclass(frozen=True)
class Example:
    """A model and a call of it that gives a loss. `own_loss`: the model computes it; else it is the mean square
    of the outputs, compared with a target of zero, by `loss_fn`."""

    model: nn.Module
    inputs: Mapping[str, Any]
    scheme: str
    own_loss: bool

    @property
    def args(self) -> tuple[Any, ...]:
        return () if self.own_loss else (torch.zeros(()),)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        return None if self.own_loss else mean_square


def traced_variant(example: Example) -> tuple[Example, Traced | None, str]:
    """The first variant of the example that traces, and why the example itself does not."""
    refused = ""
    for variant in variants(example):
        try:
            return variant, trace(variant.model, variant.args, variant.inputs, loss_fn=variant.loss_fn), refused
        except Exception as e:
            refused = refused or reason(e)
    return example, None, refused


def reason(e: BaseException) -> str:
    return " ".join(str(e).split())[:600] if isinstance(e, AutoshardError) else f"{UNCLEAR} {short(e)}"


def variants(example: Example) -> tuple[Example, ...]:
    """The example; with masks of ones where the model takes them and would else look at the data, or at whether it is
    being compiled; without its own loss."""
    masked = with_masks(example)
    found = (example,) if masked is None else (example, masked)
    return found + tuple(without_loss(e) for e in found if e.own_loss)


def with_masks(example: Example) -> Example | None:
    """The same call with attention masks of ones; None where there are none, or the model does not run with them."""
    accepted = inspect.signature(example.model.forward).parameters
    masks = {mask: torch.ones_like(example.inputs[ids]) for ids, mask in
             (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask"))
             if ids in example.inputs and mask in accepted and mask not in example.inputs}
    masked = replace(example, inputs={**example.inputs, **masks})
    return masked if len(masked.inputs) > len(example.inputs) and stopped(masked) is None else None


def without_loss(example: Example) -> Example:
    """The same call with the loss outside of the model."""
    inputs = {k: v for k, v in example.inputs.items() if "label" not in k and k not in ("start_positions", "end_positions", "return_loss")}
    return replace(example, inputs=inputs, own_loss=False)


def mean_square(out: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss for models without one: the mean square of every floating output."""
    parts = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
    return sum((t.float() - target).square().mean() for t in parts)


def build(candidate: Candidate, schemes: Sequence[Scheme] = SCHEMES) -> Example:
    """Raises CannotBuild with the first obstacle of the scheme that came furthest."""
    obstacles: list[tuple[int, str]] = []
    for scheme in schemes:
        try:
            return _build(candidate, scheme)
        except _Stopped as e:
            obstacles.append((e.stage, f"{e.what} (sizes: {scheme.name})"))
    raise CannotBuild(max(obstacles, key=lambda o: o[0])[1])


class _Stopped(Exception):
    def __init__(self, stage: int, what: str) -> None:
        super().__init__(what)
        self.stage, self.what = stage, what


def _build(candidate: Candidate, scheme: Any) -> Example:
    model_class = getattr(transformers, candidate.class_name)
    try:
        config = small_config(transformers.CONFIG_MAPPING[candidate.model_type], scheme)
    except Exception as e:
        raise _Stopped(0, f"config: {short(e)}") from None
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
    except Exception:  # some models compute in their constructor: they are built straight away
        size = 0
    if size > MOST_PARAMETERS:
        raise _Stopped(1, f"too large: {size:,} parameters")
    try:
        model = model_class(config).float().train()
    except Exception as e:
        raise _Stopped(1, f"model: {short(e)}") from None
    return _with_inputs(model, config, scheme)


def _with_inputs(model: nn.Module, config: Any, scheme: Any) -> Example:
    first = None
    forward = inspect.signature(model.forward).parameters
    base = {"return_dict": True} if "return_dict" in forward else {}
    for inputs in proposals(model, config):
        try:
            with torch.no_grad():
                model(**inputs, **base)
        except Exception as e:
            first = first or short(e)
            continue
        for own in (*labels(model, config, inputs), None):
            given = {**inputs, **(own or {})}
            if "return_loss" in forward:
                given["return_loss"] = True
            example = Example(model, given, scheme.name, own is not None or "return_loss" in given)
            why = stopped(example)
            if why is None:
                return example
            first = first or why
            if not example.own_loss or "return_loss" not in given:
                continue
            given.pop("return_loss")
    raise _Stopped(2, f"run: {first or 'no inputs known for ' + ', '.join(forward)}")


def eager_step(example: Example) -> torch.Tensor:
    """The loss, after its backward."""
    out = example.model(**example.inputs)
    loss = out["loss"] if example.own_loss else mean_square(out, example.args[0])
    loss.sum().backward()
    return loss.detach()


def stopped(example: Example) -> str | None:
    """Why the example is no training step, or None."""
    try:
        loss = eager_step(example)
    except Exception as e:
        return short(e)
    grads = [p.grad for p in example.model.parameters() if p.grad is not None]
    example.model.zero_grad()
    if loss.numel() != 1 or not bool(torch.isfinite(loss)):
        return f"the loss is {loss.tolist()}"
    if not any(bool(g.abs().max() > 0) for g in grads if g.numel()):
        return "no parameter gets a gradient"
    return None if all(bool(torch.isfinite(g).all()) for g in grads) else "a gradient is not finite"


def short(e: BaseException) -> str:
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:300]}"
