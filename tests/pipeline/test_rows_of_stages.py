"""Memory rows of stages of a pipeline against their timelines: no plan needs less than a row counts, so no plan that fits is left out."""
from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoshard import Pipeline
from autoshard.base.graph import FORWARD, Op
from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import NOWHERE
from autoshard.base.turns import Duty, Turn
from autoshard.cost.cluster import load_cluster
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.memory_problems import ample, least_memory, memory_priced, rows_of
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.formulate.copies import KEPT, MADE
from autoshard.formulate.memory_rows import without_idle
from autoshard.formulate.problem_of import Formulation
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.microbatches.batch import traced
from autoshard.pipeline.pipelined import pipelined
from autoshard.pipeline.rank_memory import duties
from autoshard.planner.one_stage import prices
from autoshard.program.calling import Traced
from autoshard.recompute.rewrite import is_source
from autoshard.recompute.undecided import decided, first_run, open_table
from autoshard.search import solve
from autoshard.search.problem import Problem, evaluate, row_loads
from autoshard.space.cost_table import CostTable, Training
from tests.pipeline.cut_models import MODELS

OPTIONS = Options(cluster="h100-dgx")
FOUR = Pipeline(microbatches=4)


@functools.cache
def program(name: str, microbatches: int) -> Traced:
    model, batch = MODELS[name].build(batch=4 * microbatches, seq=8, layers=2)
    return traced(model, batch, {}, Pipeline(microbatches), loss_fn=MODELS[name].loss, training=True)


def stages(name: str, mesh: str, options: Pipeline) -> Iterator[CostTable]:
    """Prices of every stage, with what its rank does in a step."""
    found, cluster, on = program(name, options.microbatches), load_cluster("h100-dgx"), parse_mesh(mesh)
    names, count = Blocks.of(found.graph).names, on.sizes[0] * (2 if options.chunks == 2 else 1)
    made = pipelined(found.graph, on, replace(options, cuts=tuple(names[len(names) * k // count] for k in range(1, count))), cluster)
    for stage, duty in zip(made.cut.stages, duties(made), strict=True):
        step = Training("adamw", True, wire=cluster.links_for(on)[0], duty=duty)
        yield prices(replace(found, graph=stage.graph), made.submesh, OPTIONS, profile=cluster, step=step)


def choices(formulation: Formulation) -> Iterator[np.ndarray]:
    """Greedy ones, those of least memory, and the best at random prices, and at random prices of memory."""
    problem, rng = formulation.problem, np.random.default_rng(0)
    yield from (choice for _, choice in greedy_plans(formulation))
    for row in formulation.memory_rows.values():
        yield from _found(least_memory(problem, [row]))
    plain = replace(ample(problem), edges=tuple(replace(e, table=np.where(np.isfinite(e.table), 0.0, np.inf)) for e in problem.edges))
    for _ in range(2):
        costs = tuple(c + rng.random(len(c)) for c in plain.node_costs)
        yield from _found(replace(plain, node_costs=costs, groups=None))
        yield from _found(replace(memory_priced(problem, rows_of(formulation), 10.0 ** rng.uniform(-12, -6)), groups=None))


def _found(problem: Problem) -> Iterator[np.ndarray]:
    choice = solve(problem, time_limit=5, enough=0.2).choice
    if choice is not None:
        yield np.asarray(choice)


def without_unread(formulation: Formulation, choice: np.ndarray) -> np.ndarray:
    """`choice` with copies made and kept only where some op reads them: prices that are drawn by chance do not say so, and a plan never has others."""
    units, out, graph, picked = formulation.units, np.array(choice), formulation.table.graph, formulation.strategy_of(choice)
    for i, copy in enumerate(formulation.copies, len(units.units)):
        state, there = copy.states[out[i]], np.array(copy.spec)
        read = {graph.window_of(op) for op, at in copy.readers if (formulation.table.strategies[op].inputs[picked[op], at] == there).all()}
        if state.name in (MADE, KEPT):
            how = [None if w not in read else bool(state.times[w]) for w in range(len(state.serves))]
            first = min(read, default=None)
            how = [True if w == first else h for w, h in enumerate(how)]
            same = [k for k, s in enumerate(copy.states) if s.name in (MADE, KEPT) and s.price == state.price
                    and all(h is None or s.serves[w] and bool(s.times[w]) == h for w, h in enumerate(how))]
            out[i] = min(same, key=lambda k: sum(copy.states[k].serves), default=0) if read else 0
    return out


def keeps_in_vain(formulation: Formulation, choice: np.ndarray) -> bool:
    """Whether some source keeps a value that nobody reads. Sources of one unit keep together, so a choice may not say less; a plan does."""
    table, picked = formulation.table, formulation.strategy_of(choice)
    if table.base is None:
        return False
    graph = decided(table, picked)[0].graph
    read = {r.op for window in graph.windows[graph.window_index[FORWARD] + 1:] for op in window.ops for r in op.refs}

    def keeps(source: Op) -> bool:
        return bool((table.strategies[source.name].inputs[picked[source.name]][-len(source.kept):] != NOWHERE).any())

    return any(keeps(op) for op in table.graph.ops if is_source(op) and op.kept and not {op.name, first_run(op.name)} & read)


def excess(table: CostTable) -> list[float]:
    """What a row counts beyond the timeline's peak at most, as part of it, per choice."""
    formulation = formulate_within(table, 1e15)
    played, rows = Timelines(formulation, {}), rows_of(formulation)
    found = []
    for choice in (without_idle(formulation, without_unread(formulation, c)) for c in choices(formulation)):
        if np.isfinite(evaluate(ample(formulation.problem), choice)) and not keeps_in_vain(formulation, choice):
            found.append(row_loads(formulation.problem, choice)[rows].max() / played(choice).peak - 1.0)
    return found


@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("llama", "pp=2,dp=2", replace(FOUR, schedule="1f1b")), ("llama", "pp=2,dp=2", replace(FOUR, schedule="zb1p")),
    ("gpt", "pp=2,dp=2", replace(FOUR, schedule="zbv", chunks=2)),
    pytest.param("gpt", "pp=2,dp=2,tp=2", replace(FOUR, schedule="zb1p"), marks=pytest.mark.slow)])
def test_rows_never_count_more_than_the_peak(name: str, mesh: str, options: Pipeline) -> None:
    for table in stages(name, mesh, options):
        plain, again = excess(table), excess(open_table(table))
        assert len(plain) > 5 and again, "hardly any choice was looked at"
        assert max(plain + again) <= 0.0


def test_what_waits_for_its_weight_part_is_counted_apart() -> None:
    """Three forwards in a row, a fourth behind two first parts of backward: of four in flight, two wait."""
    order = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 0), ("backward", 1), ("forward", 3), ("backward", 2), ("backward", 3)]
    turns = [Turn("run", 0, window, m) for window, m in (*order, *(("weight", m) for m in range(4)))]
    assert Duty(0, tuple(turns)).fullest == (4, 2)
    assert Duty(0, tuple(t for t in turns if t.window != "weight")).fullest == (3, 0)
