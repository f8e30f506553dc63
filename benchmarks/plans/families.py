"""Families of transformers at their real widths and vocabularies, two layers, on a tensor-parallel axis: the plan, and which products it computes
whole on every rank (heads, hidden features or vocabulary that are not split).

    python -m benchmarks.plans.families [--only phi3] [--mesh tp=4 tp=8] [--batch 2] [--seq 1024] [--pad all]

Predicted steps of the profile h100-dgx in bf16, logits left as they are split. Times are planning CPU seconds, the trace aside.
"""
from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from autoshard.api import mesh_of
from autoshard.base.plan import Plan
from autoshard.base.spec import is_shard
from autoshard.decide.options import Options, Passing
from autoshard.decide.phase_timer import cpu_seconds
from autoshard.padding.padded import padded
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.rules import registry

LAYER = r"\.\d+\."
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 2, "vocab_size": 50257, "n_positions": 1024},
    "bert": {"architectures": ["BertForMaskedLM"], "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522,
             "num_hidden_layers": 2, "max_position_embeddings": 1024},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32,
             "intermediate_size": 8192, "vocab_size": 32064, "num_hidden_layers": 2, "pad_token_id": 0},
    "phi3 (medium, 40 heads of 10)": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10,
        "intermediate_size": 17920, "vocab_size": 32064, "num_hidden_layers": 2, "pad_token_id": 0},
    "falcon (7B, 71 heads of 1)": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024,
        "num_hidden_layers": 2, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False},
    "falcon (40B, 128 heads of 8)": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
        "vocab_size": 65024, "num_hidden_layers": 2, "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": True},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 2, "vocab_size": 49152,
                    "n_positions": 8192, "multi_query": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
              "intermediate_size": 8960, "vocab_size": 151936, "num_hidden_layers": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families whose name contains this")
    parser.add_argument("--mesh", nargs="+", default=["tp=4", "tp=8"])
    parser.add_argument("--pad", default="weights")
    for name, value in (("--batch", 2), ("--seq", 1024)):
        parser.add_argument(name, type=int, default=value)
    args = parser.parse_args()
    print("| family | mesh | step | status | gap | computed whole | CPU s |\n" + "| --- " * 7 + "|", flush=True)
    for name, config in FAMILIES.items():
        if args.only and args.only not in name:
            continue
        program, has_loss = traced({"model_type": name.split()[0], "use_cache": False, **config}, args.batch, args.seq)
        for mesh in args.mesh:
            start, wide = cpu_seconds(), padded(program, mesh_of(mesh), pad=args.pad)
            plan = plan_traced(wide, mesh_of(mesh), Options(time_limit=120.0, passing=Passing(outputs="auto")), has_loss=has_loss)
            print(f"| {name} | {mesh} | {plan.objective_s * 1e3:.3f} ms | {plan.status} | {plan.gap:.1e} | "
                  f"{', '.join(whole(plan, wide)) or 'nothing'} | {cpu_seconds() - start:.0f} |", flush=True)


def traced(config: dict[str, Any], batch: int, seq: int) -> tuple[Traced, bool]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        spec = load_model(None, batch=batch, seq=seq, dtype="bf16", hf=str(path))
    return trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn), spec.loss_fn is not None


def whole(plan: Plan, program: Traced) -> list[str]:
    """Modules with products, forward or backward, of which every rank computes all."""
    found: dict[str, None] = {}
    for op in program.graph.of_kind("call"):
        family = registry.family_of(op)
        placed = plan.ops.get(op.name)
        if family is not None and family.heavy and placed is not None and not any(is_shard(p) for spec in placed.inputs for p in spec):
            found[f"{re.sub(LAYER, '.*.', op.module or op.name)}{'' if op.phase == 'forward' else ' (backward)'}"] = None
    return list(found)


if __name__ == "__main__":
    main()
