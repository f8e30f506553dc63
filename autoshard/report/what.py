"""What a report shows, as rows computed from a `Plan` alone; `text.py` draws them."""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autoshard.base import quantities
from autoshard.base.plan import GRADIENTS_IN_FLIGHT, Collective, PlacedTensor, Plan, in_flight
from autoshard.base.roles import Output
from autoshard.base.spec import R, ShardingSpec, Spec
from autoshard.base.windows import ONCE
from autoshard.base.worth import GIB, SAME, Neighbour
from autoshard.collectives.phases import phases
from autoshard.cost.cluster import Cluster
from autoshard.report.collapse import Folded, collapse
from autoshard.simulation.traffic import LinkUse, link_use

MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved activations",
    "buffers": "buffers",
    "inputs": "inputs",
    "outputs": "outputs",
    "temporaries": "temporaries",
    "slack": "allocator slack",
}


@dataclass(frozen=True)
class Amount:
    """One line of a sum: `value` in seconds or bytes; `counts` is False for lines outside the sum, of which those
    with `beside` run beside what is in it."""

    label: str
    value: float
    counts: bool = True
    beside: bool = False


@dataclass(frozen=True)
class TensorRow:
    """A weight, input or activation; `copies` of them are alike. `placement` is `spec` in words."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    placement: str
    copies: int


@dataclass(frozen=True)
class LayerGroup:
    """Tensors of one repeated layer (`name` is `layers.*`), or those outside of any (`name` is "")."""

    name: str
    rows: tuple[TensorRow, ...]


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind at the same place of repeated layers. Bytes and seconds are per rank.

    `calls`: their indices in `Plan.collectives`; `source`: the user's line, where rows are kept apart by it."""

    kind: str
    axis: str
    phase: str
    where: str
    count: int
    nbytes: int
    total_bytes: int
    seconds: float
    hideable: bool
    calls: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class FallbackRow:
    """Ops of one kind without a sharding rule, run whole on every rank."""

    target: str
    where: str
    source: str
    count: int
    seconds: float


def step_time(plan: Plan) -> tuple[Amount, ...]:
    """Parts of the predicted step; those with `counts` add up to `step_s`.

    Hidden communication is not added, but what it takes from the compute it runs beside is (the cluster's
    `interference`): the rest of the step after all other parts. The step as it runs, with small gradients reduced
    together, is not a part either. Of a pipeline: the parts of its busiest rank, with what it waits for other ranks."""
    p = plan.predicted
    parts = [
        Amount("compute", p.get("compute_s", 0.0)),
        Amount("blocking communication", p.get("blocking_s", 0.0)),
        Amount("exposed communication", p.get("exposed_s", 0.0)),
        Amount("optimizer update", p.get("optimizer_s", 0.0)),
        *([Amount("exchange of tied gradients", p["exchange_s"])] if "exchange_s" in p else []),
        *([Amount("waiting in the pipeline", p["idle_s"])] if "idle_s" in p else []),
    ]
    slowdown = p.get("step_s", plan.objective_s) - sum(part.value for part in parts)
    if slowdown > 1e-9 * plan.objective_s:
        parts.insert(3, Amount("slowdown by hidden", slowdown))
    bucketed = p.get("bucketed_s", plan.objective_s)
    differs = quantities.seconds(bucketed) != quantities.seconds(plan.objective_s)
    as_run = (Amount("step with gradients in buckets", bucketed, counts=False),) if differs else ()
    return (*parts, Amount("hidden communication", p.get("hidden_s", 0.0), counts=False, beside=True), *as_run)


def synchronisation(plan: Plan) -> tuple[float, float]:
    """Parts of a step that are communication between ranks: what the step waits for, and what that would be if nothing were hidden
    behind compute (hidden seconds added to both). In a pipeline waiting for another stage is a part of it."""
    p = plan.predicted
    step, hidden = p.get("step_s", plan.objective_s), p.get("hidden_s", 0.0)
    waited = p.get("blocking_s", 0.0) + p.get("exposed_s", 0.0) + p.get("exchange_s", 0.0) + p.get("idle_s", 0.0)
    return (waited / step, (waited + hidden) / (step + hidden)) if step > 0 else (0.0, 0.0)


def memory(plan: Plan) -> tuple[Amount, ...]:
    """Bytes per category and rank of the device; categories this report has no words for keep the plan's name."""
    known = [Amount(label, plan.memory[key] or 0.0) for key, label in MEMORY_LABELS.items() if key in plan.memory]
    other = [Amount(key, value or 0.0) for key, value in plan.memory.items()
             if key not in MEMORY_LABELS and key not in ("total", "limit", "host")]
    return tuple(known + other)


def memory_worth(plan: Plan) -> tuple[str, ...]:
    """What more or less memory would change, in sentences; nothing where it is not known."""
    worth, step = plan.worth, plan.objective_s
    if worth is None or step <= 0 or not (worth.ample_s or worth.less or worth.more):
        return ()
    out = []
    if worth.ample_s and not worth.binds(step):
        out.append("more memory changes nothing: no plan is faster, whatever the memory (proven)")
    elif worth.ample_s:
        most = step - worth.ample_s
        out.append(f"all the memory there could be saves at most {quantities.seconds(most)} ({quantities.share(most, step)}) of a step")
    limit = plan.memory.get("limit")
    for word, there in (("more", worth.more), ("less", worth.less)):
        if there is not None and limit:
            out.append(_neighbour(word, there, abs(there.budget - limit), step))
    if worth.gib_s is not None:
        unit, part = ("GiB", 1.0) if limit and limit >= GIB else ("MiB", 1024.0)
        out.append(f"around this budget a {unit} per rank is worth {quantities.seconds(worth.gib_s / part)} of a step")
    return tuple(out)


def _neighbour(word: str, there: Neighbour, amount: float, step: float) -> str:
    """What a step of budget changes: by the plan found, and by what is proven."""
    start = f"{quantities.size(amount)} {word} ({quantities.size(there.budget)})"
    if there.step_s is None:
        return f"{start}: no plan fits, or none was found"
    change = there.step_s - step
    if abs(change) <= SAME * step:
        return f"{start}: the same step"
    proven = there.bound_s - step if word == "less" else step - there.bound_s
    beyond = f", and {'at least' if word == 'less' else 'at most'} {quantities.seconds(proven)} (proven)" if proven > SAME * step else ""
    saves = "costs" if change > 0 else "saves"
    return f"{start}: {saves} {quantities.seconds(abs(change))} ({quantities.share(abs(change), step)}) of a step{beyond}"


def peak(plan: Plan) -> tuple[str, ...]:
    """When memory is fullest, and the largest tensors then: equal ones of repeated layers added up."""
    moment = plan.fullest.peak
    if moment is None:
        return ()
    place = ", ".join(x for x in (moment.module, moment.source) if x)
    lines = [f"in {moment.window}, at {moment.op}" + (f" ({place})" if place else ""), f"of the {len(plan.fullest.largest)} largest tensors then:"]
    groups: dict[tuple[str, str], list[int]] = {}
    for tensor in plan.fullest.largest:
        groups.setdefault((tensor.module.rpartition(".")[2] or tensor.name, tensor.category), []).append(tensor.nbytes)
    for (name, category), sizes in sorted(groups.items(), key=lambda g: -sum(g[1]))[:4]:
        times = f"{len(sizes)} x " if len(sizes) > 1 else ""
        lines.append(f"{name}, {category}: {times}{quantities.size(max(sizes))}")
    return tuple(lines)


def reading(plan: Plan) -> str:
    """How placements are read, by the axes of this plan."""
    names = plan.spec_mesh.names
    one = f"[{names[-1]}, -] reads: dim 0 is split over mesh axis {names[-1]}, dim 1 is whole."
    return one if len(names) == 1 else f"{one} [({names[-2]}*{names[-1]}), -]: dim 0 is split over both, {names[-2]} major."


def layer_groups(plan: Plan) -> tuple[LayerGroup, ...]:
    """Weights, then activations, with equal repeated layers folded. Whole buffers are left out."""
    groups: dict[str, list[Folded]] = {}
    for row in tensors(plan):
        groups.setdefault(row.section, []).append(row)
    return tuple(LayerGroup(name, tuple(tensor_row(plan, row, row.name.removeprefix(name).lstrip(".")) for row in rows))
                 for name, rows in groups.items())


def tensors(plan: Plan) -> tuple[Folded, ...]:
    """What `tensor_row` reads: named tensors, equal ones of repeated layers folded. An activation is `MODULE.(layer)`."""
    shown = [x for x in plan.layouts if x.kind != "buffer" or any(p != R for p in x.spec)]
    return collapse((_row_name(x), (x.kind, x.shape, x.dtype, x.spec)) for x in shown)


def tensor_row(plan: Plan, row: Folded, name: str) -> TensorRow:
    """A row of `tensors` under `name`."""
    kind, shape, dtype, spec = row.payload
    placement = str(ShardingSpec.from_spec(spec, len(shape), plan.spec_mesh))
    return TensorRow(kind, name.removesuffix(".(layer)"), shape, dtype, spec, placement, row.copies)


def whole_buffers(plan: Plan) -> int:
    """How many buffers every rank holds whole."""
    return sum(x.kind == "buffer" and all(p == R for p in x.spec) for x in plan.layouts)


def _row_name(layout: PlacedTensor) -> str:
    """A part more for activations, so that the output of a layer itself stays within its group."""
    if layout.kind == "output":
        return Output.parse(layout.name).shown
    return f"{layout.name}.(layer)" if layout.kind == "activation" else layout.name


def collectives(plan: Plan, by_source: bool = False) -> tuple[CollectiveRow, ...]:
    """Equal calls of repeated layers added up, the costliest first. `by_source` keeps apart what differs in source line."""
    folded = collapse((_place(c), (*_call_key(c), c.source if by_source else "")) for c in plan.collectives)
    rows = (_collective_row(row, runs_of(plan, row.payload[2])) for row in folded)
    return tuple(sorted(rows, key=lambda r: (-r.seconds, r.kind, r.where, r.phase)))


def links(plan: Plan) -> tuple[LinkUse, ...]:
    """What a rank sends over each level of links in a step, by the algorithms that are priced. Of pipelines, whose stages differ, and of plans
    without a whole cluster: nothing."""
    if len(plan.stages) > 1 or not plan.cluster.get("links"):
        return ()
    cluster, mesh = Cluster.from_snapshot(plan.cluster), plan.spec_mesh
    calls = ((c, cluster.link_of(mesh, mesh.axes(c.axis))) for c in plan.collectives)
    return link_use((p for c, link in calls for p in [phases(c.kind, c.nbytes, link)] * runs_of(plan, c.phase)), plan.objective_s)


def _call_key(c: Collective) -> tuple:
    label = f"{c.kind} {c.reduce_op}" if c.reduce_op not in ("", "sum") else c.kind
    return label, c.axis, c.phase, c.nbytes, c.hideable, c.seconds


def _place(c: Collective) -> str:
    return c.module or c.value or c.op


def _collective_row(row: Folded, runs: int) -> CollectiveRow:
    kind, axis, phase, nbytes, hideable, seconds, source = row.payload
    count = runs * row.copies
    return CollectiveRow(kind, axis, phase, row.name, count, nbytes, nbytes * count, seconds * count, hideable, row.rows, source)


def runs_of(plan: Plan, phase: str) -> int:
    """How often a step runs a window: once, or for every micro-batch."""
    given = plan.settings.get("pipeline", {})
    count = given.get("microbatches", 1) if isinstance(given, Mapping) and plan.settings.get("training") else 1
    return count if isinstance(count, int) and phase not in ONCE else 1


def communication_totals(rows: Iterable[CollectiveRow]) -> tuple[int, int, float]:
    """(calls, bytes, seconds) over all rows."""
    rows = tuple(rows)
    return sum(r.count for r in rows), sum(r.total_bytes for r in rows), sum(r.seconds for r in rows)


def fallbacks(plan: Plan) -> tuple[FallbackRow, ...]:
    """Ops without a rule, equal ones of repeated layers added up, the costliest first."""
    folded = collapse((f.module or f.op, (f.target, f.source, f.seconds)) for f in plan.fallbacks)
    rows = [FallbackRow(r.payload[0], r.name, r.payload[1], r.copies, r.payload[2] * r.copies) for r in folded]
    return tuple(sorted(rows, key=lambda r: (-r.seconds, r.target)))


def header(plan: Plan) -> Iterator[tuple[str, str]]:
    """(label, text) of what was planned."""
    model = dict(plan.model)
    reference = str(model.pop("reference", "") or "model")
    yield "model", ", ".join([reference, *_facts(model)])
    settings = {k: v for k, v in sorted(plan.settings.items()) if k != "training"}  # as a plan that was saved has them
    if GRADIENTS_IN_FLIGHT in settings:
        settings[GRADIENTS_IN_FLIGHT] = quantities.size(in_flight(plan.settings))
    yield "mode", ", ".join(["training" if plan.settings.get("training") else "inference", *_facts(settings)])
    if plan.kind:
        yield "kind", plan.kind
    yield "mesh", f"{plan.mesh} ({plan.mesh.size} rank{'s' if plan.mesh.size > 1 else ''})"
    if plan.finer:
        yield "finer axes", "; ".join(finer_axes(plan))
    device = plan.cluster.get("device", {}).get("name", "")
    yield "cluster", ", ".join(x for x in (str(plan.cluster.get("name", "unnamed")), device) if x)
    if plan.seeds:
        yield "seeds", ", ".join(f"{k}={v}" for k, v in sorted(plan.seeds.items()))


def finer_axes(plan: Plan) -> Iterator[str]:
    """A phrase per axis in parts: `"tp=8 as tp//2 (4) and tp%2 (2)"`."""
    mesh = plan.spec_mesh
    for axis in plan.finer:
        parts = (f"{mesh.names[i]} ({mesh.sizes[i]})" for i in mesh.named(axis))
        yield f"{axis}={plan.mesh.sizes[plan.mesh.index(axis)]} as {' and '.join(parts)}"


def _facts(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        words = key.replace("_", " ")
        if value is True:
            yield words
        elif isinstance(value, Mapping):
            yield f"{words} ({', '.join(_facts(value))})"
        elif value not in (None, "", False, (), []):
            yield f"{words} {value}"


def search_facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Numbers the search left about itself, as (label, text)."""
    return tuple((key.replace("_", " "), _brief(value)) for key, value in sorted(plan.search.items()))


def _brief(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, default=str) if isinstance(value, (dict, list, tuple)) else str(value)


def to_json(plan: Plan) -> str:
    """The plan file's JSON text and, beyond it, `timings` (seconds per phase of this run)."""
    data = json.loads(plan.to_json())
    data["timings"] = dict(plan.timings)
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
