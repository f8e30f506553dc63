"""Redistributions that share a call give every value the numbers it gets by itself, on all ranks."""
from __future__ import annotations

import pytest
import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import PSUM, R, Spec, local_tensor_shape, shard_counts
from autoshard.collectives import KIND_OF
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.emit import Emitter, Part
from autoshard.lower.lower import LocalGraph, Port
from autoshard.lower.passes.in_place import overwrite
from autoshard.verification.one_process.ranks import run_ranks

CASES = {
    "all_reduce": ("d=2", [((3,), (PSUM,), (R,)), ((5, 7), (PSUM,), (R,)), ((), (PSUM,), (R,))]),
    "reduce_scatter": ("d=2", [((4, 3), (PSUM,), (0,)), ((3, 6, 2), (PSUM,), (1,)), ((5, 2), (PSUM,), (1,))]),
    "over joined axes": ("a=2,b=2", [((3,), (PSUM, PSUM), (R, R)), ((251,), (PSUM, PSUM), (R, R))]),
    "after another step": ("a=2,b=2", [((4, 6), (PSUM, PSUM), (0, R)), ((4, 2), (PSUM, PSUM), (0, R))]),
}


def emitted(mesh: str, values: list[tuple[tuple[int, ...], Spec, Spec]], together: bool) -> LocalGraph:
    on = parse_mesh(mesh)
    route, emit, prepared = Redistribution(on, load_cluster("cpu-gloo")).steps, Emitter(on), []
    with emit.part(Part("redistribute", "x", "backward", True)):
        for shape, source, target in values:
            meta = TensorMeta(shape, torch.float64)
            x = emit.placeholder("x", local_tensor_shape(meta, source, on), meta.dtype)
            prepared.append(emit.prepare(x, meta, shard_counts(meta.ndim, source, on.sizes), route(shape, meta.dtype, source, target)))
        if together:
            pending = emit.issue(prepared)
            results = [emit.complete(pending, i) for i in range(len(prepared))]
        else:
            results = [emit.complete(emit.issue([p])) for p in prepared]
    takes = [Port("grad", i) for i in range(len(values))]
    graph = emit.finish(results)
    named = [n for n in graph.nodes if n.op == "placeholder"]
    order = iter(takes)
    ports = tuple(Port(*emit.extra_ports[n.name]) if n.name in emit.extra_ports else next(order) for n in named)
    return LocalGraph("backward", graph, ports, tuple(takes))


def reductions(local: LocalGraph) -> list[torch.fx.Node]:
    return [n for n in local.graph.nodes if n.target in KIND_OF and KIND_OF[n.target].runs.reduces]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_same_numbers_as_one_by_one(case: str, in_place: bool) -> None:
    mesh, values = CASES[case]
    shared, single = emitted(mesh, values, True), emitted(mesh, values, False)
    (call,) = [n for n in reductions(shared) if "bucket" in n.meta]
    assert len(reductions(shared)) == len(reductions(single)) - len(values) + 1
    assert len(call.meta["bucket"]) == len(values) and sum(call.meta["bucket"]) == call.args[0].meta["val"].nbytes
    if in_place:
        overwrite(shared.graph)
    on, rng = parse_mesh(mesh), torch.Generator().manual_seed(0)
    given = {Port("grad", i): [torch.randn(local_tensor_shape(TensorMeta(shape, torch.float64), source, on), generator=rng, dtype=torch.float64)
                               for _ in range(on.size)] for i, (shape, source, _) in enumerate(values)}
    kept = {port: [t.clone() for t in tensors] for port, tensors in given.items()}
    got, want = (run_ranks(local, on, given, torch.device("cpu")) for local in (shared, single))
    for i, (shape, _, target) in enumerate(values):
        for one, other in zip(got[Port("grad", i)], want[Port("grad", i)], strict=True):
            assert torch.equal(one, other) and tuple(one.shape) == local_tensor_shape(TensorMeta(shape, torch.float64), target, on)
    assert all(torch.equal(a, b) for port in given for a, b in zip(given[port], kept[port], strict=True)), "arguments stay as they were"
