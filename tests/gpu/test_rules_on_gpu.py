"""The numeric oracle of the rules, by the kernels of a GPU: some want other arguments than those of a CPU, or make other results of them."""
from __future__ import annotations

import pytest

from autoshard.rules.check.oracle import run_whole, wrong_rows
from autoshard.rules.check.samples import SAMPLES, build
from autoshard.rules.check.samples_images import IMAGES
from autoshard.rules.check.samples_special import SPECIAL
from autoshard.rules.device_kernels import ELSEWHERE

ALL = [s for s in (*SAMPLES, *IMAGES, *SPECIAL) if s.op not in ELSEWHERE]


@pytest.mark.parametrize("s", ALL, ids=[f"{i}-{s.op}" for i, s in enumerate(ALL)])
def test_rows_are_true(s):
    call, tensors = build(s)
    tensors = [t.cuda() for t in tensors]
    try:
        run_whole(call, tensors)
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"no GPU runs it: {str(e).splitlines()[0]}")
    wrong = wrong_rows(call, tensors, pairs=8, values=s.values)
    assert not wrong, "\n".join(map(str, wrong))
