"""Plans of several meshes and clusters in one process are those of each alone: nothing is remembered across."""
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from models import mlp

WANTED = (("dp=4", "h100-dgx"), ("dp=2,tp=2", "h100-dgx"), ("dp=4", "cpu-gloo"), ("tp=2,dp=2", "l40s-ethernet-25g"))


def plans(order):
    model, batch = mlp.build("tiny", widths=(64, 256, 256, 64), batch=64)
    traced = trace(model, batch, loss_fn=mlp.loss)
    return {key: plan_traced(traced, parse_mesh(key[0]), Options(cluster=key[1]), has_loss=True) for key in order}


def test_meshes_and_clusters_one_after_another_plan_as_alone():
    together, reverse = plans(WANTED), plans(WANTED[::-1])
    for key in WANTED:
        alone = plans([key])[key]
        assert alone == together[key] == reverse[key]
    assert len({plan.objective_s for plan in together.values()}) >= 3, "the clusters differ"
