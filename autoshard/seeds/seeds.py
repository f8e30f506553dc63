"""The user's seeds: sharding specs fixed, fully or in part, before the search.

A key is a glob over parameter names, `input:INDEX-or-name`, `output:INDEX`, a glob over module paths (what leaves the module, and
its gradient) or the name of an op (what other ops of its pass read). A value gives per tensor dim an axis name, a tuple of axes
(major first), None or "-" for whole, `...` or "?" for open; a trailing `...` opens all dims that remain. `"tp,-"` and `"dp*tp,?"`
say the same as text. `"S(0),R"` is one placement per mesh axis; `ShardingSpec` and DTensor placements work as well.

    {"layers.*.attn.wq.weight": ("tp", None), "input:0": ("dp", ...), "layers.*.mlp": "dp,tp,-"}

Inside a model, `autoshard.annotate(x, "dp,-,tp")` fixes an activation, and its gradient with it.
"""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard import _torch
from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, ShardingSpec, Spec, divides, format_spec, parse_spec
from autoshard.errors import MeshError, SeedError, UsageError
from autoshard.seeds.names import names, nearest
from autoshard.seeds.user_placements import FREE, axes_of, given_specs, gradient_of

OPEN = (..., "?", "...")
WHOLE = (None, "-", "")
PER_AXIS = re.compile(r"(S\(?\d+\)?|R)(,(S\(?\d+\)?|R))*")
MARKER = "autoshard.annotate.default"


@dataclass(frozen=True)
class Seed:
    """A seed's value with the place it was written at, for messages."""

    value: Any
    where: str = ""

    def __str__(self) -> str:
        return seed_text(self.value)


@dataclass(frozen=True)
class Seeds:
    """Allowed specs per op name (of its output), per (op, input index) of readers, how many values each key matched, and
    per entry of `specs` and `reads` the seed that was the first to restrict it, as a user reads it."""

    specs: Mapping[str, frozenset[Spec]] = field(default_factory=dict)
    matches: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[tuple[str, int], frozenset[Spec]] = field(default_factory=dict)
    origins: Mapping[str | tuple[str, int], str] = field(default_factory=dict)

    @property
    def held(self) -> frozenset[str]:
        """Names of the ops that seeds restrict."""
        return frozenset((*self.specs, *(op for op, _ in self.reads)))

    def __bool__(self) -> bool:
        return bool(self.specs or self.reads)


# -- inside a model ---------------------------------------------------------------------------------

@torch.library.custom_op("autoshard::annotate", mutates_args=())
def _marked(x: torch.Tensor, spec: str, group: str = "") -> torch.Tensor:
    """With a `group`, a mark of the model's own collective: `spec` is the placement on the group's mesh axis alone."""
    return x.clone()


@_marked.register_fake
def _(x: torch.Tensor, spec: str, group: str = "") -> torch.Tensor:
    return torch.empty_like(x)


def _keep_spec(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.spec, ctx.group = inputs[1:]


def _mark_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    if ctx.group and ctx.spec == FREE:
        return gradient, None, None
    spec = gradient_of(ctx.spec) if ctx.group else ctx.spec
    return torch.ops.autoshard.annotate(gradient, spec, ctx.group), None, None


_marked.register_autograd(_mark_gradient, setup_context=_keep_spec)


def annotate(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """Fix how an activation lies on the mesh, in the model itself: `x = autoshard.annotate(x, ("dp", None, "tp"))`.

    Returns `x` untouched where the model runs without autoshard. While it is traced, the value and its gradient are held
    in `spec` (see this module). Raises SeedError for something that is no spec."""
    text = seed_text(spec)
    return torch.ops.autoshard.annotate(x, text) if _torch.is_traced(x) or torch.compiler.is_compiling() else x


# -- values -----------------------------------------------------------------------------------------

def seed_text(value: Any) -> str:
    """A seed's value as the command line writes it: `("tp", None)` -> `"tp,-"`, `(Shard(0), Replicate())` -> `"S(0),R"`.

    Raises SeedError for a value of another kind."""
    if isinstance(value, Seed):
        return seed_text(value.value)
    if isinstance(value, str):
        return ",".join(p.strip() for p in value.strip().strip("[]").split(","))
    if isinstance(value, ShardingSpec):
        return ",".join("*".join(d) or "-" for d in value.dims)
    if not isinstance(value, (tuple, list)):
        raise SeedError(f"a seed has value {value!r}; give one entry per tensor dim, for example ('tp', None) or 'tp,-'")
    if any(isinstance(v, Partial) for v in value):
        raise SeedError(f"a seed has value {value!r}; Partial cannot be a seed, since nothing becomes a sum of parts by being moved")
    if value and all(isinstance(v, (Shard, Replicate)) for v in value):
        return ",".join(f"S({v.dim})" if isinstance(v, Shard) else "R" for v in value)
    odd = [v for v in value if not (v is None or v is ... or isinstance(v, (str, tuple, list)))]
    if odd:
        raise SeedError(f"a seed has the entry {odd[0]!r}; an entry is an axis, a tuple of axes, None, '?' or ...")
    return ",".join("?" if v in OPEN[1:2] else "..." if v in OPEN else "-" if v in WHOLE else v if isinstance(v, str)
                    else "*".join(map(str, v)) for v in value)


def marks_of(module: str, marks: Mapping[str, str], params: Iterable[str]) -> list[str]:
    """The texts of `marks` whose key names a module and no parameter; `*` stays within one part of a path."""
    return [text for key, text in marks.items() if ":" not in key and key.count(".") == module.count(".")
            and fnmatchcase(module, key) and not any(fnmatchcase(p, key) for p in params)]


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


# -- keys -------------------------------------------------------------------------------------------

def resolve_seeds(graph: Graph, mesh: Mesh, seeds: Mapping[str, Any] | None) -> Seeds:
    """Match every key, and the marks that `annotate` left, and expand every value to the specs it allows.

    Raises SeedError for a key that matches nothing (with the nearest names), a malformed value, or two
    seeds that disagree about one tensor (naming both)."""
    found = _Found(graph, mesh)
    for key, value in (seeds or {}).items():
        where = value.where if isinstance(value, Seed) else ""
        origin = f"{key!r} = {seed_text(value)!r}" + (f" ({where})" if where else "")
        found.matches[key] = found.match(key, seed_text(value), origin)
        if not found.matches[key]:
            raise SeedError(f"seed {origin} matches nothing{_nearest(graph, key)}")
    for op in marks(graph):
        found.mark(op)
    return Seeds(found.specs, found.matches, found.reads, found.origins)


@dataclass(eq=False)
class _Found:
    """What the seeds so far allow, and which seed said so."""

    graph: Graph
    mesh: Mesh
    specs: dict[str, frozenset[Spec]] = field(default_factory=dict)
    reads: dict[tuple[str, int], frozenset[Spec]] = field(default_factory=dict)
    matches: dict[str, int] = field(default_factory=dict)
    origins: dict[Any, str] = field(default_factory=dict)

    def match(self, key: str, text: str, origin: str) -> int:
        """Apply one seed to everything its key names; how many values that are."""
        stored = list(matching(self.graph, key)) or _marked_modules(self.graph, key, text)
        for op in stored:
            self.hold(op.name, op, text, origin)
        if stored or key not in self.graph.by_name or self.graph.op(key).kind != "call":
            return len(stored)
        value = Ref(key)
        allowed = self.allowed(text, self.graph.meta(value), key, origin)
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
        meta = op.outputs[0] if op.outputs else self.graph.meta(op.refs[0])
        self._narrow(self.specs, name, self.allowed(text, meta, str(op.target), origin), str(op.target), origin)

    def _narrow(self, table: dict, key: Any, allowed: frozenset[Spec], name: str, origin: str) -> None:
        both = table.get(key, allowed) & allowed
        if not both:
            raise SeedError(f"seeds {self.origins[key]} and {origin} both match {name} and disagree; keep one of them")
        table[key] = both
        self.origins.setdefault(key, origin)

    def allowed(self, text: str, meta: TensorMeta, name: str, origin: str) -> frozenset[Spec]:
        allowed = specs_of(text, meta, self.mesh, origin)
        if not allowed:
            raise SeedError(f"seed {origin} splits {name} of shape {meta.shape} unevenly on mesh {self.mesh}; "
                            "shard a dim that the axis size divides")
        return allowed


def specs_of(text: str, meta: TensorMeta, mesh: Mesh, origin: str) -> frozenset[Spec]:
    """The specs that a seed's text allows for a tensor; none where a dim does not divide. An axis of size 1 splits nothing.
    Raises SeedError, naming `origin`."""
    if PER_AXIS.fullmatch(text) and not set(text.split(",")) <= set(mesh.names):
        found = [_per_axis(text, meta, mesh, origin)]
    else:
        found = list(_expand(_per_dim(text, len(meta.shape), mesh, origin), meta, mesh))
    return frozenset(tuple(p if size > 1 else R for p, size in zip(spec, mesh.sizes, strict=True)) for spec in found)


def marks(graph: Graph) -> tuple[Op, ...]:
    """The ops that `annotate` left, and the model's own collectives."""
    return tuple(op for op in graph.of_kind("call") if str(op.target) == MARKER)


def given_group(op: Op) -> str:
    """The group of a mark that a collective of the model left; "" for other marks."""
    return op.args[2] if len(op.args) > 2 else ""


def was_given(op: Op) -> bool:
    """Whether the op is such a mark."""
    return op.kind == "call" and str(op.target) == MARKER and bool(given_group(op))


def matching(graph: Graph, key: str) -> Iterable[Op]:
    """Inputs, outputs and parameters that a key names."""
    kind, _, name = key.partition(":")
    if kind == "input" and name:
        inputs = graph.of_kind("input")
        yield from (op for i, op in enumerate(inputs) if fnmatchcase(str(i), name) or fnmatchcase(str(op.target), name))
    elif kind == "output" and name:
        yield from (op for op in graph.of_kind("output") if fnmatchcase(str(op.target), f"user:{name}"))
    else:
        tied = dict(graph.tied)
        kept = {tied[a] for a in tied if fnmatchcase(a, key)}
        yield from (op for op in graph.of_kind("param") if fnmatchcase(op.target, key) or op.target in kept)


def named_by(graph: Graph, key: str) -> dict[str, Op]:
    """What `key` names, each under a key of its own."""
    inputs = [op.name for op in graph.of_kind("input")]
    own = {"input": lambda op: f"input:{inputs.index(op.name)}", "output": lambda op: str(op.target).replace("user:", "output:", 1)}
    return {own.get(op.kind, lambda op: str(op.target))(op): op for op in matching(graph, key)}


def _marked_modules(graph: Graph, key: str, text: str) -> list[Op]:
    """The marks that `trace` left on what leaves the modules of a key."""
    return [op for op in marks(graph) if op.phase == "forward" and op.args[1] == text and not given_group(op)
            and fnmatchcase(op.module, key) and op.module.count(".") == key.count(".")]


def _nearest(graph: Graph, key: str) -> str:
    known = [*names(graph), *(f"input:{i}" for i in range(len(graph.of_kind("input"))))]
    found = nearest(key.replace("*", "0"), known)
    return found or f"; the parameters are {', '.join(str(op.target) for op in graph.of_kind('param')[:5])} ..."


def _per_axis(text: str, meta: TensorMeta, mesh: Mesh, origin: str) -> Spec:
    spec = parse_spec(text)
    if len(spec) != mesh.ndim or max(spec) >= len(meta.shape):
        raise SeedError(f"seed {origin}: give one Shard or Replicate per mesh axis ({mesh}) on dims below {len(meta.shape)}")
    spec = tuple(meta.logical_dims(p)[0] if p >= 0 else p for p in spec)
    if not divides(meta.logical_shape, spec, mesh.sizes):
        raise SeedError(f"seed {origin} splits a tensor of shape {meta.shape} unevenly ({format_spec(spec)} on mesh {mesh}); "
                        "shard a dim that the axis size divides")
    return spec


def _per_dim(text: str, ndim: int, mesh: Mesh, origin: str) -> list[tuple[str, ...] | None]:
    """Axes per dim; None for an open dim. A trailing `...` (or `?`) opens all dims that remain."""
    entries = [e.strip() for e in text.split(",")] if ndim or text not in WHOLE else []
    if entries and entries[-1] in OPEN and len(entries) < ndim:
        entries += ["?"] * (ndim - len(entries))
    if entries and entries[-1] == "..." and len(entries) == ndim + 1:
        entries.pop()
    if len(entries) != ndim:
        raise SeedError(f"seed {origin} gives {len(entries)} dims for a tensor with {ndim}; end it with ... to leave the rest open")
    out: list[tuple[str, ...] | None] = []
    for entry in entries:
        axes = None if entry in OPEN else () if entry in WHOLE else tuple(entry.strip("()").split("*"))
        for axis in axes or ():
            if axis not in mesh.names:
                near = difflib.get_close_matches(str(axis), mesh.names, n=1)
                raise SeedError(f"seed {origin} names mesh axis {axis!r}; the mesh has {mesh}{f' (did you mean {near[0]}?)' if near else ''}")
        out.append(axes)
    return out


def _expand(dims: list[tuple[str, ...] | None], meta: TensorMeta, mesh: Mesh) -> Iterable[Spec]:
    """All specs with the closed dims as given and the free axes on open dims or nowhere. A closed dim that is made of
    several logical dims is split along the major one."""
    logical: list[tuple[str, ...]] = [()] * meta.ndim
    for d, axes in enumerate(dims):
        if axes:
            logical[meta.logical_dims(d)[0]] = axes
    try:
        base = ShardingSpec(tuple(logical)).to_spec(mesh)
    except MeshError as e:
        raise SeedError(str(e)) from None
    open_dims = [i for d, axes in enumerate(dims) if axes is None for i in meta.logical_dims(d)]
    free = [a for a in range(mesh.ndim) if base[a] == R]
    for choice in product((R, *open_dims), repeat=len(free)):
        spec = list(base)
        for a, p in zip(free, choice, strict=True):
            spec[a] = p
        if divides(meta.logical_shape, tuple(spec), mesh.sizes):
            yield tuple(spec)


# -- files ------------------------------------------------------------------------------------------

def load_seeds(path: str) -> dict[str, Seed]:
    """Seeds from a YAML file: a mapping from keys to values, a value being text (`tp,-`) or a list of axes per dim.

    Raises UsageError, naming file and line."""
    import yaml

    try:
        with open(path) as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
            if root is None:
                return {}
            if not isinstance(root, yaml.MappingNode):
                raise UsageError(f"{path} is no mapping of seeds; write lines such as: layers.*.wq.weight: tp,-")
            loader = yaml.SafeLoader("")
            pairs = [(k, loader.construct_object(v, deep=True)) for k, v in root.value]
    except OSError as e:
        raise UsageError(f"cannot read seeds {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # such as the date 2026-13-45
        raise UsageError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    seeds: dict[str, Seed] = {}
    for key, value in pairs:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key.value, str):
            raise UsageError(f"{where}: the name of a seed must be text, such as layers.*.wq.weight")
        if key.value in seeds:
            raise UsageError(f"seed {key.value!r} is given twice, at {seeds[key.value].where} and {where}; keep one of them")
        try:
            seeds[key.value] = Seed(seed_text(value), where)
        except SeedError as e:
            raise SeedError(f"{where}: {e}") from None
    return seeds
