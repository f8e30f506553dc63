"""Prompt and token planned together: two programs over one stored state.

A request takes t_prompt + steps x t_token. Each program planned alone can do whatever it likes with the stored tensors, so the sum of the two
bounds is a bound of every joint plan. Two joint plans are made: each program with the stored placements of the other one; and where both are far
from the bound a third, with the caches as the token likes them and the weights as the prompt does with such caches: of a weight that is
stored whole the token may read a part, which costs nothing. The best one is kept, and its distance to the bound is reported.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.errors import InfeasibleError
from autoshard.program.calling import Traced

ENOUGH = 1e-3
"""A joint plan so close to the bound ends the work."""
WIDE = 1e-2
"""Above this gap, a third way is planned, and what two layouts would bring is priced."""
WAYS = {"token": 0.0, "prompt": ENOUGH, "both": WIDE}
"""Whose placements decide, and the gap of the ways before above which it is tried."""
PlanOne = Callable[[Traced, Mapping[str, Spec]], Plan]
"""Plans a program with some stored placements fixed."""


@dataclass(frozen=True)
class Phases:
    """The plans of a request: its prompt once, then `steps` single tokens.

    decides    whose placements both have: "token" or "prompt"; "both": caches as the token likes them, weights as the prompt does
    bound_s    no request with one layout of the stored tensors is faster
    relaid_s   a request whose caches lie otherwise in the prompt and are redistributed once after it; None where this was not priced or
               does not fit
    twice_s    a request in which each phase has its own layout of all: weights stored twice, caches redistributed once; None likewise

    `autoshard.generator` keeps one layout."""

    prompt: Plan
    token: Plan
    steps: int
    decides: str
    bound_s: float
    relaid_s: float | None = None
    twice_s: float | None = None

    @property
    def request_s(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.prompt.objective_s + self.steps * self.token.objective_s

    @property
    def gap(self) -> float:
        """Share of the request by which a better one could be faster."""
        return max(0.0, 1.0 - self.bound_s / self.request_s) if self.request_s else 0.0

    @property
    def memory(self) -> float:
        """Bytes that a rank needs."""
        return max(p.memory.get("total") or 0.0 for p in (self.prompt, self.token))


def plan_phases(prompt: Traced, token: Traced, steps: int, plan_one: PlanOne, *, mesh: Mesh, profile: Cluster) -> Phases:
    """Plan `prompt` and `token`, which write the same stored tensors, for one prompt and `steps` tokens. Raises InfeasibleError."""
    token_alone, prompt_alone = plan_one(token, {}), plan_one(prompt, {})
    bound = prompt_alone.bound_s + steps * token_alone.bound_s
    if stored(token_alone) == stored(prompt_alone):
        return Phases(prompt_alone, token_alone, steps, "token", bound)
    states = states_of(prompt.graph)

    def joint(decides: str) -> Phases:
        if decides == "token":
            return Phases(plan_one(prompt, stored(token_alone)), token_alone, steps, decides, bound)
        first = prompt_alone if decides == "prompt" else plan_one(prompt, {name: stored(token_alone)[name] for name in states})
        return Phases(first, plan_one(token, stored(first)), steps, decides, bound)

    best = _best_of(joint)
    if best.gap <= WIDE:
        return best
    return _with_two_layouts(best, prompt, (prompt_alone, token_alone), plan_one, Redistribution(mesh, profile))


def _best_of(joint: Callable[[str], Phases]) -> Phases:
    """Raises InfeasibleError where there is none."""
    best, why = None, ""
    for decides, above in WAYS.items():
        if best is not None and best.gap <= above:
            break
        try:
            found = joint(decides)
        except InfeasibleError as e:
            why = str(e)
            continue
        best = found if best is None or found.request_s < best.request_s else best
    if best is None:
        raise InfeasibleError(f"the prompt and the token each have a plan, and neither fits with the stored tensors as the other one has them: {why}")
    return best


def _with_two_layouts(best: Phases, prompt: Traced, alone: tuple[Plan, Plan], plan_one: PlanOne, redistribution: Redistribution) -> Phases:
    """With what a request would take whose caches, or caches and weights, have a layout for each phase. `alone`: prompt and token as they like it."""
    states, (first, token) = states_of(prompt.graph), alone
    tokens = best.steps * token.objective_s

    def moved(before: Plan) -> float:
        """Seconds to redistribute the caches after the prompt."""
        return sum(redistribution.seconds(meta.logical_shape, meta.dtype, stored(before)[name], stored(token)[name]) for name, meta in states.items())

    try:
        relaid = plan_one(prompt, {name: spec for name, spec in stored(token).items() if name not in states})
    except InfeasibleError:
        relaid = None
    return replace(best, relaid_s=relaid and relaid.objective_s + moved(relaid) + tokens,
                   twice_s=first.objective_s + moved(first) + tokens if _both_fit(first, token) else None)


def stored(plan: Plan) -> dict[str, Spec]:
    """Placements of parameters and buffers by name."""
    return {name: tuple(spec) for name, spec in plan.placements.items()}


def states_of(graph: Graph) -> dict[str, TensorMeta]:
    """Name of every buffer that is written back -> its shape and dtype."""
    written = graph.outputs(Role.MUTATION)
    return {str(op.target): op.outputs[0] for op in graph.of_kind("buffer") if op.target in written}


def _both_fit(one: Plan, other: Plan) -> bool:
    """Whether a rank has memory for each phase beside what the other one stores."""
    limit = one.memory.get("limit")
    needs = max((a.memory.get("total") or 0.0) + sum(b.memory.get(kind) or 0.0 for kind in ("parameters", "buffers"))
                for a, b in ((one, other), (other, one)))
    return limit is None or needs <= limit
