"""Plans by hand are what their names say, and no searched plan is worse than one that fits."""
from __future__ import annotations

import importlib
from collections import Counter

import numpy as np
import pytest
import torch
from steering import MODELS, formulation_of, traced

from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import INNER
from autoshard.cli.read import parse_precision
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.walks.baselines import baseline, baselines
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.program.trace import trace
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.study.compare import comparison


def plans_of(name: str, mesh: str, **shape):
    return planned(formulation_of(traced(name, **shape), mesh))


def planned(formulation):
    """Every baseline as a plan, by name."""
    found = {}
    for scheme, choice in baselines(formulation):
        cost = evaluate(formulation.problem, choice)
        found[scheme.name] = make_plan(formulation, Solution(choice, cost, 0.0, Status.GAP, 0.0), model={},
                                       settings={}, seeds={})
        assert found[scheme.name].objective_s == pytest.approx(cost, rel=1e-9)
    return found


@pytest.fixture(scope="module")
def gpt():
    return plans_of("gpt", "d=4")


@pytest.mark.parametrize("name", [n if n in ("dlrm", "moe", "gpt") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_every_baseline_exists_for_every_model(name):
    formulation = formulation_of(traced(name), "dp=2,tp=2")
    costs = {scheme.name: evaluate(formulation.problem, choice) for scheme, choice in baselines(formulation)}
    graph, mesh = formulation.table.graph, formulation.table.mesh
    assert set(costs) == {s.name for s in schemes(mesh, graph) if not s.late and not s.obstacle(graph, mesh)} > {s.name for s in schemes(mesh)[2:]}
    assert np.isfinite(list(costs.values())).all(), costs


def calls(plan, phase: str | None = None) -> Counter:
    return Counter(c.kind for c in plan.collectives if phase in (None, c.phase))


def weights(plan) -> int:
    return len(plan.placements)


def test_data_parallel_reduces_every_gradient_once_and_gathers_nothing(gpt):
    plan = gpt["DDP"]
    assert set(plan.placements.values()) == {(-1,)}
    reduced = [c for c in plan.collectives if c.hideable]
    assert {c.kind for c in reduced} == {"all_reduce"} and {c.phase for c in reduced} == {"backward"}
    assert sum(c.nbytes for c in reduced) >= sum(x.shape and 4 * np.prod(x.shape) for x in plan.layouts if x.kind == "weight")
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


def test_fully_sharded_gathers_in_both_windows_and_zero_2_in_one(gpt):
    sharded, kept = gpt["FSDP (ZeRO-3)"], gpt["ZeRO-2"]
    assert all(-1 not in spec for spec in sharded.placements.values())
    assert sharded.placements == kept.placements
    assert calls(sharded, "backward")["all_gather"] > 0
    assert calls(kept, "backward")["all_gather"] == 0
    assert calls(sharded, "forward") == calls(kept, "forward")
    assert calls(sharded, "backward")["reduce_scatter"] == calls(kept, "backward")["reduce_scatter"] == weights(kept)
    assert any(c.source == "kept" for c in kept.copies)
    assert gpt["DDP"].memory["total"] > kept.memory["total"]


def test_megatron_alternates_columns_and_rows(gpt):
    plan = gpt["Megatron TP"]
    for layer in (0, 1):
        assert {plan.placements[f"h.{layer}.{w}.weight"] for w in ("attn.c_attn", "mlp.c_fc")} == {(0,)}
        assert {plan.placements[f"h.{layer}.{w}.weight"] for w in ("attn.c_proj", "mlp.c_proj")} == {(1,)}
    assert plan.placements["wte.weight"] == (0,), "the vocabulary is split"
    assert plan.placements["h.0.ln_1.weight"] == (-1,)
    blocks = [c for c in plan.collectives if c.module.startswith("h.")]
    assert {c.kind for c in blocks} == {"all_reduce"}
    assert Counter(c.phase for c in blocks) == {"forward": 4, "backward": 4}, "two a layer and pass"


def test_sequence_parallel_scatters_sums_and_splits_norms():
    plan = plans_of("gpt", "d=4", batch=512)["TP + sequence parallel"]  # with small tensors an all-reduce and a slice are cheaper
    assert plan.placements["h.0.mlp.c_fc.weight"] == (0,) and plan.placements["h.0.mlp.c_proj.weight"] == (1,)
    assert calls(plan, "forward")["reduce_scatter"] >= 4 and calls(plan, "forward")["all_gather"] >= 4
    norm = next(p for n, p in plan.ops.items() if n.startswith("native_layer_norm"))
    assert norm.outputs[0] == (1,), "split along the sequence"
    assert not any(c.kind == "all_reduce" and c.module.startswith("h.") and c.nbytes > 512 * 64 for c in plan.collectives)


def test_products_shard_on_one_axis_and_compute_split_on_the_other():
    plan = plans_of("gpt", "dp=2,tp=2", width=1024)["FSDP x TP"]
    assert plan.placements["h.0.mlp.c_fc.weight"] == plan.placements["h.0.mlp.c_fc.bias"] == (INNER, 0), "tp's pieces, cut by dp, as torch stores them"
    gathers = {c.axis for c in plan.collectives if c.kind == "all_gather" and c.hideable}
    assert gathers == {"dp"}, "parameters are gathered over the data axis only, a bias too, whose dim both axes split"


@pytest.fixture(scope="module")
def along_sequence():
    return plans_of("gpt", "cp=4", batch=1, seq=2048)  # with small tensors an all-reduce and a slice are cheaper


def activations_moved(plan, axis: str) -> Counter:
    """Calls that move neither parameters nor their gradients, nor single numbers, by kind and phase."""
    return Counter((c.kind, c.phase) for c in plan.collectives if c.axis == axis and not c.hideable and c.nbytes > 64)


def test_context_parallel_gathers_keys_and_values_alone(along_sequence):
    plan = along_sequence["FSDP x context parallel (gather)"]
    assert activations_moved(plan, "cp") == {("all_gather", "forward"): 4, ("reduce_scatter", "backward"): 4,
                                             ("mirror", "forward"): 6, ("mirror", "backward"): 10}, "keys and values of two layers; balance"
    attention = [p for n, p in plan.ops.items() if n.startswith("_scaled_dot_product") and "backward" not in n]
    assert {p.inputs[:3] for p in attention} == {((2,), (-1,), (-1,))} and {p.outputs[0] for p in attention} == {(2,)}
    assert plan.ops["embedding_0"].outputs[0] == (1,), "the sequence is split from the words on"
    assert all(-1 not in spec for spec in plan.placements.values()), "parameters are stored in shares"


def test_ulysses_goes_to_heads_and_back_once(along_sequence):
    plan = along_sequence["FSDP x context parallel (Ulysses)"]
    assert activations_moved(plan, "cp") == {("all_to_all", "forward"): 8, ("all_to_all", "backward"): 8}, "q, k, v and the result; their gradients"
    assert {p.inputs[:3] for n, p in plan.ops.items() if n.startswith("_scaled_dot_product") and "backward" not in n} == {((1,),) * 3}
    assert "DDP" not in along_sequence, "one sample does not split"


def test_experts_are_split_and_tokens_travel():
    plan = plans_of("moe", "dp=2,ep=2")["FSDP x expert parallel"]
    assert activations_moved(plan, "ep") == {("all_to_all", "forward"): 4, ("all_to_all", "backward"): 8}, "no gather of tokens"
    experts = [spec for name, spec in plan.placements.items() if ".experts." in name]
    assert experts and all(spec[1] == 0 and spec[0] > 0 for spec in experts), "experts over ep, split further over dp"
    moved = {c.axis for c in plan.collectives if c.hideable and ".experts" in c.module}
    assert moved == {"dp"}, "weights of experts are gathered and reduced over data ranks alone"


def test_obstacles_of_sequences_heads_and_experts():
    def obstacle(name: str, mesh: str, scheme: str, **shape) -> str:
        program, on = traced(name, **shape), parse_mesh(mesh)
        return next(s.obstacle(program.graph, on) for s in schemes(on, program.graph) if scheme in s.name)

    assert obstacle("gpt", "cp=4", "gather", batch=1, seq=30) == "a sequence of 30 does not split over 4 ranks"
    assert obstacle("gpt", "cp=8", "Ulysses", batch=1, seq=32) == "a number of heads of 4 does not split over 8 ranks"
    assert obstacle("moe", "ep=8", "expert") == "a number of experts of 4 does not split over 8 ranks"
    names = {s.name for s in schemes(parse_mesh("a=2"), traced("mlp").graph)}
    assert not any("context" in n or "expert" in n for n in names), "where there is no attention and are no experts"


def test_a_batch_that_does_not_divide_is_an_obstacle():
    formulation = formulation_of(traced("gpt", batch=2), "d=4")
    obstacles = {s.name: s.obstacle(formulation.table.graph, parse_mesh("d=4")) for s in schemes(parse_mesh("d=4"))}
    assert obstacles["DDP"] == "a batch of 2 does not split over 4 ranks"
    assert obstacles["Megatron TP"] == ""
    assert "DDP" not in {s.name for s, _ in baselines(formulation)}


@pytest.mark.parametrize(("name", "mesh", "memory"), [
    ("mlp", "d=4", None), ("gpt", "d=2", None), pytest.param("moe", "dp=2,tp=2", None, marks=pytest.mark.slow)])
def test_the_chosen_plan_is_never_worse_than_a_baseline_that_fits(name, mesh, memory):
    found = comparison(traced(name, batch=64), parse_mesh(mesh), Options(cluster="h100-dgx", memory_budget=memory, time_limit=120))
    best = found.best_baseline
    assert best is not None
    assert found.chosen.plan.objective_s <= best.plan.objective_s * (1 + 1e-9)
    assert all(row.plan.objective_s > 0 for row in found.contenders if row.plan)
    late, soon = (next(row.plan for row in found.contenders if row.name == name) for name in ("ZeRO-1", "ZeRO-2"))
    assert late.placements == soon.placements and late.settings["reduce_gradients"] == "at the end"
    assert late.objective_s > soon.objective_s, "nothing hides them"
    assert not any(c.hideable for c in late.collectives if c.kind == "reduce_scatter")
    data = found.to_dict()
    assert data["rows"][0]["name"] == "chosen by the search" and len(data["rows"]) == len(found.contenders)


def test_zero_1_holds_whole_gradients_and_zero_2_only_those_on_their_way():
    found = comparison(traced("mlp", "wide"), parse_mesh("d=2"), Options(cluster="h100-dgx", time_limit=5))
    late, soon = (next(row.plan for row in found.contenders if row.name == name) for name in ("ZeRO-1", "ZeRO-2"))
    assert late.memory["total"] > soon.memory["total"] + 100e6, "but for the largest matrix, whose gradient ZeRO-2 holds whole for a moment too"


def test_tensor_parallelism_only_sums_activations():
    """A unit of cheap ops whose inputs are whole stays whole, though an expand in it could be split and would compute less."""
    assert set(calls(plans_of("llama", "tp=2")["Megatron TP"])) == {"all_reduce"}


def test_a_baseline_is_the_same_twice():
    wiring = Wiring(formulation_of(traced("mlp"), "d=2"))
    (scheme, *_) = schemes(parse_mesh("d=2"))
    assert np.array_equal(baseline(wiring, scheme), baseline(wiring, scheme))


def test_what_fits_nowhere_is_a_row():
    found = comparison(traced("mlp"), parse_mesh("d=2"), Options(cluster="h100-dgx", memory_budget=4096.0, time_limit=10))
    assert found.chosen.plan is None and "no plan fits" in found.chosen.note
    assert not any(row.fits for row in found.contenders) and found.best_baseline is None




@pytest.mark.parametrize("policy", ["param=bf16,master=fp32,reduce=fp32", "param=bf16,master=fp32,reduce=bf16"])
@pytest.mark.parametrize("name, mesh", [("llama", "tp=4"), ("llama", "dp=2,tp=2"), ("gpt", "dp=2,tp=2")])
def test_a_policy_changes_no_plan_by_hand(name, mesh, policy):
    """Casts stand between a weight and its readers, and between a gradient and its output: calls and placements are those of the
    model in bf16."""
    module = importlib.import_module(f"models.{name}")
    found = {}
    for precision, dtype in ((None, torch.bfloat16), (parse_precision(policy), torch.float32)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model, inputs = module.build("tiny")
        finally:
            torch.set_default_dtype(before)
        program = trace(model, inputs, loss_fn=module.loss, training=True, precision=precision)
        found[precision] = planned(formulation_of(program, mesh))
    plain, cast = found.values()
    for scheme in plain:
        assert cast[scheme].placements == plain[scheme].placements, scheme
        assert calls(cast[scheme], "forward") == calls(plain[scheme], "forward"), scheme
        assert calls(cast[scheme], "backward") == calls(plain[scheme], "backward"), scheme
