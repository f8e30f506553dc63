"""The user's seeds: sharding specs fixed, fully or in part, before the search.

A key is a glob over names of parameters and buffers, `input:INDEX-or-name`, `output:INDEX`, a glob over module paths (what leaves
the module, and its gradient) or the name of an op (what other ops of its pass read). A value gives per tensor dim an axis name, a
tuple of axes (major first), None or "-" for whole, `...` or "?" for open; a trailing `...` opens all dims that remain. `"tp,-"`
and `"dp*tp,?"` say the same as text. `"S(0),R"` is one placement per mesh axis; `ShardingSpec` and DTensor placements work as well.

The value may also be another key: `{"output:1": "input:2"}` says that the two lie alike, as a state does between two steps.

    {"layers.*.attn.wq.weight": ("tp", None), "input:0": ("dp", ...), "layers.*.mlp": "dp,tp,-"}

Inside a model, `autoshard.annotate(x, "dp,-,tp")` fixes an activation, and its gradient with it.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch

from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, is_inner
from autoshard.errors import SeedError
from autoshard.seeds.grammar import ROLE, Seed, in_parts, seed_text, specs_of
from autoshard.seeds.marks import MARKER, given_group, marks
from autoshard.seeds.names import names, nearest
from autoshard.seeds.user_placements import axes_of, given_specs

log = logging.getLogger("autoshard")


@dataclass(frozen=True)
class Seeds:
    """Allowed specs per op name (of its output), per (op, input index) of readers, how many values each key matched, and
    per entry of `specs` and `reads` the seed that was the first to restrict it, as a user reads it. `ties`: pairs of ops whose
    tensors (of an output op what it reads) lie alike."""

    specs: Mapping[str, frozenset[Spec]] = field(default_factory=dict)
    matches: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[tuple[str, int], frozenset[Spec]] = field(default_factory=dict)
    origins: Mapping[str | tuple[str, int], str] = field(default_factory=dict)
    ties: tuple[tuple[str, str], ...] = ()

    def on(self, mesh: Mesh) -> Seeds:
        """Seeds about the axes of `mesh.whole` as seeds about those of `mesh`: all parts of an axis lie alike."""
        if mesh.whole is mesh:
            return self
        specs, reads = ({key: frozenset(map(mesh.as_parts, allowed)) for key, allowed in table.items()} for table in (self.specs, self.reads))
        return replace(self, specs=specs, reads=reads)

    @property
    def held(self) -> frozenset[str]:
        """Names of the ops that seeds restrict."""
        return frozenset((*self.specs, *(op for op, _ in self.reads)))

    def __bool__(self) -> bool:
        return bool(self.specs or self.reads)


def with_held(model: torch.nn.Module, seeds: Mapping[str, Any] | None) -> dict[str, Any]:
    """The seeds, and parameters that are DTensors already, as seeds before them. Raises SeedError for a seed on one of those
    that is not in the same words."""
    held = {name: Seed(tuple(p.placements), f"parameter {name}, which is a DTensor already")
            for name, p in model.named_parameters() if isinstance(p, torch.distributed.tensor.DTensor)}
    for name in held.keys() & (seeds or {}).keys():
        if seed_text(seeds[name]) != seed_text(held[name]):
            raise SeedError(f"seed {name!r} = {seed_text(seeds[name])!r} is on {held[name].where}, as {seed_text(held[name])!r}; "
                            "leave the seed out, or move the parameter there before")
    return {**held, **(seeds or {})}


def names_in(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of parameters, buffers and modules that a key may be about."""
    return tuple(name for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers(), model.named_modules()))


def present(seeds: Mapping[str, Any], graph: Graph, known: Sequence[str], settled: bool) -> dict[str, Any]:
    """The seeds but those about what this form of the call does without, as evaluation does without an auxiliary head: keys that match
    nothing in `graph`, and either one of the `known` names of the model, or anything once an earlier form `settled` the placements. The log names
    those that are left aside, as a warning where no earlier form obeyed them."""
    def here(key: str, text: str) -> bool:
        return key in graph.by_name or bool(next(iter(matching(graph, key)), None) or _marked_modules(graph, key, text))

    aside = [key for key, value in seeds.items()
             if not here(key, seed_text(value)) and (settled or any(fnmatchcase(name, key) for name in known))]
    if aside:
        log.log(logging.INFO if settled else logging.WARNING, "seeds about what this form of the call lacks are left aside: %s", ", ".join(aside))
    return {key: value for key, value in seeds.items() if key not in aside}


def resolve_seeds(graph: Graph, mesh: Mesh, seeds: Mapping[str, Any] | None, stage: bool = False) -> Seeds:
    """Match every key, and the marks that `annotate` left, and expand every value to the specs it allows. `stage`: the graph is one stage
    of a pipeline, where keys may be about other stages.

    Raises SeedError for a key that matches nothing (with the nearest names), a malformed value, or two
    seeds that disagree about one tensor (naming both)."""
    found = _Found(graph, mesh)
    for key, value in (seeds or {}).items():
        where = value.where if isinstance(value, Seed) else ""
        origin = f"{key!r} = {seed_text(value)!r}" + (f" ({where})" if where else "")
        text = seed_text(value)
        found.matches[key] = found.tie(key, text, origin) if ROLE.fullmatch(text) else found.match(key, text, origin)
        if not found.matches[key] and not stage:
            raise SeedError(f"seed {origin} matches nothing{_nearest(graph, key)}")
    for op in marks(graph):
        found.mark(op)
    found.spread_ties()
    return Seeds(found.specs, found.matches, found.reads, found.origins, tuple(found.ties))


@dataclass(eq=False)
class _Found:
    """What the seeds so far allow, and which seed said so."""

    graph: Graph
    mesh: Mesh
    specs: dict[str, frozenset[Spec]] = field(default_factory=dict)
    reads: dict[tuple[str, int], frozenset[Spec]] = field(default_factory=dict)
    matches: dict[str, int] = field(default_factory=dict)
    origins: dict[Any, str] = field(default_factory=dict)
    ties: dict[tuple[str, str], str] = field(default_factory=dict)

    def tie(self, key: str, role: str, origin: str) -> int:
        """Note that what `key` names lies as what `role` names; how many tensors that are."""
        others = list(matching(self.graph, role))
        if len(others) != 1:
            raise SeedError(f"seed {origin}: {role} names {len(others)} tensors, and one is needed{_nearest(self.graph, role)}")
        mine = [op for op in matching(self.graph, key) if op.name != others[0].name]
        for op in mine:
            one, two = (_held(self.graph, o) for o in (op, others[0]))
            if one.shape != two.shape:
                raise SeedError(f"seed {origin} ties {key} of shape {list(one.shape)} to {role} of shape {list(two.shape)}; tie tensors of one shape")
            if one.logical_shape != two.logical_shape:
                raise SeedError(f"seed {origin} ties {key} to {role}, and their dims consist of different parts ({list(one.logical_shape)} and "
                                f"{list(two.logical_shape)}); give both the same layout instead")
            self.ties[op.name, others[0].name] = origin
        return len(mine)

    def spread_ties(self) -> None:
        """What holds for one of two tensors that lie alike holds for the other; a buffer is written back as it was."""
        written = self.graph.outputs(Role.MUTATION)
        for op in self.graph.of_kind("buffer"):
            if op.name in self.specs and op.target in written:
                self.ties[written[op.target].name, op.name] = self.origins[op.name]
        for _ in self.ties:  # a chain of ties settles in as many rounds
            for pair, origin in self.ties.items():
                for name, other in (pair, pair[::-1]):
                    if other in self.specs:
                        self._narrow(self.specs, name, self.specs[other], str(self.graph.op(name).target), f"{origin} (as {self.origins[other]})")

    def match(self, key: str, text: str, origin: str) -> int:
        """Apply one seed to everything its key names; how many values that are."""
        stored = list(matching(self.graph, key)) or _marked_modules(self.graph, key, text)
        for op in stored:
            self.hold(op.name, op, text, origin)
        if stored or key not in self.graph.by_name or self.graph.op(key).kind != "call":
            return len(stored)
        value = Ref(key)
        allowed = self.allowed(text, self.graph.meta(value), self.graph.op(key).where, origin)
        for reader, index in self.graph.users.get(value, ()):
            if self.graph.op(reader).phase == self.graph.op(key).phase:
                self._narrow(self.reads, (reader, index), allowed, key, origin)
        return 1

    def mark(self, op: Op) -> None:
        """Apply what `annotate`, or a collective of the model, says about a value."""
        spec, group = op.args[1], given_group(op)
        if not group:
            self.hold(op.name, op, spec, f"annotate(..., {spec!r}) at {op.source or op.module or op.name}")
            before = self.graph.op(op.refs[0].op)
            same_place = (before.phase, before.module, before.source) == (op.phase, op.module, op.source)
            if str(before.target) == MARKER and same_place:  # two keys on one module, not a change of layout from line to line
                self._narrow(self.specs, before.name, self.specs[op.name], op.module or op.name, self.origins[op.name])
            return
        origin = f"the model's own collective{f' {op.code!r}' if op.code else ''} at {op.source or op.module or op.name}"
        allowed = given_specs(spec, axes_of(group, self.mesh, origin), op.outputs[0], self.mesh, origin)
        self._narrow(self.specs, op.name, allowed, op.name, origin)
        maker = self.graph.op(op.refs[0].op)
        if maker.kind == "param":  # a weight that the model gathers is stored as it is gathered
            self._narrow(self.specs, maker.name, allowed, str(maker.target), origin)

    def hold(self, name: str, op: Op, text: str, origin: str) -> None:
        """Restrict the output of `op` (the input of an output op)."""
        meta = _held(self.graph, op)
        self._narrow(self.specs, name, self.allowed(text, meta, str(op.target), origin, op.kind == "param"), str(op.target), origin)

    def _narrow(self, table: dict, key: Any, allowed: frozenset[Spec], name: str, origin: str) -> None:
        both = table.get(key, allowed) & allowed
        if not both:
            raise SeedError(f"seeds {self.origins[key]} and {origin} both match {name} and disagree; keep one of them")
        table[key] = both
        self.origins.setdefault(key, origin)

    def allowed(self, text: str, meta: TensorMeta, name: str, origin: str, is_param: bool = False) -> frozenset[Spec]:
        if not (allowed := specs_of(text, meta, self.mesh, origin)):
            raise SeedError(f"seed {origin} splits {name} of shape {meta.true_shape} unevenly on mesh {self.mesh}; "
                            f"shard a dim that the axis size divides{in_parts(meta)}")
        if not is_param and any(map(is_inner, chain.from_iterable(allowed))):
            raise SeedError(f"seed {origin} nests axes out of the order of the mesh ({self.mesh}), and {name} is no parameter; write them "
                            "in that order")
        return allowed


def matching(graph: Graph, key: str) -> Iterable[Op]:
    """Inputs, outputs, parameters and buffers that a key names."""
    kind, _, name = key.partition(":")
    if kind == "input" and name:
        inputs = graph.of_kind("input")
        yield from (op for i, op in enumerate(inputs) if fnmatchcase(str(i), name) or fnmatchcase(str(op.target), name))
    elif kind == "output" and name:
        yield from (op for i, op in graph.outputs(Role.USER).items() if fnmatchcase(str(i), name))
    else:
        tied = dict(graph.tied)
        kept = {tied[a] for a in tied if fnmatchcase(a, key)}
        yield from (op for op in graph.of_kind("param", "buffer") if fnmatchcase(op.target, key) or op.target in kept)


def _held(graph: Graph, op: Op) -> TensorMeta:
    """The tensor of a placeholder, or the one that an output op reads."""
    return op.outputs[0] if op.outputs else graph.meta(op.refs[0])


def named_by(graph: Graph, key: str) -> dict[str, Op]:
    """What `key` names, each under a key of its own."""
    inputs = [op.name for op in graph.of_kind("input")]
    own = {"input": lambda op: f"input:{inputs.index(op.name)}", "output": lambda op: op.target.shown}
    return {own.get(op.kind, lambda op: str(op.target))(op): op for op in matching(graph, key)}


def _marked_modules(graph: Graph, key: str, text: str) -> list[Op]:
    """The marks that `trace` left on what leaves the modules of a key."""
    return [op for op in marks(graph) if op.phase == "forward" and op.args[1] == text and not given_group(op)
            and fnmatchcase(op.module, key) and op.module.count(".") == key.count(".")]


def _nearest(graph: Graph, key: str) -> str:
    inputs = (f"input:{i}" for i in range(len(graph.of_kind("input"))))
    params = (str(op.target) for op in graph.of_kind("param")[:5])
    return nearest(key.replace("*", "0"), [*names(graph), *inputs]) or f"; the parameters are {', '.join(params)} ..."


