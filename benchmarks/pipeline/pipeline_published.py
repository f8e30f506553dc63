"""Steps of pipelines that were published, beside what block prices say of the same configuration and of a searched one.

    python -m benchmarks.pipeline.pipeline_published                      # all rows
    python -m benchmarks.pipeline.pipeline_published 39B 405B "H100 70B"  # some
    python -m benchmarks.pipeline.pipeline_published --searched 39B       # and the searched cuts, schedule and layouts: about ten short searches each

Published: Llama 3 405B, arXiv 2407.21783, table 4 (seconds from 430 and 400 TFLOP/s a device); Narayanan et al., SC'21, table 1 (GPT on A100);
Megatron-Core on H100, the table in its README (images/model_table.png at f2e5db402c, GPT, seconds from TFLOP/s a device and its count of FLOPs).
`same` is what they say they ran, by hand, no search, nothing fitted:

* Megatron: tensor parallelism inside a node and replicas, without sequence parallelism; attention as matrix products; fp16 with fp32 masters; equal
  layers, 1F1B; every layer is computed again in backward. Their micro-batches where there is no pipeline are not published: 4 rows here.
* Llama 3: bf16 with fp32 masters, gradients reduced in fp32; fused attention; one layer per chunk, the embedding and the head chunks of their own,
  interleaved ("the first chunk on the first stage has only the embedding": 128 chunks on 16 ranks); nothing is computed again. Layouts inside of tp
  and dp are searched: the paper does not say them all.
* Megatron-Core: bf16 with fp32 masters, fused attention, equal layers, layouts searched likewise. Not published: micro-batches (4 rows here
  without a pipeline, which is all of a rank, and one row with it), interleaving (plain 1F1B here), and what is computed again (nothing here).

Windows are simulated as they are executed, launches included. A model of three layers gives the prices of all blocks; the chain has as many as the
run. Memory is not limited. `searched` is without their recomputation.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from autoshard import Pipeline, Precision
from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE
from autoshard.cost.cluster import AxisLink, load_cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import Scheme, baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.lower.schedule import schedule
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.shapes.cut_search import TRIED
from autoshard.pipeline.shapes.decide import make_run
from autoshard.pipeline.shapes.mesh_prices import MeshPricer, Sizes
from autoshard.pipeline.shapes.meshes import Room, Shape, Slot, shapes
from autoshard.pipeline.shapes.price import StagePrice, chain_from, with_ends
from autoshard.pipeline.shapes.stage_prices import price_of
from autoshard.planner.one_stage import prices
from autoshard.planner.open_mesh import searches
from autoshard.program.calling import Traced
from autoshard.runtime.route import route_of
from autoshard.search.partition import Chain, partition
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.simulation.program import Program, program_of, update_program
from autoshard.simulation.replay import replay
from autoshard.space.cost_table import Training
from benchmarks.simulation.outside import Unfused
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
    seq: int = 2048
    vocab: int = 51200

    @property
    def dp(self) -> int:
        return self.devices // self.tp // self.pp

    @property
    def shape(self) -> Shape:
        rows = self.dp * self.rows
        chunks = (self.layers + 2) // self.pp if self.hidden else 1
        return Shape(self.pp, Slot(self.dp, self.tp, rows), self.batch // rows, "interleaved" if chunks > 1 else "1f1b", chunks)

    @property
    def precision(self) -> Precision:
        return Precision(param="fp16", master="fp32", reduce="fp16") if self.by_hand else Precision(param="bf16", master="fp32", reduce="fp32")

    @property
    def by_hand(self) -> bool:
        """Whether the paper says how its layers are split, and that they are computed again: Megatron's on A100."""
        return self.cluster == "a100-dgx"

    @property
    def scheme(self) -> Scheme | None:
        """None: layouts are searched."""
        return Scheme("Megatron TP", ("data", "tensor")) if self.by_hand else None

    def build(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], object]:
        """A short model of the same width."""
        with torch.device("meta"):
            if self.hidden:
                config = llama.Config(SHORT, self.width, self.heads, 8, self.hidden)
                model, module, vocab, seq = llama.Llama(config), llama, config.vocab, 8192
            else:
                seq, vocab, module = self.seq, self.vocab, gpt
                model = gpt.build(batch=1, seq=seq, layers=SHORT, width=self.width, heads=self.heads, vocab=vocab, context=seq)[0]
                for block in model.h if self.by_hand else ():
                    block.attn.__class__ = Unfused
            return model, tuple(torch.zeros(self.batch, seq, dtype=torch.int64) for _ in range(2)), module.loss


def megatron(name: str, layers: int, width: int, heads: int, tp: int, pp: int, devices: int, batch: int, rows: int, seconds: float) -> Published:
    return Published(name, "a100-dgx", layers, width, heads, tp, pp, devices, batch, rows, seconds)


def megatron_core(name: str, layers: int, width: int, heads: int, tp: int, pp: int, batch: int, tflops: float) -> Published:
    """One of 48 data-parallel ranks' worth of devices each; forward and backward of a GPT have 72 B s l h^2 (1 + s / 6h + V / 12lh) FLOPs."""
    seq, vocab, devices = 4096, 131072, 48 * tp * pp
    flops = 72 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (12 * layers * width))
    return Published(f"H100 {name}", "h100-dgx", layers, width, heads, tp, pp, devices, batch, 4 if pp == 1 else 1, flops / (tflops * 1e12 * devices), 0, seq, vocab)


RUNS = (
    megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 4, 3.5), megatron("3.6B", 30, 3072, 32, 2, 1, 64, 512, 4, 3.7),
    megatron("7.5B", 36, 4096, 32, 4, 1, 128, 512, 4, 3.7), megatron("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 4, 9.4),
    megatron("39B", 48, 8192, 64, 8, 2, 512, 1536, 4, 14.4), megatron("76B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 16.1),
    megatron("145B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 24.8), megatron("310B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 37.6),
    megatron("530B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 54.1), megatron("1T", 128, 25600, 160, 8, 64, 3072, 3072, 1, 102.6),
    Published("405B", "h100-dgx", 126, 16384, 128, 8, 16, 8192, 2048, 1, 12.0, hidden=53248),
    Published("405B on 16,384", "h100-dgx", 126, 16384, 128, 8, 16, 16384, 2048, 1, 6.5, hidden=53248),
    megatron_core("1.7B", 24, 2048, 16, 1, 1, 192, 408.8), megatron_core("7.1B", 30, 4096, 32, 2, 1, 192, 465.9),
    megatron_core("16B", 32, 6144, 48, 4, 1, 192, 489.1), megatron_core("32B", 48, 7168, 56, 8, 1, 192, 459.6),
    megatron_core("70B", 84, 8192, 64, 8, 2, 384, 419.7), megatron_core("119B", 92, 10240, 80, 8, 4, 768, 420.5),
    megatron_core("177B", 96, 12288, 96, 8, 6, 1152, 432.8), megatron_core("314B", 96, 16384, 128, 8, 8, 1536, 474.4),
    megatron_core("462B", 112, 18432, 144, 8, 16, 3072, 459.9))


class ByHand(MeshPricer):
    """Prices of blocks by a scheme instead of a search where there is one, of windows as they are executed."""

    def __init__(self, scheme: Scheme | None, whole: Traced, options: Options, *given: Any) -> None:
        super().__init__(*given)
        self.scheme, self.traced, self.options = scheme, whole, options

    def _price(self, first: int, end: int, slot: Slot, split: bool) -> StagePrice:
        stage, wire, mesh = self._stage(first, end, slot, split), self._wire(slot), self.mesh_of(slot)
        if not stage.graph.of_kind("call"):
            return StagePrice(0.0, 0.0)
        plan = self._by_scheme(stage.graph, mesh, wire) if self.scheme else self.searches.plan(stage.graph, mesh, wire, 1, 0.0)
        order = schedule(stage.graph, plan, mesh, route_of(plan))
        seconds = {w.name: self._played(program_of(stage.graph, plan, order, self.cluster, executed=True, windows=(w.name,))) for w in order.windows}
        update = self._played(update_program(stage.graph, plan, self.cluster))
        forward, backward, weight = (seconds.get(w, 0.0) for w in (FORWARD, BACKWARD, WEIGHT))
        return replace(price_of(stage, plan, wire), forward=forward, input=backward, weight=weight,
                       once=sum(t for w, t in seconds.items() if w in ONCE), update=update)

    def _by_scheme(self, graph: Graph, mesh: Mesh, wire: AxisLink) -> Plan:
        table = prices(replace(self.traced, graph=graph), mesh, self.options, profile=self.cluster, step=Training("adamw", True, wire=wire, in_flight=1))
        formulation = formulate_within(table, float("inf"))
        choice = baseline(Wiring(formulation), self.scheme)
        solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
        return make_plan(formulation, solution, model={}, settings={"optimizer": "adamw"}, seeds={})

    def _played(self, program: Program) -> float:
        return replay(program, self.cluster).step_s if program.events else 0.0


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
        made = chain_from(self.labels, with_ends(self.labels, price, [*weights[:self.first], *more, *weights[self.first:]]))
        return made if split else made.undivided()

    def with_recompute(self, slot: Slot) -> Chain:
        """The chain with the forward of every layer once more in backward."""
        chain, layer = self.chain(slot, False), self.pricer.price(self.first, self.first + 1, slot, 0, False).forward
        at = np.clip(np.arange(len(self.labels) + 1) - self.first, 0, self.more + SHORT)
        return replace(chain, backward=chain.backward + layer * np.maximum(at[None, :] - at[:, None], 0))

    def equal(self, stages: int, ends: bool) -> np.ndarray:
        """Layers divided evenly; what is in front of them and behind goes with the first and the last. `ends`: these are stages of their own."""
        layers, own = self.more + SHORT, int(ends)
        inner = [self.first + layers * s // (stages - 2 * own) for s in range(1 - own, stages - own)]
        return np.array([[0, *inner, len(self.labels)]])


def priced(run: Published, search: bool) -> tuple[float, float, str]:
    """Seconds of the published configuration, and of the best cuts and schedule for its shape, with its name."""
    model, inputs, loss = run.build()
    cluster = load_cluster(run.cluster)
    options = Options(cluster=run.cluster, precision=run.precision, pipeline=Pipeline(microbatches="auto"))
    batch = Batch(model, inputs, {}, {"loss_fn": loss, "training": True, "precision": run.precision})

    def mesh_of(slot: Slot) -> Mesh:
        return Mesh(("dp", "tp"), (slot.dp, slot.tp))

    found = searches(batch.whole, options, PhaseTimer(), cluster)
    given = Sizes(batch, options.pipeline, run.batch, run.shape.microbatches), run.devices, mesh_of, cluster, np.inf, found
    by_hand, shape = Repeated(ByHand(run.scheme, batch.whole, options, *given), run.layers), run.shape
    chain = by_hand.with_recompute(shape.slot) if run.by_hand else by_hand.chain(shape.slot, False)
    same = float(make_run(shape).price(chain)(by_hand.equal(shape.stages, bool(run.hidden)))[0])
    if not search:
        return same, float("nan"), ""
    model_of = by_hand if not run.by_hand else Repeated(ByHand(None, batch.whole, options, *given), run.layers)
    chain_of = cache(lambda split: model_of.chain(shape.slot, split))  # `split`: for schedules that divide backward
    room = Room(run.devices, run.tp, run.batch, len(model_of.labels), pp=run.pp, dp=run.dp, tp=run.tp, microbatches=shape.microbatches,
                schedules=TRIED, warmups=False)
    bests = {str(shape): _best(shape, chain_of) for shape in shapes(room)}
    best = min(bests, key=lambda name: bests[name])
    return same, bests[best], best.rpartition("rows ")[2]


def _best(shape: Shape, chain_of: Callable[[bool], Chain]) -> float:
    made = make_run(shape)
    chain = chain_of(made.table.split_backward)
    return partition(chain, made.course, made.price(chain), most=50).seconds


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows, by default all")
    parser.add_argument("--searched", action="store_true", help="search cuts and schedule too")
    asked = parser.parse_args()
    names = asked.names
    rows, begin = [], time.process_time()
    print(f"{'run':>16} {'shape':>34} {'published':>10} {'same':>8} {'error':>7} {'searched':>9}  schedule")
    for run in RUNS:
        if names and run.name not in names:
            continue
        same, best, how = priced(run, asked.searched)
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
