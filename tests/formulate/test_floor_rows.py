"""Floor rows: no plan holds less at their moment than they count, and what is proven under them is no more than the best plan that fits."""
from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from small_models import Wavy

from autoshard.base.graph import Ref
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import CATEGORIES
from autoshard.base.precision import Precision
from autoshard.decide.make_plan import Timelines
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.formulate.floor_rows import Floors, with_floor
from autoshard.formulate.floor_weights import exact_near
from autoshard.formulate.memory_rows import without_idle
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.formulate.values import storage_root
from autoshard.planner.one_stage import decide, prices
from autoshard.play.footprint import Footprints
from autoshard.play.timeline import Timeline
from autoshard.program.calling import Traced
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import candidates, is_source
from autoshard.recompute.undecided import open_table, open_units, program_with, source_state
from autoshard.search import Edge, Problem, solve
from autoshard.search.problem import evaluate, row_loads
from autoshard.space.decision_units import singletons

OPTIONS = Options(cluster="h100-dgx", time_limit=60.0)


class WithLogits(torch.nn.Module):
    """Returns logits beside its loss, as models of transformers do: the user holds them through backward. The head's weight is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(512, 32), torch.nn.Linear(32, 512, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


def open_formulation(name: str, mesh: str, limit: float = 1e18) -> Formulation:
    if name == "logits":
        traced = trace(WithLogits(), (torch.randint(512, (8, 16)), torch.randint(512, (8, 16))), precision=Precision(param="bf16"))
    else:
        module = importlib.import_module(f"models.{name}")
        model, batch = module.build()
        traced = trace(model, batch, loss_fn=module.loss)
    return formulate_within(open_table(prices(traced, parse_mesh(mesh), OPTIONS)), limit)


def floors_of(formulation: Formulation) -> Floors:
    return Floors(formulation, Footprints(formulation.table.mesh, formulation.table.cluster), whole=True)


def random_choice(formulation: Formulation, seed: int) -> np.ndarray:
    """A plan whose layouts and recomputation are random, without copies and kept values that nobody reads."""
    rng, problem, row = np.random.default_rng(seed), formulation.problem, formulation.memory_rows["turn"]
    costs = [np.asarray(c) * rng.uniform(0.1, 10.0) * rng.uniform(0.5, 2.0, len(c)) + 1e-9 for c in problem.node_costs]
    on = problem.items.row == row
    byte = rng.choice([1e-4, 1.0, 10.0]) * 1e-9 / problem.items.amount[on].mean()
    for n, s, amount in zip(problem.items.node[on], problem.items.strategy[on], problem.items.amount[on], strict=True):
        costs[n][s] += byte * amount  # idle ones are worth nothing
    edges = tuple(Edge(e.u, e.v, e.table * rng.uniform(0.01, 10.0), e.rows, e.cols) for e in problem.edges)
    found = solve(Problem(tuple(costs), edges), time_limit=120.0, enough=0.2)
    assert found.choice is not None, "a random plan exists"
    return tidied(formulation, without_idle(formulation, found.choice))


def tidied(formulation: Formulation, choice: np.ndarray) -> np.ndarray:
    """The choice without values that are kept for nobody: a search may leave these, since they cost no time."""
    problem, row, units = formulation.problem, formulation.memory_rows["turn"], formulation.units.units
    amounts = [np.zeros(len(c)) for c in problem.node_costs]
    on = problem.items.row == row
    for n, s, amount in zip(problem.items.node[on], problem.items.strategy[on], problem.items.amount[on], strict=True):
        amounts[n][s] += amount
    out, cost = np.array(choice), evaluate(problem, choice)
    for n in [n for n in range(problem.n) if n >= len(units) or len(units[n].members) > 1]:
        for s in np.flatnonzero(amounts[n] < amounts[n][out[n]]):
            one = out.copy()
            one[n] = s
            if evaluate(problem, one) <= cost * (1 + 1e-12) and amounts[n][s] < amounts[n][out[n]]:
                out = one
    return out


def fullest(timeline: Timeline) -> dict[str, int]:
    """Per op, the most bytes from when what it reads is brought to where it reads it until it has made its results."""
    total, out, last = timeline.live.sum(axis=1), {}, 0
    for t, (_, instruction) in enumerate(timeline.playback.times):
        if instruction is not None and instruction.kind == "compute":
            out[instruction.op] = max(out.get(instruction.op, 0), int(total[last:t + 1].max()))
            last = t
    return out


@pytest.mark.parametrize(("name", "mesh"), [("gpt", "dp=2"), ("gpt", "dp=2,tp=2"), ("t5", "dp=2"), ("moe", "dp=2"), ("resnet", "dp=2"), ("mlp", "dp=2,tp=2"),
                                            ("logits", "dp=2"), ("logits", "dp=2,tp=2")])
def test_no_plan_holds_less_than_a_floor_row_counts(name: str, mesh: str) -> None:
    formulation = open_formulation(name, mesh)
    floors, played = floors_of(formulation), Timelines(formulation, {})
    shares: dict[str, list[float]] = {"forward": [], "backward": []}
    for seed in range(2):
        choice = random_choice(formulation, seed)
        timeline = played(choice)
        live = fullest(timeline)
        for moment in floors.moments:
            load = floors.load(moment, choice)
            assert load <= live.get(moment, timeline.peak), f"{moment} of {name}, seed {seed}"
            shares[floors.graph.op(moment).phase] += [load / live[moment]] if moment in live else []
    assert min(map(len, shares.values())) >= 10 and np.mean(shares["forward"]) > 0.8 and np.mean(shares["backward"]) > 0.6


def test_a_copy_that_forward_keeps_in_place_of_the_value_counts_in_full() -> None:
    """The source of such a value is off, and backward reads the copy alone."""
    formulation = open_formulation("moe", "dp=2")
    floors, first, seen = floors_of(formulation), formulation.units.index, 0
    moment = next(m for m in floors.moments if floors.graph.op(m).phase == "backward")
    read = {floors._home(root) for ref in floors.graph.op(moment).refs for root in [storage_root(floors.graph, ref)]}
    sources = {floors._home(root): root for root in floors.readers if is_source(floors.graph.op(root.op))}
    for seed in (1, 2):
        choice, loads = random_choice(formulation, seed), np.zeros(formulation.problem.n)
        for node, amounts in floors.amounts(moment, choice):
            loads[node] += amounts[choice[node]]
        kept = [c for c in floors._copies if c.kept[choice[c.node]] and c.root in sources and c.root not in read]
        for copied in (c for c in kept if [other.root for other in kept].count(c.root) == 1):
            root = sources[copied.root]
            if source_state(formulation.units, root)[choice[first(root.op)]] == 0 and copied.until > floors.graph.order[moment]:
                assert loads[copied.node] + loads[first(root.op)] >= copied.nbytes, f"{copied.copy.value}, seed {seed}"
                seen += 1
    assert seen, "some values are kept as copies"


def test_results_that_the_user_holds_are_counted() -> None:
    formulation = open_formulation("logits", "dp=2")
    floors, choice = floors_of(formulation), random_choice(formulation, 0)
    timeline = Timelines(formulation, {})(choice)
    live = fullest(timeline)
    full = max((m for m in floors.moments if floors.graph.op(m).phase == "backward" and m in live), key=lambda m: live[m])
    held = timeline.live[timeline.begins(full), CATEGORIES.index("outputs")]
    assert held >= 8 * 16 * 512 * 2 / 2 and live[full] - held < floors.load(full, choice) <= live[full]


def test_amounts_of_two_nodes_are_exact_near_a_plan_and_never_too_high() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        together = rng.integers(0, 9, (3, 4)).astype(float)
        together[rng.random((3, 4)) < 0.2] = np.inf
        plan = np.array([int(rng.integers(3)), 0])
        (second, beyond), (first, own) = exact_near(plan, (0, 1), together)
        total, possible = own[:, None] + beyond[None, :], np.isfinite(together)
        assert (first, second) == (0, 1) and (total <= together + 1e-12).all()
        here = plan[0]
        assert np.allclose(total[here][possible[here]], together[here][possible[here]])


def test_bounds_under_floor_rows_are_no_more_than_the_best_plan_that_fits() -> None:
    """Against all subsets of recomputed ops, each played; and they say more than the rows of the turn and the update."""
    table = prices(trace(Wavy(), (torch.randn(64, 4),)), parse_mesh("dp=1"), Options(cluster="h100-dgx", optimizer="sgd"))
    every, names, opened = [], candidates(table.graph), open_table(table)
    for again in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)):
        one = formulate(program_with(table, frozenset(again)))
        choice = solve(one.problem).choice
        every.append((evaluate(one.problem, choice), Timelines(one, {})(choice).peak))
    units, higher = open_units(singletons(table), opened), 0
    for limit in sorted({peak for _, peak in every}):
        formulation = formulate(opened, memory_limit=limit, units=units)
        grown, floors, first = formulation, floors_of(formulation), solve(formulation.problem).choice
        for moment in floors.moments:
            grown = with_floor(grown, floors, moment, first)
        found = solve(grown.problem)
        assert found.choice is not None and found.bound <= min(s for s, peak in every if peak <= limit) * (1 + 1e-9)
        higher += found.bound > solve(formulation.problem).bound * (1 + 1e-9)
    assert higher


def test_a_floor_row_is_a_row_of_the_problem() -> None:
    formulation = open_formulation("mlp", "dp=2", limit=1e6)
    floors = floors_of(formulation)
    moment = floors.moments[0]
    choice = random_choice(formulation, 0)
    grown = with_floor(formulation, floors, moment, choice)
    assert row_loads(grown.problem, choice)[-1] == pytest.approx(floors.load(moment, choice))
    assert grown.problem.row_limit[-1] == 1e6 and with_floor(grown, floors, moment, choice) is grown


def test_programs_with_decided_recomputation_get_none() -> None:
    formulation = open_formulation("mlp", "dp=2")
    assert floors_of(formulation).possible
    table = replace(formulation.table, training=replace(formulation.table.training, in_flight=2))
    assert not floors_of(replace(formulation, table=table)).possible
    assert not floors_of(formulate_within(formulation.table.base, 1e18)).possible


def test_what_waits_to_be_recomputed_from_is_counted_and_a_small_model_is_proven() -> None:
    """Four ranks over slow links recompute rather than split. Before floor rows counted whole inputs, what the last reader reads, and values kept for a
    source that runs later, the gap was 65 %, and the plan found a third slower."""
    traced, mesh = mlp_of(512), parse_mesh("dp=4")
    options = replace(OPTIONS, cluster="cpu-gloo")
    ample = decide(prices(traced, mesh, options), options)
    found = decide(prices(traced, mesh, options), replace(options, memory_budget=0.8 * ample.memory["total"]), has_loss=True)
    assert found.recompute and found.gap < 1e-6


def mlp_of(batch: int) -> Traced:
    module = importlib.import_module("models.mlp")
    model, inputs = module.build("tiny", batch=batch)
    return trace(model, inputs, loss_fn=module.loss)


def test_values_kept_for_sources_count_while_these_run_behind_the_op() -> None:
    """relu's value is recomputed from addmm's, which is kept: it lies there whole until relu runs, and is nothing where relu's value is kept."""
    formulation = formulate_within(open_table(prices(mlp_of(64), parse_mesh("dp=2"), OPTIONS)), 1e18)
    floors, units = floors_of(formulation), formulation.units
    root, source = Ref("addmm_0_again"), "relu_0_again"
    now = floors.graph.order["threshold_backward_0"]
    assert root in floors.roots and root not in floors.readers
    kept = floors._kept(floors.graph.op(root.op), root)
    runs = floors._reads(floors._all_readers[root][0]) > 0
    early = next(r for r in floors._all_readers[Ref(source)] if r.order <= now)
    plan = np.zeros(formulation.problem.n, dtype=np.int64)
    for node, wanted in ((units.index(root.op), kept > 0), (units.index(source), runs), (units.index(early.op), floors._reads(early) == 0)):
        plan[node] = np.flatnonzero(wanted)[0]
    counted = sum(float(amounts[plan[node]]) for node, amounts, _ in floors._value(root, now, plan))
    assert counted == kept[plan[units.index(root.op)]] > 0
    for node, other in ((units.index(source), ~runs), (units.index(early.op), floors._reads(early) > 0)):
        changed = plan.copy()
        changed[node] = np.flatnonzero(other)[0]
        assert sum(float(amounts[changed[node]]) for node, amounts, _ in floors._value(root, now, plan)) <= 0.0
        assert not list(floors._value(root, now, changed)), "in another plan nothing says that it lies there"
