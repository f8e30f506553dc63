"""One variant of the model as it runs: two local functions and one autograd node between them."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.base.graph import Graph
from autoshard.base.pads import shorter
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.collectives import KIND_OF
from autoshard.errors import AutoshardError, UsageError
from autoshard.lower.lower import LocalGraph, Lowered, Port, bind, call_of, lower_deferred
from autoshard.lower.schedule import CollectiveCall
from autoshard.program.around import in_checkpoint
from autoshard.program.calling import Calling, as_stored
from autoshard.program.flow import passed_on
from autoshard.program.output_modes import DTENSOR, LOCAL, modes_of
from autoshard.rules.states import states
from autoshard.runtime.inputs import localize, plain_tangent
from autoshard.runtime.once import differentiable_once
from autoshard.runtime.own_memory import apart, may_share
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.params.strided import placements
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.route import route_of
from autoshard.runtime.unused import as_zeros, check_left_out, form_of, results_behind

Backend = Callable[[torch.fx.GraphModule, str], Callable[[list[Any]], Sequence[torch.Tensor]]]


@dataclass(frozen=True, eq=False)
class Function:
    """A bound local graph: called with one list, which it empties. `issues`: its collectives, as they are in the graph."""

    takes: tuple[Port, ...]
    gives: tuple[Port, ...]
    call: Callable[[list[Any]], Sequence[torch.Tensor]]
    issues: tuple[CollectiveCall, ...]

    @staticmethod
    def of(local: LocalGraph, place: Place, backend: Backend, name: str) -> "Function":
        module, takes = bind(local, place.coordinates, place.group, place.mesh, place.device)
        module.meta["carriers"] = place.carriers()
        axes = {group: axis for axis, group in place.groups.items()}
        issues = tuple(call_of(n, axes[n.args[-1]]) for n in module.graph.nodes if n.target in KIND_OF)
        return Function(takes, local.gives, backend(module, name), issues)


def locals_of(calling: Calling, plan: Plan, place: Place, stored: Stored) -> Callable[[str], torch.Tensor]:
    """By name, a parameter, a buffer, or a constant of the graph, as this rank holds it."""
    own = {name: as_stored(place.slice(value.to(place.device), plan.placements[name]))
           for name, value in calling.constants.items() if name in plan.placements}
    return lambda name: own[name] if name in own else stored.local(name)


class Border(NamedTuple):
    """How an input that gets a gradient comes in: as a DTensor, as this rank's piece, else whole; and from where."""

    dtensor: bool
    local: bool
    device: torch.device

    @staticmethod
    def of(t: torch.Tensor, given: bool) -> "Border":
        """`given`: whether it comes in placed."""
        return Border(isinstance(t, DTensor), given and not isinstance(t, DTensor), t.device)


class Step:
    """Runs a variant. `within`: the place on the mesh of the program, whose axes may be parts of the user's, on which all lies that is passed and
    handed out. `given`: inputs that come in placed: DTensors, and those of which every rank passes its piece.
    `calls`: how often it ran. Everything that can be settled before the call is settled here."""

    def __init__(self, graph: Graph, calling: Calling, plan: Plan, lowered: Lowered, place: Place, stored: Stored,
                 backend: Backend, outputs: str, given: Collection[str] = ()) -> None:
        self.given, self.calls = frozenset(given), 0
        self.graph, self.calling, self.plan, self.lowered = graph, calling, plan, lowered
        self.place, self.stored, self.outputs, self.backend = place, stored, outputs, backend
        self.within = place.on(lowered.mesh)
        self.forward = Function.of(lowered.forward, self.within, backend, "forward")
        self.backward = Function.of(lowered.backward, self.within, backend, "backward") if lowered.backward else None
        self.input_specs = {op.target: lowered.mesh.as_whole(plan.ops[op.name].outputs[0]) for op in graph.of_kind("input")}
        results = graph.outputs(Role.USER).values()
        self.user_specs = tuple(lowered.mesh.as_whole(plan.ops[op.name].inputs[0]) for op in results)
        self.user_metas = tuple(graph.meta(op.refs[0]) for op in results)
        self.mutated = tuple(p.name for p in self.forward.gives if p.kind == Role.MUTATION)
        self.states = frozenset(graph.op(name).target for name in states(graph))
        self.modes = tuple(modes_of(graph, outputs).values())
        self.n_users = len(self.user_specs)
        self.shards = tuple(_pieces(spec, place) for spec in self.user_specs)
        tangents = {op.target for op in graph.of_kind("tangent")}
        self.left_out = calling.left_out
        self.constants = tuple(i for i in range(self.n_users) if i not in tangents and i not in self.left_out)
        self.trained = tuple(sorted(tangents))
        self.takes = tuple((p.kind, p.name) for p in self.forward.takes)
        self.draws = any(kind == "seed" for kind, _ in self.takes)
        self.writes = next((name for name in self.mutated if name in stored.params), "")
        used = {name for kind, name in self.takes if kind == "input"}
        self.reads = tuple((int(name.removeprefix("input:")), name, spec) for name, spec in self.input_specs.items() if name in used)
        self.grad_names: tuple[str, ...] = ()
        self._known: dict[Function, tuple[tuple[str, int], ...]] = {}
        if self.backward:
            self.grad_names = tuple(p.name for p in self.backward.gives)
            self.input_grads = tuple(i for i, name in enumerate(self.grad_names) if name not in stored.params)
            self.kept = tuple(p for p in self.backward.takes if p.kind in ("param", "buffer"))
            self.kept_at = {p: i for i, p in enumerate(self.kept)}
            held = {p.name: stored.params.get(p.name, stored.buffers.get(p.name)) for p in self.kept}
            self.watched = {name: t for name, t in held.items() if t is not None and not t.is_inference()}
            self.saved_at = {p: i for i, p in enumerate(p for p in self.forward.gives if p.kind == "saved")}

        self.local = locals_of(calling, plan, place, stored)

    @property
    def wraps(self) -> bool:
        """Whether some output is a DTensor."""
        return DTENSOR in self.modes

    @property
    def issues(self) -> tuple[CollectiveCall, ...]:
        """The collectives of one step."""
        return self.forward.issues + (self.backward.issues if self.backward else ())

    def on(self, stored: Stored) -> "Step":
        """The same program with other tensors."""
        return self._made(stored, self.backend)

    def run_by(self, backend: Backend) -> "Step":
        """The same program on the same tensors, run by another backend."""
        made = self._made(self.stored, backend)
        made.calls = self.calls
        return made

    def _made(self, stored: Stored, backend: Backend) -> "Step":
        return type(self)(self.graph, self.calling, self.plan, self.lowered, self.place, stored, backend, self.outputs, self.given)

    @property
    def status(self) -> str:
        """Of the plan."""
        return self.plan.status

    # --- forward ---

    def arguments(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int) -> list[Any]:
        """Local tensors in the order the forward takes them, from the call's tensors and how each comes in."""
        local, place = self.local, self.place
        inputs = {name: localize(tensors[i], given[i], spec, place) for i, name, spec in self.reads}
        return [inputs[name] if kind == "input" else seed if kind == "seed" else local(name) for kind, name in self.takes]

    def leaves(self, tensors: Sequence[torch.Tensor], apart: bool = False) -> list[torch.Tensor]:
        """What gradients go to, in the order of `grad_names`. `apart`: autograd does not know the parameters, see `finish_gradients`."""
        params = dict.fromkeys(self.stored.params, torch.zeros((), requires_grad=True)) if apart else self.stored.params
        return [params[n] if n in params else tensors[int(n.removeprefix("input:"))] for n in self.grad_names]

    def write_back(self, values: Sequence[torch.Tensor]) -> None:
        for name, value in zip(self.mutated, values, strict=True):
            write = self.stored.write_state if name in self.states else self.stored.write
            write(name, value)

    def run(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int, model: Any) -> tuple[torch.Tensor, ...]:
        """User outputs of one call, local."""
        _torch.take_plain_tensors()  # the loop around this call may mix them with DTensors, and torch keeps that by thread
        self._refuse_checkpoint()
        arguments = self.arguments(tensors, given, seed)
        if self.backward is None or not torch.is_grad_enabled():
            with torch.no_grad():
                outs = self._off_states(self.forward.call(arguments))
            self.write_back(outs[self.n_users:self.n_users + len(self.mutated)])
            return tuple(outs[:self.n_users])
        kept = [self.local(p.name).detach() if p.name in self.mutated else self.local(p.name) for p in self.kept]  # as they are before
        apart = model.keeps_apart()
        result = _Node.apply(self, model, arguments, kept, seed, apart, *self.leaves(tensors, apart))
        return result if isinstance(result, tuple) else (result,)

    def _refuse_checkpoint(self) -> None:
        """Raises UsageError where the call runs again in backward and would do something else then."""
        if not (self.draws or self.writes) or not in_checkpoint():
            return
        does, again = (("draws random numbers (dropout)", "draw others") if self.draws else
                       (f"writes into its parameter {self.writes}", "write it twice"))
        raise UsageError(f"the compiled model {does}, and torch.utils.checkpoint around its call would {again} when it runs it again: use it inside "
                         "of the model, where the trace follows it, or let memory_budget= decide what runs again")

    @cached_property
    def _hands_on_states(self) -> bool:
        """Whether what a state was before the call is a result, or another state's new value (`self.last, self.now = self.now, h`)."""
        ends = [(op, passed_on(self.graph, op.args[0])[-1].op) for role in (Role.USER, Role.MUTATION) for op in self.graph.outputs(role).values()]
        return any(source in states(self.graph) and op.target.name != self.graph.op(source).target for op, source in ends)

    def _off_states(self, outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the forward gives, with copies of what lies in the memory of a state that is about to be written."""
        if not self._hands_on_states:
            return outs
        owner = {self.local(name).untyped_storage().data_ptr(): name for name in self.states}
        names = (*(None,) * self.n_users, *self.mutated)
        return [t.clone() if owner.get(t.untyped_storage().data_ptr(), name) != name else t for t, name in zip(outs, names, strict=False)]

    # --- backward ---

    def versions(self) -> list[int]:
        """How often the stored tensors that backward reads were changed in place. Of DTensors autograd sees only the local tensors, whose
        count stays where it is when the DTensor is changed."""
        return [t._version for t in self.watched.values()]

    def check_versions(self, then: list[int]) -> None:
        """Raises UsageError where a stored tensor that backward reads was changed since forward: its gradient would be of two models."""
        if (now := self.versions()) != then:
            name = next(n for n, a, b in zip(self.watched, then, now, strict=True) if a != b)
            raise UsageError(f"{name} was changed in place between forward and backward (by an optimizer's step, perhaps), and backward needs the "
                             "value of forward: call backward before, or the model once more")

    def backward_arguments(self, function: Function, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor],
                           seed: int) -> list[Any]:
        return [saved[i] if kind == "saved" else seed if kind == "seed" else self._tangent(i, tangents[i])
                for kind, i in self._backward_takes(function)]

    def _backward_takes(self, function: Function) -> tuple[tuple[str, int], ...]:
        """Per argument: ("saved", which saved tensor), ("tangent", which) or ("seed", 0)."""
        if function not in self._known:
            n = len(self.kept)
            self._known[function] = tuple(
                ("saved", self.kept_at[p]) if p.kind in ("param", "buffer") else ("saved", n + self.saved_at[p]) if p.kind == "saved"
                else (p.kind, p.name if p.kind == "tangent" else 0) for p in function.takes)
        return self._known[function]

    def _tangent(self, i: int, tangent: torch.Tensor) -> torch.Tensor:
        """Losses are means over the global batch: a rank that averages its own shard of an output sees gradients
        as many times too large as there are shards."""
        tangent = plain_tangent(tangent)
        if self.modes[i] == LOCAL and self.shards[i] > 1:
            tangent = tangent / self.shards[i]
        return as_stored(tangent)

    @cached_property
    def shares(self) -> bool:
        """Whether gradients may lie in one memory."""
        return may_share(self.graph)

    def apart(self, grads: Sequence[torch.Tensor], given: Collection[int] = ()) -> Sequence[torch.Tensor]:
        """Local gradients in memory of their own, and not at the addresses that were `given`."""
        return apart(grads, given) if self.shares else grads

    @cached_property
    def _behind(self) -> dict[str, frozenset[int]]:
        return results_behind(self.graph)

    def behind_only(self, missing: frozenset[int]) -> frozenset[str]:
        """Names of the gradients that are computed from results alone to which no gradient came."""
        return frozenset(n for n in self.grad_names if (results := self._behind[n]) and results <= missing) if missing else frozenset()

    @cached_property
    def deferred(self) -> tuple[Function, Function]:
        """Backward without the reduction of parameters' gradients, and that reduction. See `no_sync`."""
        backward, reduction = lower_deferred(self.graph, self.plan, self.within.mesh, route_of(self.plan), self.lowered.forward)
        return (Function.of(backward, self.within, self.backend, "backward_deferred"),
                Function.of(reduction, self.within, self.backend, "reduction"))

    def reduce(self, grads: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Final local gradients by name, from those of `deferred`. Of equal ones the reduction takes one."""
        reduction, given = self.deferred[1], dict(zip((n for n in self.grad_names if n in self.stored.params), grads, strict=True))
        return dict(zip((p.name for p in reduction.gives), self.apart(reduction.call([given[p.name] for p in reduction.takes])), strict=True))

    def deliver(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Add local gradients to `.grad` of parameters that autograd does not reach from this call; their hooks run. Autograd takes none for a
        parameter that is frozen by now, though it was trained in calls whose gradients were kept."""
        params, given = self.stored.params, {n: self.as_gradient(n, g) for n, g in grads.items()}
        if trained := [n for n in given if params[n].requires_grad]:
            torch.autograd.backward([params[n] for n in trained], [given[n] for n in trained])
        for p, g in ((params[n], g) for n, g in given.items() if not params[n].requires_grad):
            p.grad = g if p.grad is None else p.grad + g

    def as_gradient(self, name: str, local: torch.Tensor, border: "Border | None" = None) -> torch.Tensor:
        """A local gradient in the form its leaf has: a DTensor placed like it, or of an input (which has a `border`) the whole tensor
        or this rank's piece. A piece's gradient is that of the mean over the piece, see `_tangent`. On one process without a group
        that is the local gradient itself."""
        if self.place.device_mesh is None:
            return local if border is None else local.to(border.device)
        if border is None:
            p = self.stored.params[name]
            return _torch.dtensor_like(as_stored(shorter(local, p._local_tensor.shape)), p)  # autograd sees to strides of plain tensors alone
        spec = self.input_specs[name]
        if border.local:
            return (local * _pieces(spec, self.place)).to(border.device)
        if border.dtensor or any(p >= 0 for p in spec):
            found = DTensor.from_local(local, self.place.device_mesh, placements(spec, self.place.mesh.sizes), run_check=False)
            return found if border.dtensor else found.full_tensor().to(border.device)
        return local.to(border.device)


NO_GRADIENTS = (None,) * 6
"""Of what `_Node.forward` takes before the leaves."""


class _Node(torch.autograd.Function):
    """The whole model as one autograd node. `kept` and what forward saves go through `save_for_backward`, so
    that autograd notices a parameter changed in between."""

    @staticmethod
    def forward(ctx: Any, step: Step, model: Any, arguments: list[Any], kept: list[torch.Tensor], seed: int,
                apart: bool, *leaves: torch.Tensor) -> Any:
        outs = step.forward.call(arguments)
        n, m = step.n_users, len(step.mutated)
        ctx.save_for_backward(*kept, *outs[n + m:])
        ctx.step, ctx.model, ctx.seed, ctx.apart, ctx.leaves = step, model, seed, apart, leaves
        ctx.borders = {step.grad_names[i]: Border.of(leaves[i], step.grad_names[i] in step.given) for i in step.input_grads}
        step.write_back(outs[n:n + m])
        ctx.versions = step.versions()
        ctx.mark_non_differentiable(*(outs[i] for i in step.constants))
        if len(step.trained) + len(step.left_out) > 1:  # else a gradient arrives at that one
            ctx.set_materialize_grads(False)
            ctx.forms = {i: form_of(outs[i]) for i in step.trained}
        return tuple(outs[:n])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *tangents: Any) -> Any:
        step, model = ctx.step, ctx.model
        step.check_versions(ctx.versions)
        check_left_out(tangents, step.left_out)
        missing = frozenset(i for i in step.trained if tangents[i] is None)
        if missing:
            tangents = as_zeros(tangents, {i: ctx.forms[i] for i in missing})
        function = model.gradient_function(step)
        arguments = step.backward_arguments(function, ctx.saved_tensors, tangents, ctx.seed)
        given = {t.data_ptr() for t in arguments if isinstance(t, torch.Tensor)} if step.shares else ()
        del tangents
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept for another backward
        try:
            grads = model.finish_gradients(step, step.apart(function.call(arguments), given), ctx.apart, missing)
        except (AutoshardError, RuntimeError) as e:
            model.name_who_left(e)
            raise
        borders = ctx.borders
        if step.place.device_mesh is None and not borders:
            return (*NO_GRADIENTS, *grads)
        return NO_GRADIENTS + tuple(
            None if g is None else step.as_gradient(name, g, borders.get(name)) for name, g in zip(step.grad_names, grads, strict=True))


def _pieces(spec: Spec, place: Place) -> int:
    """How many a tensor placed so is cut into."""
    return prod(size for size, p in zip(place.mesh.sizes, spec, strict=True) if p >= 0)

