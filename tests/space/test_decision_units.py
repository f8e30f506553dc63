"""What grouping ops into units costs against deciding op by op."""
from __future__ import annotations

import importlib

import pytest
import torch

from autoshard.base.graph import Ref
from autoshard.base.mesh import mesh_of
from autoshard.base.precision import Precision
from autoshard.base.spec import PSUM
from autoshard.cli.read import parse_precision
from autoshard.decide.options import Options
from autoshard.formulate.problem_of import formulate
from autoshard.planner.one_stage import prices
from autoshard.program.trace import trace
from autoshard.search import solve
from autoshard.space.decision_units import find_units, singletons
from autoshard.space.views_of_readers import views_of_contractions

WIDE = {"bert": ("base", {"layers": 2}), "dlrm": ("small", {}), "gpt": ("124M", {"layers": 2}), "llama": ("1B", {"layers": 2}),
        "mlp": ("wide", {}), "moe": ("small", {"layers": 2}), "resnet": ("18", {}), "t5": ("small", {"layers": 1}), "vit": ("b16", {"layers": 2})}
"""Real widths and one sample: communication on slow links decides, and every join counts."""
MOST = 5e-3
"""What op by op may gain."""
POLICY = parse_precision("param=bf16,master=fp32,reduce=bf16")


def table_of(name: str, mesh: str, cluster: str, tiny: bool = False, precision: Precision | None = None,
             dtype: torch.dtype = torch.float32, **shape):
    module = importlib.import_module(f"models.{name}")
    size, more = ("tiny", {}) if tiny else WIDE[name]
    with torch.device("meta"):
        model, inputs = module.build(size, **shape, **more)
    traced = trace(model.to(dtype), inputs, loss_fn=module.loss, training=True, precision=precision)
    return prices(traced, mesh_of(mesh), Options(cluster=cluster, precision=precision))


@pytest.mark.parametrize("name, mesh, cluster, tiny, batch", [
    *[(name, "a=8", "cpu-gloo", False, 1) for name in WIDE],
    *[(name, mesh, "h100-dgx", True, 4096) for name in ("gpt", "dlrm") for mesh in ("a=8", "a=4")],
    *[("mlp", mesh, "cpu-gloo", False, 1) for mesh in ("a=2,b=4", "a=2,b=2,c=2")]])
def test_op_by_op_gains_little(name, mesh, cluster, tiny, batch):
    assert_little(table_of(name, mesh, cluster, tiny, batch=batch))


@pytest.mark.parametrize("name, batch", [("moe", 4), ("moe", 8), ("dlrm", 8), ("llama", 4)])
def test_op_by_op_gains_little_under_a_policy(name, batch):
    assert_little(table_of(name, "a=8", "h100-dgx", precision=POLICY, batch=batch))


def assert_little(table) -> None:
    free, grouped = (solve(formulate(table, units=find(table)).problem, time_limit=60) for find in (singletons, find_units))
    assert len(find_units(table).units) < len(singletons(table).units)
    assert grouped.cost <= free.bound * (1 + MOST)


def test_a_view_for_a_contraction_decides_with_it():
    """The view reads what it looks at as its contraction reads the view, and the contraction names the unit."""
    table = table_of("gpt", "a=4", "cpu-gloo", True)
    views, units = views_of_contractions(table.graph), find_units(table)
    assert views
    for view, contraction in views.items():
        assert units.index(view) == units.index(contraction)
        assert units.units[units.index(view)].name == contraction
        (reader, index), = table.graph.users[Ref(view)]
        made, read = units.outputs(table.graph.op(reader).refs[index]), units.inputs(reader, index)
        assert [made.specs[i] for i in made.index] == [read.specs[i] for i in read.index]
    assert all(len(unit) == len(set(zip(*(p.tolist() for p in unit.picked), strict=True))) for unit in units.units)


def test_one_sample_may_be_split_along_its_sequence_over_all_axes():
    """The gradient of a norm's weight sums over the sequence, and what casts it waits for that sum; the norm itself does not."""
    table = table_of("llama", "a=2,b=2", "h100-dgx", True, dtype=torch.bfloat16, batch=1)
    units = find_units(table)
    values = [op.name for op in table.graph.of_kind("call") if op.phase == "backward" and op.outputs[0].shape == (1, 32, 64)]
    assert len(values) > 20
    assert [name for name in values if (1, 1) not in units.outputs(Ref(name)).specs] == []


def test_weights_of_norms_leave_the_batch_split():
    """Their gradients are cast, in which they must not be Partial: such a cast is no part of the norm's unit."""
    table = table_of("llama", "a=2,b=4", "h100-dgx", dtype=torch.bfloat16, batch=8)
    units, norms = find_units(table), [op.name for op in table.graph.ops if "rms_norm_backward" in str(op.target)]
    assert norms
    for name in norms:
        assert (0, 0) in units.outputs(Ref(name)).specs
        assert (PSUM, PSUM) in units.outputs(Ref(name, 1)).specs


def test_features_of_norms_are_split_on_one_axis_or_op_by_op():
    for mesh, is_fine in (("a=4", True), ("a=2,b=2", False)):
        table = table_of("llama", mesh, "cpu-gloo", tiny=True)
        name = next(op.name for op in table.graph.ops if "rms_norm" in str(op.target))
        split = (2,) * table.mesh.ndim
        assert (split in find_units(table).outputs(Ref(name)).specs) == is_fine
        assert split in singletons(table).outputs(Ref(name)).specs
