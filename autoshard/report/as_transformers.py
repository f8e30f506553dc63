"""A plan in the words of transformers: a style per module (`tp_plan`), and what these words cannot say."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from autoshard.base.plan import PlacedTensor, Plan
from autoshard.base.spec import R, split_by
from autoshard.seeds.from_transformers import PACKED, generic

IN_PARTS = -2
"""In place of a dim: two parts of dim 0, each split."""


@dataclass(frozen=True)
class TransformersPlan:
    """`tp_plan`: style by module, to be given to `from_pretrained` with `DistributedConfig(tp_plan=...)`; `unsaid`: a sentence for each thing
    of the plan that is not in it."""

    tp_plan: Mapping[str, str]
    unsaid: tuple[str, ...] = ()


def transformers_plan(plan: Plan, model: nn.Module, axis: str | None = None) -> TransformersPlan:
    """How `plan` splits the model's weights over one mesh axis (default: the last), as a `tp_plan`.

    Styles speak of linear layers and embeddings, and of all layers of a list alike; what is split in another way, or over other axes (those
    are DDP's and FSDP's), is said in `unsaid`. The plan must be one of this model; raises MeshError for an axis that its mesh lacks."""
    a, fine = plan.mesh.index(axis or plan.mesh.names[-1]), plan.spec_mesh
    said = [replace(x, spec=spec) for x in plan.layouts if (spec := fine.as_whole(x.spec)) is not None]  # a style is about all of an axis
    weights = {x.name: x for x in said if x.kind == "weight"}
    leaving = {x.module: x for x in said if x.kind == "activation"}
    found: dict[str, dict[str, str]] = {}
    unsaid: dict[str, None] = {}
    for path, module in model.named_modules():
        for said, line in _styles(path, module, weights, leaving, a):
            if line:
                unsaid[line] = None
            else:
                found.setdefault(generic(path), {})[path] = said
    for key, styles in list(found.items()):
        if len(set(styles.values())) > 1:
            each = ", ".join(f"{path} is {style or 'whole'}" for path, style in styles.items())
            unsaid[f"{each}; a style holds for all layers"] = None
            del found[key]
    others = [n for i, n in enumerate(plan.mesh.names) if i != a and any(x.spec[i] != R for x in weights.values())]
    unsaid |= {f"weights are split over {n} too, which is FSDP's part there": None for n in others}
    return TransformersPlan({key: style for key, styles in found.items() for style in set(styles.values()) if style}, tuple(unsaid))


def _styles(path: str, module: nn.Module, weights: Mapping[str, PlacedTensor], leaving: Mapping[str, PlacedTensor],
            a: int) -> Iterator[tuple[str, str]]:
    """(style, "") of a module with parameters of its own, "" for one that is whole; or ("", why there is none)."""
    own = {name: weights[f"{path}.{name}".lstrip(".")] for name, _ in module.named_parameters(recurse=False)
           if f"{path}.{name}".lstrip(".") in weights}
    dims = {name: _tensor_dim(x, module.get_parameter(name).shape, a) for name, x in own.items()}
    if not own:
        return
    if all(d is None for d in dims.values()):
        yield "", ""
        return
    kind = "embedding" if isinstance(module, nn.Embedding) else "linear" if isinstance(module, nn.Linear) else ""
    style = {("linear", 0): "colwise", ("linear", 1): "rowwise", ("linear", IN_PARTS): "packed_colwise", ("embedding", 0): "embedding_rowwise",
             ("embedding", 1): "embedding_colwise"}.get((kind, dims.get("weight", -1)), "")
    if not style or dims.get("bias", None) != (dims["weight"] if style.endswith("colwise") and "bias" in own else None):
        shown = ", ".join(f"{name} {_in_words(d)}" for name, d in dims.items())
        yield "", f"{generic(path)} ({type(module).__name__}): {shown}, for which there is no style"
        return
    out = leaving.get(path)
    yield "colwise_gather_output" if style == "colwise" and out is not None and out.spec[a] == R else style, ""


def _in_words(dim: int | None) -> str:
    return "whole" if dim is None else f"split along dim {dim}" if dim >= 0 else "split along each part of a dim"


def _tensor_dim(weight: PlacedTensor, shape: tuple[int, ...], a: int) -> int | None:
    """The dim of the tensor that a weight is split along on mesh axis `a`; None: whole; IN_PARTS: along both parts of dim 0; -1: along each part of
    another dim, or of more parts."""
    place = split_by(weight.spec[a])
    if place < 0:
        return None
    logical, dim, at = list(weight.shape), 0, 0
    for size in shape:
        begin, product = at, 1
        while at < len(logical) and (product < size or at == begin):
            product *= logical[at]
            at += 1
        if begin <= place < at:
            return dim if place == begin else IN_PARTS if (dim, place, logical[begin]) == (0, begin + 1, PACKED) else -1
        dim += 1
    return -1
