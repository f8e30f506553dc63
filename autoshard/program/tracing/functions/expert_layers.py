"""Layers of experts that a trace takes as one op: those of transformers, whichever of its loops over experts they are set to.

Sorting tokens and calling grouped matmuls op by op needs all tokens in one place; as one op (experts/ops.py) the layer has strategies in
which tokens stay split and travel. A module is such a layer if it has transformers' interface of experts and computes what the op does:
no biases, matrices as `nn.Linear` has them, its default gate, an activation that is known. Others are traced op by op.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard.experts.activations import ACTIVATIONS
from autoshard.experts.ops import EXPERTS

LOOPS = ("grouped_mm", "batched_mm", "eager")
"""transformers' own loops, which give the same numbers; others are kernels that somebody asked for."""


def forward_as_op(module: nn.Module, capacity: float) -> Callable[..., Any] | None:
    """A forward for `module` that is one op; None for what is no such layer."""
    if "forward" in vars(module) or not _has_interface(module):
        return None
    activation = _name_of(module.act_fn)
    up = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    if activation is None or not all(isinstance(w, torch.Tensor) and w.dim() == 3 for w in (up, module.down_proj)):
        return None
    own, gated = module.forward, module.has_gate

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if any(t.dim() != 2 for t in (hidden_states, top_k_index, top_k_weights)):
            return own(hidden_states, top_k_index, top_k_weights)
        weights = module.gate_up_proj if gated else module.up_proj
        return EXPERTS(hidden_states, top_k_index, top_k_weights, weights, module.down_proj, activation, gated, capacity)[0]

    return forward


def _has_interface(module: nn.Module) -> bool:
    library = sys.modules.get("transformers.integrations.moe")
    if library is None or not all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_bias", "down_proj", "act_fn")):
        return False
    plain = not (module.is_transposed or module.has_bias or module.has_post_expert_norm or module._is_expert_parallel)
    gate = not module.has_gate or module.is_concatenated and type(module)._apply_gate is library._default_apply_gate
    return plain and gate and getattr(module.config, "_experts_implementation", None) in LOOPS


def _name_of(act: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The known activation that gives what `act` gives."""
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        return None
    with _torch.no_modes(), torch.no_grad():
        x = torch.linspace(-6, 6, 97, dtype=torch.float64)
        try:
            made = act(x)
        except (RuntimeError, TypeError, ValueError):  # it wants something else than numbers of any shape
            return None
        if not isinstance(made, torch.Tensor) or made.shape != x.shape:
            return None
        return next((name for name, known in ACTIVATIONS.items() if torch.allclose(made, known.run(x), 1e-12, 1e-12)), None)
