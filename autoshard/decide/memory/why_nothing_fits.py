"""Why no plan fits: the proven lower bound, the least peak found, what is alive at that peak, and seeds that cost memory."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10

from autoshard.cost.budget import Budget
from autoshard.cost.optimizers import OPTIMIZERS
from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.fit import search_within
from autoshard.decide.memory.leanest import Lean
from autoshard.decide.memory.memory_problems import least_memory, least_possible
from autoshard.decide.notes.seed_bytes import pinned, without_seeds
from autoshard.decide.program import Program
from autoshard.errors import InfeasibleError
from autoshard.formulate.problem_of import formulate
from autoshard.play.timeline import Timeline
from autoshard.search.problem import Problem, Solution, Status
from autoshard.seeds.marks import calls_collectives
from autoshard.space.cost_table import CostTable

NAMED = 3  # seeds in a message
DIGITS, MOST_DIGITS = 4, 12  # of an amount in a message; more than usual where amounts would read the same


def explain_infeasible(program: Program, solution: Solution, lean: Lean | None, how: How) -> InfeasibleError:
    """The error to raise. `program`: the one with recomputation undecided; `lean`: the plan of least memory found. The time left goes
    into the bound; with seeds, half of it into a search without them."""
    formulation, table, budget = program.formulation, program.formulation.table, program.formulation.budget
    problem, rows = formulation.problem, formulation.memory_rows.values()
    leasts = _leasts(problem, tuple(rows), how.part(0.5 if table.seeds.matches else 1.0))
    if any(least.status is Status.INFEASIBLE for least in leasts):
        given = " and the collectives that the model calls itself" if calls_collectives(table.graph) else ""
        return InfeasibleError(f"no choice of strategies satisfies all seeds{given}, whatever the memory; "
                               "take seeds away until a plan exists, or leave dims open with ...", proven=True)
    counted = max(max(least.bound, least_possible(problem, row)) for least, row in zip(leasts, rows, strict=True))
    bound = budget.taken(counted)
    proven = bound > budget.limit or solution.status is Status.INFEASIBLE
    if lean is None:
        return InfeasibleError(f"the time limit ended the search before any plan was found, for {_text(budget.limit)} per rank or more; "
                               f"no plan needs less than {_text(bound, floor)} (proven). Give more time (time_limit, --time-limit)", proven=proven)
    return InfeasibleError(_sentence(budget, bound, lean[1], solution)
                           + f"{_offload(table)}{_seeds_in_the_way(program, how)}", proven=proven)


def _leasts(problem: Problem, rows: Sequence[int], how: How) -> list[Solution]:
    """Per row, the least load that any choice has; each row gets an equal share of the time left."""
    return [how.part(1 / (len(rows) - i)).solve(least_memory(problem, [row])) for i, row in enumerate(rows)]


def _sentence(budget: Budget, bound: float, timeline: Timeline, solution: Solution) -> str:
    """What fits and what does not, with as many digits as tell the amounts apart."""
    limit, needs = budget.limit, budget.taken(timeline.peak)
    digits = next((d for d in range(DIGITS, MOST_DIGITS) if len({_text(x, digits=d) for x in (limit, bound, needs)}) == 3), DIGITS)
    given, low, high = _text(limit, digits=digits), _text(bound, floor, digits), _text(needs, ceil, digits)
    if bound > limit:
        start = f"no plan fits in {given} per rank: no plan needs less than {low} (proven), and the least found needs {high}"
    elif solution.status is Status.INFEASIBLE:  # proven by the search, though not by one moment alone
        start = f"no plan fits in {given} per rank (proven), and the least found needs {high}"
    else:
        start = (f"no plan was found that fits in {given} per rank (not proven: the search stopped, {solution.status.value}): "
                 f"no plan needs less than {low} (proven), and the least found needs {high}")
    return f"{start}. {_when(timeline)}. Raise the memory budget to {high}, use more ranks or a smaller batch"


def _offload(table: CostTable) -> str:
    """A hint at `offload='optimizer'`, where it is possible and was not requested."""
    could = table.graph.training and not table.training.offload and table.cluster.device.host_link is not None
    return ", or let optimizer state lie on the host (offload='optimizer')" if could and OPTIMIZERS[table.training.optimizer].state else ""


def _seeds_in_the_way(program: Program, how: How) -> str:
    """Whether a plan fits without the user's seeds, and which seeds cost most memory. Empty without seeds."""
    table, budget = program.formulation.table, program.formulation.budget
    if not table.seeds.matches:
        return ""
    free = formulate(without_seeds(table.base or table, program.settings.get("outputs", "replicate")), memory_limit=budget.limit,
                     in_flight=table.training.fullest)
    timelines = Timelines(free, program.settings)
    found = search_within(Program(free, timelines), how)
    if found.choice is None:
        count = len(table.seeds.matches)
        return f", or take seeds away, though without {f'all {count} of them' if count > 1 else 'the one there is'} none was found that fits either"
    needs = _text(budget.taken(timelines(found.choice).peak), ceil)
    most = ", ".join(f"{p.seed} {_text(p.nbytes)}" for p in pinned(table)[:NAMED])
    return f". Without the seeds a plan fits: one that needs {needs} was found. Most bytes per rank are held by {most}"


def _when(timeline: Timeline) -> str:
    """The peak of a plan in words."""
    peak = max(timeline.moments(), key=lambda m: m.total)
    place = f" ({', '.join(x for x in (peak.module, peak.source) if x)})" if peak.module or peak.source else ""
    parts = sorted(((n, c) for c, n in peak.by_category.items() if n), reverse=True)
    alive = ", ".join(f"{a.name} {_text(a.nbytes)}" for a in timeline.largest()[:4])
    return (f"Its peak is in {peak.window} at {peak.op}{place}: {', '.join(f'{c} {_text(n)}' for n, c in parts[:4])}; "
            f"the largest tensors there: {alive}")


def _text(nbytes: float, rounded: Callable[[float], int] = round, digits: int = DIGITS) -> str:
    """Bytes for a message, in the largest unit that leaves a number above 1. `rounded`: what becomes of further digits: a budget to
    give must not be smaller than what is needed."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            scale = 10.0 ** (digits - 1 - floor(log10(nbytes / size)))
            return f"{rounded(nbytes / size * scale) / scale:.{digits}g} {unit}"
    return f"{rounded(nbytes)} bytes"
