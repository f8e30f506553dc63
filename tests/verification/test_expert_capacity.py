"""More tokens for the experts of a rank than it has room for: what users read."""
import pytest
import torch

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.errors import CapacityError
from autoshard.padding.padded import padded
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from autoshard.rules.ops import experts as rule
from tests.support.experts import build, travelling

pytest.importorskip("transformers")


@pytest.mark.slow
def test_the_layer_and_the_line_are_named(monkeypatch):
    monkeypatch.setattr(rule, "FEWEST", 1)
    model, (ids,) = build("exact")
    with torch.no_grad():
        for router in model.routers:
            router.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))
    inputs, options, mesh = {"input_ids": ids, "labels": ids}, Options(cluster="cpu-gloo"), parse_mesh("ep=2")
    plan = decide(travelling(prices(padded(trace(model, (), inputs, expert_capacity=1.0), mesh), mesh, options)), options, finer=False)
    with pytest.raises(CapacityError, match=r"experts_0 \(autoshard.experts.default\) in experts\.0 at .*experts\.py:\d+: 64 rows of tokens go "
                                            r"to the experts of this rank, which has room for 32: .* expert_capacity"):
        autoshard.verify(model, "ep=2", (), inputs, plan=plan, expert_capacity=1.0)
