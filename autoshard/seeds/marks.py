"""Marks in a model: `autoshard.annotate`, and the two sides of a user collective.

A mark is an op of the graph: an identity that fixes the spec of its value and of the value's gradient."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.graph import Graph, Op
from autoshard.seeds.grammar import seed_text
from autoshard.seeds.user_placements import FREE, gradient_of

MARKER = "autoshard.annotate.default"


@torch.library.custom_op("autoshard::annotate", mutates_args=())
def _marked(x: torch.Tensor, spec: str, group: str = "") -> torch.Tensor:
    """With a `group`, a mark of the model's own collective: `spec` is the placement on the group's mesh axis alone."""
    return x.clone()


@_marked.register_fake
def _(x: torch.Tensor, spec: str, group: str = "") -> torch.Tensor:
    return torch.empty_like(x)


def _keep_spec(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.spec, ctx.group = inputs[1:]


def _mark_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    if ctx.group and ctx.spec == FREE:
        return gradient, None, None
    spec = gradient_of(ctx.spec) if ctx.group else ctx.spec
    return torch.ops.autoshard.annotate(gradient, spec, ctx.group), None, None


_marked.register_autograd(_mark_gradient, setup_context=_keep_spec)


def annotate(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """Fix how an activation lies on the mesh, in the model itself: `x = autoshard.annotate(x, ("dp", None, "tp"))`.

    Returns `x` untouched where the model runs without autoshard. While it is traced, the value and its gradient are held
    in `spec` (see docs/seeds.md). Raises SeedError for something that is no spec."""
    text = seed_text(spec)
    return torch.ops.autoshard.annotate(x, text) if _torch.is_traced(x) or torch.compiler.is_compiling() else x


def marks_of(module: str, marks: Mapping[str, str], params: Iterable[str]) -> list[str]:
    """The texts of `marks` whose key names a module and no parameter; `*` stays within one part of a path."""
    return [text for key, text in marks.items() if ":" not in key and key.count(".") == module.count(".")
            and fnmatchcase(module, key) and not any(fnmatchcase(p, key) for p in params)]


def marks(graph: Graph) -> tuple[Op, ...]:
    """The ops that `annotate` left, and the model's own collectives."""
    return tuple(op for op in graph.of_kind("call") if str(op.target) == MARKER)


def given_group(op: Op) -> str:
    """The group of a mark that a collective of the model left; "" for other marks."""
    return op.args[2] if len(op.args) > 2 else ""


def is_user_collective(op: Op) -> bool:
    """Whether the op is such a mark."""
    return op.kind == "call" and str(op.target) == MARKER and bool(given_group(op))


def calls_collectives(graph: Graph) -> bool:
    """Whether the model calls collectives itself."""
    return any(map(is_user_collective, marks(graph)))
