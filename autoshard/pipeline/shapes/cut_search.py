"""Cuts and schedule where the user leaves them open: searched at prices of short stages, and the best few planned as they are.

Prices of short stages leave out that neighbours agree on layouts, so the plan of the whole decides between the best candidates. The
cuts that are even by the seconds of blocks are always among them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.graph import Graph
from autoshard.base.plan import Plan
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.action_lists.action_text import read_csv
from autoshard.pipeline.action_lists.actions import COMPUTE, ActionTable
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut_points import balanced, names_of
from autoshard.pipeline.cutting.pinned import allowed
from autoshard.pipeline.cutting.stretches import Stretches
from autoshard.pipeline.plan_stages import PlanStage
from autoshard.pipeline.schedules import SCHEDULES, make_schedule
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.pipeline.shapes.stage_prices import GraphPricer
from autoshard.search.partition import Partition, partition

TRIED = ("1f1b", "interleaved", "zb1p", "zbv")
"""Schedules that "auto" means, with the fewest stages on a rank that each takes."""
PLANNED = 2
"""Candidates that are planned, besides the even cuts."""

SHORT_STAGES = 8
"""About as many short stages are planned for prices: each gets this part of the time limit."""


@dataclass(frozen=True)
class Candidate:
    options: Pipeline
    found: Partition


def search_cuts(choices: Sequence[Pipeline], plan_with: Callable[[Pipeline], Plan]) -> Plan:
    """The cheapest plan of the candidates. Raises the error of the first where there is none: InfeasibleError where it does not fit, UsageError where
    its cuts are not possible, which even ones may not be."""
    plans: list[Plan] = []
    failures: list[InfeasibleError | UsageError] = []
    for choice in choices:
        try:
            plans.append(plan_with(choice))
        except (InfeasibleError, UsageError) as e:
            failures.append(e)
    if not plans:
        raise failures[0]
    return min(plans, key=lambda plan: plan.objective_s)


def choices(graph: Graph, ranks: int, options: Pipeline, plan_stage: PlanStage, cluster: Cluster, wire: AxisLink,
            memory_limit: float = np.inf) -> list[Pipeline]:
    """Options with nothing left open, the best first by the prices of short stages. Where the user gave cuts, or there is no backward, the
    schedule is the first of those that "auto" means."""
    plain = replace(options, schedule=TRIED[0]) if options.schedule == AUTO else options
    if options.cuts != AUTO or options.layout or not graph.training:
        return [plain]
    blocks = Blocks.of(graph)
    tables = list(_tables(graph, blocks, ranks, options))
    if not tables:
        return [plain]  # more stages than blocks: whoever cuts says so
    first, table = tables[0]
    even = with_even_cuts(first, blocks, cluster, table.stages)
    try:
        pricer = GraphPricer(Stretches(graph, blocks, split=True), plan_stage, wire)
        found = sorted(_candidates(pricer, tables, memory_limit), key=lambda c: c.found.seconds)
    except UsageError:  # some two blocks cannot be stages of their own; even cuts may still be possible
        return [even]
    return list(dict.fromkeys([*(c.options for c in found[:PLANNED]), even]))


def with_even_cuts(options: Pipeline, blocks: Blocks, cluster: Cluster, stages: int) -> Pipeline:
    """`options` with the cuts that are even by the seconds of blocks. Raises UsageError for more stages than blocks."""
    starts = balanced(blocks, cluster, stages, allowed(blocks, options.pinned, stages))
    return replace(options, cuts=names_of(blocks, starts))


def _tables(graph: Graph, blocks: Blocks, ranks: int, options: Pipeline) -> Iterator[tuple[Pipeline, ActionTable]]:
    if options.schedule.endswith(".csv"):
        yield options, read_csv(options.schedule).only(COMPUTE)
        return
    for name in TRIED if options.schedule == AUTO else (options.schedule,):
        chunks = SCHEDULES[name].chunks[0] if options.chunks == AUTO else int(options.chunks)
        if chunks in SCHEDULES[name].chunks and ranks * chunks <= len(blocks.blocks):
            yield replace(options, schedule=name, chunks=chunks), make_schedule(name, ranks, graph.microbatches, chunks)


def _candidates(pricer: GraphPricer, tables: Sequence[tuple[Pipeline, ActionTable]], memory_limit: float) -> Iterator[Candidate]:
    """One per schedule. Stages are priced once, with backward split; schedules that do not split it take both parts together."""
    chain = pricer.chain()
    for chosen, table in tables:
        scheduled = chain if table.split_backward else chain.undivided()
        course = replace(course_of(table), allowed=allowed(pricer.stretches.blocks, chosen.pinned, table.stages))
        found = partition(scheduled, course, price_by_play(scheduled, table), memory_limit)
        if found.cuts:
            yield Candidate(replace(chosen, cuts=names_of(pricer.stretches.blocks, found.cuts[1:-1])), found)
