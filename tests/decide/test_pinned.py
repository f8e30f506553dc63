"""Seeds that keep plans from fitting are named, the one that holds most first."""
from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.decide.notes.seed_bytes import pinned, without_seeds
from autoshard.decide.options import Options
from autoshard.errors import InfeasibleError
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from autoshard.space.cost_table import CostTable
from models import mlp

WHOLE = {"layers.1.weight": "-,-", "layers.0.weight": "d,-", "layers.0.bias": "-", "input:0": "d,-"}
OPTIONS = Options(cluster="h100-dgx", time_limit=60.0, seeds=WHOLE)


@pytest.fixture(scope="module")
def table() -> CostTable:
    model, batch = mlp.build(widths=(64, 256, 256, 64), batch=16)
    return prices(trace(model, batch, loss_fn=mlp.loss), parse_mesh("d=4"), OPTIONS)


def test_bytes_beyond_the_least(table: CostTable) -> None:
    """With AdamW a float32 parameter takes 16 bytes an element; a quarter of that is the least on four ranks."""
    assert [(p.seed, p.nbytes) for p in pinned(table)] == [
        ("'layers.1.weight' = '-,-'", 16 * 256 * 256 * 3 // 4), ("'layers.0.bias' = '-'", 16 * 256 * 3 // 4)]


def test_without_seeds_less_is_enough_and_the_error_names_them(table: CostTable) -> None:
    free = decide(without_seeds(table, "replicate"), replace(OPTIONS, seeds={}, memory_budget=700e3))
    with pytest.raises(InfeasibleError, match=r"Without the seeds a plan fits.*Most bytes per rank are held by 'layers.1.weight' = '-,-' 768 KiB"):
        decide(table, replace(OPTIONS, memory_budget=700e3))
    assert free.memory["total"] <= 700e3


def test_seeds_are_not_blamed_where_nothing_fits_anyway(table: CostTable) -> None:
    with pytest.raises(InfeasibleError, match="without all 4 of them none was found") as caught:
        decide(table, replace(OPTIONS, memory_budget=6000.0))
    assert "a plan fits" not in str(caught.value)
