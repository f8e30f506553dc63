"""What the ranks of a pipeline hold on real processes, in four schedules, as their plans say."""
from __future__ import annotations

import pytest

import autoshard
from tests.dist.harness import on_ranks
from tests.dist.live_bytes import step_peak
from tests.dist.pipeline_cases import Case, subject

CASES = [Case("gpt", "pp=2", 4, "gpipe", ("h.1",)), Case("gpt", "pp=2", 4, "1f1b", ("h.1",)), Case("gpt", "pp=2", 4, "zb1p", ("h.1",)),
         Case("gpt", "pp=2", 3, "interleaved", ("h.1", "h.2", "h.3"), 2)]
SCALARS = 64
"""Bytes of the loss on its way to other ranks, its weight and the tangent, which the plan counts in part."""


def measure(cases: list[Case]) -> list[tuple[str, int, int]]:
    """(schedule, bytes that the plan says of this rank, bytes measured)"""
    out = []
    for case in cases:
        model, batch, loss = subject(case)
        compiled = autoshard.compile(model, case.mesh, batch, loss_fn=loss, cluster="cpu-gloo", pipeline=case.options(case.cuts or ()), cache=False, time_limit=10.0)
        predicted = max(s.peak.total for s in compiled.plan.stages if s.rank == compiled.place.coordinates[0])
        out.append((case.schedule, predicted, step_peak(compiled, batch)))
    return out


@pytest.mark.dist
def test_every_byte_in_four_schedules():
    for rank, found in enumerate(on_ranks(2, measure, CASES, timeout=600)):
        for schedule, predicted, measured in found:
            assert abs(predicted - measured) <= SCALARS, f"{schedule}, rank {rank}: {predicted} predicted, {measured} measured"
