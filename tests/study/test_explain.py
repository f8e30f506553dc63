"""Tables of edges and ops, forced choices, and differences between plans."""
from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from sample_plan import sample_plan
from steering import traced
from torch import nn

from autoshard.base.graph import Ref
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.decide.make_plan import price
from autoshard.decide.options import Options
from autoshard.errors import PlanError, SeedError, UsageError
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import candidates
from autoshard.recompute.undecided import program_with
from autoshard.seeds.names import find_edge, find_op
from autoshard.study import layout_pairs
from autoshard.study.diff import diff
from autoshard.study.explain import chosen_by, edge_table, op_table
from autoshard.study.layout_pairs import layout_pair
from autoshard.study.why_not import released, why_not

MESH = parse_mesh("a=2,b=2,c=2")


class Classic(nn.Module):
    """MatMul, Add, ReLU, MatMul."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b = nn.Parameter(torch.empty(512, 512)), nn.Parameter(torch.empty(512))
        self.w2 = nn.Parameter(torch.empty(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1 + self.b) @ self.w2


@pytest.fixture(scope="module")
def classic():
    program = trace(Classic(), (torch.empty(1024, 512),), training=False)
    return prices(program, MESH, Options(cluster="h100-dgx"))


@pytest.fixture(scope="module")
def gpt():
    options = Options(cluster="h100-dgx", time_limit=120)
    table = prices(traced("gpt", batch=512), parse_mesh("tp=4"), options)
    return table, options, decide(table, options)


def test_the_classic_table(classic):
    """The source is split [2, 4] (axis a | axes b, c); targets by pieces per dim of both inputs of the second matmul."""
    rows = edge_table(classic, find_edge(classic.graph, "relu_0->mm_1"), sources=[(0, 1, 1)], most=None).rows
    best = {}
    for row in rows:
        if not any("partial" in t for t in row.targets):
            best.setdefault(row.splits[1:], row)
    assert best[(2, 4), (4, 1)].words == "0" and best[(2, 4), (4, 1)].seconds == 0
    assert best[(4, 2), (2, 1)].words == "AllToAll over c"
    # Two axes that split a dim move together by one all-to-all; an axis under which another splits the dim has to free it first.
    assert best[(8, 1), (1, 1)].words == "AllToAll over b+c" and best[(8, 1), (1, 1)].nbytes == 1024 * 512 * 4 // 8
    assert best[(1, 8), (8, 1)].words.startswith("AllGather over a, AllGather over b+c, Slice")
    assert [r.seconds for r in rows] == sorted(r.seconds for r in rows)


# (source, target, pieces, what it takes) of the first product on a=2,b=2,c=2; the first four are the classic table.
PAIRS = [
    ("a,b*c", "a*b*c,-", (8, 1), "AllToAll over b+c"),
    ("a,b*c", "a*b,c", (4, 2), None),
    ("a,b*c", "a,b*c", (2, 4), "0"),
    ("a,b*c", "-,a*b*c", (1, 8), None),
    ("a,b*c", "a*c,b", (4, 2), "AllToAll over c"),
    ("a,b*c", "b*c,a", (4, 2), None),
    ("a,b*c", "a,c*b", (2, 4), None),
    ("-,-", "c*b*a,-", (8, 1), "Slice over c, Slice over b, Slice over a"),
    ("c*b*a,-", "-,-", (1, 1), "AllGather over a+b+c"),
    ("c*a,b", "-,c*a*b", (1, 8), None),
    ("a,b*c", "-,b*c*a", (1, 8), "AllGather over a, Slice over a"),
]


@pytest.mark.parametrize(("source", "target", "pieces", "words"), PAIRS)
def test_any_pair_of_layouts(classic, source, target, pieces, words):
    found = layout_pair(classic, Ref("relu_0"), source, target)
    assert found.splits[1] == pieces and (words is None or found.words == words), found
    assert found.in_plans == all(e.split("*") == sorted(e.split("*")) for t in (source, target) for e in t.split(","))
    assert (found.seconds == 0) == (not found.nbytes)


def test_pairs_that_plans_have_cost_what_plans_pay(classic):
    """The search over nestings in any order finds what the tables of the plan say, or less where a way leads out of mesh order."""
    meta, mesh = classic.graph.meta(Ref("relu_0")), classic.mesh
    layouts = list(product((-1, 0, 1), repeat=3))
    cheaper = 0
    for source, target in product(layouts, layouts):
        ends = [tuple(tuple(a for a in range(3) if s[a] == d) for d in range(2)) for s in (source, target)]
        seconds = sum(s for *_, s in layout_pairs._cheapest(classic.redistribution, meta.logical_shape, meta.dtype, *ends))
        priced = sum(s.seconds for s in classic.steps(meta, source, target))
        assert seconds <= priced * (1 + 1e-12)
        cheaper += seconds < priced * (1 - 1e-12)
    assert cheaper < 0.2 * len(layouts) ** 2
    assert mesh.ndim == 3


@pytest.mark.parametrize(("target", "words"), [("a,?", ("is open", "--target a,?")), ("a,z", ("'z'", "a=2")), ("a,a", ("'a'",)),
                                               ("a", ("1 dims for a tensor with 2",))])
def test_layouts_that_cannot_be_asked_for(classic, target, words):
    with pytest.raises(SeedError) as e:
        layout_pair(classic, Ref("relu_0"), "a,b*c", target)
    for word in words:
        assert word in str(e.value)


def test_an_edge_table_shows_the_chosen_row_and_says_what_it_leaves_out(gpt):
    table, _, plan = gpt
    chosen = chosen_by(plan, table)
    found = edge_table(table, find_edge(table.graph, "h.0.mlp.c_fc->gelu_0"), chosen, most=2)
    assert sum(r.chosen for r in found.rows) == 1 and len(found.rows) == 2 and found.left_out > 0
    assert "models/gpt.py:" in found.maker and found.reader.startswith("gelu_0")
    data = found.to_dict()
    assert set(data["rows"][0]) == {"source", "targets", "splits", "steps", "nbytes", "seconds", "compute_s", "chosen"}


def test_an_op_table_has_regrets(gpt):
    table, _, plan = gpt
    found = op_table(chosen_by(plan, table), find_op(table.graph, "h.0.mlp.c_fc").name)
    first, *others = found.rows
    assert first.chosen and first.regret_s == 0 and not any(r.chosen for r in others)
    possible = [r.regret_s for r in others if r.regret_s is not None]
    assert possible and min(possible) >= -1e-12, "the plan is optimal: no single change helps"
    assert any(r.regret_s is None for r in others), "nothing becomes Partial"
    assert len(found.to_dict()["rows"]) == len(found.rows)


def test_a_parameter_and_its_gradient_change_together(gpt):
    table, _, plan = gpt
    rows = op_table(chosen_by(plan, table), "param:h.0.mlp.c_fc.weight").rows
    assert {r.outputs for r in rows} == {("[-, -]",), ("[tp, -]",), ("[-, tp]",)}
    assert all(r.regret_s is not None and r.regret_s >= -1e-12 for r in rows)
    asked_the_other_way = op_table(chosen_by(plan, table), "grad:h.0.mlp.c_fc.weight").rows
    assert {r.inputs: r.regret_s for r in asked_the_other_way} == {r.outputs: r.regret_s for r in rows}


def test_a_plan_read_back_is_the_plan(gpt):
    table, options, plan = gpt
    from autoshard.decide.make_plan import price

    chosen = chosen_by(plan, table)
    assert price(chosen)["step_s"] == pytest.approx(plan.objective_s, rel=1e-12)
    with pytest.raises(PlanError, match="another program"):
        chosen_by(replace(plan, graph_hash="0"), table)


def test_a_plan_that_runs_ops_again_is_explained_too():
    options = Options(cluster="h100-dgx", time_limit=60)
    table = prices(traced("mlp"), parse_mesh("d=2"), options)
    program = program_with(table, frozenset(candidates(table.graph)))
    plan = decide(program, options).recomputing(table.graph.hash)
    chosen = chosen_by(plan, table)
    assert plan.recompute and price(chosen)["step_s"] == pytest.approx(plan.objective_s, rel=1e-9)
    again, reader = next((ref.op, users[0][0]) for ref, users in chosen.table.graph.users.items() if ref.op.endswith(RECOMPUTE_SUFFIX))
    assert op_table(chosen, again).rows[0].chosen and again in op_table(chosen, again).where
    assert any(row.chosen for row in edge_table(chosen.table, find_edge(chosen.table.graph, f"{again}->{reader}"), chosen).rows)


def test_why_not_forces_and_solves_again(gpt):
    _, options, plan = gpt
    program, mesh = traced("gpt", batch=512), parse_mesh("tp=4")
    found = why_not(program, mesh, options, "h.0.mlp.c_fc", "-,tp", plan=plan)
    assert found.key == "h.0.mlp.c_fc.weight" and found.regret_s >= -1e-12
    changed = {(c.name, c.after) for c in found.difference.placements}
    assert ("h.0.mlp.c_fc.weight", "[-, tp]") in changed
    assert found.to_dict()["regret_s"] == found.after_s - found.before_s
    same = why_not(program, mesh, options, "h.0.mlp.c_fc.weight", "S(1)", plan=plan)
    assert same.after_s == pytest.approx(found.after_s)


@pytest.mark.parametrize(("text", "words"), [
    ("relu_0", ("cannot read edge", "PRODUCER->CONSUMER")), ("relu_0->mm_0", ("reads nothing that relu_0 makes", "read by mm_1")),
    ("relu_9->mm_1", ("'relu_9'", "nearest names are relu_0")), ("->mm_1", ("cannot read edge",)),
    ("relu_*->mm_1", ("'relu_*' is a pattern, of", "give one of them, such as 'relu_0'"))])
def test_edges_that_do_not_exist(classic, text, words):
    with pytest.raises(UsageError) as e:
        find_edge(classic.graph, text)
    for word in words:
        assert word in str(e.value)


def test_names(gpt):
    graph = gpt[0].graph
    assert find_op(graph, "h.0.mlp").module == "h.0.mlp.c_proj" and find_op(graph, "wte.weight").kind == "param"
    assert find_op(graph, "lm_head.weight").target == "wte.weight", "a tied weight by its other name"
    value, reader, _ = find_edge(graph, "h.0->h.1")
    assert graph.op(value.op).module == "h.0" and graph.op(reader).module.startswith("h.1")


# -- diff -----------------------------------------------------------------------------------------

def test_equal_plans_do_not_differ():
    found = diff(sample_plan(), sample_plan())
    assert found.equal and found.to_dict()["equal"] is True
    assert diff(sample_plan(), replace(sample_plan(), status="optimal", timings={"search": 3.0})).equal


def test_what_differs_is_named():
    a = sample_plan()
    name = next(iter(a.placements))
    layouts = tuple(replace(x, spec=tuple(-1 for _ in x.spec)) if x.name == name else x for x in a.layouts)
    b = replace(a, layouts=layouts, collectives=a.collectives[1:], predicted={**a.predicted, "step_s": 2.0},
                stages=(replace(a.stages[0], memory={**a.memory, "total": 1.0}),), seeds={**a.seeds, "x": "tp,-"})
    found = diff(a, b)
    assert not found.equal
    assert {c.name for c in found.placements} == ({name} if layouts != a.layouts else set())
    assert [(c.name, c.after) for c in found.settings] == [("seeds: x", "tp,-")]
    assert {"step_s", "total"} <= {c.name for c in found.numbers}
    (change,) = found.collectives
    assert change.before[0] == change.after[0] + 1


@pytest.mark.parametrize(("key", "name", "text", "other"), [
    ("wte.weight", "wte.weight", "tp,-", "-,-"), ("h.*.mlp.c_fc.weight", "h.0.mlp.c_fc", "tp,-", "-,tp"), ("input:0", "input:0", "-,-", "tp,-")])
def test_why_not_prices_a_seed(gpt, key, name, text, other):
    """The seed gives way to the forced layout, or to nothing; a glob goes on to hold the others."""
    _, options, _ = gpt
    program, mesh, seeded = traced("gpt", batch=512), parse_mesh("tp=4"), replace(options, seeds={key: text})
    freed = why_not(program, mesh, seeded, name, text)
    assert freed.seed == text and freed.freed and freed.after_s <= freed.before_s * (1 + 1e-9)
    forced = why_not(program, mesh, seeded, name, other)
    assert forced.seed == text and not forced.freed and forced.after_s >= freed.after_s * (1 - 1e-9)
    assert forced.before_s == pytest.approx(freed.before_s) and forced.to_dict()["seed"] == text


def test_a_glob_goes_on_to_hold_the_others(gpt):
    graph = gpt[0].graph
    layers = {op.target for op in graph.of_kind("param") if op.target.endswith("mlp.c_fc.weight")} - {"h.0.mlp.c_fc.weight"}
    others, seed = released(graph, {"h.*.mlp.c_fc.weight": "tp,-", "wte.weight": "-,-"}, "h.0.mlp.c_fc.weight")
    assert seed == "tp,-" and layers and others == {**dict.fromkeys(layers, "tp,-"), "wte.weight": "-,-"}
    assert released(graph, {"wte.weight": "-,-"}, "h.0.mlp.c_fc.weight") == ({"wte.weight": "-,-"}, "")


def test_a_seed_on_a_module_is_named_as_such(gpt):
    with pytest.raises(SeedError, match="what a module returns"):
        released(gpt[0].graph, {"h.0.mlp": "tp,-,-"}, "h.0.mlp")
