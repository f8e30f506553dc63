"""Axes of one rank: nothing to search there, unless something is held as Shard."""
from __future__ import annotations

import pytest
import torch

from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import R
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.decide.options import Options
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.one_stage import decide, prices
from models import gpt

WIDE, ALL = "dp=2,tp=2", "pp=1,dp=2,cp=1,tp=2"
AT = (1, 3)
"""Where the axes of `WIDE` are in `ALL`."""


def built(mesh: str):
    with torch.device("meta"):
        model, inputs = gpt.build(layers=1, width=24, heads=6, batch=5, seq=8, vocab=50)
    return Batch(model, inputs, {}, {"loss_fn": gpt.loss, "training": True}).on(parse_mesh(mesh), Options().pipeline)


def test_they_add_no_strategies_and_the_plan_is_the_same():
    options = Options(cluster="h100-dgx", time_limit=60.0)
    less, more = (prices(built(mesh), parse_mesh(mesh), options) for mesh in (WIDE, ALL))
    for name, found in less.strategies.items():
        assert len(more.strategies[name]) == len(found), name
        assert (more.strategies[name].outputs[..., AT] == found.outputs).all(), name
        assert (more.strategies[name].outputs[..., (0, 2)] == R).all(), name
    one, other = (decide(table, options, has_loss=True, finer=False) for table in (less, more))
    assert other.objective_s == pytest.approx(one.objective_s, rel=1e-9)


def test_what_is_held_as_shard_there_stays_so():
    """Seeds of one's own never say so (they are read as Replicate on an axis of one rank); a DTensor that is there already may."""
    mesh, options = parse_mesh("dp=2,tp=1"), Options(cluster="h100-dgx", seeds={"*.mlp.*.weight": "?,tp"})
    traced = built("dp=2,tp=1")
    weight = next(op for op in traced.graph.of_kind("param") if ".mlp." in str(op.target) and str(op.target).endswith("weight"))
    free, held = (prices(traced, mesh, options, fixed=fixed) for fixed in (None, {str(weight.target): (R, 0)}))
    assert all((s.outputs[..., 1] == R).all() for s in free.strategies.values())
    plan = decide(held, options, has_loss=True, finer=False)
    assert plan.ops[weight.name].outputs[0] == (R, 0)
    assert plan.objective_s >= decide(free, options, has_loss=True, finer=False).objective_s * (1 - 1e-9)


@pytest.mark.parametrize("shape", [(8, 6), (5, 4, 12)])
def test_ways_are_priced_as_where_such_axes_take_part(shape):
    """With one spec that is Shard there among the sources, all states of the axis are in the search for ways."""
    mesh, specs = parse_mesh("a=2,b=1,c=2"), [(R, R, R), (0, R, R), (R, R, 1), (1, R, 0), (0, R, 1), (-2, R, -2)]
    found = Redistribution(mesh, load_cluster("h100-dgx"))
    alone, among = found.table(shape, torch.float32, specs, specs[:-1]), found.table(shape, torch.float32, [*specs, (R, 0, R)], specs[:-1])
    assert (alone == among[:-1]).all()
    for s in specs:
        for t in specs[:-1]:
            if shape == (8, 6) or 0 not in (*s, *t):
                wide = Redistribution(parse_mesh("a=2,c=2"), load_cluster("h100-dgx")).steps(shape, torch.float32, (s[0], s[2]), (t[0], t[2]))
                assert [(x.kind, x.seconds) for x in found.steps(shape, torch.float32, s, t)] == [(x.kind, x.seconds) for x in wide]
