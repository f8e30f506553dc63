"""Tiny models of transformers with layers of experts, at unfriendly sizes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.space.cost_table import CostTable, build_cost_table
from autoshard.space.strategies import StrategySet

COMMON = {"vocab_size": 251, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 16, "use_cache": False,
          "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "experts_implementation": "batched_mm"}
"""torch's grouped matmul has no float64: as a model of its own, each gathers its experts' weights there."""


def mixtral(experts: int = 4, **more: Any) -> nn.Module:
    import transformers as tf

    return tf.MixtralForCausalLM(tf.MixtralConfig(**COMMON, num_key_value_heads=3, intermediate_size=20, num_local_experts=experts, **more))


def qwen3_moe(experts: int = 8, **more: Any) -> nn.Module:
    import transformers as tf

    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**COMMON, head_dim=4, num_key_value_heads=2, intermediate_size=20, moe_intermediate_size=12,
                                                    num_experts=experts, num_experts_per_tok=3, norm_topk_prob=True, **more))


def deepseek_v3(experts: int = 8, **more: Any) -> nn.Module:
    """A dense layer, then one of experts: two groups of them, of which a token goes to one; a shared expert; a bias for the choice."""
    import transformers as tf

    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **COMMON, num_key_value_heads=6, intermediate_size=20, moe_intermediate_size=12, n_routed_experts=experts, n_group=2, topk_group=1,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=4, **more))


class Exact(nn.Module):
    """Two layers of transformers' Mixtral experts behind routers of our own, all of it in the dtype of its weights, which none of the others is."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = _mixtral_config(experts)
        self.embed, self.head = nn.Embedding(251, 24), nn.Linear(24, 251)
        self.routers = nn.ModuleList(nn.Linear(24, experts) for _ in range(2))
        self.experts = nn.ModuleList(MixtralExperts(config) for _ in range(2))
        for layer in self.experts:
            for weight in layer.parameters():
                nn.init.normal_(weight, std=0.2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for router, layer in zip(self.routers, self.experts, strict=True):
            flat = nn.functional.layer_norm(x, (24,)).flatten(0, 1)
            best = router(flat).softmax(-1).topk(2)
            x = x + layer(flat, best.indices, best.values / best.values.sum(-1, keepdim=True)).view(x.shape)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Block(nn.Module):
    """A layer of `InStages`: norm, router, experts of Mixtral."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        self.norm, self.router, self.experts = nn.LayerNorm(24), nn.Linear(24, experts), MixtralExperts(_mixtral_config(experts))
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        best = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, best.indices, best.values / best.values.sum(-1, keepdim=True)).view(x.shape)


class InStages(nn.Module):
    """As `Exact`, in blocks that stages may begin at, and without a loss: ids (rows, positions) -> logits (rows x positions, 251)."""

    def __init__(self, experts: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(251, 24), nn.ModuleList(Block(experts) for _ in range(layers)), nn.Linear(24, 251)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def _mixtral_config(experts: int) -> Any:
    import transformers as tf

    config = tf.MixtralConfig(**COMMON, num_key_value_heads=3, intermediate_size=20, num_local_experts=experts)
    config._experts_implementation = "batched_mm"
    return config


def travelling(table: CostTable) -> CostTable:
    """The table in which layers of experts have those strategies alone in which tokens travel, where there are any."""
    strategies = that_travel(table.strategies)
    return replace(build_cost_table(table.graph, table.mesh, table.cluster, strategies, table.training), seeds=table.seeds)


def that_travel(strategies: Mapping[str, StrategySet]) -> dict[str, StrategySet]:
    """The strategies of such tables. Equal sets stay one object."""
    made: dict[int, StrategySet] = {}
    return {name: made.setdefault(id(found), _that_travel(found)) for name, found in strategies.items()}


def _that_travel(found: StrategySet) -> StrategySet:
    if found.call is None or found.call.target not in (EXPERTS, EXPERTS_BACKWARD) or found.picked is None:
        return found
    travels = np.array([any(c.kind == "all_to_all_rows" for c in row.inner) for row in found.rows])[found.picked].any(axis=1)
    return found.keep(travels) if travels.any() else found


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "exact": Exact}


def build(name: str, batch: int = 4, seq: int = 8, **more: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import transformers as tf

    tf.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = MODELS[name](**more)
    return model, (torch.randint(1, 251, (batch, seq)),)
