"""Step times that others measured and published, beside those that are predicted for the same configuration.

    python -m benchmarks.simulation.outside [ROW ...] [--json out.json]

A prediction is a plan by hand (a baseline of docs/plan.md, no search), simulated as it is executed, on a built-in profile. Nothing is fitted
here. What a publication does and the configuration does not: see `note`. Tables of measured steps: outside_rows.py.

Devices of one kind are not equally fast, and a step waits for the slowest of them. How much they differ is from measurements of others (`VARIED`), of no
row: a prediction is the mean step over draws of the ranks' speeds. `equal_s` is the step on devices that are all alike.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard import Pipeline, Plan, Precision
from autoshard.base.graph import Graph
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import Cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.pipeline.microbatches import batch as microbatched
from autoshard.planner.one_stage import prices
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.program import Program
from autoshard.simulation.replay import replay
from autoshard.simulation.simulate import program_for
from models import gpt, llama


@dataclass(frozen=True)
class Row:
    """`published`: seconds a step; `model`: "llama" or "gpt" with `sizes` (layers, width, heads, ...); `scheme`: a baseline; `recompute`: every so
    many-th block is checkpointed, 0: none; `batch`: of all ranks; `microbatches`: of it; `least`: the least share of
    the profile's peak that the source leaves open, where it knows no better."""

    name: str
    published: float
    source: str
    cluster: str
    mesh: str
    batch: int
    seq: int
    scheme: str
    model: str
    sizes: tuple[tuple[str, int], ...] = ()
    recompute: int = 0
    half: str = "bf16"
    microbatches: int = 1
    least: float | None = None
    note: str = ""


def gpt_sizes(layers: int, width: int, heads: int, vocab: int = 51200) -> tuple[tuple[str, int], ...]:
    return (("layers", layers), ("width", width), ("heads", heads), ("vocab", vocab))


TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 5,762 (8 GPUs) and 5,605 (128) tokens/s per GPU"
TITAN_A100 = "github.com/pytorch/torchtitan, docs/performance.md of 2024: 2,904 tokens/s per GPU, selective by layer"
KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, table 5"
MEGATRON = "Shoeybi et al., arXiv 1909.08053: 77 % of one GPU's FLOP/s per GPU on 8, 74 % on 512"
VTRAIN = "github.com/VIA-Research/vTrain, data/ground_truth_multi.csv"
H100S = "their boards run at 500 W; selective by op, here every second block"
NVL = 835 / 989.4
"""Says the page: "the actual peak TFLOPs number is between SXM and NVL, and we don't know its exact value". NVIDIA H100 data sheet: NVL 835 (bf16, dense)."""
DROPOUT = 0.1
"""Of GPT, after softmax, projections and embeddings: arXiv 1909.08053, section 4.2, and the default of Megatron-LM's `--hidden-dropout` and
`--attention-dropout`, with which the others ran."""
VARIED, DRAWS = 0.016, 32
"""Relative standard deviation of what GPUs of one kind take for the same work: that of the medians of 386 V100 of TACC's Longhorn for one matrix product
without 6 outliers (github.com/hal-uw/blox-pal, aggregated_data/sim/sgemm-longhorn-agg.csv; Sinha et al., arXiv 2208.11035, and Jain et al., arXiv 2408.11919).
ResNet-50 likewise: 2.0 % on 319 V100 there and 2.0 % on 211 A100 of Lonestar6; BERT 0.5 % on 131 V100. Matrix products are most of these rows."""
OTHERS = (0.005, 0.02)
ROWS = (
    Row("llama 8B, 8 H100", 16384 / 5762, TITAN, "h100-dgx:hbm2e", "dp=8", 16, 8192, "FSDP (ZeRO-3)", "llama", recompute=2, least=NVL, note=H100S),
    Row("llama 8B, 128 H100", 16384 / 5605, TITAN, "h100-dgx:hbm2e", "dp=128", 256, 8192, "FSDP (ZeRO-3)", "llama", recompute=2, least=NVL, note=H100S),
    Row("llama 8B, 64 A100", 8192 / 2904, TITAN_A100, "a100-dgx", "dp=64", 64, 8192, "FSDP (ZeRO-3)", "llama", recompute=2),
    Row("GPT 22B, 8 A100", 1.42, KORTHIKANTI, "a100-dgx", "tp=8", 4, 2048, "Megatron TP", "gpt", gpt_sizes(48, 6144, 64), 1, "fp16"),
    Row("GPT 3.6B, 64 A100", 3.5665, VTRAIN, "a100-dgx", "dp=64", 512, 2048, "DDP", "gpt", gpt_sizes(30, 3072, 32), 1, "fp16"),
    Row("GPT 1.2B, 1 V100", 0.0, MEGATRON, "v100-dgx2", "tp=1", 8, 1024, "Megatron TP", "gpt", gpt_sizes(40, 1536, 16), 1, "fp16"),
    Row("GPT 8.3B, 8 V100", 0.0, MEGATRON, "v100-dgx2", "tp=8", 8, 1024, "Megatron TP", "gpt", gpt_sizes(72, 3072, 32), 1, "fp16"),
    Row("GPT 8.3B, 512 V100", 0.0, MEGATRON, "v100-dgx2", "dp=64,tp=8", 512, 1024, "Megatron TP", "gpt", gpt_sizes(72, 3072, 32), 1, "fp16"),
)


def built(row: Row) -> tuple[nn.Module, tuple, object]:
    """The model with a batch and its loss, on the meta device. Attention of gpt is three matrix products and RMS norm its formula, as both were then: torch of
    2024 had no kernel for the norm."""
    module = llama if row.model == "llama" else gpt
    with torch.device("meta"):
        made, inputs = module.build("8B" if row.model == "llama" else "tiny", batch=row.batch, seq=row.seq,
                                    **{"context": row.seq, "dropout": DROPOUT, **dict(row.sizes)} if row.sizes else {})
    if row.model == "gpt":
        for block in made.h:
            block.attn.__class__ = Unfused
    for norm in [m for m in made.modules() if isinstance(m, nn.RMSNorm)]:
        norm.__class__ = WrittenOut
    if row.recompute:
        for block in (made.h if row.model == "gpt" else made.layers)[::row.recompute]:
            block.__class__ = checkpointed(type(block))
    return made, inputs, module.loss


class WrittenOut(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Unfused(gpt.Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.c_attn(x).view(b, s, self.heads, 3 * d // self.heads).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = F.dropout(F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1), self.dropout, self.training)
        return F.dropout(self.c_proj((weights @ v).transpose(1, 2).reshape(b, s, d)), self.dropout, self.training)


@cache
def checkpointed(block: type[nn.Module]) -> type[nn.Module]:
    class Checkpointed(block):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, *args, use_reentrant=False)

    return Checkpointed


def planned(row: Row) -> tuple[Graph, Plan]:
    """The graph of a row and the plan of its scheme."""
    model, inputs, loss = built(row)
    mesh, precision = parse_mesh(row.mesh), Precision(param=row.half, master="fp32", reduce=row.half)
    traced = microbatched.traced(model, inputs, {}, Pipeline(microbatches=row.microbatches), loss_fn=loss, training=True, precision=precision,
                                 marks={}, fallback="error")
    formulation = formulate_within(prices(traced, mesh, Options(cluster=row.cluster, precision=precision)), float("inf"))
    scheme = next(s for s in schemes(mesh) if s.name == row.scheme)
    choice = baseline(Wiring(formulation), scheme)
    solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
    return traced.graph, make_plan(formulation, solution, model={}, settings={"optimizer": "adamw"}, seeds={})


def predicted(row: Row) -> dict:
    start = process_time()
    graph, plan = planned(row)
    cluster = Cluster.from_snapshot(plan.cluster)
    program = program_for(graph, plan, cluster, executed=True)
    equal = replay(program, cluster).step_s
    more = 1 + unread(program) / equal if row.model == "gpt" else 1.0
    step = more * on_varied(program, cluster, VARIED)
    return {"name": row.name, "published_s": row.published or None, "predicted_s": step, "equal_s": more * equal, "unread_s": (more - 1) * equal,
            "varied_s": {str(v): more * on_varied(program, cluster, v) for v in OTHERS}, "objective_s": plan.objective_s,
            "error": step / row.published - 1 if row.published else None, "scheme": row.scheme, "mesh": row.mesh, "source": row.source,
            "least_s": at_peak(graph, plan, cluster, row.least) if row.least else None, "note": row.note, "cpu_s": process_time() - start}


def unread(program: Program) -> float:
    """Seconds of what Megatron's checkpoint repeats of a block and backward does not read, which our programs have not: its last product and all-reduce,
    and dropouts, whose masks are kept here."""
    def seconds(window: str, repeated: bool) -> float:
        works = [(w.name, w) for w in program.works if w.kind == "op"]
        return sum(e.seconds for name, e in (*works, *((c.value, c) for c in program.calls))
                   if e.module.startswith("h.") and e.window == window and ("_recompute" in name) == repeated)

    return seconds("forward", False) - seconds("backward", True)


def at_peak(graph: Graph, plan: Plan, cluster: Cluster, share: float) -> float:
    """Seconds of a step where only so much of the profile's peak is there."""
    slower = replace(cluster, device=replace(cluster.device, peak={dtype: share * rate for dtype, rate in cluster.device.peak.items()}))
    return on_varied(program_for(graph, plan, slower, executed=True), slower, VARIED)


def on_varied(program: Program, cluster: Cluster, varied: float) -> float:
    """Seconds of a step, mean over draws of the ranks' speeds."""
    return mean(replay(program, cluster, Conditions(varied=varied, seed=seed)).step_s for seed in range(DRAWS))


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's; 1 where both say the same order, and for one row."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(a) > 1 else 1.0


def weak_scaling(rows: list[dict]) -> list[str]:
    """Ratios, which do not depend on how fast one device is."""
    by_name, by_row = {r["name"]: r for r in rows}, {r.name: r for r in ROWS}
    out = []
    if {"llama 8B, 8 H100", "llama 8B, 128 H100"} <= by_name.keys():
        few, many = by_name["llama 8B, 8 H100"], by_name["llama 8B, 128 H100"]
        equal, *others = (100 * (a / b - 1) for a, b in ((few["equal_s"], many["equal_s"]), *zip(few["varied_s"].values(), many["varied_s"].values())))
        out.append(f"llama 8B, 8 to 128 GPUs: tokens/s per GPU {100 * (few['predicted_s'] / many['predicted_s'] - 1):+.1f} % "
                   f"(published {100 * (5605 / 5762 - 1):+.1f} %); on GPUs that are alike {equal:+.1f} %, "
                   + ", ".join(f"that differ by {100 * v:g} % {found:+.1f} %" for v, found in zip(OTHERS, others, strict=True)))
    one = by_name.get("GPT 1.2B, 1 V100")
    for name, published in (("GPT 8.3B, 8 V100", 77), ("GPT 8.3B, 512 V100", 74)):
        if one and name in by_name:
            work = flops(by_row["GPT 8.3B, 8 V100"]) / flops(by_row["GPT 1.2B, 1 V100"]) / 8  # per GPU: 8 replicas' batch each on 512
            ratio, equal = (100 * work * one[key] / by_name[name][key] for key in ("predicted_s", "equal_s"))
            out.append(f"{name}: {ratio:.0f} % of one GPU's FLOP/s (published {published} %); on GPUs that are alike {equal:.0f} %")
    return out


def flops(row: Row) -> float:
    """Of one replica's step, up to a factor: layers and head of a GPT (Narayanan et al., arXiv 2104.04473, appendix)."""
    layers, h, _, v = (n for _, n in row.sizes)
    return layers * h * h * (1 + row.seq / (6 * h) + v / (16 * layers * h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to predict, by a part of their names; default: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [r for r in ROWS if not given.names or any(n in r.name for n in given.names)]
    found = []
    for row in rows:
        found.append(predicted(row))
        r = found[-1]
        said = f"{r['published_s']:.3f} s published, {100 * r['error']:+.0f} %" if r["error"] is not None else "a ratio is published"
        if r["least_s"]:
            said += f", {100 * (r['least_s'] / r['published_s'] - 1):+.0f} % with the least peak that the source leaves open"
        print(f"{r['name']}: {r['predicted_s']:.3f} s predicted, {said}  [{r['scheme']} on {r['mesh']}, {r['cpu_s']:.0f} CPU s]", flush=True)
    errors = [abs(r["error"]) for r in found if r["error"] is not None]
    if errors:
        ours, theirs = ([r[key] for r in found if r["error"] is not None] for key in ("predicted_s", "published_s"))
        signed = median(r["error"] for r in found if r["error"] is not None)
        print(f"median error {100 * median(errors):.0f} % of {len(errors)} rows, signed {100 * signed:+.0f} %, "
              f"rank correlation {rank_correlation(ours, theirs):.2f}")
    print("\n".join(weak_scaling(found)))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
