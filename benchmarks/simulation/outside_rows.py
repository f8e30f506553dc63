"""Tables of steps that others measured on one cluster, beside what is predicted for the same configurations.

    python -m benchmarks.simulation.outside_rows one-node.csv --width 2048 [--launch 40e-6] [--bandwidth 0.8] [--matmul 0.8] [--every 3]

The table is in the format of github.com/VIA-Research/vTrain, data/ground_truth_*.csv (Megatron-DeepSpeed, GPT, fp16, all recomputed, A100);
its rows without pipeline stages are predicted. --launch, --bandwidth and --matmul are the three numbers of a device that a table's own
software may change: seconds in which its host issues one op (device.launch), the reached share of the memory's bandwidth as a factor on
the profile's, and the share of the peak that large matrix products reach. Fit them on some rows (--fit tries a grid) and judge others.

Steps grow linearly with layers and with micro-batches: a row is predicted from programs of one and two layers, two and four
micro-batches, so that a table takes minutes (20 layers x 1024 on dp=4: 128.13 ms, and 128.13 ms as a whole).
"""
from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path
from statistics import median

import numpy as np

from autoshard import Plan
from autoshard.base.graph import Graph
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.simulation.replay import replay
from autoshard.simulation.simulate import program_for
from benchmarks.simulation.outside import VTRAIN, Row, gpt_sizes, planned, rank_correlation

GRID = {"launch": (30e-6, 35e-6, 40e-6, 45e-6, 50e-6), "matmul": (0.6, 0.7, 0.8, 0.87), "bandwidth": (0.6, 0.7, 0.8, 0.9, 1.0)}


@dataclass(frozen=True)
class Measured:
    """A row of the table: seconds of a step of `layers` on dp x tp ranks, with `microbatches` of `rows` rows on each."""

    seconds: float
    gpus: int
    width: int
    heads: int
    layers: int
    seq: int
    dp: int
    tp: int
    rows: int
    microbatches: int

    @property
    def form(self) -> tuple[int, ...]:
        """What one pair of programs stands for."""
        return self.width, self.heads, self.seq, self.dp, self.tp, self.rows

    @property
    def question(self) -> tuple[int, ...]:
        """Rows among which a user would choose: the same model and batch on as many GPUs."""
        return self.gpus, self.dp * self.rows * self.microbatches, self.layers, self.width

    def as_row(self, layers: int) -> Row:
        mesh = ",".join(f"{n}={k}" for n, k in (("dp", self.dp), ("tp", self.tp)) if k > 1) or "dp=1"
        return Row(str(self.form), self.seconds, VTRAIN, "a100-dgx", mesh, 2 * self.rows * self.dp, self.seq,
                   "Megatron TP" if self.tp > 1 else "DDP", "gpt", gpt_sizes(layers, self.width, self.heads), 1, "fp16", 2)


def table(path: Path) -> Iterator[Measured]:
    """Rows that have one pipeline stage."""
    with path.open() as f:
        for r in csv.reader(f):
            if len(r) < 11 or not r[-1].replace(".", "", 1).isdigit() or int(r[-2]) != 1:
                continue
            gpus, batch, rows, width, heads, layers, seq, tp, dp = (int(x) for x in r[-11:-2])
            yield Measured(float(r[-1]) / 1e3, gpus, width, heads, layers, seq, dp, tp, rows, batch // dp // rows)


def cluster_with(launch: float | None, matmul: float | None, bandwidth: float) -> Cluster:
    """a100-dgx with three numbers changed. Attention here is matrix products, and has no number of its own."""
    cluster = load_cluster("a100-dgx")
    device = cluster.device
    reached = {f: matmul if f == "matmul" and matmul else v if f in ("matmul", "attention", "conv") else v * bandwidth
               for f, v in device.efficiency.items()}
    alone = {f: v * bandwidth for f, v in device.bandwidth_efficiency.items()}
    return replace(cluster, device=replace(device, efficiency=reached, bandwidth_efficiency=alone, launch=launch))


class Programs:
    """Graph and plan of a form with one and with two layers."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], list[tuple[Graph, Plan]]] = {}

    def seconds(self, row: Measured, cluster: Cluster) -> dict[tuple[int, int], float]:
        """By layers and micro-batches."""
        if row.form not in self.made:
            self.made[row.form] = [planned(row.as_row(layers)) for layers in (1, 2)]
        return {(layers, m): replay(program_for(replace(graph, microbatches=m), plan, cluster, executed=True), cluster).step_s
                for layers, (graph, plan) in enumerate(self.made[row.form], 1) for m in (2, 4)}


def predict(rows: Sequence[Measured], programs: Programs, cluster: Cluster) -> list[float]:
    """Seconds of each row: linear in layers and in micro-batches."""
    known: dict[tuple[int, ...], dict[tuple[int, int], float]] = {}
    out = []
    for row in rows:
        if row.form not in known:
            known[row.form] = programs.seconds(row, cluster)
        one, two = (known[row.form][n, 2] + (row.microbatches - 2) * (known[row.form][n, 4] - known[row.form][n, 2]) / 2 for n in (1, 2))
        out.append(one + (row.layers - 1) * (two - one))
    return out


def fitted(rows: Sequence[Measured], programs: Programs, start: dict[str, float]) -> dict[str, float]:
    """One number after the other, twice, to the least mean square of the logarithm of predicted over measured."""
    best = dict(start)
    for _, name in product(range(2), GRID):
        def off(value: float, name: str = name) -> float:
            found = predict(rows, programs, cluster_with(**{**best, name: value}))
            return sum(log(p / r.seconds) ** 2 for p, r in zip(found, rows, strict=True))

        best[name] = min(GRID[name], key=off)
        print(f"{best}: root mean square of the logarithm {(off(best[name]) / len(rows)) ** 0.5:.3f}", flush=True)
    return best


def show(rows: Sequence[Measured], found: Sequence[float], each: bool) -> None:
    for row, p in sorted(zip(rows, found, strict=True), key=lambda x: str(x[0].form)) if each else ():
        print(f"{row.layers} x {row.width}, dp={row.dp},tp={row.tp}, {row.microbatches} x {row.rows}: {1e3 * row.seconds:.0f} ms, "
              f"{1e3 * p:.0f} predicted, {100 * (p / row.seconds - 1):+.0f} %")
    errors = [p / r.seconds - 1 for r, p in zip(rows, found, strict=True)]
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, p in zip(rows, found, strict=True):
        groups[row.question].append((p, row.seconds))
    ranks = [rank_correlation(*map(list, zip(*pairs, strict=True))) for pairs in groups.values() if len(pairs) > 4]
    lost = [min(pairs)[1] / min(t for _, t in pairs) - 1 for pairs in groups.values()]
    print(f"{len(rows)} rows: median error {100 * median(map(abs, errors)):.0f} %, signed {100 * median(errors):+.0f} %, "
          f"90 % within {100 * float(np.quantile(np.abs(errors), 0.9)):.0f} %")
    if ranks:
        print(f"{len(ranks)} groups of equal (GPUs, batch, layers) with 5 rows or more: Spearman {median(ranks):.2f} (median), {min(ranks):.2f} (least); "
              f"the row predicted fastest is {100 * median(lost):.0f} % (median), {100 * max(lost):.0f} % (most) slower than the fastest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--width", type=int, help="rows of this hidden size only")
    parser.add_argument("--every", type=int, default=1, help="each so many forms (mesh, rows of a micro-batch) only")
    parser.add_argument("--launch", type=float)
    parser.add_argument("--matmul", type=float)
    parser.add_argument("--bandwidth", type=float, default=1.0)
    parser.add_argument("--fit", action="store_true", help="fit the three numbers on these rows first")
    parser.add_argument("--each", action="store_true", help="print every row")
    given = parser.parse_args()
    rows = [r for r in table(given.table) if given.width in (None, r.width)]
    kept = sorted({r.form for r in rows})[::given.every]
    rows, programs = [r for r in rows if r.form in kept], Programs()
    numbers = {"launch": given.launch, "matmul": given.matmul, "bandwidth": given.bandwidth}
    if given.fit:
        numbers = fitted(rows, programs, {"launch": 40e-6, "matmul": 0.8, "bandwidth": 0.8, **{k: v for k, v in numbers.items() if v}})
    show(rows, predict(rows, programs, cluster_with(**numbers)), given.each)


if __name__ == "__main__":
    main()
