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

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.by_hand_hybrid import average, deal_out_experts, deal_out_tables


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


def hybrid(model: nn.Module, kind: str, mesh: DeviceMesh, batch: tuple[Tensor, ...], loss: Callable) -> Trained | None:
    """Data parallel, with experts or embedding tables dealt out over the same ranks."""
    if kind not in DEALT or not DEALT[kind](model, mesh):
        return None
    own = [name for name, _ in model.named_parameters() if ".experts." in name or name.startswith("tables.")]
    average([model.get_parameter(name) for name in own])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    mine = shard(batch, mesh)
    if kind == "dlrm":
        mine = (mine[0], batch[1], mine[2])  # a table's rank looks the whole batch up
    return Trained(wrapped, _loss(wrapped, mine, loss), True)


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
    """What fully_shard gathers at once: transformer or residual blocks; the layers of an MLP; DLRM's two MLPs (its tables go
    with the rest, in one call)."""
    if kind == "dlrm":
        return [model.bottom, model.top]
    if kind == "t5":
        return [*model.encoder.blocks, *model.decoder.blocks]
    table = {"gpt": "h", "llama": "layers", "moe": "layers", "vit": "blocks", "resnet": "blocks", "mlp": "layers", "bert": "layers"}
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


def _bert_attention(self: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    b, s, d = x.shape
    q, k, v = (w(x).view(b, s, -1, d // self.heads).transpose(1, 2) for w in (self.query, self.key, self.value))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return self.output(y.transpose(1, 2).reshape(b, s, -1))


ATTENTION = {"bert": _bert_attention, "gpt": _gpt_attention, "llama": _llama_attention, "moe": _moe_attention, "vit": _vit_attention}


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


def _bert_tensor() -> dict[str, ParallelStyle]:
    """Heads and hidden units; the table of words, which the output layer reads too, stays whole."""
    columns = {f"layers.*.{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
    return {**columns, "layers.*.attention.output": RowwiseParallel(), "layers.*.down": RowwiseParallel()}


def _moe_sequence() -> dict[str, ParallelStyle]:
    """The router sees whole sequences: it fills slots in their order."""
    return {**_moe_tensor(),
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "layers.*.attention_norm": SequenceParallel(use_local_output=True),
            "layers.*.moe_norm": SequenceParallel(use_local_output=True), "norm": SequenceParallel(use_local_output=True),
            "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "layers.*.moe": PrepareModuleInputOutput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),),
                                                     use_local_input=True, output_layouts=(Replicate(),),
                                                     desired_output_layouts=(Shard(1),), use_local_output=True),
            "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


def _vit_sequence() -> dict[str, ParallelStyle]:
    """The last norm and the mean over patches see whole sequences."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)
    return {**_vit_tensor(),
            "patches": PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=True),
            "blocks.*.norm_1": SequenceParallel(use_local_output=True), "blocks.*.norm_2": SequenceParallel(use_local_output=True),
            "blocks.*.attention": whole, "norm": whole,
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(1))}


def _dlrm_tensor() -> dict[str, ParallelStyle]:
    """Tables by columns, whose gather moves half of what the sum of a split by rows moves; MLPs by columns and rows in turn."""
    pairs = {f"{mlp}.layers.{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel()
             for mlp, count in (("bottom", 2), ("top", 4)) for i in range(count)}
    return {"tables.*": ColwiseParallel(output_layouts=Replicate()), **pairs}


def _mlp_tensor() -> dict[str, ParallelStyle]:
    """Columns and rows in turn."""
    return {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "layers.2": ColwiseParallel(output_layouts=Replicate())}


TENSOR = {"gpt": _gpt_tensor, "llama": _llama_tensor, "moe": _moe_tensor, "vit": _vit_tensor, "bert": _bert_tensor, "mlp": _mlp_tensor, "dlrm": _dlrm_tensor}
SEQUENCE = {"gpt": _gpt_sequence, "llama": _llama_sequence, "moe": _moe_sequence, "vit": _vit_sequence}
DEALT = {"moe": deal_out_experts, "dlrm": deal_out_tables}
PLANS = {"one": alone, "independent": independent, "ddp": ddp, "fsdp2": fsdp2, "tp": tp, "tp+sp": tp_sp, "hybrid": hybrid}
