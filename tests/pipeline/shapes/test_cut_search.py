"""Cuts and schedules that are searched, for small models on two stages of one rank."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.decide.pipeline_options import AUTO
from autoshard.pipeline.action_lists.action_text import write_csv
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.stretches import Stretches
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.shapes.cut_search import TRIED, choices, search_cuts
from autoshard.pipeline.shapes.price import StagePrice, chain_from
from autoshard.pipeline.shapes.stage_prices import GraphPricer
from models import gpt, llama, mlp
from tests.pipeline.cut_models import subject

CLUSTER = load_cluster("cpu-gloo")
WIRE = CLUSTER.links_for(parse_mesh("pp=2"))[0]


class Counted(GraphPricer):
    """Prices by the number of ops, without planning: what the search asks for, and what it makes of the answers."""

    def price(self, first, end):
        calls = [op for op in self.stretches.stage(first, end).graph.of_kind("call") if op.phase == "forward"]
        return StagePrice(float(len(calls)), float(len(calls)), float(len(calls)), saved=1.0, between=1.0)


@pytest.fixture(scope="module")
def graph():
    return subject("llama", layers=4).traced.graph


def test_equal_layers_have_equal_labels(graph):
    pricer = GraphPricer(Stretches(graph, Blocks.of(graph), True), None, WIRE)
    layers = [label for label, name in zip(pricer.stretches.labels, pricer.stretches.blocks.names) if name.startswith("layers.")]
    assert len(layers) == 4
    assert len(set(layers)) == 1
    assert len(set(pricer.stretches.labels)) == len(pricer.stretches.labels) - 3


def test_short_stages_price_long_ones(graph):
    """By the number of ops, which is a sum: the chain from single blocks and pairs says what every stage has."""
    pricer = Counted(Stretches(graph, Blocks.of(graph), True), None, WIRE)
    chain = chain_from(pricer.stretches.labels, pricer.price)
    blocks = len(pricer.stretches.labels)
    ranges = [(a, b) for a in range(blocks) for b in range(a + 1, blocks + 1)]
    assert [chain.forward[a, b] for a, b in ranges] == [pricer.price(a, b).forward for a, b in ranges]


def test_a_block_whose_ops_run_elsewhere_is_no_stage():
    """t5's first block has the embedding, which runs with the block that reads it, and masks, which every stage makes for itself."""
    graph = subject("t5").traced.graph
    pricer = Counted(Stretches(graph, Blocks.of(graph), True), None, WIRE)
    empty = [k for k, label in enumerate(pricer.stretches.labels) if not label]
    assert empty == [0]
    chain = pricer.chain()
    assert all(np.isinf(chain.forward[k, k + 1]) for k in empty)
    assert np.isfinite(chain.forward[0]).sum() == len(pricer.stretches.labels) - 1
    unplanned = GraphPricer(pricer.stretches, lambda *_: pytest.fail("it was planned"), WIRE)
    assert unplanned.price(empty[0], empty[0] + 1) == StagePrice(0.0, 0.0)


def plan(**options):
    torch.manual_seed(0)
    with torch.device("meta"):
        model, inputs = llama.build(batch=8, seq=8, layers=2, vocab=4096)
    return autoshard.plan(model, "pp=2", inputs, loss_fn=llama.loss, cluster="cpu-gloo", pipeline=Pipeline(microbatches=4, **options))


def test_auto_is_no_dearer_than_what_it_could_be_told():
    """The head is as heavy as all layers together, so layers stand before the cut."""
    auto = plan()
    assert auto.pipeline["schedule"] in TRIED
    assert auto.stages[0].last.startswith("layers.")
    told = [plan(schedule="1f1b", cuts=(cut,)) for cut in ("layers.1", "norm")]
    assert auto.objective_s <= min(p.objective_s for p in told) * (1 + 1e-9)
    again = plan(schedule=auto.pipeline["schedule"], cuts=tuple(auto.pipeline["options"]["cuts"]))
    assert again.objective_s == pytest.approx(auto.objective_s)


@pytest.mark.parametrize(("m", "schedule"), [(1, "1f1b"), (2, "1f1b"), (4, "gpipe"), (4, "zb1p")])
def test_the_classic_mlp_is_cut_behind_its_first_layer(m, schedule):
    """784-512-512-10, batch 32: 401,408 multiply-adds | 262,144 + 5,120."""
    with torch.device("meta"):
        model, inputs = mlp.build("base", batch=32)
    made = autoshard.plan(model, "pp=2", inputs, loss_fn=mlp.loss, cluster="cpu-gloo", optimizer="sgd", pipeline=Pipeline(m, schedule))
    assert made.pipeline["options"]["cuts"] == ["layers.1"]


@pytest.mark.parametrize(("module", "vocab", "wins", "schedule"), [(llama, 2048, 0.05, "1f1b"), (gpt, 2048, 0.05, "zb1p"), (llama, 64, 0.0, "gpipe")])
def test_the_searched_cut_never_loses_to_equal_layers(module, vocab, wins, schedule):
    """Played; with a large vocabulary the head is about as heavy as all layers, and counting it as one of them costs 5 % at least."""
    asked = {"pipeline": Pipeline(microbatches=4, schedule=schedule), "loss_fn": module.loss, "cluster": "cpu-gloo", "optimizer": "sgd"}
    length = {llama: {"seq": 128}, gpt: {"context": 128}}[module]
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=8, layers=4, vocab=vocab, **length)
    searched = autoshard.plan(model, "pp=2", inputs, **asked)
    names = Blocks.of(Batch(model, inputs, {}, {"loss_fn": module.loss}).cut(asked["pipeline"]).graph).names
    equal = autoshard.plan(model, "pp=2", inputs, **{**asked, "pipeline": replace(asked["pipeline"], cuts=(names[len(names) // 2],))})
    assert searched.objective_s <= equal.objective_s * (1 + 1e-9)
    assert searched.pipeline["makespan_s"] <= (1 - wins) * equal.pipeline["makespan_s"] * (1 + 1e-9)


def test_what_the_user_gives_stays(graph, tmp_path):
    def chosen(**given):
        return choices(graph, 2, Pipeline(microbatches=4, **given), lambda *_: pytest.fail("it was planned"), CLUSTER, WIRE)

    assert chosen(cuts=("layers.1",)) == [Pipeline(microbatches=4, cuts=("layers.1",), schedule="1f1b")]
    assert chosen(cuts=("layers.1",), schedule="zb1p") == [Pipeline(microbatches=4, cuts=("layers.1",), schedule="zb1p")]
    assert chosen(chunks=50) == [Pipeline(microbatches=4, chunks=50, schedule="1f1b")]


def test_a_schedule_from_a_file_keeps_its_name(graph, tmp_path, monkeypatch):
    path = str(tmp_path / "mine.csv")
    write_csv(make_schedule("zb1p", 2, graph.microbatches), path)
    monkeypatch.setattr(GraphPricer, "price", Counted.price)
    found = choices(graph, 2, Pipeline(microbatches=graph.microbatches, schedule=path), None, CLUSTER, WIRE)
    assert {c.schedule for c in found} == {path}
    assert all(c.cuts != AUTO for c in found)


def test_candidates_are_in_the_order_of_their_prices_and_even_cuts_are_among_them(graph, monkeypatch):
    monkeypatch.setattr(GraphPricer, "price", Counted.price)
    found = choices(graph, 2, Pipeline(microbatches=1), None, CLUSTER, WIRE, np.inf)
    assert found[-1].schedule == TRIED[0] or len(found) < 3
    assert len(set(found)) == len(found) <= 3
    assert all(c.cuts != AUTO and c.schedule in TRIED for c in found)


def test_the_cheapest_plan_that_fits_is_taken():
    made = plan(schedule="1f1b", cuts=("layers.1",))
    costs = {"1f1b": 3.0, "zb1p": 2.0}

    def plan_with(choice):
        if choice.schedule not in costs:
            raise autoshard.errors.InfeasibleError(f"{choice.schedule} does not fit")
        return replace(made, objective_s=costs[choice.schedule])

    options = [Pipeline(microbatches=4, schedule=name) for name in ("zbv", "1f1b", "zb1p")]
    assert search_cuts(options, plan_with).objective_s == 2.0
    with pytest.raises(autoshard.errors.InfeasibleError, match="zbv does not fit"):
        search_cuts(options[:1], plan_with)
