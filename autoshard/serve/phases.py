"""Prompt and token planned together: two programs over one stored state.

A request takes t_prompt + steps x t_token. Each program planned alone can do whatever it likes with the stored tensors, so the sum of the two
bounds is a bound of every joint plan. Two joint plans are made: each program with the stored placements of the other one. The better
one is kept, and its distance to the bound is reported.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
"""Above this gap, caches that change their layout between the phases are priced, too."""
PlanOne = Callable[[Traced, Mapping[str, Spec]], Plan]
"""Plans a program with some stored placements fixed."""


@dataclass(frozen=True)
class Phases:
    """The plans of a request: its prompt once, then `steps` single tokens.

    decides    whose placements both have: "token" or "prompt"
    bound_s    no request with one layout of the stored tensors is faster
    relaid_s   a request whose caches lie otherwise in the prompt and are redistributed once after it; None where this was not priced or
               does not fit. `autoshard.generator` keeps one layout"""

    prompt: Plan
    token: Plan
    steps: int
    decides: str
    bound_s: float
    relaid_s: float | None = None

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
    found: list[Phases] = []
    why = ""
    for decides in ("token", "prompt"):
        try:
            if decides == "token":
                found.append(Phases(plan_one(prompt, stored(token_alone)), token_alone, steps, decides, bound))
            else:
                found.append(Phases(prompt_alone, plan_one(token, stored(prompt_alone)), steps, decides, bound))
        except InfeasibleError as e:
            why = str(e)
            continue
        if found[-1].gap <= ENOUGH:
            return found[-1]
    if not found:
        raise InfeasibleError(f"the prompt and the token each have a plan, and neither fits with the stored tensors as the other one has them: {why}")
    best = min(found, key=lambda p: p.request_s)
    return best if best.gap <= WIDE else _with_relaid(best, prompt, token_alone, plan_one, Redistribution(mesh, profile))


def stored(plan: Plan) -> dict[str, Spec]:
    """Placements of parameters and buffers by name."""
    return {name: tuple(spec) for name, spec in plan.placements.items()}


def states_of(graph: Graph) -> dict[str, TensorMeta]:
    """Name of every buffer that is written back -> its shape and dtype."""
    written = graph.outputs(Role.MUTATION)
    return {str(op.target): op.outputs[0] for op in graph.of_kind("buffer") if op.target in written}


def _with_relaid(best: Phases, prompt: Traced, token: Plan, plan_one: PlanOne, redistribution: Redistribution) -> Phases:
    """With the price of a request whose caches are redistributed once."""
    states = states_of(prompt.graph)
    try:
        free = plan_one(prompt, {name: spec for name, spec in stored(token).items() if name not in states})
    except InfeasibleError:
        return best
    moved = sum(redistribution.seconds(meta.logical_shape, meta.dtype, stored(free)[name], stored(token)[name]) for name, meta in states.items())
    return Phases(best.prompt, best.token, best.steps, best.decides, best.bound_s, free.objective_s + moved + best.steps * token.objective_s)
