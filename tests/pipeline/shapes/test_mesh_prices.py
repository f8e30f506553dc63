"""Prices of blocks in little memory: what they do if a byte costs seconds, and what a rank does between two such rates."""
from dataclasses import fields

import pytest
import torch
from torch import nn

from autoshard import Pipeline
from autoshard.base.graph import BACKWARD, FORWARD
from autoshard.base.plan import CATEGORIES
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.shapes.choose import AMPLE, Asked
from autoshard.pipeline.shapes.mesh_prices import PARTS, RATES, MeshPricer, Sizes
from autoshard.pipeline.shapes.meshes import Slot
from autoshard.pipeline.shapes.price import StagePrice, mixed
from autoshard.pipeline.shapes.stage_prices import price_of
from autoshard.planner.open_mesh import searches
from autoshard.play.footprint import Footprints
from autoshard.play.timeline import timeline
from autoshard.recompute.rewrite import with_recompute
from autoshard.space.cost_table import trained_params

OPTIONS = Options(cluster="cpu-gloo", pipeline=Pipeline(microbatches="auto"))
FLYING, SLOT = 4, Slot(2, 1, 64)


@pytest.fixture(scope="module")
def pricer():
    """Of six equal blocks on four ranks of two devices, between which there are four micro-batches."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)))
    inputs, cluster = (torch.randn(512, 8), torch.randn(512, 8)), load_cluster("cpu-gloo")
    batch = Batch(model, inputs, {}, {"loss_fn": nn.functional.mse_loss, "training": True})
    asked, found = Asked(8, None, OPTIONS.pipeline, cluster, AMPLE), searches(batch.whole, OPTIONS, PhaseTimer(), cluster)
    return MeshPricer(Sizes(batch, OPTIONS.pipeline, 512, 8), 8, asked.mesh_of, cluster, AMPLE, found)


def test_no_plan_is_better_at_the_rate(pricer):
    """The plan found at each rate is the cheapest of all that were found, with its bytes at that rate: those that are always there, parameters that
    are held for the step among them, and those of all micro-batches in flight."""
    stage, wire = pricer.sizes.stage(1, 2, 8, False), pricer._wire(SLOT)
    ample = pricer.price(1, 2, SLOT, 0, False)
    scale = 8 * ample.forward / (FLYING * ample.saved)
    rates = [0.0, *(scale * times for times in (0.1, 1.0, 10.0, 1000.0))]
    plans = [pricer.searches.plan(stage.graph, pricer.mesh_of(SLOT), wire, FLYING, rate) for rate in rates]

    def nbytes(plan):
        price = price_of(stage, plan, wire)
        return price.stored + FLYING * price.saved

    for rate, plan in zip(rates, plans, strict=True):
        own = plan.objective_s + rate * nbytes(plan)
        assert all(own <= 1.06 * (other.objective_s + rate * nbytes(other)) for other in plans)
    assert nbytes(plans[-1]) < 0.8 * nbytes(plans[0]) and plans[-1].objective_s > plans[0].objective_s
    assert plans[-1].recompute and not plans[0].recompute


def test_blocks_get_leaner_and_slower(pricer):
    prices = [pricer.price(1, 3, SLOT, lean, True) for lean in range(pricer.corners()[-1] + 1)]
    assert len(prices) == PARTS * (len(RATES) - 1) + 1 and prices[0] == pricer.price(3, 5, SLOT, 0, True)
    held = [p.stored + FLYING * p.saved for p in prices]
    assert held[-1] < 0.8 * held[0] and prices[-1].microbatch > prices[0].microbatch
    assert all(b <= a * 1.01 for a, b in zip(held, held[1:]))


def test_between_two_rates_some_blocks_are_at_each():
    names = [f.name for f in fields(StagePrice)]
    one, other = StagePrice(*map(float, range(len(names)))), StagePrice(*(2.0 * n + 1.0 for n in range(len(names))))
    middle = mixed(one, other, 0.25)
    assert [getattr(middle, name) for name in names] == pytest.approx([0.75 * n + 0.25 * (2 * n + 1) for n in range(len(names))])
    assert mixed(one, other, 0.0) == one


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_micro_batch_keeps_what_its_windows_leave(pricer, scale):
    """Behind forward, and between the parts of backward, where gradients wait, and what was recomputed for the first part."""
    stage, wire, cluster = pricer.sizes.stage(1, 2, 8, True), pricer._wire(SLOT), pricer.cluster
    rate = scale * pricer._unit(SLOT, True)
    plan = pricer.searches.plan(stage.graph, pricer.mesh_of(SLOT), wire, FLYING, rate)
    graph, mesh = with_recompute(stage.graph, plan.recompute), pricer.mesh_of(SLOT)
    played = timeline(graph, plan, Redistribution(mesh, cluster).steps, Footprints(mesh, cluster), str(plan.settings["optimizer"]),
                      trained_params(graph), cluster.device.updates_together)
    behind = {name: kept[CATEGORIES.index("saved")] for name, kept in played.keeping.behind.items()}
    price = price_of(stage, plan, wire)
    assert (price.saved, price.between) == (behind[FORWARD], behind[BACKWARD])
    assert price.between > price.saved and bool(plan.recompute) == (scale > 0)
