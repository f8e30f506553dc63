"""The parallel plans that models of transformers bring along, in our words: placements of parameters as seeds, cuts of a pipeline.

Such a model names per module a style (`tp_plan`, and `ep_plan` for experts): {"model.layers.*.mlp.up_proj": "colwise"}. `*` stands
for the number of a layer; an entry for a parameter comes before one for its module. Of a style only how it stores parameters is a seed; what its
hooks do with activations follows from that, and the search or propagation may find something cheaper. Only public attributes are read."""
from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.base.mesh import Mesh, mesh_of
from autoshard.errors import UsageError
from autoshard.seeds.grammar import Seed

log = logging.getLogger("autoshard")

WHOLE = "whole"
STYLES: Mapping[str, tuple[int | str, int | str]] = {
    "colwise": (-2, -1), "colwise_rep": (-2, -1), "colwise_gather_output": (-2, -1),
    "rowwise": (-1, WHOLE), "rowwise_rep": (-1, WHOLE), "rowwise_split_input": (-1, WHOLE),
    "embedding_rowwise": (0, WHOLE), "embedding_colwise": (1, WHOLE),
    "packed_colwise": (-2, -1), "packed_rowwise": (-1, WHOLE),
    "grouped_gemm": (0, 0),
    **dict.fromkeys(("sequence_parallel", "replicated_with_grad_allreduce", "replicate", "all_reduce", "local_params", "mla_kv_a_proj",
                     "moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts"), (WHOLE, WHOLE)),
}
"""Style -> the dim that is split of parameters with more than one dim, and of those with one (biases). As in transformers 5.23,
distributed/tensor_parallel.py and expert_parallel.py."""
PACKED = 2
"""Parts of a fused weight that a packed style splits one by one. A seed on such a dim does that too, where the trace finds the parts."""


@dataclass(frozen=True)
class HandPlan:
    """A model's own plan. `seeds` by glob over names of parameters; `unsaid`: what has no words here, or does not divide, a
    sentence each; it is left to the search."""

    seeds: Mapping[str, Seed]
    unsaid: tuple[str, ...] = ()


def transformers_seeds(model: nn.Module, mesh: Any, axis: str | None = None, kind: str = "tp") -> dict[str, Seed]:
    """Seeds that hold parameters as the model's own plan has them: `autoshard.plan(model, mesh, ..., seeds=transformers_seeds(model, mesh))`.

    axis   the mesh axis to split over; default: the last one
    kind   "tp" for its tensor-parallel plan, "ep" for that of its experts

    What has no words here is logged as a warning and left to the search. Raises UsageError for a model without such a plan,
    MeshError for an axis that the mesh lacks."""
    found = hand_plan(model, mesh_of(mesh), axis, kind)
    for line in found.unsaid:
        log.warning("%s's own plan: %s", type(model).__name__, line)
    return dict(found.seeds)


def transformers_cuts(model: nn.Module, stages: int) -> tuple[str, ...]:
    """Where transformers would cut the model into pipeline stages: `Pipeline(cuts=transformers_cuts(model, 2), ...)`. As many layers in each,
    and the rest in the last one. Raises UsageError for a model without a pipeline plan, or with fewer layers than stages."""
    plan = _plan_of(model, "pp")
    paths = [path for path in plan if isinstance(_submodule(model, path), nn.ModuleList)]
    if len(paths) != 1:
        raise UsageError(f"the pipeline plan of {type(model).__name__} has {len(paths)} lists of layers ({', '.join(paths) or 'none'}); name the "
                         "cuts yourself: Pipeline(cuts=['model.layers.2'])")
    layers = len(_submodule(model, paths[0]))
    if not 1 <= stages <= layers:
        raise UsageError(f"{paths[0]} has {layers} layers, which are no {stages} stages")
    return tuple(f"{paths[0]}.{stage * (layers // stages)}" for stage in range(1, stages))


def hand_plan(model: nn.Module, mesh: Mesh, axis: str | None = None, kind: str = "tp", others_whole: bool = False) -> HandPlan:
    """See `transformers_seeds`. `others_whole`: parameters that the plan does not name are whole on every rank, as transformers has them."""
    axis = axis or mesh.names[-1]
    ranks, plan = mesh.sizes[mesh.index(axis)], _plan_of(model, kind)
    seeds: dict[str, Seed] = {}
    unsaid: dict[str, None] = {}
    for name, p in model.named_parameters():
        entry = _entry(name, plan)
        if entry is None and not others_whole:
            continue
        dim, problem = _split(plan[entry], p, ranks) if entry is not None else (None, "")
        if problem:
            unsaid[f"{generic(name)} of shape {tuple(p.shape)} is {plan[entry]!r}: {problem}"] = None
            continue
        spec = tuple(axis if d == dim else None for d in range(p.ndim))
        said = "not in the model's plan" if entry is None else f"{entry!r}: {plan[entry]!r} of the model's {kind}_plan"
        seeds[generic(name)] = Seed(spec, said)
    return HandPlan(seeds, tuple(unsaid))


def generic(name: str) -> str:
    """`"model.layers.3.mlp.up_proj.weight"` -> `"model.layers.*.mlp.up_proj.weight"`: as transformers names layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def has_plan(model: nn.Module, kind: str = "tp") -> bool:
    """Whether the model brings such a plan."""
    return bool(getattr(model, f"{kind}_plan", None))


def _plan_of(model: nn.Module, kind: str) -> Mapping[str, Any]:
    if kind not in ("tp", "ep", "pp"):
        raise UsageError(f"kind={kind!r} is not one of tp, ep")
    if not has_plan(model, kind):
        has = [k for k in ("tp", "ep", "pp") if has_plan(model, k)]
        raise UsageError(f"{type(model).__name__} has no {kind}_plan" + (f"; it has {', '.join(f'{k}_plan' for k in has)}" if has else
                         "; plan it without these seeds, the search finds the splits itself"))
    plan: Mapping[str, Any] = getattr(model, f"{kind}_plan")
    return plan


def _entry(name: str, plan: Mapping[str, Any]) -> str | None:
    """The key of the plan that a parameter goes by: its own, else its module's."""
    own = generic(name)
    return next((key for key in (own, own.rpartition(".")[0]) if key in plan), None)


def _split(style: str, p: nn.Parameter, ranks: int) -> tuple[int | None, str]:
    """The dim that a style splits (None: whole), or why that cannot be said."""
    if style not in STYLES:
        return None, "an unknown style; left to the search"
    dim = STYLES[style][0 if p.ndim > 1 else 1]
    if isinstance(dim, str):
        return None, ""
    dim %= p.ndim
    if p.shape[dim] % (ranks * (PACKED if style.startswith("packed") else 1)):
        return None, f"{p.shape[dim]} does not divide over {ranks} ranks; left to the search"
    return dim, ""


def _submodule(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
