"""Steps of pipelines that were published, beside what block prices say of the same configuration and of a searched one.

    python benchmarks/pipeline_published.py                      # all rows, about ten short searches each
    python benchmarks/pipeline_published.py 39B 405B             # some

Published: Llama 3 405B, arXiv 2407.21783, table 4 (seconds from 430 and 400 TFLOP/s a device); Narayanan et al., SC'21, table 1 (GPT on A100). Those runs
compute forward twice and count it, and the prices here do not, so 3/4 of their steps are shown. Their micro-batches where there is no pipeline are not
published: 4 rows here.

A model of three layers gives the prices of all blocks; the chain has as many as the run. `same` is the published shape with equal layers, `searched`
the best cuts and schedule for it. Memory is not limited.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard import Pipeline
from autoshard.base.mesh import Mesh
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.shapes.cut_search import TRIED
from autoshard.pipeline.shapes.decide import make_run
from autoshard.pipeline.shapes.mesh_prices import MeshPricer, Sizes
from autoshard.pipeline.shapes.meshes import Room, Shape, Slot, shapes
from autoshard.pipeline.shapes.price import StagePrice, chain_from, with_ends
from autoshard.planner.open_mesh import searches
from autoshard.search.partition import Chain, partition
from models import gpt, llama

SHORT = 3


@dataclass(frozen=True)
class Published:
    """`rows`: of a micro-batch on one data-parallel rank."""

    name: str
    cluster: str
    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    devices: int
    batch: int
    rows: int
    seconds: float
    hidden: int = 0

    @property
    def dp(self) -> int:
        return self.devices // self.tp // self.pp

    @property
    def shape(self) -> Shape:
        rows = self.dp * self.rows
        return Shape(self.pp, Slot(self.dp, self.tp, rows), self.batch // rows, "1f1b")

    def build(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], object]:
        """A short model of the same width."""
        with torch.device("meta"):
            if self.hidden:
                config = llama.Config(SHORT, self.width, self.heads, 8, self.hidden)
                model, module, vocab, seq = llama.Llama(config), llama, config.vocab, 8192
            else:
                seq, vocab, module = 2048, 51200, gpt
                model = gpt.build(batch=1, seq=seq, layers=SHORT, width=self.width, heads=self.heads, vocab=vocab, context=seq)[0]
            model = model.to(torch.bfloat16)
            return model, tuple(torch.zeros(self.batch, seq, dtype=torch.int64) for _ in range(2)), module.loss


def megatron(name: str, layers: int, width: int, heads: int, tp: int, pp: int, devices: int, batch: int, rows: int, seconds: float) -> Published:
    return Published(name, "a100-dgx", layers, width, heads, tp, pp, devices, batch, rows, 0.75 * seconds)


RUNS = (
    megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 4, 3.5), megatron("3.6B", 30, 3072, 32, 2, 1, 64, 512, 4, 3.7),
    megatron("7.5B", 36, 4096, 32, 4, 1, 128, 512, 4, 3.7), megatron("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 4, 9.4),
    megatron("39B", 48, 8192, 64, 8, 2, 512, 1536, 4, 14.4), megatron("76B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 16.1),
    megatron("145B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 24.8), megatron("310B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 37.6),
    megatron("530B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 54.1), megatron("1T", 128, 25600, 160, 8, 64, 3072, 3072, 1, 102.6),
    Published("405B", "h100-dgx", 126, 16384, 128, 8, 16, 8192, 2048, 1, 12.0, hidden=53248),
    Published("405B on 16,384", "h100-dgx", 126, 16384, 128, 8, 16, 16384, 2048, 1, 6.5, hidden=53248))


class Repeated:
    """Labels and prices of a model whose layers are as many as `layers`, from one of `SHORT` layers."""

    def __init__(self, pricer: MeshPricer, layers: int) -> None:
        self.pricer, names = pricer, pricer.sizes.first.blocks.names
        self.first = next(i for i, name in enumerate(names) if name.rpartition(".")[2].isdigit())
        self.more = layers - SHORT
        self.labels = (*pricer.labels[:self.first], *(pricer.labels[self.first],) * layers, *pricer.labels[self.first + SHORT:])

    def chain(self, slot: Slot, split: bool) -> Chain:
        def price(a: int, b: int) -> StagePrice:
            shift = self.more if a > self.first + 1 else 0
            return self.pricer.price(a - shift, b - shift, slot, 0, split)

        weights = self.pricer.weights
        more = [weights[self.first]] * self.more
        return chain_from(self.labels, with_ends(self.labels, price, [*weights[:self.first], *more, *weights[self.first:]]))

    def equal(self, stages: int) -> np.ndarray:
        """Layers divided evenly, the rest at the ends; what the first stages get more is one layer."""
        layers = self.more + SHORT
        inner = [self.first + layers * s // stages for s in range(1, stages)]
        return np.array([[0, *inner, len(self.labels)]])


def priced(run: Published) -> tuple[float, float, str]:
    """Seconds of the published shape, and of the best cuts and schedule for it, with its name."""
    model, inputs, loss = run.build()
    cluster, options = load_cluster(run.cluster), Options(cluster=run.cluster, pipeline=Pipeline(microbatches="auto"))
    batch = Batch(model, inputs, {}, {"loss_fn": loss, "training": True})
    found = searches(batch.whole, options, PhaseTimer(), cluster)

    def mesh_of(slot: Slot) -> Mesh:
        return Mesh(("dp", "tp"), (slot.dp, slot.tp))

    pricer = MeshPricer(Sizes(batch, options.pipeline, run.batch, run.shape.microbatches), run.devices, mesh_of, cluster, np.inf, found)
    model_of = Repeated(pricer, run.layers)
    chain, cuts = model_of.chain(run.shape.slot), model_of.equal(run.pp)
    same = float(make_run(run.shape).price(chain.undivided())(cuts)[0])
    room = Room(run.devices, run.tp, run.batch, len(model_of.labels), pp=run.pp, dp=run.dp, tp=run.tp, microbatches=run.shape.microbatches,
                schedules=TRIED, warmups=False)
    found = {str(shape): _best(shape, chain) for shape in shapes(room)}
    best = min(found, key=lambda name: found[name])
    return same, found[best], best.rpartition("rows ")[2]


def _best(shape: Shape, chain: Chain) -> float:
    made = make_run(shape)
    chain = chain if made.table.split_backward else chain.undivided()
    return partition(chain, made.course, made.price(chain), most=50).seconds


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows, by default all")
    names = parser.parse_args().names
    rows, begin = [], time.process_time()
    print(f"{'run':>16} {'shape':>34} {'published':>10} {'same':>8} {'error':>7} {'searched':>9}  schedule")
    for run in RUNS:
        if names and run.name not in names:
            continue
        same, best, how = priced(run)
        rows.append((run.seconds, same))
        shape = f"tp={run.tp} pp={run.pp} dp={run.dp} M={run.shape.microbatches}"
        print(f"{run.name:>16} {shape:>34} {run.seconds:10.2f} {same:8.2f} {same / run.seconds - 1:+7.1%} {best:9.2f}  {how}", flush=True)
    if len(rows) > 2:
        errors = [abs(same / seconds - 1) for seconds, same in rows]
        print(f"median error {np.median(errors):.1%}, largest {max(errors):.1%}, rank correlation {rank_correlation(*zip(*rows)):.3f}, "
              f"{time.process_time() - begin:.0f} CPU s")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
