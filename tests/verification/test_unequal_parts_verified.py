"""Grouped heads with a fused projection, heads of the query split, against one device."""
import pytest

import autoshard
from tests.support.grouped_models import build, loss

SPLIT = {"_scaled_dot_product_flash_attention_for_cpu_0": "-,tp,-,-", "attention.out.weight": (None, "tp")}


@pytest.mark.parametrize("mesh, way, heads, shared", [
    ("tp=4", "slices", 12, 3),        # three heads of four that share one
    ("tp=2", "picked heads", 6, 3),   # three heads share one and half of another
    ("dp=3,tp=2", "heads", 6, 2),
])
def test_same_numbers_as_one_device(mesh, way, heads, shared):
    model, (ids, target) = build(way, heads, shared)
    report = autoshard.verify(model.double(), mesh, (ids, target), loss_fn=loss, seeds=SPLIT, plans=("searched",))
    assert report.ok and report.tolerance == 1e-9, str(report)
