"""What the lowered module costs beside the plain model: one process, mesh size 1, one training step.

    python -m benchmarks.runtime.overhead [CASE ...] [--backend inductor] [--rounds 30] [--json out.json]

Both do forward, loss and backward on the same batch. Rounds alternate, and so does who goes first, because a busy
machine drifts by more than the difference. The ratio is the median of each round's ratio (neighbours share the
machine's mood), with a 95 % bootstrap interval. "fixed" is the difference of median times. The inductor backend is
compared with torch.compile of the same model.
"""
from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import autoshard
from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.rounds import CLOCKS, ratio
from models import gpt, llama, mlp, resnet, vit

CASES = {
    "mlp tiny": (mlp, {}),
    "mlp 4x1024": (mlp, {"widths": (1024,) * 5, "batch": 64}),
    "gpt 4x256": (gpt, {"layers": 4, "width": 256, "heads": 4, "vocab": 4096, "context": 128}),
    "llama 4x256": (llama, {"layers": 4, "width": 256, "hidden": 512, "vocab": 4096, "seq": 128}),
    "resnet tiny": (resnet, {}),
    "resnet 32x64": (resnet, {"width": 32, "image": 64, "batch": 8}),
    "vit 4x256": (vit, {"layers": 4, "width": 256, "heads": 4, "image": 64, "patch": 8}),
}
LIMIT = 1.02
"""At most 2 % over the plain model."""


@dataclass(frozen=True)
class Result:
    """Milliseconds per step (medians), and ratios lowered / plain."""

    case: str
    plain_ms: float
    lowered_ms: float
    ratio: float
    low: float
    high: float


def measure(case: str, backend: str, rounds: int, clock: Callable[[], float]) -> Result:
    module, options = CASES[case]
    torch.manual_seed(0)
    model, batch = module.build(**options)
    lowered = autoshard.compile(copy.deepcopy(model), "one=1", batch, loss_fn=module.loss, cluster="cpu-gloo",
                                backend=backend, cache=False)
    forward = torch.compile(model) if backend == "inductor" else model
    plain = _step(model, lambda: module.loss(forward(*batch[:-1]), batch[-1]), clock)
    ours = _step(lowered, lambda: lowered(*batch), clock)
    for _ in range(3):
        plain(), ours()
    repeat = max(1, round(0.02 / max(plain(), 1e-6)))  # a round lasts 20 ms or more, for the clock's sake
    times = [_round(plain, ours, i, repeat) for i in range(rounds)]
    plain_s, ours_s = zip(*times, strict=True)
    return Result(case, 1e3 * statistics.median(plain_s), 1e3 * statistics.median(ours_s), *ratio(ours_s, plain_s))


def _step(model: nn.Module, loss: Callable[[], torch.Tensor], clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds of one forward and backward; dropping the gradients is not counted."""
    def run() -> float:
        model.zero_grad()
        start = clock()
        loss().backward()
        return clock() - start

    return run


def _round(plain: Callable[[], float], ours: Callable[[], float], i: int, repeat: int) -> tuple[float, float]:
    seconds = {}
    for name, step in (("plain", plain), ("ours", ours))[::1 if i % 2 else -1]:
        seconds[name] = statistics.median(step() for _ in range(repeat))
    return seconds["plain"], seconds["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)} (default: all)")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a busy machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.cases:
        if name not in CASES:
            parser.error(f"no case {name!r}; choose from {', '.join(CASES)}")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: a spread needs them")
    torch.set_num_threads(options.threads)
    results = []
    for case in options.cases or CASES:
        results.append(measure(case, options.backend, options.rounds, CLOCKS[options.clock]))
        print(f"{case}: {results[-1].ratio:.3f}", file=sys.stderr)
    facts = about()
    rows = [(r.case, f"{r.plain_ms:.3f}", f"{r.lowered_ms:.3f}", f"{1e3 * (r.lowered_ms - r.plain_ms):.0f}", f"{r.ratio:.3f}",
             f"{r.low:.3f} .. {r.high:.3f}", "yes" if r.ratio <= LIMIT else "no") for r in results]
    columns = (f"case, {options.backend}", "plain ms", "lowered ms", "fixed us", "ratio", "95 % interval", f"at most {LIMIT}")
    print(f"{line(facts, f'{options.rounds} rounds of {options.clock} time')}\n\n{markdown(columns, rows)}")
    if options.json:
        options.json.write_text(json.dumps({**facts, "backend": options.backend, "results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
