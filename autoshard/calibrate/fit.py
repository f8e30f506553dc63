"""Samples -> a cluster profile, and how well it repeats them.

A curve is what isotonic regression leaves of the samples that are not held out: of all curves that never fall, the one
with the least squared error of log seconds (pool adjacent violators; Barlow et al., "Statistical Inference under Order
Restrictions", 1972). Noise can then not make a larger size cheaper, which the search relies on.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import geometric_mean, median

import torch

from autoshard import collectives
from autoshard.calibrate.sample import Machine, Sample
from autoshard.cost.cluster import OPTIMIZER, AxisLink, Cluster, Device, Link, Overlap, OwnHost, load_cluster
from autoshard.cost.compute import op_seconds
from autoshard.cost.curve import Curve, Points
from autoshard.rules.family import PRICED, Family

ANCHOR = {Family.POINTWISE: ("aten::add.Tensor", "aten::mul.Tensor"), Family.REDUCTION: ("aten::sum.dim_IntList",),
          Family.NORM: ("aten::native_layer_norm", "aten::native_layer_norm_backward"), Family.MATMUL: ("aten::mm", "aten::addmm")}
"""Ops that stand for their family where an op of it has no curve of its own; of the other families, all."""


LEAST = 1e-9
"""Seconds: what noise made negative."""
PER_BYTE = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""FLOP that a byte of a convolution may count for."""


@dataclass(frozen=True)
class Error:
    """A sample and what the profile says about it; `error` is predicted / measured - 1."""

    sample: Sample
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.sample.seconds - 1


def fit(machine: Machine, samples: Sequence[Sample], overlap: Overlap) -> Cluster:
    """The profile. Its sources say what was measured, when and on what."""
    used = [s for s in samples if not s.held_out]
    links = tuple(_link(machine, i, [s for s in used if s.kind == "collective" and s.link == i]) for i in range(len(machine.links)))
    return Cluster(machine.name, _device(machine, used), links, overlap,
                   f"{machine.device}, {machine.backend}, {machine.ranks} ranks; calibrated {machine.made}", conditions=machine.conditions)


def errors(cluster: Cluster, samples: Iterable[Sample]) -> list[Error]:
    """Every sample beside the profile's price of the same thing."""
    return [Error(s, predicted(cluster, s)) for s in samples]


def predicted(cluster: Cluster, s: Sample) -> float:
    """What the cost model says, through the functions that price plans."""
    if s.kind == "collective":
        return float(collectives.seconds(s.key, s.nbytes, AxisLink(((cluster.links[s.link], s.ranks),))))
    if s.kind in ("view", "step"):
        host = cluster.device.own_host
        assert host is not None, "made of these very samples"
        return host.view if s.kind == "view" else host.step + s.amount * host.parameter
    if s.kind == "optimizer":
        curve = cluster.device.curve_of(f"{OPTIMIZER}/{s.key}", OPTIMIZER, torch.float32)
        return float(curve(s.amount))
    flops = s.amount if s.family.heavy else 0.0
    return float(op_seconds(s.family, flops, s.moved, getattr(torch, s.dtype), cluster.device, s.key))


def monotone(points: Iterable[tuple[float, float]]) -> Curve:
    """Isotonic regression of log seconds; equal amounts are averaged first. Flat stretches keep their two ends, but for the last.

    >>> monotone([(1, 2.0), (2, 1.0), (4, 8.0)])              # 2 and 1 become their geometric mean
    Curve(amounts=(1.0, 2.0, 4.0), seconds=(1.414..., 1.414..., 8.0))
    """
    by_amount: dict[float, list[float]] = {}
    for amount, seconds in points:
        by_amount.setdefault(float(amount), []).append(log(seconds))
    blocks: list[list] = []  # [mean, weight, amounts]
    for amount in sorted(by_amount):
        logs = by_amount[amount]
        blocks.append([sum(logs) / len(logs), len(logs), [amount]])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, weight, amounts = blocks.pop()
            last = blocks[-1]
            last[:] = [(last[0] * last[1] + mean * weight) / (last[1] + weight), last[1] + weight, last[2] + amounts]
    knots = [(amount, exp(mean)) for mean, _, amounts in blocks for amount in dict.fromkeys((amounts[0], amounts[-1]))]
    if len(blocks) > 1 and len(blocks[-1][2]) > 1:
        del knots[-2]  # a flat end would go on flat for ever
    if len(knots) == 1:
        knots.append((2 * knots[0][0] + 1.0, knots[0][1]))
    return Curve(tuple(a for a, _ in knots), tuple(s for _, s in knots))


def _device(machine: Machine, used: Sequence[Sample]) -> Device:
    ops = [s for s in used if s.kind == "op"]
    heavy, light = [s for s in ops if s.family.heavy], [s for s in ops if not s.family.heavy]
    peak = {d: max(s.amount / s.seconds for s in heavy if s.dtype == d) for d in sorted({s.dtype for s in heavy})}
    bandwidth = max(s.amount / s.seconds for s in light)
    fraction = {f: _fraction([s for s in ops if s.family is f], bandwidth, peak) for f in PRICED}
    overhead = min(s.seconds for s in light)
    efficiency = {f.value: fraction[f] for f in PRICED}
    curves = _op_curves(used)
    return Device(machine.device, peak, bandwidth, machine.memory, overhead, efficiency, {key: curve.points for key, curve in curves.items()},
                  updates_together=machine.backend == "nccl", own_host=_own_host(used),
                  byte_flop={key: curve.per_byte for key, curve in curves.items() if curve.per_byte})


def _own_host(used: Sequence[Sample]) -> OwnHost | None:
    """The line through what is left of steps with fewer and with more parameters."""
    views, steps = ([s for s in used if s.kind == kind] for kind in ("view", "step"))
    if not views or not steps:
        return None
    fewer, more = sorted(steps, key=lambda s: s.amount)
    parameter = max((more.seconds - fewer.seconds) / (more.amount - fewer.amount), LEAST)
    return OwnHost(views[0].seconds, max(fewer.seconds - fewer.amount * parameter, LEAST), parameter)


def _fraction(samples: Sequence[Sample], bandwidth: float, peak: dict[str, float]) -> float:
    """Reached share of the best rate, over the largest size of each op; a family without samples is taken at a half."""
    largest = {(s.key, s.dtype): s for s in sorted(samples, key=lambda s: s.amount)}
    rates = [s.amount / s.seconds / (peak[s.dtype] if s.family.heavy else bandwidth) for s in largest.values()]
    return min(geometric_mean(rates), 1.0) if rates else 0.5


def _op_curves(used: Sequence[Sample]) -> dict[str, Curve]:
    """Per op and dtype, and per family and dtype for ops that were not measured."""
    groups: dict[str, list[Sample]] = {}
    for s in used:
        if s.kind == "optimizer":
            groups.setdefault(f"{OPTIMIZER}/{s.key}", []).append(s)
            groups.setdefault(OPTIMIZER, []).append(s)
        elif s.kind == "op":
            groups.setdefault(f"{s.key}/{s.dtype}", []).append(s)
            if s.key in ANCHOR.get(s.family, (s.key,)):
                groups.setdefault(f"{s.family}/{s.dtype}", []).append(s)
    return {key: _curve(groups[key]) for key in sorted(groups)}


def _curve(samples: Sequence[Sample]) -> Curve:
    """Of convolutions with the bytes that count as FLOP such that the curve comes closest to the samples, and as few as do so: a curve over FLOP
    alone has one price for a large image with few channels and a small one with many."""
    if any(s.family is not Family.CONV for s in samples):
        return monotone((s.amount, s.seconds) for s in samples)
    tried = [replace(monotone((s.amount + k * s.moved, s.seconds) for s in samples), per_byte=k) for k in PER_BYTE]
    return min(tried, key=lambda curve: sum(log(float(curve(s.amount + curve.per_byte * s.moved)) / s.seconds) ** 2 for s in samples))


def _link(machine: Machine, i: int, samples: Sequence[Sample]) -> Link:
    """Latency from the smallest buffers, what is left as a curve over bytes on the wire per collective. One process alone
    cannot measure a link: it gets that of a built-in profile, and a name that says so."""
    if not samples:
        stand_in = load_cluster("h100-dgx" if machine.links[i] == "nvlink" else "cpu-gloo").links[0]
        return replace(stand_in, name=f"{stand_in.name}-not-measured")
    latency = _latency(samples)
    curves = {}
    for kind in collectives.KINDS:
        mine = [s for s in samples if s.key == kind]
        if mine:
            left = [(s.amount, max(s.seconds - collectives.ring_steps(kind, s.ranks) * latency, latency)) for s in mine]
            curves[kind] = monotone(left)
    best = [c.amounts[-1] / c.seconds[-1] for c in curves.values()]
    bandwidth = max(best)
    return Link(machine.links[i], latency, median(c.seconds[0] for c in curves.values()), bandwidth,
                min(geometric_mean(best) / bandwidth, 1.0), machine.devices[i] if i + 1 < len(machine.links) else float("inf"),
                measured=bounded(curves))


def _latency(samples: Sequence[Sample]) -> float:
    """Seconds per step: how the time of the smallest buffers grows with steps if groups of several sizes were measured;
    of one size, half of what the quickest collective takes per step (a small share: the curves hold the rest)."""
    small: dict[str, dict[int, float]] = {}
    for s in sorted(samples, key=lambda s: -s.amount):
        small.setdefault(s.key, {})[collectives.ring_steps(s.key, s.ranks)] = s.seconds
    limit = min(t / (steps + 1) for times in small.values() for steps, t in times.items())
    slopes = [(t[max(t)] - t[min(t)]) / (max(t) - min(t)) for t in small.values() if len(t) > 1]
    return min(max(median(slopes), 1e-8), limit) if slopes else limit / 2


def bounded(curves: dict[str, Curve]) -> dict[str, Points]:
    """An exchange never costs more than the gather of the same local tensor, which could stand in for it: over n ranks
    that has n >= 2 times the bytes on the wire. The lower of two lines lies above its chord, so bounding the points of
    both curves bounds everything between."""
    if "all_to_all" in curves and "all_gather" in curves:
        exchange, gather = curves["all_to_all"], curves["all_gather"]
        amounts = sorted({*exchange.amounts, *(a / 2 for a in gather.amounts)})
        lower = [min(float(exchange(a)), float(gather(2 * a))) for a in amounts]
        last = amounts[-1]  # from here on both are straight: go on with the flatter one
        rise = min(float(exchange(2 * last) - exchange(last)), float(gather(4 * last) - gather(2 * last)))
        curves = {**curves, "all_to_all": Curve((*amounts, 2 * last), (*lower, lower[-1] + rise))}
    return {kind: curve.points for kind, curve in curves.items()}
