"""What a stage costs, and a chain of such prices from a few short stages.

Solving every stage of K blocks would be K (K + 1) / 2 searches. Blocks with equal labels cost the same, so one search per label, and one per pair of
labels that stand together, price all of them: a stage costs the sum of its blocks, and at each place between two of them the difference that
being together makes (what they need not send or gather twice).
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

from autoshard.search.partition import Chain


@dataclass(frozen=True)
class StagePrice:
    """Seconds of a micro-batch, seconds of a step, bytes, and seconds of what the stage sends.

    forward, input, weight   the windows F, I and W of a micro-batch
    once, update             once a step: reductions and gathers that are; the optimizer's update
    stored, peak             bytes that are always there; bytes more while it computes
    saved, between           bytes of a micro-batch from F to I, and from I to W
    wire_out, wire_in        an activation to the next stage, a gradient back to the previous one
    """

    forward: float
    input: float
    weight: float = 0.0
    once: float = 0.0
    update: float = 0.0
    stored: float = 0.0
    peak: float = 0.0
    saved: float = 0.0
    between: float = 0.0
    wire_out: float = 0.0
    wire_in: float = 0.0

    @property
    def microbatch(self) -> float:
        """Seconds that a micro-batch keeps the stage busy."""
        return self.forward + self.input + self.weight


Range = Callable[[int, int], StagePrice]
"""The price of the stage of blocks first..end-1."""
SUMS = tuple(f.name for f in fields(StagePrice) if f.name not in ("peak", "wire_out", "wire_in"))


def mixed(one: StagePrice, other: StagePrice, part: float) -> StagePrice:
    """Of blocks of which `part` are as the other."""
    return StagePrice(*((1.0 - part) * a + part * b for a, b in zip(astuple(one), astuple(other), strict=True)))


def chain_from(labels: Sequence[Hashable], price: Range) -> Chain:
    """The chain of `len(labels)` blocks, from prices of single blocks and of pairs; each distinct one is asked for once. Blocks with the label ()
    have no ops, and are no stage by themselves."""
    singles = _distinct([(labels[k],) for k in range(len(labels))], price)
    pairs = _distinct([(labels[k], labels[k + 1]) for k in range(len(labels) - 1)], price)
    sums = {name: _ranges([getattr(s, name) for s in singles], [getattr(p, name) for p in pairs]) for name in SUMS}
    before = np.concatenate([[0], np.cumsum([label != () for label in labels])])
    none = np.where(before[None, :] > before[:, None], 0.0, np.inf)
    return Chain(
        sums["forward"] + none, sums["input"], sums["weight"], sums["once"] + sums["update"], sums["stored"],
        _highest([s.peak for s in singles], [p.peak for p in pairs]), sums["saved"], sums["between"],
        hop_forward=np.array([0.0, *(s.wire_out for s in singles[:-1]), 0.0]), hop_backward=np.array([0.0, *(s.wire_in for s in singles[1:]), 0.0]))


def with_ends(labels: Sequence[Hashable], price: Range, weights: Sequence[float]) -> Range:
    """The same with fewer questions: what stands in front of the blocks that repeat, and what is behind them, is priced in one stretch with its
    neighbour, whose own price is taken off; inside of such an end blocks cost in proportion to `weights`."""
    count = len(labels)
    often = [k for k in range(count) if labels.count(labels[k]) > 1]
    if not often:
        return price
    first, last = often[0], often[-1]

    def end_price(block: int) -> StagePrice:
        own, near, whole = (range(first), first, (0, first + 1)) if block < first else (range(last + 1, count), last, (last, count))
        alone, all_of_it = price(near, near + 1), price(*whole)
        share = weights[block] / (sum(weights[k] for k in own) or 1.0)
        if block < first and not all_of_it.input:  # no gradient is sent back, so that all of backward is in the weight part
            alone = replace(alone, input=0.0, weight=alone.input + alone.weight, between=alone.saved)
        parts = {name: max(0.0, share * (getattr(all_of_it, name) - getattr(alone, name))) for name in SUMS}
        return StagePrice(**parts, peak=all_of_it.peak, wire_out=alone.wire_out, wire_in=alone.wire_in)

    def answer(a: int, b: int) -> StagePrice:
        inner = [price(max(a, first), min(b, last + 1))] if max(a, first) < min(b, last + 1) else []
        parts = [*(end_price(k) for k in range(a, min(b, first))), *inner, *(end_price(k) for k in range(max(a, last + 1), b))]
        sums = {name: sum(getattr(p, name) for p in parts) for name in SUMS}
        return StagePrice(**sums, peak=max(p.peak for p in parts), wire_out=parts[-1].wire_out, wire_in=parts[0].wire_in)

    return answer


def _distinct(kinds: list[tuple[Hashable, ...]], price: Range) -> list[StagePrice]:
    """The price of each place, that of the first place of its kind."""
    known: dict[tuple[Hashable, ...], StagePrice] = {}
    for place, kind in enumerate(kinds):
        if kind not in known:
            known[kind] = price(place, place + len(kind))
    return [known[kind] for kind in kinds]


def _ranges(single: list[float], pair: list[float]) -> np.ndarray:
    """[a, b]: the sum of blocks a..b-1 and of the differences between neighbours among them; never below nothing."""
    blocks = len(single)
    alone = np.concatenate([[0.0], np.cumsum(single)])
    together = np.concatenate([[0.0], np.cumsum([pair[k] - single[k] - single[k + 1] for k in range(blocks - 1)]), [0.0]])
    a, b = np.meshgrid(np.arange(blocks + 1), np.arange(blocks + 1), indexing="ij")
    inside = np.where(b > a, together[np.maximum(b - 1, 0)] - together[np.minimum(a, blocks - 1)], 0.0)
    return np.maximum(np.where(b > a, alone[b] - alone[a] + inside, 0.0), 0.0)


def _highest(single: list[float], pair: list[float]) -> np.ndarray:
    """[a, b]: the highest peak of blocks a..b-1 and of neighbours among them."""
    blocks = len(single)
    highest = np.zeros((blocks + 1, blocks + 1))
    for a in range(blocks):
        tops = np.maximum(single[a:], np.concatenate([[0.0], pair[a:]]))
        highest[a, a + 1:] = np.maximum.accumulate(tops)
    return highest


def chain_of_stages(stages: Sequence[StagePrice]) -> Chain:
    """The chain in which these stages are the blocks: one stage each, at their own prices."""
    table = dict(zip((f.name for f in fields(StagePrice)), np.array([astuple(s) for s in stages]).T))
    size = len(stages) + 1

    def single(values: np.ndarray) -> np.ndarray:
        out = np.zeros((size, size))
        out[np.arange(size - 1), np.arange(1, size)] = values
        return out

    only = np.full((size, size), np.inf)
    only[np.arange(size - 1), np.arange(1, size)] = 0.0
    return Chain(
        single(table["forward"]) + only, single(table["input"]), single(table["weight"]), single(table["once"] + table["update"]),
        single(table["stored"]), single(table["peak"]), single(table["saved"]), single(table["between"]),
        hop_forward=np.array([0.0, *table["wire_out"][:-1], 0.0]), hop_backward=np.array([0.0, *table["wire_in"][1:], 0.0]))
