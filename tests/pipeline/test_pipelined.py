"""Where stages begin, what a plan of stages says, and what bad requests get."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Pipeline
from autoshard.base.plan import Plan
from autoshard.errors import InfeasibleError, MeshError, UsageError
from autoshard.pipeline.microbatches import batch
from autoshard.pipeline.pipelined import pipelined_as, stage_plan
from autoshard.runtime.check_plan import check_fits
from tests.pipeline.cut_models import subject


def plan_of(name: str = "gpt", mesh: str = "pp=2,dp=2", **options) -> Plan:
    what = subject(name)
    kept = {k: options.pop(k) for k in ("memory_budget", "seeds") if k in options}
    return autoshard.plan(what.model, mesh, what.batch, loss_fn=what.loss, cluster="cpu-gloo", pipeline=Pipeline(microbatches=4, **options), **kept)


def test_a_plan_of_stages():
    plan = plan_of(cuts=["h.1"], schedule="1f1b")
    assert [(s.index, s.rank, s.first, s.last, s.in_flight) for s in plan.stages] == [(0, 0, "wte", "h.0", 2), (1, 1, "h.1", "lm_head", 1)]
    assert all(str(s.submesh) == "dp=2" and s.windows["forward"] > 0 and s.once_s > 0 for s in plan.stages)
    assert [t["value"] for t in plan.pipeline["transfers"]] == ["add_2@1", "add_6@0"]
    assert plan.pipeline["makespan_s"] < plan.objective_s and plan.bound_s <= plan.objective_s
    assert {c.stage for c in plan.collectives} <= {0, 1}


def test_progress_is_a_line_per_stage():
    """And not the phases of every search."""
    what, heard = subject("gpt"), []
    autoshard.plan(what.model, "pp=2", what.batch, loss_fn=what.loss, cluster="cpu-gloo", progress=lambda *news: heard.append(news),
                   pipeline=Pipeline(microbatches=4, cuts=["h.1"]))
    assert [phase for phase, _ in heard] == ["trace", "cut", "stages", "stages", "stages"]
    assert heard[2][1].startswith("planning stage 1 (h.1 to lm_head") and "planning stage 0" in heard[3][1] and "at least" in heard[4][1]


def test_stages_come_out_of_a_plan_file_as_they_went_in():
    plan = plan_of(cuts=["h.1"])
    again = Plan.from_json(plan.to_json())
    what = subject("gpt")
    made = pipelined_as(batch.traced(what.model, what.batch, {}, Pipeline(microbatches=4), loss_fn=what.loss).graph, again)
    for stage in made.cut.stages:
        check_fits(stage_plan(again, made, stage.index), stage.graph, made.submesh)
    tied = {op for op in again.ops if op.startswith("param:wte.weight")}
    assert tied == {"param:wte.weight", "param:wte.weight@1"}
    assert len({again.ops[op].outputs for op in tied}) == 1, "a tied weight lies alike in both stages"


def test_both_ends_of_a_wire_agree():
    plan = plan_of("t5", schedule="zb1p", cuts=["decoder.bias"])
    sends = {name.partition(":")[2]: o.inputs[0] for name, o in plan.ops.items() if name.startswith("send:")}
    receives = {name.partition(":")[2]: o.outputs[0] for name, o in plan.ops.items() if name.startswith("recv:")}
    assert sends == receives and sends


def test_seeds_may_be_about_one_stage():
    plan = plan_of(cuts=["h.1"], seeds={"h.0.mlp.c_fc.weight": "dp,-"})
    assert plan.placements["h.0.mlp.c_fc.weight"] == (0,)


@pytest.mark.parametrize(("options", "words"), [
    ({"cuts": ["h.7"]}, "'h.7' is no module at which a stage can begin; blocks are wte, wpe, h.0, h.1, ln_f, lm_head"),
    ({"cuts": ["h.0.mlp"]}, "it is inside 'h.0'"),
    ({"cuts": ["h.0", "h.1"]}, "make 3 stages, and the pipeline has 2"),
    ({"cuts": ["wte"]}, "the first stage would be empty"),
    ({"schedule": "zbv", "chunks": 3}, "not 3"),
])
def test_bad_cuts(options, words):
    with pytest.raises(UsageError, match=words):
        plan_of(**options)


def test_cuts_out_of_order():
    with pytest.raises(UsageError, match="'h.0' does not come behind 'h.1'"):
        plan_of(mesh="pp=3", cuts=["h.1", "h.0"])


def test_more_stages_than_blocks():
    with pytest.raises(UsageError, match="8 stages need as many blocks at least, and the model has 6"):
        plan_of(mesh="pp=8")


def test_the_pipeline_is_the_first_axis():
    with pytest.raises(MeshError, match="must be the first.*pp=2"):
        plan_of(mesh="dp=2,pp=2")


def test_micro_batches_that_do_not_divide():
    what = subject("gpt")
    with pytest.raises(UsageError, match="8 rows does not divide into 3"):
        autoshard.plan(what.model, "pp=2", what.batch, loss_fn=what.loss, pipeline=Pipeline(microbatches=3))


def test_a_stage_that_does_not_fit_is_named():
    words = r"stage 1 \(h.1 to lm_head, 1 micro-batches? in flight\): no plan fits in 100 KiB per rank: .* needs [\d.]+ MiB"
    with pytest.raises(InfeasibleError, match=words):
        plan_of(cuts=["h.1"], memory_budget="100KiB")


class Twice(nn.Module):
    """A module that runs before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shared(torch.relu(self.between(self.shared(x)))))


class TwiceInside(Twice):
    """The same with two layers in the module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize(("model", "cut"), [(Twice, "shared"), (TwiceInside, "shared.1")])
def test_a_cut_at_a_module_that_runs_twice(model, cut):
    with pytest.raises(UsageError, match=f"'{cut}': the module runs 2 times"):
        autoshard.plan(model(), "pp=2", (torch.randn(8, 8), torch.randn(8, 4)), loss_fn=nn.functional.mse_loss, cluster="cpu-gloo",
                       pipeline=Pipeline(microbatches=2, cuts=[cut]))


class Follows(nn.Module):
    """The first layer reads what the last one wrote in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x - self.mean))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


def test_a_buffer_that_another_stage_writes():
    """The first stage's copy would stay as it was."""
    with pytest.raises(UsageError, match="the buffer mean is written in stage 1, and stage 0 has a copy of it"):
        autoshard.plan(Follows(), "pp=2", (torch.randn(4, 8), torch.randn(4, 8)), loss_fn=nn.functional.mse_loss, cluster="cpu-gloo",
                       pipeline=Pipeline(1, cuts=["layers.1"]))


@pytest.mark.parametrize("options", [Pipeline(), Pipeline(2, "1f1b"), Pipeline(2, "zb1p", ["1"])])
def test_a_loss_outside_of_the_graph(options):
    with pytest.raises(UsageError, match="loss_fn"):
        autoshard.plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "pp=2", (torch.randn(8, 8),), cluster="cpu-gloo", pipeline=options)
