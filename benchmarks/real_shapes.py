"""Models as transformers ships them, at their real widths and vocabularies: what tensor parallelism splits, and what stays whole.

    python benchmarks/real_shapes.py [NAME ...] [--layers 2] [--batch 2] [--seq 1024] [--mesh tp=4 tp=8] [--pad weights all]

Per model and mesh: the predicted step of the profile h100-dgx in bf16, the gap, and of forward's attention, feed-forward products and vocabulary how the plan
splits them over the axis: `heads`, `batch`, `sequence`, `hidden`, `classes`, or `whole`. Planning CPU seconds are of this process.
"""
from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard.api import mesh_of
from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options, Passing
from autoshard.decide.phase_timer import cpu_seconds
from autoshard.padding.padded import padded
from autoshard.planner.stages import plan_traced
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.rules import registry
from autoshard.rules.family import Family

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 2,
             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bert-base": {"architectures": ["BertForMaskedLM"], "model_type": "bert", "num_attention_heads": 12, "hidden_size": 768,
                  "vocab_size": 30522, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "phi-3-mini": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 32, "num_key_value_heads": 32,
                   "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064, "num_hidden_layers": 2, "pad_token_id": 0},
    "phi-4-mini": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 24, "num_key_value_heads": 8,
                   "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 200064, "num_hidden_layers": 2, "pad_token_id": 0,
                   "tie_word_embeddings": True},
    "falcon-7b": {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544,
                  "multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "alibi": False,
                  "vocab_size": 65024, "num_hidden_layers": 2},
    "starcoder": {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_head": 48, "n_embd": 6144, "n_inner": 24576,
                  "n_positions": 8192, "vocab_size": 49152, "multi_query": True, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                  "embd_pdrop": 0.0},
    "qwen2-1.5b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2,
                   "hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936, "num_hidden_layers": 2, "tie_word_embeddings": True},
}


def traced(config: dict[str, Any], batch: int, seq: int) -> tuple[Any, bool]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        spec = load_model(None, batch=batch, seq=seq, dtype="bf16", hf=str(path))
    return trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn), spec.loss_fn is not None


ATTENTION = ("batch", "heads", "sequence", "head size")


def splits(graph: Graph, plan: Plan, vocabulary: int) -> dict[str, Counter[str]]:
    """How forward's attention, its products and the products and tables with the vocabulary are split over the last axis."""
    found: dict[str, Counter[str]] = {"attention": Counter(), "products": Counter(), "vocabulary": Counter()}
    for kind, name in _looked_at(graph, vocabulary):
        op = plan.ops[name]
        placements = [spec[-1] for spec in (*op.inputs, *op.outputs)]
        metas = [*(graph.meta(r) for r in graph.op(name).refs), *graph.op(name).outputs]
        dims = [(m, p) for m, p in zip(metas, placements, strict=True) if p >= 0]
        found[kind][_said(kind, dims, vocabulary)] += 1
    return found


def _looked_at(graph: Graph, vocabulary: int) -> Iterator[tuple[str, str]]:
    for op in graph.of_kind("call"):
        family = registry.family_of(op)
        if op.phase != "forward":
            continue
        sizes = {n for m in (*(graph.meta(r) for r in op.refs), *op.outputs) if m for n in m.shape}
        if family is Family.ATTENTION:
            yield "attention", op.name
        elif any(vocabulary <= n <= vocabulary + 8 for n in sizes) and (family is Family.MATMUL or "embedding" in str(op.target)):
            yield "vocabulary", op.name
        elif family is Family.MATMUL and min(sizes) > 8:
            yield "products", op.name


def _said(kind: str, dims: list[Any], vocabulary: int) -> str:
    if not dims:
        return "whole"
    meta, at = dims[0]
    if kind == "attention":
        return next(name for d, name in enumerate(ATTENTION) if at in meta.logical_dims(d))
    if kind == "vocabulary":
        return "classes" if any(vocabulary <= m.logical_shape[p] <= vocabulary + 8 for m, p in dims) else "tokens or features"
    weight = [m for m, p in dims[1:] if m is not None]
    return "features" if weight and len(dims) > 1 and dims[1][0].ndim >= 2 and _by_features(dims) else "tokens"


def _by_features(dims: list[Any]) -> bool:
    """Whether the dim that is split is one of the weight's."""
    return dims[0][1] == dims[0][0].ndim - 1 or len(dims) > 1 and dims[-1][1] == dims[-1][0].ndim - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CONFIGS))
    for name, value in (("--layers", 2), ("--batch", 2), ("--seq", 1024)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--mesh", nargs="+", default=["tp=4", "tp=8"])
    parser.add_argument("--pad", nargs="+", default=["weights"], help="weights, all")
    args = parser.parse_args()
    for name in args.names or CONFIGS:
        config = {k: args.layers if k in ("n_layer", "num_hidden_layers") else v for k, v in CONFIGS[name].items()}
        program, has_loss = traced(config, args.batch, args.seq)
        for mesh in map(mesh_of, args.mesh):
            for pad in args.pad:
                print(line(name, program, mesh, has_loss, config.get("vocab_size", 50257), pad), flush=True)


def line(name: str, program: Any, mesh: Mesh, has_loss: bool, vocabulary: int, pad: str) -> str:
    start, wide = cpu_seconds(), padded(program, mesh, pad=pad)
    plan: Plan = plan_traced(wide, mesh, Options(time_limit=60.0, pad=pad, passing=Passing(outputs="auto")), has_loss=has_loss)
    found = splits(wide.graph, plan, vocabulary)
    said = "; ".join(f"{kind} {', '.join(f'{n} x {how}' for how, n in ways.items())}" for kind, ways in found.items())
    return f"{name:12s} {mesh}  pad {pad:8s}{plan.objective_s * 1e3:8.4f} ms  {plan.status}, gap {plan.gap:.1e}; {said}; {cpu_seconds() - start:.1f} CPU s"


if __name__ == "__main__":
    main()
