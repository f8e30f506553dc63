"""A chosen strategy per op -> the Plan, priced once more from the chosen specs themselves."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.plan import Collective, Copy, Fallback, OpPlan, Plan, StagePlan, Window
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Overlap
from autoshard.decide.notes.kinds import kind_of
from autoshard.decide.notes.shown_tensors import layouts
from autoshard.formulate.copies import State
from autoshard.formulate.problem_of import Formulation
from autoshard.lower.seconds import saved_by_buckets
from autoshard.play.footprint import Footprints
from autoshard.play.timeline import Timeline, timeline
from autoshard.program.flow import passed_on
from autoshard.recompute.undecided import decided, first_run
from autoshard.rules import registry
from autoshard.search.problem import Solution
from autoshard.space.cost_table import CostTable, inner_bytes, local_shapes


@dataclass(frozen=True)
class Chosen:
    """What the search decided: strategy per op and the copies that are really read, with their producer's spec."""

    table: CostTable
    strategies: Mapping[str, int]
    copies: tuple[tuple[Ref, Spec, Copy], ...]

    def out_spec(self, ref: Ref) -> Spec:
        return tuple(self.table.strategies[ref.op].outputs[self.strategies[ref.op], ref.index].tolist())

    def in_spec(self, op: str, index: int) -> Spec:
        return tuple(self.table.strategies[op].inputs[self.strategies[op], index].tolist())

    @property
    def on_host(self) -> tuple[Op, ...]:
        """Parameters whose optimizer state lies on the host."""
        sets = self.table.strategies
        return tuple(op for op in self.table.graph.of_kind("param") if not sets[op.name].on_device[self.strategies[op.name]])


def choose(formulation: Formulation, solution: Solution) -> Chosen:
    """Read a solution: the strategy of every op, and for every (value, window, spec) that is read, how that copy is made."""
    return chosen_by(formulation, solution.choice)


def chosen_by(formulation: Formulation, choice: np.ndarray) -> Chosen:
    """`choose` for a bare choice. If recomputation was not decided yet, the result is about the program with the chosen recomputation."""
    table, strategies, states = formulation.table, formulation.strategy_of(choice), formulation.state_of(choice)
    if table.base is not None:
        table, strategies = decided(table, strategies)
    bare = Chosen(table, strategies, ())
    copies: dict[tuple[Ref, Window, Spec], tuple[Ref, Spec, Copy]] = {}
    for op in table.graph.ops:
        for i, ref in enumerate(op.refs):
            source, wanted = bare.out_spec(ref), bare.in_spec(op.name, i)
            key = (ref, op.phase, wanted)
            if source != wanted and key not in copies:
                copies[key] = (ref, source, Copy(str(ref), op.phase, wanted, "kept" if _is_kept(table.graph, states, key, copies) else "made"))
    return Chosen(table, strategies, tuple(copies.values()))


def _is_kept(graph: Graph, states: Mapping[tuple[Ref, Spec], State], key: tuple[Ref, Window, Spec], copies: Mapping) -> bool:
    """A kept copy needs an earlier window that reads it too. Without one, this window makes the copy, at the same price."""
    ref, window, spec = key
    if not copied_before(graph, key, copies):
        return False
    found = states.get((replace(ref, op=first_run(ref.op)), spec))  # a value that is recomputed shares the node of the first one
    return found is not None and not found.times[graph.window_index[window]]


def copied_before(graph: Graph, key: tuple[Ref, Window, Spec], copies: Mapping[tuple[Ref, Window, Spec], Any]) -> bool:
    """Whether a window before that of `key` reads the same copy."""
    ref, window, spec = key
    return any((ref, earlier.name, spec) in copies for earlier in graph.windows[:graph.window_index[window]])


def price(chosen: Chosen, saved: Mapping[Window, float] | None = None) -> dict[str, float]:
    """Predicted seconds of one step by the one objective (see docs/costs.md), from the chosen specs.

    Keys: compute_s, blocking_s, hideable_s, hidden_s, exposed_s, optimizer_s, step_s; host_s, the part of optimizer_s for state
    on the host, where there is some; bucketed_s, with `saved`: the step when hideable communication takes so much less per window."""
    return price_windows(chosen, saved)[0]


def price_windows(chosen: Chosen, saved: Mapping[Window, float] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """`price`, and the seconds of each window: with `optimizer_s` they add up to the step, but for rounding."""
    table, overlap = chosen.table, chosen.table.cluster.overlap
    compute = blocking = update = 0.0
    windows, heavy, hide = (dict.fromkeys(table.graph.window_index, 0.0) for _ in range(3))
    for op in table.graph.ops:
        cost, s = table.ops[op.name], chosen.strategies[op.name]
        compute += float(cost.compute[s])
        blocking += float(cost.inner[s])
        update += float(cost.update[s])
        windows[op.phase] += float(cost.compute[s]) + float(cost.inner[s])
        if registry.is_heavy(op):
            heavy[op.phase] += float(cost.compute[s])
    overlaps = overlap.eta > 0 and table.mesh.size > 1
    for ref, source, copy in chosen.copies:
        seconds = 0.0 if copy.source == "kept" else table.graph.runs_of(copy.window) * table.seconds(ref, source, copy.spec)
        if overlaps and table.hideable(ref):
            hide[copy.window] += seconds
        else:
            blocking += seconds
            windows[copy.window] += seconds
    exposed, paid = _paid(overlap, hide, heavy)
    hideable = sum(hide.values())
    windows = {w: s + _paid(overlap, {w: hide[w]}, heavy)[1] for w, s in windows.items()}
    host = sum(float(table.ops[op.name].update[chosen.strategies[op.name]]) for op in chosen.on_host)
    return {"compute_s": compute, "blocking_s": blocking, "hideable_s": hideable, "hidden_s": hideable - exposed,
            "exposed_s": exposed, "optimizer_s": update, "step_s": compute + blocking + update + paid,
            **({"host_s": host} if host else {}),
            **({} if saved is None else {"bucketed_s": compute + blocking + update + _bucketed(overlap, hide, heavy, saved, overlaps)})}, windows


def _paid(overlap: Overlap, hide: Mapping[Window, float], heavy: Mapping[Window, float]) -> tuple[float, float]:
    """Of communication that can hide behind heavy ops: seconds that do not, and what it adds to a step."""
    exposed = sum(max(0.0, hide[w] - overlap.eta * heavy[w]) for w in hide)
    return exposed, overlap.interference * sum(hide.values()) + (1.0 - overlap.interference) * exposed


def _bucketed(overlap: Overlap, hide: Mapping[Window, float], heavy: Mapping[Window, float], saved: Mapping[Window, float],
              overlaps: bool) -> float:
    """What communication that can hide adds to a step when it takes `saved` less; where nothing overlaps, all of it blocks."""
    if not overlaps:
        return -sum(saved.values())
    return _paid(overlap, {w: seconds - saved.get(w, 0.0) for w, seconds in hide.items()}, heavy)[1]


def collectives(chosen: Chosen) -> tuple[Collective, ...]:
    """Every collective of one step: those of copies at their first reader, then the op's own."""
    table, mesh = chosen.table, chosen.table.mesh
    made = {(ref, c.window, c.spec): source for ref, source, c in chosen.copies if c.source == "made"}
    out: list[Collective] = []
    for op in table.graph.ops:
        for i, ref in enumerate(op.refs):
            wanted = chosen.in_spec(op.name, i)
            source = made.pop((ref, op.phase, wanted), None)
            if source is not None:
                out += _redistribution(chosen, op, ref, source, wanted)
        if op.kind == "call":
            out += _inner(chosen, op, mesh)
    return tuple(out)


def _redistribution(chosen: Chosen, op: Op, ref: Ref, source: Spec, wanted: Spec) -> list[Collective]:
    table, meta = chosen.table, chosen.table.graph.meta(ref)
    shown = _shown(table.graph, op, ref)
    return [Collective(step.kind, table.mesh.label(step.axes), int(step.nbytes), table.step_seconds(ref, step), op.phase, str(ref), op.name,
                       step.reduce_op or "", str(meta.dtype).removeprefix("torch."), table.hideable(ref), False,
                       shown.module, shown.source)
            for step in table.steps(meta, source, wanted) if step.kind != "slice"]


def _shown(graph: Graph, op: Op, ref: Ref) -> Op:
    """Of the op that reads a value, the one that made it, and those whose value it is but for views and casts, the first that the user knows. The
    casts of a precision policy are in no module and at no line."""
    made = [graph.op(value.op) for value in passed_on(graph, ref)]
    return next((each for each in (op, *made) if each.module or each.source), made[0])


def _inner(chosen: Chosen, op: Op, mesh) -> list[Collective]:
    from autoshard.collectives import seconds

    found, s = chosen.table.strategies[op.name], chosen.strategies[op.name]
    if not any(found.rows[r].inner for r in found.picked[s].tolist()):
        return []
    one = found.keep(np.arange(len(found)) == s)
    ins, outs = local_shapes(one, mesh)
    links = chosen.table.cluster.links_for(mesh)
    result = []
    for axis in range(mesh.ndim):
        for inner in found.rows[int(found.picked[s, axis])].inner if mesh.sizes[axis] > 1 else ():
            nbytes = int(inner_bytes(inner, one, ins, outs)[0])
            side = found.input_metas if inner.tensor.startswith("in") else found.output_metas
            dtype = inner.dtype or side[int(inner.tensor.lstrip("inout"))].dtype
            result.append(Collective(inner.kind, mesh.names[axis], nbytes, float(seconds(inner.kind, nbytes, links[axis])),
                                     op.phase, op.name, op.name, inner.reduce_op, str(dtype).removeprefix("torch."),
                                     False, True, op.module, op.source))
    return result


def fallbacks(chosen: Chosen) -> tuple[Fallback, ...]:
    """Ops without a sharding rule, which run replicated, and their price."""
    graph = chosen.table.graph
    return tuple(Fallback(op.name, str(op.target), float(chosen.table.ops[op.name].compute[chosen.strategies[op.name]]),
                          op.module, op.source)
                 for op in graph.of_kind("call") if registry.origin(graph.calls[op.name]) == "replicate")


def make_plan(formulation: Formulation, solution: Solution, *, model: Mapping[str, Any], settings: Mapping[str, Any],
              seeds: Mapping[str, str], notes: tuple[str, ...] = (), timelines: Callable[[np.ndarray], Timeline] | None = None) -> Plan:
    """Assemble the plan of a solution. The objective is the re-priced one; it may only be lower than the
    search's (a state chosen but not needed costs nothing). `timelines` may know its timeline already."""
    chosen = choose(formulation, solution)
    table, graph = chosen.table, chosen.table.graph
    step = (timelines or Timelines(formulation, settings))(solution.choice)
    bare = bare_plan(chosen, settings)
    predicted, windows = price_windows(chosen, saved_by_buckets(step.order, graph, bare, table.cluster))
    objective = predicted["step_s"]
    bound = min(max(0.0, float(solution.bound)), objective)  # no price is below nothing, also where no bound was found yet
    memory = step.summary(formulation.budget)
    stage = StagePlan(submesh=table.mesh.whole, windows=windows, once_s=predicted["optimizer_s"], memory=memory, timeline=step.moments(),
                      largest=step.largest())
    found = replace(
        bare, model=dict(model), layouts=layouts(graph, bare.ops, bare.placements), collectives=collectives(chosen),
        fallbacks=fallbacks(chosen), predicted=predicted, stages=(stage,),
        objective_s=objective, bound_s=bound, gap=max(0.0, objective - bound) / max(objective, 1e-30),
        status=solution.status.value, seeds=dict(seeds), notes=(*notes, *_host_notes(bare, predicted, memory)),
        search=_search_facts(formulation, solution))
    return replace(found, kind=kind_of(found))


def _host_notes(plan: Plan, predicted: Mapping[str, float], memory: Mapping[str, float | None]) -> tuple[str, ...]:
    """A note on the optimizer state on the host: bytes and seconds."""
    if not plan.offload:
        return ()
    n, (unit, size) = len(plan.offload), ("GiB", 2**30) if memory["host"] >= 2**30 else ("MiB", 2**20)
    return (f"optimizer state of {n} parameter{'s' if n > 1 else ''}, {memory['host'] / size:.3g} {unit} a rank, lies on the host: updating from "
            f"there takes {predicted['host_s']:.3g} s a step and needs autoshard.local_update(optimizer)",)


def bare_plan(chosen: Chosen, settings: Mapping[str, Any]) -> Plan:
    """The part of the plan that is executed: no prices, nothing for reports."""
    table, graph = chosen.table, chosen.table.graph
    ops = {op.name: OpPlan(*table.strategies[op.name].strategy(chosen.strategies[op.name])) for op in graph.ops}
    return Plan(
        graph_hash=graph.hash, mesh=table.mesh.whole, finer=table.mesh.finer, cluster=table.cluster.snapshot(), model={}, settings=dict(settings),
        ops=ops,
        placements={op.target: table.mesh.as_whole(chosen.out_spec(Ref(op.name))) for op in graph.of_kind("param", "buffer")},
        copies=tuple(c for _, _, c in chosen.copies), collectives=(), fallbacks=(), predicted={}, stages=(StagePlan(submesh=table.mesh.whole),),
        objective_s=0.0, bound_s=0.0, gap=0.0, status="", offload=tuple(op.target for op in chosen.on_host))


@dataclass(eq=False)
class Timelines:
    """Timelines of choices, each played once. `settings`: the settings of the plan; input placements matter."""

    formulation: Formulation
    settings: Mapping[str, Any]
    _known: dict[bytes, Timeline] = field(default_factory=dict)
    _footprints: Footprints | None = None

    def __call__(self, choice: np.ndarray) -> Timeline:
        key = np.asarray(choice, dtype=np.int64).tobytes()
        if key not in self._known:
            self._footprints = self._footprints or Footprints(self.formulation.table.mesh, self.formulation.table.cluster)
            chosen = chosen_by(self.formulation, np.asarray(choice))
            self._known[key] = memory_of(chosen.table, bare_plan(chosen, self.settings), self._footprints)
        return self._known[key]


def memory_of(table: CostTable, plan: Plan, footprints: Footprints) -> Timeline:
    """The plan's memory over one step of one rank."""
    trained = [op.name for op in table.graph.of_kind("param") if op.name in table.trained]
    return timeline(table.graph, plan, table.redistribution.steps, footprints, table.training.optimizer, trained,
                    table.cluster.device.updates_together, table.training.duty)


def _search_facts(formulation: Formulation, solution: Solution) -> dict[str, Any]:
    problem = formulation.problem
    return {"nodes": problem.n, "edges": len(problem.edges), "choices": int(sum(map(len, problem.node_costs))),
            **{k: v for k, v in solution.stats.items() if isinstance(v, (int, str, bool))}}
