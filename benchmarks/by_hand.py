"""Hand-written plans as users know them: DistributedDataParallel, fully_shard, parallelize_module.

`PLANS` maps a name to a function (model, module, mesh, batch, loss) -> `Trained`, or to None where the model has no
such plan. `mesh` is a one-axis DeviceMesh; `batch` is the global one, which every rank has.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Trained:
    """A model and how to get its loss: of the rank's shard where `shards`, else of the global batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    shards: bool
    around: Callable[[], AbstractContextManager] = nullcontext


def shard(batch: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """This rank's part of dim 0."""
    return tuple(t.chunk(mesh.size())[mesh.get_local_rank()].contiguous() for t in batch)


def _loss(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable) -> Callable[[], Tensor]:
    return lambda: loss(model(*batch[:-1]), batch[-1])


def alone(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained:
    """The plain model on the whole batch."""
    return Trained(model, _loss(model, batch, loss), False)


def independent(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained:
    """The plain model on this rank's shard, with no communication: what no data-parallel plan can beat."""
    return Trained(model, _loss(model, shard(batch, mesh), loss), True)


def ddp(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained:
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    return Trained(wrapped, _loss(wrapped, shard(batch, mesh), loss), True)


def fsdp2(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained:
    """Every repeated block, then the rest; parameters gathered again for backward (ZeRO-3)."""
    for block in _blocks(model, kind):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trained(model, _loss(model, shard(batch, mesh), loss), True)


def tp(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained | None:
    """Megatron: heads and hidden units split, the vocabulary too."""
    return _tensor_parallel(TENSOR.get(kind), model, kind, mesh, batch, loss)


def tp_sp(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained | None:
    """Megatron with sequence parallelism: what lies between its layers is split along the sequence."""
    return _tensor_parallel(SEQUENCE.get(kind), model, kind, mesh, batch, loss)


def _tensor_parallel(styles: Callable[[], Mapping[str, Any]] | None, model: nn.Module, kind: str, mesh: DeviceMesh,
                     batch: tuple[Tensor, ...], loss: Callable) -> Trained | None:
    if styles is None:
        return None
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.forward = MethodType(ATTENTION[kind], module)
    parallelize_module(model, mesh, dict(styles()))
    if kind == "gpt":
        model.lm_head.weight = model.wte.weight
    split_logits = kind in ("gpt", "llama", "moe")
    return Trained(model, _loss(model, batch, loss), False, loss_parallel if split_logits else nullcontext)


def _blocks(model: nn.Module, kind: str) -> list[nn.Module]:
    """What fully_shard gathers at once: transformer or residual blocks; the layers of an MLP."""
    table = {"gpt": "h", "llama": "layers", "moe": "layers", "vit": "blocks", "resnet": "blocks", "mlp": "layers"}
    return list(getattr(model, table[kind]))


# --- attention on a part of the heads ---

def _gpt_attention(self: nn.Module, x: Tensor) -> Tensor:
    b, s, d = x.shape
    qkv = self.c_attn(x).view(b, s, -1, 3 * d // self.heads).transpose(1, 2)
    y = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1), is_causal=True)
    return self.c_proj(y.transpose(1, 2).reshape(b, s, -1))


def _llama_attention(self: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from models.llama import rotate

    b, s, _ = x.shape
    q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.wo(y.transpose(1, 2).reshape(b, s, -1))


def _moe_attention(self: nn.Module, x: Tensor) -> Tensor:
    b, s, d = x.shape
    q, k, v = (w(x).view(b, s, -1, d // self.heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.wo(y.transpose(1, 2).reshape(b, s, -1))


def _vit_attention(self: nn.Module, x: Tensor) -> Tensor:
    b, s, d = x.shape
    q, k, v = (w(x).view(b, s, -1, d // self.heads).transpose(1, 2) for w in (self.query, self.key, self.value))
    y = F.scaled_dot_product_attention(q, k, v)
    return self.output(y.transpose(1, 2).reshape(b, s, -1))


ATTENTION = {"gpt": _gpt_attention, "llama": _llama_attention, "moe": _moe_attention, "vit": _vit_attention}


class _ExpertHidden(ParallelStyle):
    """Batched expert weights [experts, in, out], hidden units split: columns of up and gate, rows of down."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, placement in (("up", Shard(2)), ("gate", Shard(2)), ("down", Shard(1))):
            weight = distribute_tensor(getattr(module, name).data, mesh, [placement])
            module.register_parameter(name, nn.Parameter(weight))
        module.register_forward_pre_hook(lambda m, args: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),))
        module.register_forward_hook(lambda m, args, out: out.redistribute(placements=[Replicate()]).to_local())
        return module


# --- styles by model ---

def _gpt_tensor() -> dict[str, ParallelStyle]:
    return {"wte": RowwiseParallel(input_layouts=Replicate()),
            "h.*.attn.c_attn": ColwiseParallel(), "h.*.attn.c_proj": RowwiseParallel(),
            "h.*.mlp.c_fc": ColwiseParallel(), "h.*.mlp.c_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(use_local_output=False)}


def _gpt_sequence() -> dict[str, ParallelStyle]:
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {**_gpt_tensor(),
            "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "h.*.ln_1": SequenceParallel(use_local_output=True), "h.*.ln_2": SequenceParallel(use_local_output=True),
            "ln_f": SequenceParallel(use_local_output=True),
            "h.*.attn": whole, "h.*.mlp": whole,
            "h.*.attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
            "h.*.mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


def _llama_tensor() -> dict[str, ParallelStyle]:
    columns = {f"layers.*.{name}": ColwiseParallel() for name in
               ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")}
    rows = {f"layers.*.{name}": RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
    return {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), **columns, **rows,
            "output": ColwiseParallel(use_local_output=False)}


def _llama_sequence() -> dict[str, ParallelStyle]:
    return {**_llama_tensor(),
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.attention_norm": SequenceParallel(use_local_output=True),
            "layers.*.ffn_norm": SequenceParallel(use_local_output=True), "norm": SequenceParallel(use_local_output=True),
            "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1), None, None),
                                                     desired_input_layouts=(Replicate(), None, None)),
            "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


def _moe_tensor() -> dict[str, ParallelStyle]:
    columns = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    return {"tokens": RowwiseParallel(input_layouts=Replicate()), **columns,
            "layers.*.attention.wo": RowwiseParallel(), "layers.*.moe.experts": _ExpertHidden(),
            "output": ColwiseParallel(use_local_output=False)}


def _vit_tensor() -> dict[str, ParallelStyle]:
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
    return {**columns, "blocks.*.attention.output": RowwiseParallel(), "blocks.*.down": RowwiseParallel()}


def _mlp_tensor() -> dict[str, ParallelStyle]:
    """Columns and rows in turn."""
    return {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "layers.2": ColwiseParallel(output_layouts=Replicate())}


TENSOR = {"gpt": _gpt_tensor, "llama": _llama_tensor, "moe": _moe_tensor, "vit": _vit_tensor, "mlp": _mlp_tensor}
SEQUENCE = {"gpt": _gpt_sequence, "llama": _llama_sequence}
PLANS = {"one": alone, "independent": independent, "ddp": ddp, "fsdp2": fsdp2, "tp": tp, "tp+sp": tp_sp}
