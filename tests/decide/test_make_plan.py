"""What a plan says about its stage adds up to what it says about the step."""
from __future__ import annotations

import pytest

import autoshard
from autoshard.base.mesh import Mesh
from autoshard.program.load import load_model


@pytest.mark.parametrize("cluster", ["cpu-gloo", "h100-dgx"])  # without and with communication behind compute
@pytest.mark.parametrize("training", [True, False])
def test_windows_and_update_add_up_to_the_step(cluster, training):
    spec = load_model("llama:tiny") if training else load_model("llama:tiny").for_inference
    plan = autoshard.plan(spec.model, "a=2,b=2", spec.example_inputs, loss_fn=spec.loss_fn, training=training, cluster=cluster)
    (stage,) = plan.stages
    assert list(stage.windows) == ["forward", "backward"][:1 + training] and min(stage.windows.values()) > 0
    assert sum(stage.windows.values()) + stage.once_s == pytest.approx(plan.objective_s, rel=1e-12)
    assert stage.once_s == plan.predicted["optimizer_s"] and (stage.once_s > 0) == training
    assert stage.submesh == plan.mesh == Mesh(("a", "b"), (2, 2)) and (stage.first, stage.last, stage.in_flight) == ("", "", 1)
    assert autoshard.Plan.from_json(plan.to_json()) == plan and autoshard.Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_reductions_of_gradients_stand_at_the_module_of_their_parameter():
    """Under a precision policy they are of a cast, which is in no module: a report listed each by the name of its op, instead of one row for all
    layers."""
    spec = load_model("gpt:tiny", batch=8)
    plan = autoshard.plan(spec.model, "dp=4", spec.example_inputs, loss_fn=spec.loss_fn,
                          precision=autoshard.Precision("bf16", reduce="fp32"), cluster="h100-dgx", seeds={"input:*": "dp,-"}, search="propagate")
    reductions = [c for c in plan.collectives if c.hideable and c.phase == "backward"]
    modules = {name for name, _ in spec.model.named_modules() if name}
    assert reductions and all(c.module in modules for c in reductions), [(c.op, c.module) for c in reductions]
