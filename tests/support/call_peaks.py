"""Peaks of the calls of `generate`, measured and planned."""
from __future__ import annotations

from typing import NamedTuple

import torch

from tests.dist.live_bytes import LiveBytes


class Peak(NamedTuple):
    measured: int
    planned: int


@torch.no_grad()
def call_peaks(served, ids) -> list[Peak]:
    """Of a prompt and of the token after it, both built already. Bytes of this rank."""
    compiled, calls = served.compiled, []
    hook = compiled.register_forward_pre_hook(lambda module, args: calls.append(args))
    served.generate(ids, max_new_tokens=2, do_sample=False)
    hook.remove()
    return [_peak(compiled, call) for call in calls]


def _peak(compiled, call) -> Peak:
    before = {id(step): step.calls for step in compiled._steps.values()}
    compiled(*call)
    (step,) = (step for step in compiled._steps.values() if step.calls > before[id(step)])
    constants = [t for name, t in step.calling.constants.items() if name in step.plan.placements]  # no buffers of the module
    with LiveBytes() as seen:
        seen.track(list(compiled.parameters()), list(compiled.buffers()), constants, call)
        compiled(*call)
    return Peak(seen.peak, int(step.plan.memory["total"]))
