"""Tokens per second of `autoshard.generator` on processes, beside tensor parallelism by hand and beside a ceiling.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.runtime.generate
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.runtime.generate --width 1024 --layers 8 --rounds 15

A random llama generates greedily with transformers' own loop, everywhere the same one:

    gloo      autoshard.generator, collectives by gloo messages, planned at their prices
    shared    the same through shared memory, where the machine has it, planned as autoshard.generator does without cluster=
    hand      parallelize_module (colwise q, k, v, gate, up; rowwise o, down; head gathered) over transformers' static cache, gloo
    ceiling   on every rank a model with its share of heads, hidden layer and vocabulary, which exchanges nothing

Rounds are interleaved; the slowest rank counts. The targets are 0.95 of `hand` and 0.9 of `ceiling`, for `gloo` and `shared` apart.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoshard
from benchmarks.shared.about import about, line
from benchmarks.shared.rounds import interleaved, ratio, spread

BY_HAND = {**{f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"}, "self_attn.o_proj": RowwiseParallel,
           "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}


def llama(asked: argparse.Namespace, share: int = 1) -> Any:
    """A random model, equal on every rank; `share`: with one of so many parts of what tensor parallelism splits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=asked.vocab // share, hidden_size=asked.width, intermediate_size=asked.width * 11 // 4 // share, num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads // share, num_key_value_heads=asked.heads // 2 // share, head_dim=asked.width // asked.heads,
        max_position_embeddings=asked.prompt + asked.new, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()


def by_hand(asked: argparse.Namespace, mesh: DeviceMesh) -> Any:
    model = llama(asked)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in BY_HAND.items()})
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model


def ours(asked: argparse.Namespace, mesh: DeviceMesh, shared: bool) -> Any:
    """`shared`: collectives go through shared memory where ranks share a machine, else by messages."""
    options = {"batch": asked.batch, "max_cache_len": asked.prompt + asked.new, "prompt": asked.prompt, "new": asked.new, "cache": False, "check_inputs": "never"}
    if shared:
        return autoshard.generator(llama(asked), mesh, cluster=asked.cluster, **options)
    with patch("autoshard.runtime.ranks.place.share_memory", lambda *arguments: None):
        return autoshard.generator(llama(asked), mesh, cluster=asked.cluster or "cpu-gloo", **options)


def generation(model: Any, asked: argparse.Namespace, ids: torch.Tensor, **how: Any) -> Callable[[], torch.Tensor]:
    return lambda: model.generate(ids, max_new_tokens=asked.new, min_new_tokens=asked.new, do_sample=False, **how)


def contenders(asked: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that generate. Raises AssertionError where one gives other tokens than the model on one process."""
    ids = torch.randint(3, asked.vocab // mesh.size(), (asked.batch, asked.prompt), generator=torch.Generator().manual_seed(1))
    static = {"cache_implementation": "static", "disable_compile": True}
    found = {"gloo": generation(ours(asked, mesh, False), asked, ids), "shared": generation(ours(asked, mesh, True), asked, ids),
             "hand": generation(by_hand(asked, mesh), asked, ids, **static),
             "ceiling": generation(llama(asked, mesh.size()), asked, ids, **static)}
    want = generation(llama(asked), asked, ids)()
    for name in ("gloo", "shared", "hand"):
        got = found[name]()
        same = (got[:, asked.prompt:] == want[:, asked.prompt:]).float().mean().item()
        assert same > 0.9, f"{name}: only {same:.0%} of the tokens are those of one process"  # float32: ties may fall otherwise
    found["ceiling"]()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 4), ("heads", 8), ("vocab", 4096), ("batch", 4), ("prompt", 32), ("new", 32), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cluster", help="profile to plan with; default: by what carries the collectives, cpu-gloo or cpu-gloo:shared")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    calls = contenders(asked, mesh)
    seconds = interleaved({name: (lambda call=call: (call(), None)[1]) for name, call in calls.items()}, asked.rounds)
    if dist.get_rank() == 0:
        show(seconds, asked)
    dist.destroy_process_group()


def show(seconds: dict[str, list[float]], asked: argparse.Namespace) -> None:
    tokens = asked.batch * asked.new
    ratios = {f"{name}/{other}": ratio(seconds[other], seconds[name]) for name in ("gloo", "shared") for other in ("hand", "ceiling")}
    if asked.json:
        print(json.dumps({"about": about(), "seconds": seconds, "ratios": ratios}))
        return
    print(line(about(), f"{dist.get_world_size()} processes", f"{asked.layers} layers of width {asked.width}, batch {asked.batch}, prompt {asked.prompt}, "
               f"{asked.new} new tokens"))
    for name, found in seconds.items():
        middle, low, high = spread(found)
        print(f"{name:8} {tokens / middle:8.1f} tokens/s   [{tokens / high:.1f}, {tokens / low:.1f}]")
    for name, (middle, low, high) in ratios.items():
        print(f"{name:15} {middle:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
