"""Known plans as starting points: a plan that was not proven optimal is never worse than one of these that fits.

Each walks the ops in order and gives every op the strategy that is cheapest where it stands (its own time plus
the redistribution of its inputs), from a classic storage of the parameters: whole (data parallel) or split
over as many mesh axes as they divide by (fully sharded). Nothing moves on the all-Replicate plan."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from autoshard.formulate import CopyNode, Formulation, State
from autoshard.graph import Op, Ref
from autoshard.spec import R, Spec
from autoshard.strategies import SpecIndex


def _data_parallel(spec: Spec) -> int:
    """Rank of a storage spec, lower is preferred: parameters whole everywhere."""
    return sum(p != R for p in spec)


def _fully_sharded(spec: Spec) -> int:
    """Parameters split over as many mesh axes as they divide by."""
    return sum(p == R for p in spec)


KNOWN: dict[str, Callable[[Spec], int]] = {"data parallel": _data_parallel, "fully sharded": _fully_sharded}


def known_plans(formulation: Formulation) -> Iterator[tuple[str, np.ndarray]]:
    """(name, choice) of every known plan, complete with copy states. Whether it fits in memory is the search's to see."""
    yield "replicated", complete(formulation, np.zeros(len(formulation.op_names), dtype=np.int64))
    for name, rank in KNOWN.items():
        yield name, complete(formulation, greedy(formulation, rank))


def greedy(formulation: Formulation, rank: Callable[[Spec], int]) -> np.ndarray:
    """Strategy per op: parameters by least `rank` of their storage spec, every other op the locally cheapest."""
    table = formulation.table
    number = {name: i for i, name in enumerate(formulation.op_names)}
    stored = {f"grad:{op.target}": op.name for op in table.graph.of_kind("param")}
    outputs = {str(op.target): op.name for op in table.graph.of_kind("output")}
    picked = np.zeros(len(number), dtype=np.int64)

    def out_index(ref: Ref) -> int:
        return int(table.strategies[ref.op].output_specs[ref.index].index[picked[number[ref.op]]])

    def choose(op: Op) -> int:
        found = table.strategies[op.name]
        if op.kind == "param":
            specs = found.output_specs[0]
            return int(np.argmin(np.array([rank(s) for s in specs.specs])[specs.index]))
        if str(op.target) in stored and op.kind == "output":
            param = stored[str(op.target)]
            wanted = table.strategies[param].strategy(picked[number[param]])[1][0]
            return int(np.flatnonzero([s == wanted for s in found.input_specs[0].specs])[0])
        if op.kind == "tangent":
            output = outputs[f"user:{op.target}"]
            wanted = table.strategies[output].strategy(picked[number[output]])[0][0]
            return int(np.flatnonzero([s == wanted for s in found.output_specs[0].specs])[0])
        cost = table.ops[op.name].total.copy()
        for i, ref in enumerate(op.refs):
            seconds, _, dst = table.edge(ref, op.name, i)
            cost += seconds[out_index(ref)][dst.index]
        return int(np.argmin(cost))

    for op in _outputs_before_tangents(table.graph.ops):
        picked[number[op.name]] = choose(op)
    return picked


def _outputs_before_tangents(ops: tuple[Op, ...]) -> list[Op]:
    """Forward ops and user outputs first: a tangent's placement is its output's."""
    forward = [op for op in ops if op.kind != "tangent" and op.phase == "forward"]
    return forward + [op for op in ops if op.kind == "tangent"] + [
        op for op in ops if op.kind != "tangent" and op.phase == "backward"]


def complete(formulation: Formulation, picked: np.ndarray) -> np.ndarray:
    """Add the state of every copy node that the chosen strategies ask for: the cheapest that serves its readers."""
    table = formulation.table
    number = {name: i for i, name in enumerate(formulation.op_names)}

    def read(name: str, index: int) -> Spec:
        return tuple(table.strategies[name].inputs[picked[number[name]], index].tolist())

    def state_of(copy: CopyNode) -> int:
        readers = [name for name, i in copy.readers if read(name, i) == copy.spec]
        windows = {table.graph.op(name).phase for name in readers}
        if not readers:
            return 0
        specs = table.strategies[copy.value.op].output_specs[copy.value.index]
        source = int(specs.index[picked[number[copy.value.op]]])
        target = SpecIndex((copy.spec,), np.zeros(1, dtype=np.int64))
        price = float(table.table(copy.value, target)[source, 0]) if specs.specs[source] != copy.spec else None
        fits = [i for i, s in enumerate(copy.states) if _serves(s, windows) and (s.name == "own") == (price is None)
                and (s.price is None or s.price == price)]
        return min(fits, key=lambda i: (sum(copy.states[i].times), copy.states[i].name == "kept"), default=0)

    return np.concatenate([picked, np.array([state_of(c) for c in formulation.copies], dtype=np.int64)])


def _serves(state: State, windows: set[str]) -> bool:
    return all(state.serves[w == "backward"] for w in windows)
