"""Bytes in the prices of blocks: what a micro-batch keeps behind its forward, with all that are in flight in the plan's timeline."""
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoshard import Pipeline
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.shapes.choose import AMPLE, Asked
from autoshard.pipeline.shapes.mesh_prices import MeshPricer, Sizes
from autoshard.pipeline.shapes.meshes import Slot
from autoshard.pipeline.shapes.stage_prices import price_of
from autoshard.planner.open_mesh import searches

OPTIONS = Options(cluster="cpu-gloo", pipeline=Pipeline(microbatches="auto"))
FLYING = 6


@pytest.fixture(scope="module")
def planned():
    """How a block between two others is planned, with so many micro-batches in flight and in so many bytes: its price and its plan."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))
    inputs, cluster = (torch.randn(512, 8), torch.randn(512, 8)), load_cluster("cpu-gloo")
    batch = Batch(model, inputs, {}, {"loss_fn": nn.functional.mse_loss, "training": True})
    asked, found = Asked(8, None, OPTIONS.pipeline, cluster, AMPLE), searches(batch.whole, OPTIONS, PhaseTimer(), cluster)
    pricer, slot = MeshPricer(Sizes(batch, OPTIONS.pipeline, 512, 8), 8, asked.mesh_of, cluster, AMPLE, found), Slot(2, 1, 64)
    stage, wire = pricer.sizes.stage(1, 2, 8, False), pricer._wire(slot)

    def plan(flying, within):
        made = found.plan(stage.graph, pricer.mesh_of(slot), wire, flying, within)
        return price_of(stage, made, wire, flying), made

    return plan


def test_bytes_of_a_micro_batch_do_not_depend_on_how_many_are_in_flight(planned):
    one, several = planned(1, AMPLE)[0], planned(FLYING, AMPLE)[0]
    assert one.saved > 0.0 and several.saved == one.saved and several.stored == one.stored
    assert replace(one, peak=0.0) == replace(several, peak=0.0)


def test_a_plan_in_little_memory_has_all_of_them_in_it(planned):
    """The bytes of a rank by the price of its stage are those of the plan's timeline, and within the limit."""
    ample = planned(1, AMPLE)[0]
    limit = ample.stored + ample.peak + 0.6 * FLYING * ample.saved
    lean, made = planned(FLYING, limit)
    fullest = max(moment.total for moment in made.stages[0].timeline)
    assert fullest <= limit < ample.stored + ample.peak + FLYING * ample.saved
    assert lean.saved < ample.saved and lean.microbatch >= ample.microbatch
    assert lean.stored + lean.peak + FLYING * lean.saved == pytest.approx(fullest) or lean.peak == 0.0
