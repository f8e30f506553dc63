"""Checks and clamps of a model that reads data, on two processes: every rank raises where one rank's rows do not hold, and the next step runs."""
import pytest
import reading_models as models
import torch

import autoshard
from autoshard.errors import CheckError
from tests.dist.harness import on_ranks

pytestmark = pytest.mark.dist


def both(m, x):
    if x.max() >= m.bound:
        raise ValueError(f"values must be below {m.bound}")
    h = m.linear(x)
    if h.abs().max() > 1:
        h = torch.clamp(h, -0.5, 0.5)
    return h


def steps():
    """What each step of a rank gives: its outputs, or the error that it raises."""
    torch.manual_seed(0)
    model, found = models.Body(both).double(), []
    compiled = autoshard.compile(model, "d=2", cluster="cpu-gloo", cache=False)
    for row in (0.1, 2.5, 7.0, 0.1):  # neither, the clamp, the check, neither again
        x = torch.rand(8, 8, dtype=torch.float64) * 0.1
        x[6] = row
        try:
            out = compiled(x)
            out.sum().backward()
            found.append(bool(torch.allclose(out.detach(), model(x).detach(), 1e-12, 1e-12)))
        except CheckError as e:
            found.append(str(e))
    return found


def test_every_rank_raises_and_chooses_alike():
    for found in on_ranks(2, steps):
        assert found[:2] == [True, True] and found[3] is True
        assert "does not hold" in found[2] and "test_reads.py:" in found[2] and "values must be below" in found[2]


def by_a_setting(m, x):
    return m.linear(x) * m.kept.sum() if (m.kept > 0.7).any() else x


def settings():
    """Whether a form of the call gives what the model gives: while every rank has the whole buffer, and once each has a part."""
    torch.manual_seed(0)
    model, x = models.Body(by_a_setting), torch.rand(8, 8)
    compiled = autoshard.compile(model, "d=2", cluster="cpu-gloo", cache=False, seeds={"kept": ("d",)})
    same = [torch.allclose(compiled(x), model(x))]
    with torch.no_grad():
        return [*same, torch.allclose(compiled.eval()(x), model(x)), compiled.get_buffer("kept").to_local().numel() == 1]


def test_small_buffers_are_read_on_several_ranks():
    assert on_ranks(2, settings) == [[True, True, True]] * 2
