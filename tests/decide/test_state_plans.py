"""Plans of decode steps: where caches lie, what they take, and what writing to them costs."""
import pytest
import torch

import autoshard
from autoshard.base.mesh import mesh_of
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.errors import InfeasibleError
from autoshard.formulate.problem_of import formulate
from autoshard.program.trace import trace
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import Training, build_cost_table
from autoshard.space.strategies import enumerate_strategies
from tests.support.decoding import CachedAttention, Decoder

KEYS = {"batch": "tp,...", "heads": "-,tp,-,-", "sequence": "-,-,tp,-"}


def decode(width=4096, heads=32, batch=8, length=2048, mesh="tp=8", kv_heads=None, **options):
    """The plan of one new token for every sequence, bfloat16, on h100-dgx."""
    with torch.device("meta"):
        model = CachedAttention(width, heads, batch, length, kv_heads=kv_heads).bfloat16()
        inputs = torch.empty(batch, 1, width, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int64)
    return autoshard.plan(model, mesh, inputs, training=False, **options)


def splits(plan):
    return {plan.placements[name] for name in ("keys", "values")}


def cache(batch, length, width, itemsize=2):
    return 2 * batch * length * width * itemsize


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_holds_its_part_of_the_caches_and_nothing_else_of_them(ranks):
    plan = decode(mesh=f"tp={ranks}")
    assert splits(plan) <= {(0,), (1,)} and plan.status == "optimal"
    assert plan.memory["buffers"] == cache(8, 2048, 4096) / ranks
    assert plan.memory["temporaries"] < 1e6


def test_a_decode_step_is_as_fast_as_with_caches_split_by_hand():
    assert decode().objective_s <= 103e-6


def test_a_batch_that_fits_with_split_caches_alone():
    plan = decode(batch=64, length=8192, memory_budget="6GiB")
    assert plan.memory["buffers"] == cache(64, 8192, 4096) / 8 == 2**30
    with pytest.raises(InfeasibleError, match="seed"):
        decode(batch=64, length=8192, memory_budget="6GiB", seeds={"keys": "-,-,-,-", "values": "-,-,-,-"}, time_limit=10)


def test_one_long_sequence_of_one_head_is_split_along_the_sequence():
    plan = decode(width=128, heads=1, batch=1, length=2**20, memory_budget="256MiB")
    assert splits(plan) == {(2,)}
    assert plan.memory["buffers"] == cache(1, 2**20, 128) / 8
    assert sum(c.inner for c in plan.collectives) == 2


def priced(length, mesh):
    with torch.device("meta"):
        model, inputs = CachedAttention(4096, 32, 8, length), (torch.empty(8, 1, 4096), torch.empty(1, dtype=torch.int64))
    graph, mesh = trace(model, inputs, training=False).graph, mesh_of(mesh)
    return build_cost_table(graph, mesh, load_cluster("h100-dgx"), enumerate_strategies(graph, mesh, Seeds()), Training(training=False))


def test_megatron_splits_caches_by_heads():
    table = priced(2048, "tp=2")
    formulation = formulate(table)
    scheme = next(s for s in schemes(table.mesh) if s.name == "Megatron TP")
    chosen = formulation.strategy_of(baseline(Wiring(formulation), scheme))
    assert {table.strategies[f"buffer:{name}"].strategy(chosen[f"buffer:{name}"])[1] for name in ("keys", "values")} == {((1,),)}


def test_a_longer_cache_makes_attention_slower_and_nothing_else():
    found = [{name: cost.compute[0] for name, cost in priced(length, "tp=2").ops.items()} for length in (4096, 8192)]
    slower = {name for name in found[0] if found[1][name] > found[0][name] * 1.01}
    assert slower == {"_scaled_dot_product_flash_attention_for_cpu_0"}
    assert found[1][slower.pop()] > 1.9 * found[0]["_scaled_dot_product_flash_attention_for_cpu_0"]


@pytest.mark.parametrize("how", KEYS)
def test_seeds_place_caches(how):
    plan = decode(width=64, heads=8, length=64, mesh="tp=2", seeds={"keys": KEYS[how], "values": KEYS[how]})
    assert splits(plan) == {(list(KEYS).index(how),)}


def test_caches_of_one_layer_lie_alike_in_all_layers_and_a_plan_file_says_so():
    with torch.device("meta"):
        model = Decoder(width=512, heads=8, length=2**16, layers=3)
        inputs = torch.empty(4, 1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    plan = autoshard.plan(model, "tp=4", inputs, training=False)
    found = {plan.placements[f"attention.{i}.{name}"] for i in range(3) for name in ("keys", "values")}
    assert len(found) == 1 and found != {(-1,)}
    assert Plan.from_json(plan.to_json()).placements == plan.placements


def test_two_axes_split_a_cache_twice():
    plan = decode(mesh="dp=2,tp=4", seeds={"keys": "dp,tp,-,-", "values": "dp,tp,-,-"})
    assert splits(plan) == {(0, 1)} and plan.memory["buffers"] == cache(8, 2048, 4096) / 8
