"""Views that decide with the contraction that reads them rather than with what they look at.

In backward a gradient is read by one contraction as it is and by another one transposed. Where the transpose decides with the
contraction, both read the same value, and a gather of it is paid once."""
from __future__ import annotations

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.spec import is_partial
from autoshard.program.flow import param_derived
from autoshard.rules import registry
from autoshard.rules.family import Family


def views_of_contractions(graph: Graph) -> dict[str, str]:
    """View -> the matmul that alone reads it, directly or through other such views, in the same phase. Only views that show every
    layout of their input as one of their own and back; none of parameters, whose gathers are shared in any case."""
    out: dict[str, str] = {}
    stored = param_derived(graph)
    for op in reversed(graph.ops):
        readers = graph.users.get(Ref(op.name), ())
        if len(readers) == 1 and Ref(op.name) not in stored and _is_bijective(graph, op):
            reader = graph.op(readers[0][0])
            contracts = registry.family_of(reader) is Family.MATMUL
            if reader.phase == op.phase and (contracts or reader.name in out):
                out[op.name] = out.get(reader.name, reader.name)
    return out


def _is_bijective(graph: Graph, op: Op) -> bool:
    """A permutation of dims, but for dims of size 1, that passes parts of sums on."""
    if not registry.is_view(op) or len(op.refs) != 1 or len(op.outputs) != 1:
        return False
    pairs = {(row.inputs[0], row.outputs[0]) for row in registry.rows(graph.calls[op.name])}
    dims = {a: b for a, b in pairs if a >= 0 and b >= 0}
    before, after = graph.meta(op.refs[0]).logical_shape, op.outputs[0].logical_shape
    return (all((a >= 0) == (b >= 0) for a, b in pairs) and len(dims) == sum(a >= 0 for a, _ in pairs) == len(set(dims.values()))
            and {d for d, n in enumerate(before) if n > 1} <= set(dims) and {d for d, n in enumerate(after) if n > 1} <= set(dims.values())
            and all(before[a] == after[b] for a, b in dims.items()) and any(is_partial(a) for a, _ in pairs))
