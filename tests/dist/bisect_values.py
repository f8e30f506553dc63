"""Find the first op whose local values, put together, differ from one process's. A debugging aid for parity tests.

    python tests/dist/bisect_values.py gpt tp=2 0
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from autoshard.graph import Graph, Ref, map_args  # noqa: E402
from autoshard.lower import bind  # noqa: E402
from autoshard.spec import is_partial  # noqa: E402


def reference_values(graph: Graph, given: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Value of every op on one device; `given` by op name."""
    values: dict[str, Any] = {}
    with torch.no_grad():
        for op in graph.ops:
            if op.kind == "call":
                def value(leaf: Any) -> Any:
                    return values[leaf.op][leaf.index] if isinstance(leaf, Ref) else leaf
                out = op.target(*map_args(value, op.args), **{k: map_args(value, v) for k, v in op.kwargs})
                values[op.name] = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            elif op.kind != "output":
                values[op.name] = (given[op.name],)
    return values


class Checking(torch.fx.Interpreter):
    def __init__(self, module, graph, values, place, tol) -> None:
        super().__init__(module)
        self.graph_, self.values, self.place, self.tol, self.bad = graph, values, place, tol, []

    def run_node(self, n):
        out = super().run_node(n)
        held = n.meta.get("held")
        if held is not None:
            self.check(held, out)
        return out

    def check(self, held, local):
        meta, want = self.graph_.meta(held.ref), self.values[held.ref.op][held.ref.index]
        whole = want.reshape(meta.logical_shape)
        for axis, p in enumerate(held.spec):
            if is_partial(p):
                local = local.clone()
                op = {-2: dist.ReduceOp.SUM, -3: dist.ReduceOp.MAX, -4: dist.ReduceOp.MIN}[p]
                dist.all_reduce(local, op=op, group=self.place.device_mesh.get_group(axis))
        mine = self.place.slice(whole, held.spec).reshape(local.shape)
        if not torch.allclose(local.double(), mine.double(), rtol=self.tol, atol=self.tol, equal_nan=True):
            self.bad.append((held, float((local.double() - mine.double()).abs().max())))


def find(name: str, mesh: str, seed: int) -> list[str]:
    from harness import twins
    from planners import random_planner
    from test_parity import MODELS

    from autoshard.runtime.compile import Settings
    from autoshard.runtime.module import CompiledModule
    from autoshard.runtime.place import locate

    module = MODELS[name]
    model, reference, batch = twins(module.build, torch.float64)
    compiled = CompiledModule(model, locate(mesh), Settings(random_planner(seed), loss_fn=module.loss))
    compiled.prepare(*batch)
    step = compiled._latest[1]
    graph, place = step.graph, compiled.place
    state = {**dict(reference.named_parameters()), **dict(reference.named_buffers()), **step.calling.constants}
    given = {op.name: state[op.target].detach() for op in graph.of_kind("param", "buffer")}
    given |= {f"input:{i}": t for i, t in enumerate(batch)}
    given |= {op.name: torch.ones(op.outputs[0].shape, dtype=op.outputs[0].dtype) for op in graph.of_kind("tangent")}
    values = reference_values(graph, given)
    report, saved = [], {}
    for local in (step.lowered.forward, step.lowered.backward):
        bound, takes = bind(local, place.coordinates, place.groups, place.mesh, place.device)
        args = []
        for p in takes:
            if p.kind in ("param", "buffer"):
                args.append(step.local(p.name).detach())
            elif p.kind == "saved":
                args.append(saved[p.name])
            elif p.kind == "seed":
                args.append(1)
            else:
                op_name = p.name if p.kind == "input" else f"tangent:{p.name}"
                args.append(place.slice(given[op_name], step.plan.ops[op_name].outputs[0]).contiguous())
        check = Checking(bound, graph, values, place, 1e-8)
        with torch.no_grad():
            outs = check.run(*args)
        saved = {p.name: v for p, v in zip(local.gives, outs, strict=True) if p.kind == "saved"}
        for held, off in check.bad[:8]:
            report.append(f"{held} off by {off:.3e}: {graph.op(held.ref.op).where} {step.plan.ops[held.ref.op]}"
                          f"\n    {graph.calls[held.ref.op]}")
    return report


if __name__ == "__main__":
    from harness import on_ranks

    name, mesh, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    from autoshard.mesh import parse_mesh
    print("\n".join(on_ranks(parse_mesh(mesh).size, find, name, mesh, seed)[0]) or "all values agree")
