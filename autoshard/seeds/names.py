"""What a user calls a value -> the ops of the graph: parameter names, module paths, op names."""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from autoshard.base.graph import Graph, Op, Ref
from autoshard.errors import UsageError
from autoshard.rules import registry


def find_ops(graph: Graph, text: str) -> tuple[Op, ...]:
    """Ops that `text` names: an op ("mm_0"), a parameter or buffer ("wte.weight"), "input:0", or all ops of a module in
    execution order. Raises UsageError with the nearest names."""
    if text in graph.by_name:
        return (graph.op(text),)
    stored = tuple(op for op in graph.of_kind("param", "buffer", "input") if str(op.target) == text)
    tied = dict(graph.tied).get(text)
    if tied is not None:
        stored = tuple(op for op in graph.of_kind("param", "buffer") if op.target == tied)
    inside = tuple(op for op in graph.of_kind("call") if op.module == text or op.module.startswith(f"{text}."))
    if not stored and not inside:
        matching = [name for name in names(graph) if fnmatchcase(name, text)]
        if matching:
            raise UsageError(f"{text!r} is a pattern, of {len(matching)} names; give one of them, such as {matching[0]!r}")
        raise UsageError(f"no op, parameter or module is called {text!r}{nearest(text, names(graph))}")
    return stored or inside


def find_op(graph: Graph, text: str) -> Op:
    """The op that `text` names; of a module the forward op that matters most: its last of a main family (a matmul,
    attention, convolution or lookup), else its last op."""
    ops = find_ops(graph, text)
    forward = [op for op in ops if op.phase == "forward"] or list(ops)
    main = [op for op in forward if is_main(op)]
    return (main or forward)[-1]


def is_main(op: Op) -> bool:
    """Whether the op is of a family for which modules are there."""
    family = registry.family_of(op)
    return family is not None and family.main


def find_edge(graph: Graph, text: str) -> tuple[Ref, str, int]:
    """`"A->B"` -> (value made by A, op of B that reads it, which of its inputs). Views of A's values count as A's.

    Of several the first in the forward pass whose value is largest. Raises UsageError, naming who reads A."""
    left, arrow, right = (part.strip() for part in text.partition("->"))
    if not arrow or not left or not right:
        raise UsageError(f"cannot read edge {text!r}; write PRODUCER->CONSUMER, for example relu_0->mm_1 or layers.0.mlp->layers.1")
    makers, readers = find_ops(graph, left), {op.name for op in find_ops(graph, right)}
    inside = {op.name for op in makers}
    found = _between(graph, inside, readers - inside) or _between(graph, _with_views(graph, inside), readers - inside)
    if not found:
        read = sorted({name for op in makers for i in range(len(op.outputs)) for name, _ in graph.users.get(Ref(op.name, i), ())
                       if name not in inside}, key=graph.order.__getitem__)
        who = ", ".join(f"{n} ({graph.op(n).module})" if graph.op(n).module else n for n in read[:6])
        raise UsageError(f"{right} reads nothing that {left} makes{f'; {left} is read by {who}' if who else ''}")
    return min(found, key=lambda e: (graph.op(e[1]).phase == "backward", -graph.meta(e[0]).nbytes, graph.order[e[1]]))


def _between(graph: Graph, makers: Iterable[str], readers: set[str]) -> list[tuple[Ref, str, int]]:
    return [(Ref(name, i), reader, index) for name in makers for i in range(len(graph.op(name).outputs))
            for reader, index in graph.users.get(Ref(name, i), ()) if reader in readers]


def _with_views(graph: Graph, names: set[str]) -> set[str]:
    out = set(names)
    for op in graph.of_kind("call"):
        if registry.is_view(op) and all(r.op in out for r in op.refs):
            out.add(op.name)
    return out


def names(graph: Graph) -> list[str]:
    """Everything `find_ops` knows, without repetition."""
    modules = {".".join(op.module.split(".")[:i]) for op in graph.of_kind("call") for i in range(1, op.module.count(".") + 2)}
    stored = [str(op.target) for op in graph.of_kind("param", "buffer", "input")]
    return [*stored, *sorted(modules - {""}), *(op.name for op in graph.of_kind("call"))]


def nearest(text: str, known: Iterable[str]) -> str:
    """`"; the nearest names are a, b"`, or nothing."""
    near = difflib.get_close_matches(text, list(dict.fromkeys(known)), n=3, cutoff=0.4)
    return f"; the nearest names are {', '.join(near)}" if near else ""
