"""Every way to run every op on the mesh: the product of its rule's one-axis rows over the mesh axes.

Equal calls share one `StrategySet` object, so all later work (costs, tables) is done once per distinct op.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from autoshard.base.graph import Call, Graph, Op, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.roles import Role
from autoshard.base.spec import INNER, PSUM, R, Spec, format_spec, is_inner, may_be_stored, nestings, stores
from autoshard.errors import SeedError
from autoshard.program.flow import casts_of_parts, laid_as_stored, rows_of
from autoshard.program.output_modes import REPLICATE, modes_of
from autoshard.rules import registry
from autoshard.rules.states import free
from autoshard.rules.types import Row
from autoshard.seeds.marks import calls_collectives
from autoshard.seeds.seeds import Seeds


@dataclass(frozen=True, eq=False)
class SpecIndex:
    """The distinct specs one tensor takes over an op's strategies: strategy s uses `specs[index[s]]`."""

    specs: tuple[Spec, ...]
    index: np.ndarray

    @staticmethod
    def of(placements: np.ndarray) -> "SpecIndex":
        """From an int array [strategies, axes]."""
        seen: dict[Spec, int] = {}
        index = np.array([seen.setdefault(tuple(row), len(seen)) for row in placements.tolist()], dtype=np.int64)
        return SpecIndex(tuple(seen), index)


@dataclass(frozen=True, eq=False)
class StrategySet:
    """Strategies of one op as arrays [strategies, tensors, axes] of placements.

    `rows[a]`: the one-axis rows of mesh axis a and `picked[s, a]` which of them strategy s uses (calls only). `on_host`: of a
    parameter whose optimizer state may lie in the host's memory, where each strategy has it; None: on the device."""

    inputs: np.ndarray
    outputs: np.ndarray
    input_metas: tuple[TensorMeta, ...]
    output_metas: tuple[TensorMeta | None, ...]
    call: Call | None = None
    rows: tuple[Row, ...] = ()
    picked: np.ndarray | None = None
    on_host: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.outputs)

    @cached_property
    def input_specs(self) -> tuple[SpecIndex, ...]:
        return tuple(SpecIndex.of(self.inputs[:, i]) for i in range(self.inputs.shape[1]))

    @cached_property
    def output_specs(self) -> tuple[SpecIndex, ...]:
        return tuple(SpecIndex.of(self.outputs[:, i]) for i in range(self.outputs.shape[1]))

    def strategy(self, s: int) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        """Specs of the inputs and outputs of strategy `s`."""
        return (tuple(tuple(r) for r in self.inputs[s].tolist()), tuple(tuple(r) for r in self.outputs[s].tolist()))

    @cached_property
    def on_device(self) -> np.ndarray:
        """Per strategy, whether optimizer state lies on the device: a factor for its bytes there."""
        return np.ones(len(self), bool) if self.on_host is None else ~self.on_host

    def keep(self, mask: np.ndarray) -> "StrategySet":
        picked, on_host = (None if of is None else of[mask] for of in (self.picked, self.on_host))
        return StrategySet(self.inputs[mask], self.outputs[mask], self.input_metas, self.output_metas,
                           self.call, self.rows, picked, on_host)


Strategies = Mapping[str, StrategySet]


def enumerate_strategies(graph: Graph, mesh: Mesh, seeds: Seeds, *, outputs: str = "replicate") -> dict[str, StrategySet]:
    """A StrategySet per op name. `outputs` is compile's mode, or modes: "replicate" fixes a user output to Replicate.

    Raises SeedError when a seed leaves an op without a strategy, UsageError for another number of modes than of outputs."""
    cache: dict[object, StrategySet] = {}
    result: dict[str, StrategySet] = {}
    of_parts, chosen, modes, idle = casts_of_parts(graph), free(graph), modes_of(graph, outputs), _idle_axes(graph, mesh, seeds)
    stored = laid_as_stored(graph) if graph.training or _are_nested(graph, seeds) else frozenset()
    for op in graph.ops:
        seed = seeds.specs.get(op.name)
        reads = tuple((i, seeds.reads[op.name, i]) for i in range(len(op.refs)) if (op.name, i) in seeds.reads) if seeds.reads else ()
        fixed = op.name not in chosen and _is_fixed(op, modes)
        key = (graph.calls[op.name] if op.kind == "call" else (op.kind, _is_result(op), fixed, _placed(op, graph)), seed, reads, op.name in of_parts,
               op.name in stored)
        if key not in cache:
            cache[key] = _reading(op, _strategies_of(op, graph, mesh, seeds, fixed, of_parts, stored, idle), reads, seeds)
        result[op.name] = cache[key]
    return result


def _idle_axes(graph: Graph, mesh: Mesh, seeds: Seeds) -> frozenset[int]:
    """Axes of one rank on which everything may be Replicate: any other placement there is the same layout, and would only multiply strategies. Not
    where something is held as Shard, as a DTensor may be, and not where the model calls collectives itself."""
    idle: set[int] = set()
    if calls_collectives(graph):
        return frozenset()
    for axis in (a for a, size in enumerate(mesh.sizes) if size == 1):
        also = idle | {axis}
        if all(any(all(spec[a] == R for a in also) for spec in allowed) for allowed in (*seeds.specs.values(), *seeds.reads.values())):
            idle = also
    return frozenset(idle)


def _are_nested(graph: Graph, seeds: Seeds) -> bool:
    """Whether a parameter has to lie in another nesting than that of the mesh: a program for evaluation reads what training stored so."""
    return any(map(is_inner, (p for op in graph.of_kind("param") for spec in seeds.specs.get(op.name, ()) for p in spec)))


def _reading(op: Op, found: StrategySet, reads: Sequence[tuple[int, frozenset[Spec]]], seeds: Seeds) -> StrategySet:
    """The strategies that read their inputs as seeds on activations say."""
    for index, allowed in reads:
        found = found.keep(np.array([tuple(row) in allowed for row in found.inputs[:, index].tolist()], dtype=bool))
    if not len(found):
        said = list(dict.fromkeys(seeds.origins[k] for k in (op.name, *((op.name, i) for i, _ in reads)) if k in seeds.origins))
        raise SeedError(f"seed{'s' * (len(said) > 1)} {' and '.join(said)}: together with its rule this leaves {op.where} without a "
                        "strategy; take one away, or leave a dim open with ?")
    return found


def _placed(op: Op, graph: Graph) -> TensorMeta:
    """The tensor of an op that is no call."""
    return op.outputs[0] if op.kind != "output" else graph.meta(op.refs[0])


def _is_result(op: Op) -> bool:
    """Whether it is an output that the user gets."""
    return op.kind == "output" and op.target.role is Role.USER


def _is_fixed(op: Op, modes: Mapping[int, str]) -> bool:
    """Whether the op's only placement is Replicate: inputs, buffers that are no state and what is written back to them. Where a stage of a
    pipeline receives or sends a value, its placement is free."""
    if op.is_port:
        return False
    if op.kind in ("buffer", "input"):
        return True
    if op.kind == "tangent" or _is_result(op):
        return modes.get(op.target if op.kind == "tangent" else op.target.name, REPLICATE) == REPLICATE
    return op.kind == "output" and op.target.role is Role.MUTATION


def _strategies_of(op: Op, graph: Graph, mesh: Mesh, seeds: Seeds, fixed: bool, of_parts: frozenset[str],
                   stored: frozenset[str], idle: frozenset[int]) -> StrategySet:
    seed = seeds.specs.get(op.name)
    if op.kind == "call":
        found = call_strategies(graph.calls[op.name], mesh, rows_of(graph, op, of_parts), idle)
        found = with_nestings(found, mesh) if op.name in stored else found
        if seed is not None:
            found = found.keep(np.array([tuple(row) in seed for row in found.outputs[:, 0].tolist()], dtype=bool))
    else:
        meta = _placed(op, graph)
        if seed is not None:
            specs: Sequence[Spec] = sorted(s for s in seed if may_be_stored(meta, s, mesh))
        else:
            specs = [(R,) * mesh.ndim] if fixed else storage_specs(meta, mesh, idle)
            specs += [mesh.as_parts(n) for s in specs for n in nestings(mesh.as_whole(s), mesh.whole.sizes)] if op.name in stored else []
        if _is_result(op) and not op.is_port:  # the user counts dims of the tensor
            specs = [s for s in specs if meta.on_tensor_dims(s) is not None]
        found = _placeholder_set(op, meta, specs, mesh)
    if not len(found):
        wanted = " or ".join(format_spec(s) for s in sorted(seed or ()))
        raise SeedError(f"seed {seeds.origins.get(op.name, '')} on {op.where} asks for {wanted}, which none of its strategies allows "
                        f"(shape {op.outputs[0].true_shape if op.outputs else '?'} on mesh {mesh}); shard a dim that divides evenly")
    return found


def storage_specs(meta: TensorMeta, mesh: Mesh, idle: frozenset[int] = frozenset()) -> list[Spec]:
    """Every way to store a tensor without Partial, evenly divided, as DTensor would lay it on the user's mesh; Replicate on `idle` axes.
    All-Replicate first."""
    choices, whole = (R, *(d for d in range(meta.ndim) if d not in meta.part_dims)), mesh.whole
    alone = {mesh.owners[a] for a in idle}
    ways = product(*((R,) if a in alone else choices for a in range(whole.ndim)))
    return [mesh.as_parts(s) for s in ways if stores(meta, s, whole.sizes)]


def _placeholder_set(op: Op, meta: TensorMeta, specs: Sequence[Spec], mesh: Mesh) -> StrategySet:
    array = np.array(specs, dtype=np.int8).reshape(len(specs), 1, mesh.ndim)
    if op.kind == "output":
        return StrategySet(array, np.zeros((len(specs), 0, mesh.ndim), np.int8), (meta,), ())
    return StrategySet(np.zeros((len(specs), 0, mesh.ndim), np.int8), array, (), (meta,))


def with_host(strategies: Strategies, names: Iterable[str]) -> Strategies:
    """Strategies in which the parameters `names` may keep their optimizer state on the host too: those there are, which keep it on
    the device, then the same again with it on the host. Equal sets stay one object; nothing to do for a set that has both."""
    out, made = dict(strategies), {}
    for name in names:
        found = strategies[name]
        if found.on_host is None:
            if id(found) not in made:
                made[id(found)] = replace(found, inputs=np.concatenate([found.inputs] * 2), outputs=np.concatenate([found.outputs] * 2),
                                          on_host=np.repeat([False, True], len(found)))
            out[name] = made[id(found)]
    return out


def call_strategies(call: Call, mesh: Mesh, rows: tuple[Row, ...] | None = None, idle: frozenset[int] = frozenset()) -> StrategySet:
    """Product of the call's rows (by default its rule's) over the mesh axes, without those that do not divide evenly. On `idle` axes only the row
    that is all Replicate, where there is one."""
    rows = registry.rows(call) if rows is None else rows
    n_in, n_out = len(call.inputs), len(call.outputs)
    one = np.array([[*r.inputs, *r.outputs] for r in rows], dtype=np.int8).reshape(len(rows), n_in + n_out)
    whole = np.flatnonzero((one == R).all(axis=1)).tolist()[:1]
    usable = [whole if whole and a in idle else [i for i, row in enumerate(rows) if _row_divides(row, call, n)] for a, n in enumerate(mesh.sizes)]
    picked = np.array(list(product(*usable)), dtype=np.int64).reshape(-1, mesh.ndim)
    placements = np.stack([one[picked[:, a]] for a in range(mesh.ndim)], axis=2)
    ok = np.ones(len(picked), dtype=bool)
    for t, meta in enumerate((*call.inputs, *call.outputs)):
        if meta is not None and mesh.ndim > 1:
            ok &= _divisible(meta.logical_shape, placements[:, t], mesh.sizes)
    ok &= ~_mixed_partial(placements)
    if registry.is_choosy(call):
        ok &= [bool(found) and registry.takes_pieces(call, [tuple(p) for p in inputs], mesh.sizes)
               for found, inputs in zip(ok, placements[:, :n_in].tolist(), strict=True)]
    placements, picked = placements[ok], picked[ok]
    return StrategySet(placements[:, :n_in], placements[:, n_in:], call.inputs, call.outputs, call, rows, picked)


def with_nestings(found: StrategySet, mesh: Mesh) -> StrategySet:
    """A set that has, of every strategy in which input and output lie alike, also those in which their axes nest otherwise."""
    alike = np.all(found.inputs == found.outputs, axis=(1, 2)) if found.inputs.shape == found.outputs.shape else np.zeros(len(found), bool)
    more = [(s, n) for s in np.flatnonzero(alike) for n in nestings(tuple(found.inputs[s, 0].tolist()), mesh.sizes)]
    if not more:
        return found
    rows, specs = np.array([s for s, _ in more]), np.array([n for _, n in more], np.int8)[:, None, :]
    picked = None if found.picked is None else np.concatenate([found.picked, found.picked[rows]])
    return replace(found, inputs=np.concatenate([found.inputs, specs]), outputs=np.concatenate([found.outputs, specs]), picked=picked)


def _row_divides(row: Row, call: Call, size: int) -> bool:
    metas = (*call.inputs, *call.outputs)
    return all(p < 0 or (m is not None and m.logical_shape[p] % size == 0 and m.logical_shape[p] >= size)
               for p, m in zip((*row.inputs, *row.outputs), metas, strict=True))


def _divisible(shape: tuple[int, ...], placements: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Per strategy, whether every dim splits evenly; placements [strategies, axes]."""
    counts = shard_count_array(len(shape), placements, sizes)
    return np.all(np.array(shape, dtype=np.int64) % counts == 0, axis=1) if shape else np.ones(len(placements), bool)


def _mixed_partial(placements: np.ndarray) -> np.ndarray:
    """Strategies in which one tensor is Partial with two different reductions: no redistribution exists."""
    partial = placements <= PSUM
    low = np.where(partial, placements, 0).min(axis=2)
    high = np.where(partial, placements, -128).max(axis=2)
    return np.any((low < 0) & (high != low), axis=1)


def shard_count_array(ndim: int, placements: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Pieces per logical dim: [strategies, ndim] for placements [strategies, axes]."""
    counts = np.ones((len(placements), ndim), dtype=np.int64)
    for a, size in enumerate(sizes):
        hit = (placements[:, a, None] == np.arange(ndim)) | (placements[:, a, None] == np.arange(INNER, INNER + ndim))
        counts = np.where(hit, counts * size, counts)
    return counts


def local_shape_array(meta: TensorMeta, placements: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Local logical shape, one array [strategies] per dim."""
    shape = np.array(meta.logical_shape, dtype=np.int64)
    counts = shard_count_array(len(shape), placements, sizes)
    return tuple((shape // counts).T) if len(shape) else ()
