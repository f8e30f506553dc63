"""Prompt and token planned together: one layout of what is stored, its price, and the bound of all such plans."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import mesh_of
from autoshard.base.roles import Role
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError, UsageError
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from autoshard.report.serving import sentences
from autoshard.seeds.grammar import specs_of
from autoshard.serve.phases import plan_phases, stored
from autoshard.serve.sweep import Decoder, Point, Serving, _lies, sweep
from autoshard.serve.workload import Slo, Workload, parse_batches
from models.llama import decoder
from tests.support.sample_plan import sample_plan

PROFILE, GIVEN, TP8 = load_cluster("h100-dgx"), Options.of({"optimizer": "none", "time_limit": 20.0}), mesh_of("tp=8")
LAYERS, VOCAB, CONTEXT, NEW = 2, 4096, 1024, 128
WEIGHTS = 2 * (LAYERS * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + VOCAB * 4096)
"""Bytes of the weights that every token reads: two layers of llama 8B with a small vocabulary, in bfloat16."""


def on_meta(batch, context, **sizes):
    with torch.device("meta"):
        model, inputs = decoder("8B", batch=batch, context=context, **{"layers": LAYERS, "vocab": VOCAB, **sizes})

    def meta(new, start):
        with torch.device("meta"):
            return inputs(new, start)

    return Decoder(model.bfloat16(), meta)


@cache
def swept(batches=(1, 64, 512), mesh="tp=8", budget=None):
    return sweep(on_meta, mesh_of(mesh), replace(GIVEN, memory_budget=budget), Workload(256, NEW, CONTEXT), batches)


def cache_bytes(batch):
    return 2 * LAYERS * batch * 8 * CONTEXT * 128 * 2


# -- the plans that must come out -----------------------------------------------------------------

def test_one_sequence_is_served_fastest_by_splitting_weights():
    one, eight = swept((1,), "tp=1").points[0], swept().points[0]
    assert eight.token_s < one.token_s and eight.first_s < one.first_s
    assert any(c.kind == "all_reduce" for c in eight.phases.token.collectives)


def test_many_sequences_are_split_by_batch_where_they_fit():
    many = swept().points[2]
    assert many.caches == ("tp,-,-,-",) and many.cache_bytes == cache_bytes(512) / 8
    assert len(many.phases.token.collectives) <= 2 * LAYERS, "the MLPs and the head still share the weights that 64 rows a rank read"
    assert [p.best for p in swept().points][2] and many.rate == max(p.rate for p in swept().points)


@pytest.mark.parametrize("ranks", [1, 8])
def test_no_token_is_faster_than_memory_is_read(ranks):
    for p in swept((1,), "tp=1").points if ranks == 1 else swept().points:
        least = (WEIGHTS + cache_bytes(p.batch)) / ranks / PROFILE.device.memory_bandwidth
        assert p.token_s >= least and p.first_s >= least


def test_one_very_long_sequence_is_split_along_the_sequence():
    long = replace(GIVEN, memory_budget=float(300 * 2**20))
    found = sweep(lambda b, c: on_meta(b, c, layers=1, width=1024, heads=8, hidden=2048, kv_heads=1, vocab=512), TP8, long,
                  Workload(16, 2, 2**20), (1,))
    assert found.points[0].caches == ("-,-,tp,-",), found.points[0].why
    assert found.points[0].cache_bytes == found.points[0].whole_bytes / 8 == 2 * 2**20 * 128 * 2 / 8


def test_both_phases_have_one_layout_and_the_gap_is_small():
    for p in swept().points:
        assert stored(p.phases.prompt) == stored(p.phases.token)
        assert p.phases.bound_s <= p.phases.request_s and p.phases.gap <= 0.02
        assert p.phases.request_s == pytest.approx(p.first_s + (NEW - 1) * p.token_s)


def test_a_joint_plan_is_no_better_than_its_bound_and_the_better_of_two():
    made = on_meta(8, CONTEXT)
    prompt, token = (trace(made.model, made.inputs(*at), training=False) for at in ((256, 0), (1, 256)))

    def plan_one(traced, fixed):
        return plan_traced(traced, TP8, GIVEN, clock=PhaseTimer(), fixed=fixed, profile=PROFILE)

    alone = plan_one(prompt, {}), plan_one(token, {})
    ways = (plan_one(prompt, stored(alone[1])).objective_s + 3 * alone[1].objective_s,
            alone[0].objective_s + 3 * plan_one(token, stored(alone[0])).objective_s)
    found = plan_phases(prompt, token, 3, plan_one, mesh=TP8, profile=PROFILE)
    assert found.request_s == pytest.approx(min(ways), rel=2e-3)
    assert found.bound_s == pytest.approx(alone[0].bound_s + 3 * alone[1].bound_s)


def test_how_caches_lie_is_said_in_the_grammar_of_seeds():
    mesh, meta = mesh_of("a=2,b=4"), TensorMeta((8, 8, 8, 8), torch.float32)
    for spec in ((0, 0), (1, -1), (0, 2)):
        assert specs_of(_lies(spec, mesh, 4), meta, mesh, "") == {spec}


def test_where_links_are_slow_prompts_read_whole_weights_and_tokens_their_part_of_them():
    """Each phase has its own layout of weights then, and both the token's of caches. With the layouts of one phase alone a request takes over 7 % longer."""
    found = sweep(on_meta, mesh_of("tp=4"), replace(GIVEN, cluster="l40s-pcie"), Workload(2048, 64, 2111), (4,)).points[0]
    phases = found.phases
    assert phases.decides == "both" and phases.gap < 0.04 and found.caches == ("-,tp,-,-",)
    assert "data parallel" in phases.prompt.kind and "tensor parallel" in phases.token.kind
    assert all(spec == (-1,) for name, spec in stored(phases.token).items() if name.endswith(("wq.weight", "w1.weight")))


# -- how two plans are put together, with plans made up ---------------------------------------------

class MadeUp:
    """A planner of programs with one cache [8, 8] float32, which like to have it split (prompt) by dim 0 and (token) by dim 1; otherwise they
    take as long as `forced` says. `weights`: which they like to have split so, too."""

    def __init__(self, forced, refuses=(), weights=False, memory=None):
        self.forced, self.refuses, self.weights, self.stage = forced, refuses, weights, {"memory": memory or {}}
        op = SimpleNamespace(target="keys", outputs=(SimpleNamespace(logical_shape=(8, 8), dtype=torch.float32),))
        graph = SimpleNamespace(outputs=lambda role: {"keys": op} if role is Role.MUTATION else {}, of_kind=lambda *kinds: [op])
        self.programs = {name: SimpleNamespace(name=name, graph=graph) for name in ("prompt", "token")}

    def __call__(self, traced, fixed):
        likes = {"prompt": 0, "token": 1}[traced.name]
        spec, w = fixed.get("keys", (likes,)), fixed.get("w", (likes if self.weights else -1,))
        if traced.name in self.refuses and spec != (likes,):
            raise InfeasibleError(f"{traced.name} does not fit")
        seconds = 1.0 if spec == (likes,) and w in ((likes,), (-1,)) else self.forced[traced.name]
        return sample_plan(self.stage, placements={"w": w, "keys": spec}, objective_s=seconds, bound_s=1.0)

    def found(self, steps=10):
        return plan_phases(self.programs["prompt"], self.programs["token"], steps, self, mesh=mesh_of("tp=2"), profile=PROFILE)


def test_the_phase_that_takes_most_of_a_request_decides():
    few, many = MadeUp({"prompt": 3.0, "token": 3.0}).found(steps=0), MadeUp({"prompt": 3.0, "token": 3.0}).found()
    assert (few.decides, few.request_s, few.gap) == ("prompt", 1.0, 0.0)
    assert (many.decides, many.request_s, many.bound_s) == ("token", 13.0, 11.0)
    assert many.gap == pytest.approx(2 / 13)


def test_a_redistribution_between_the_phases_is_paid_once():
    found = MadeUp({"prompt": 3.0, "token": 3.0}).found()
    assert 11.0 < found.relaid_s < 11.001
    assert MadeUp({"prompt": 1.0, "token": 1.0}).found().relaid_s is None


def test_weights_stored_twice_are_priced_where_a_rank_has_memory_for_both():
    """Each phase with the caches and weights that it likes best; weights of the token hold the prompt up otherwise."""
    gib, made = 2.0**30, {"prompt": 3.0, "token": 3.0}
    found = MadeUp(made, weights=True, memory={"parameters": 3 * gib, "total": 4 * gib, "limit": 8 * gib}).found()
    assert found.request_s == 13.0 < found.relaid_s < 13.001 and 11.0 < found.twice_s < 11.001
    said = sentences(Serving("m", "tp=2", "h100-dgx", Workload(4, 11, 16), (Point(1, 2, 11, found),), 9), None)
    assert [line for line in said if "stored twice" in line and "11.0 s instead of 13.0 s" in line] and not any("that lie otherwise" in line for line in said)
    assert MadeUp(made, weights=True, memory={"parameters": 3 * gib, "total": 6 * gib, "limit": 8 * gib}).found().twice_s is None
    assert MadeUp({"prompt": 1.0, "token": 1.0}, weights=True).found().twice_s is None, "the gap is 0"


def test_a_phase_that_does_not_fit_with_the_others_layout_leaves_the_other_way():
    found = MadeUp({"prompt": 3.0, "token": 3.0}, refuses=("prompt",)).found()
    assert (found.decides, found.request_s) == ("prompt", 31.0)
    with pytest.raises(InfeasibleError, match="neither fits"):
        MadeUp({}, refuses=("prompt", "token")).found()


# -- levels of service ------------------------------------------------------------------------------

def test_a_level_picks_the_most_tokens_per_second_that_meet_it():
    found = swept()
    assert found.pick(Slo()).batch == 512
    assert found.pick(Slo(tpot=found.points[0].token_s)).batch == 1
    assert found.pick(Slo(ttft=found.points[1].first_s)).batch == 64
    with pytest.raises(UsageError, match=r"ttft is 0.001 ms, and the least is [0-9.]+ ms, at batch 1\b"):
        found.pick(Slo(ttft=1e-6))


def test_batches_that_do_not_fit_say_why_and_end_the_sweep():
    found = swept((1, 1024, 4096), budget=float(2**29))
    assert [p.phases is not None for p in found.points] == [True, False, False]
    assert found.largest == 1 < found.most < 1024
    assert f"at most {found.most} sequences fit" in found.points[2].why
    assert cache_bytes(found.most) + WEIGHTS < 8 * 2**29 <= cache_bytes(found.most + 1) + WEIGHTS + 2 * VOCAB * 4096 + 2**20


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Slo.parse("tpot=20"), "tpot=20ms"), (lambda: Slo.parse("speed=1s"), "service level 'speed=1s'"),
    (lambda: Slo.parse("tpot=0ms"), "service level"), (lambda: Slo.parse("tpot=1ms,tpot=2ms"), "service level"),
    (lambda: parse_batches("1,x"), "batches"), (lambda: parse_batches("0"), "batches"),
    (lambda: Workload(8, 8, 14), "larger context"), (lambda: Workload(0, 8, 14), "prompt=0"),
])
def test_what_cannot_be_meant_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_levels_are_read_in_all_units():
    assert Slo.parse("tpot=20ms, ttft=0.5s") == Slo(0.02, 0.5) and Slo.parse("tpot=300us").tpot == pytest.approx(3e-4)
    assert parse_batches("8,1,8") == (1, 8) and Workload(8, 8, 15).steps == 7
