"""A variant that runs its batch in micro-batches: every window a function, and the values between them.

`Windows.run` runs one window for one micro-batch. `MicroStep` is the order of one stage: start, then forward and backward of one
micro-batch after the other, then end. All of it happens when the model is called, since the loss is in the graph;
`loss.backward()` hands out the gradients, times what arrives at the loss."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.base.graph import BACKWARD, FORWARD, Graph
from autoshard.base.plan import Plan
from autoshard.base.random import of_microbatch
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, local_tensor_shape
from autoshard.base.windows import END, START, WEIGHTS, batch_dim_of
from autoshard.errors import AutoshardError, UsageError
from autoshard.lower.lower import Lowered, Port
from autoshard.pipeline.microbatches.results import Results, joined_meta, piece
from autoshard.program.calling import Calling
from autoshard.runtime.hand_out import hand_out, multiply
from autoshard.runtime.inputs import localize
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.step import Backend, Function, Step


@dataclass(eq=False)
class Micro:
    """What belongs to one micro-batch: its inputs and tangents by name, its seed, and what its windows saved for later ones."""

    inputs: dict[str, torch.Tensor]
    seed: int
    tangents: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, torch.Tensor] = field(default_factory=dict)


class Windows:
    """The windows of a lowered graph on this rank. `shared`: values that all micro-batches read (parameters held for the step,
    accumulators), there between `begin` and `finish`. Values between windows go by numbers, settled here: what they are called takes long to hash."""

    def __init__(self, graph: Graph, place: Place, local: Callable[[str], torch.Tensor], functions: Mapping[str, Function]) -> None:
        """`functions` by the name of their window, in order; `local`: a parameter or a buffer as this rank holds it."""
        self.graph, self.place, self.local, self.functions = graph, place, local, functions
        self.shared: dict[int, torch.Tensor] = {}
        every = [port for f in functions.values() for port in (*f.takes, *f.gives)]
        self._number = {held: i for i, held in enumerate(dict.fromkeys(p.name for p in every if p.kind in ("saved", "accumulator")))}
        self._shared = {p.name for p in functions[START].gives} if START in functions else set()
        self._shared |= {p.name for p in every if p.kind == "accumulator"}
        last = {port: name for name, function in functions.items() for port in function.takes if port.kind == "saved"}
        self._takes = {name: tuple(self._way(port, last.get(port) == name, name) for port in f.takes) for name, f in functions.items()}
        self._gives = {name: tuple((port, self._number[port.name] if port.kind == "saved" else None, port.name in self._shared) for port in f.gives)
                       for name, f in functions.items()}

    def _way(self, port: Port, last: bool, window: str) -> tuple[str, Any, bool]:
        """Where the value of a port is, by what name or number, and whether nothing reads it behind this window."""
        if port.kind not in ("saved", "accumulator"):
            return port.kind, port.name, False
        shared = port.name in self._shared
        return "shared" if shared else "saved", self._number[port.name], port.kind == "saved" and last and (not shared or window == END)

    def begin(self) -> None:
        """Run the window at the start, and make the accumulators."""
        self.run(START, Micro({}, 0))
        takes = (p for f in self.functions.values() for p in f.takes if p.kind == "accumulator")
        for held in (p.name for p in takes):
            meta = self.graph.meta(held.ref)
            shape = local_tensor_shape(meta, held.spec, self.place.mesh)
            self.shared[self._number[held]] = torch.zeros(shape, dtype=meta.dtype, device=self.place.device)

    def run(self, name: str, micro: Micro) -> dict[Port, torch.Tensor]:
        """Run a window for a micro-batch; what it saves goes to `micro`, of the window at the start to all. Returns the rest that it
        gives by port. Raises what collectives raise."""
        results = self.functions[name].call([self._take(kind, key, dies, micro) for kind, key, dies in self._takes[name]])
        out = {}
        for (port, number, shared), value in zip(self._gives[name], results, strict=True):
            if number is None:
                out[port] = value
            else:
                (self.shared if shared else micro.saved)[number] = value
        return out

    def finish(self) -> dict[str, torch.Tensor]:
        """Run the window at the end: local gradients by name."""
        needed = {key for kind, key, _ in self._takes[END] if kind == "shared"}
        self.shared = {number: t for number, t in self.shared.items() if number in needed}
        given = self.run(END, Micro({}, 0))
        self.shared.clear()
        return {port.name: value for port, value in given.items()}

    def _take(self, kind: str, key: Any, dies: bool, micro: Micro) -> Any:
        if kind in ("saved", "shared"):
            found = micro.saved if kind == "saved" else self.shared
            return found.pop(key) if dies else found[key]
        if kind == "input":  # one window alone takes it, and a tangent too
            return micro.inputs.pop(key)
        if kind == "tangent":
            return micro.tangents.pop(key)
        return micro.seed if kind == "seed" else self.local(key)


class MicroStep(Step):
    """`Step` for a graph with micro-batches."""

    def __init__(self, graph: Graph, calling: Calling, plan: Plan, lowered: Lowered, place: Place, stored: Stored,
                 backend: Backend, outputs: str, given: Any = ()) -> None:
        super().__init__(graph, calling, plan, lowered, place, stored, backend, outputs, given)
        bound = {FORWARD: self.forward, BACKWARD: self.backward}
        self.windows = Windows(graph, self.within, self.local, {
            w.window: bound.get(w.window) or Function.of(w, self.within, backend, w.window) for w in lowered.windows})
        self.grad_names = tuple(p.name for p in self.windows.functions[END].gives)
        self.input_grads = ()
        (self.loss,) = (op.target for op in graph.of_kind("tangent"))
        self.dims = {op.target: batch_dim_of(op) for op in graph.of_kind("input")}
        ways = Results(graph).ways
        self.shown = tuple(i for i, (how, _) in enumerate(ways) if how != WEIGHTS)
        self.shown_left_out = tuple(at for at, i in enumerate(self.shown) if i in self.left_out)
        self.user_specs = tuple(self.user_specs[i] for i in self.shown)
        self.modes = tuple(self.modes[i] for i in self.shown)
        self.user_metas = tuple(joined_meta(self.user_metas[i], *ways[i], graph.microbatches) for i in self.shown)

    @property
    def issues(self) -> tuple[Any, ...]:
        """The collectives of one step, in order."""
        f = {name: function.issues for name, function in self.windows.functions.items()}
        return f[START] + (f[FORWARD] + f[BACKWARD]) * self.graph.microbatches + f[END]

    def reduce(self, grads: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are reduced."""
        return dict(zip(self.grad_names, grads, strict=True))

    def run(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int, model: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outs, grads = self._step(tensors, given, seed)
        apart = model.keeps_apart()
        return hand_out(outs, self.shown.index(self.loss), grads, self.leaves(tensors, apart), lambda grads: self._finished(grads, model, apart),
                        self.shown_left_out)

    def _finished(self, grads: list[torch.Tensor], model: Any, apart: bool) -> list[torch.Tensor | None]:
        try:
            done = model.finish_gradients(self, grads, apart)
        except (AutoshardError, RuntimeError) as e:
            model.name_who_left(e)
            raise
        return [None if g is None else self.as_gradient(name, g) for name, g in zip(self.grad_names, done, strict=True)]

    def _step(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results of the batch, and local gradients in the order of `grad_names`."""
        results, windows = Results(self.graph), self.windows
        windows.begin()
        try:
            for m in range(self.graph.microbatches):
                micro = Micro(self._piece(tensors, given, m), of_microbatch(seed, m))
                out = windows.run(FORWARD, micro)
                self.write_back([out[Port(Role.MUTATION, name)] for name in self.mutated])
                users: list[Any] = [out.pop(Port(Role.USER, i)) for i in range(self.n_users)]
                results.add(m, users)
                micro.tangents[self.loss] = results.tangent(self.loss).to(self.place.device)
                if results.counts:
                    windows.run(BACKWARD, micro)
            grads = windows.finish()
        finally:
            windows.shared.clear()
        own = self.apart([grads[name] for name in self.grad_names])
        if (factor := results.factor) is not None:
            multiply(own, factor)
        return results.finished(), list(own)

    def _piece(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], m: int) -> dict[str, torch.Tensor]:
        """Local inputs of micro-batch `m`. One that comes in placed is cut on every rank."""
        out = {}
        for i, name, spec in self.reads:
            t, dim = tensors[i], self.dims[name]
            local = piece(t._local_tensor if isinstance(t, DTensor) else t, dim, m, self.graph.microbatches)
            out[name] = localize(local, given[i], spec, self.place)
        return out


def check_pieces(graph: Graph, tensors: Sequence[torch.Tensor]) -> None:
    """Raises UsageError where what a rank passes of an input does not divide into the micro-batches."""
    for op, t in zip(graph.of_kind("input"), tensors, strict=True):
        dim, local = batch_dim_of(op), t._local_tensor if isinstance(t, DTensor) else t
        if dim is not None and local.shape[dim] % graph.microbatches:
            raise UsageError(f"a rank passes {local.shape[dim]} rows of {op.target}, which do not divide into {graph.microbatches} micro-batches; "
                             "every rank cuts its own piece of the batch")
