"""`autoshard.verify`: every rank of a plan's program in one process, against the unsharded model."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import api
from autoshard.calling import Traced
from autoshard.errors import LoweringError, TraceError, UsageError
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.options import Options
from autoshard.plan import Plan
from autoshard.rules.factors import factor_graph
from autoshard.runtime.compile import check_fits
from autoshard.seeded import mix
from autoshard.simplify import simplify
from autoshard.trace import trace
from autoshard.verify.bisect import Found, comparing, norm
from autoshard.verify.copies import cast, default_dtype, own_copy
from autoshard.verify.pieces import Joined, distance, joined
from autoshard.verify.plans import Plans, check_names
from autoshard.verify.program import MakeOptimizer, Outcome, Program
from autoshard.verify.ranks import Watch
from autoshard.verify.reference import Eager, Expected, Interpreted, Numbers, Reference, random_ops
from autoshard.verify.report import Check, FirstWrong, PlanCheck, VerifyReport

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By the least precise float of the graph."""
UPCAST = 1e-6
"""Where a float64 model computes some values in float32."""
TINY = 1e-6
"""A gradient is measured against at least this part of the norm of all gradients: some are zero but for rounding."""
DEFAULT_PLANS = ("searched", "split", "data_parallel", "fully_sharded", "tensor_parallel", "random:0")


def verify(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
           loss_fn: Callable[..., Any] | None = None, plan: Plan | str | os.PathLike[str] | None = None,
           plans: Sequence[str] = DEFAULT_PLANS, steps: int = 1, training: bool | None = None, optimizer: Any = "momentum",
           tolerance: float | None = None, seeds: Mapping[str, Any] | None = None, cluster: str | None = None,
           time_limit: float = 60.0, dtype: torch.dtype | None = None,
           progress: Callable[[str, str], None] = lambda phase, detail: None) -> VerifyReport:
    """Run plans of `model` with real numbers, all ranks in this process, and compare with the model itself: user outputs,
    every gradient (of the outputs' sum), every buffer, and after `steps` optimizer steps every weight.

    model        real weights (they are copied); with real example inputs as for `autoshard.plan`
    plan         a Plan or its file; without one every kind named in `plans` (see verify/plans.py) is made and run
    optimizer    one that treats every element alike: "momentum", "sgd", "adam", "adamw", or a function of the parameters.
                 Adam's first step turns the rounding of gradients that should be zero into full steps: expect a mismatch there
    dtype        what to compute in: by default float64, else (ops without it, a plan that fits no float64 twin) float32
    tolerance    largest error of a tensor over its norm (or, for gradients, over 1e-6 of the norm of all of them);
                 by default 1e-9 in float64, 1e-6 where the model goes through float32, 1e-5 in float32
    seeds, cluster, time_limit   as for `autoshard.plan`

    One process holds every rank: weights, activations and their whole values. Random ops draw on the ranks what they
    would draw in a run; the model's graph is then run whole with those numbers, and without ranks against torch.

    Raises what planning and lowering raise, UsageError for unusable arguments."""
    if steps < 1:
        raise UsageError(f"steps={steps}: give at least 1")
    names, mesh = check_names(plans), api.as_mesh(mesh)
    given = Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
    call = _Call(model, tuple(example_inputs), dict(example_kwargs or {}), loss_fn, training)
    options = Options(seeds=seeds or {}, cluster=cluster or "cpu-gloo", time_limit=time_limit)
    progress("trace", "")
    subject = _subject(call, given, mesh, dtype)
    limit = tolerance if tolerance is not None else subject.tolerance
    with default_dtype(subject.dtype):
        checks = []
        for name, chosen in _chosen(subject, given, names, mesh, options, progress):
            progress("run", name)
            checks.append(_Run(subject, name, chosen, steps, optimizer_of(optimizer), limit).check())
    return VerifyReport(tuple(checks), str(mesh), str(subject.dtype).removeprefix("torch."), limit, steps, subject.notes)


def optimizer_of(optimizer: Any) -> MakeOptimizer:
    """A function of a list of parameters. Raises UsageError."""
    known: dict[str, MakeOptimizer] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3)}
    if callable(optimizer):
        return optimizer
    if optimizer not in known:
        raise UsageError(f"optimizer={optimizer!r} is none of {', '.join(known)}, nor a function of a list of parameters")
    return known[optimizer]


@dataclass(frozen=True, eq=False)
class _Call:
    """The model and how it is called, as given."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    training: bool | None

    def traced(self) -> Traced:
        found = trace(self.model, self.args, self.kwargs, loss_fn=self.loss_fn, training=self.training)
        return Traced(factor_graph(simplify(found.graph)), found.calling)


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is run: a copy of the model in `dtype`, its graph, and what torch computes for it at the first step under `SEED`."""

    call: _Call
    traced: Traced
    dtype: torch.dtype
    tolerance: float
    device: torch.device
    notes: tuple[str, ...]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.detach() for n, t in (*self.call.model.named_parameters(), *self.call.model.named_buffers())}


SEED = 20


def _subject(call: _Call, plan: Plan | None, mesh: Mesh, dtype: torch.dtype | None) -> _Subject:
    """In the first dtype that the model and the plan can do."""
    notes: list[str] = []
    original = call.traced().graph if plan is not None else None
    if plan is not None:
        check_fits(plan, original, mesh)
    for choice in (dtype,) if dtype else (torch.float64, torch.float32):
        try:
            found = _in_dtype(call, choice)
        except (TraceError, RuntimeError, NotImplementedError) as e:
            if dtype is not None or choice is torch.float32:
                raise
            notes.append(f"computed in float32, because float64 fails: {_first_line(e)}")
            continue
        if original is None or _same_ops(original, found.traced.graph):
            return replace(found, notes=tuple(notes))
        notes.append(f"the plan does not fit the model in {choice}: computed in the dtypes of the plan")
    return replace(_in_dtype(call, None), notes=tuple(notes[-1:]))


def _in_dtype(call: _Call, dtype: torch.dtype | None) -> _Subject:
    model, (args, kwargs) = own_copy(call.model, dtype), cast((call.args, dict(call.kwargs)), dtype)
    twin = replace(call, model=model, args=args, kwargs=kwargs)
    floats = [t.dtype for t in model.parameters() if t.is_floating_point()] or [torch.float32]
    used = dtype or min(floats, key=lambda d: -TOLERANCE.get(d, 1.0))
    with default_dtype(used):
        traced = twin.traced()
        Eager(model, traced, call.loss_fn).step(args, kwargs)  # whether torch can run it at all
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return _Subject(twin, traced, used, _tolerance(traced.graph, used), device, ())


def _tolerance(graph: Graph, dtype: torch.dtype) -> float:
    floats = {m.dtype for op in graph.ops for m in op.outputs if m is not None and m.dtype.is_floating_point}
    worst = max((TOLERANCE.get(d, 5e-2) for d in floats), default=0.0)
    return UPCAST if dtype is torch.float64 and worst == TOLERANCE[torch.float32] else max(worst, TOLERANCE[torch.float64])


def _same_ops(a: Graph, b: Graph) -> bool:
    """Whether a plan of one graph is one of the other: equal but for dtypes."""
    def shape(graph: Graph) -> list[Any]:
        return [(op.name, op.kind, str(op.target), op.refs, [m and (m.shape, m.factors) for m in op.outputs]) for op in graph.ops]

    return shape(a) == shape(b)


def _chosen(subject: _Subject, given: Plan | None, names: Sequence[str], mesh: Mesh, options: Options,
            progress: Callable[[str, str], None]) -> Iterator[tuple[str, Plan]]:
    if given is not None:
        yield "the given plan", replace(given, graph_hash=subject.traced.graph.hash)
        return
    progress("costs", "")
    plans = Plans(api.prices(subject.traced, mesh, options), options, subject.call.loss_fn is not None)
    for name in names:
        progress("plan", name)
        yield from plans.named((name,))


class _Run:
    """One plan's run."""

    def __init__(self, subject: _Subject, name: str, plan: Plan, steps: int, make: MakeOptimizer, tolerance: float) -> None:
        self.subject, self.name, self.plan, self.steps, self.make, self.tolerance = subject, name, plan, steps, make, tolerance
        self.traced, call = subject.traced, subject.call
        self.random = random_ops(self.traced.graph)
        self.args, self.kwargs = call.args, call.kwargs

    def check(self) -> PlanCheck:
        reference: Reference = (Interpreted(self.traced, self.subject.state) if self.random
                                else Eager(self.subject.call.model, self.traced, self.subject.call.loss_fn))
        checks = self._compare_trace() if self.random else []
        program = self._program()
        for step in range(self.steps):
            outcome, numbers = self._step(program, step)
            expected = reference.step(self.args, self.kwargs, numbers)
            checks += self._compare(step, outcome, expected)
            if self.traced.graph.training:
                program.update(self.make)
                reference.update(self.make)
        if self.traced.graph.training:
            checks += self._compare_weights(program.weights(), reference.weights())
        wrong = None if all(c.ok for c in checks) else self._first_wrong()
        return PlanCheck(self.name, self.plan, tuple(checks), wrong, bool(self.random))

    def _program(self) -> Program:
        return Program(self.traced, self.plan, self.subject.state, self.subject.device)

    def _step(self, program: Program, step: int, watch: Watch = lambda node, value: None) -> tuple[Outcome, Numbers]:
        """The step's results, and what its random ops drew."""
        drawn: dict[str, dict[int, torch.Tensor]] = {}

        def draw(node: torch.fx.Node, pieces: list[Any]) -> None:
            held = node.meta.get("held")
            if held is not None and held.ref.op in self.random:
                whole = joined(pieces, program.graph.meta(held.ref), held.spec, program.mesh).whole
                drawn.setdefault(held.ref.op, {})[held.ref.index] = whole
            watch(node, pieces)

        outcome = program.step(self.args, self.kwargs, mix(SEED, step), draw)
        return outcome, {name: tuple(found.get(i) for i in range(max(found) + 1)) for name, found in drawn.items()}

    def _compare(self, step: int, outcome: Outcome, expected: Expected) -> list[Check]:
        if len(outcome.users) != len(expected.users):
            raise LoweringError(f"the plan's program gives {len(outcome.users)} outputs, the model {len(expected.users)}")
        out = [self._against(step, "output", _output_name(i, want, self.subject.call), got, want)
               for i, (got, want) in enumerate(zip(outcome.users, expected.users, strict=True))]
        everything = sum(norm(g) ** 2 for g in expected.grads.values()) ** 0.5
        out += self._named(step, "gradient", outcome.grads, expected.grads, TINY * everything)
        changed = {n: b for n, b in expected.buffers.items() if n in outcome.mutations or not torch.equal(b, self.subject.state[n])}
        return out + self._named(step, "buffer", outcome.mutations, changed)

    def _compare_weights(self, got: Mapping[str, Joined], want: Mapping[str, torch.Tensor]) -> list[Check]:
        trained = {n: t for n, t in want.items() if n in got}
        return self._named(self.steps - 1, "weight", got, trained, TINY * sum(norm(t) ** 2 for t in trained.values()) ** 0.5)

    def _compare_trace(self) -> list[Check]:
        """With random ops the reference is the graph: here it is held against the model, both with torch's generator."""
        model, (args, kwargs) = self.subject.call.model, (self.args, self.kwargs)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            want = Eager(model, self.traced, self.subject.call.loss_fn).step(args, kwargs)
            torch.manual_seed(SEED)
            got = Interpreted(self.traced, self.subject.state).step(args, kwargs, {})
        outcome = Outcome(tuple(Joined(t, 0.0) for t in got.users), _whole(got.grads), _whole(got.buffers))
        return [replace(c, kind="random") for c in self._compare(0, outcome, want)]

    def _named(self, step: int, kind: Any, got: Mapping[str, Joined], want: Mapping[str, torch.Tensor], floor: float = 0.0) -> list[Check]:
        """Names must be the same on both sides: what one side lacks is infinitely wrong."""
        missing = [Check(step, kind, n, float("inf"), 0.0, 0.0) for n in sorted(got.keys() ^ want.keys())]
        return missing + [self._against(step, kind, n, got[n], want[n], floor) for n in want if n in got]

    def _against(self, step: int, kind: Any, name: str, got: Joined, want: torch.Tensor, floor: float = 0.0) -> Check:
        size = max(norm(want.detach()), floor)
        if got.whole.shape != want.shape or got.whole.dtype != want.dtype:
            return Check(step, kind, name, float("inf"), 0.0, size)
        error = max(distance(got.whole, want.detach()), got.disagreement)
        return Check(step, kind, name, error, self.tolerance * size, size)

    def _first_wrong(self) -> FirstWrong:
        """Run again beside the graph on one device, and stop at the first value that is off."""
        program, reference = self._program(), Interpreted(self.traced, self.subject.state)
        for step in range(self.steps):
            numbers = self._step(self._program_at(program), step)[1] if self.random else {}
            expected = reference.step(self.args, self.kwargs, numbers)
            try:
                self._step(program, step, comparing(program, expected.values, self.tolerance, step, self.random))
            except Found as found:
                return found.wrong
            if self.traced.graph.training:
                program.update(self.make)
                reference.update(self.make)
        return FirstWrong("trace", 0)

    def _program_at(self, program: Program) -> Program:
        """Another program with the same weights."""
        weights = {n: j.whole for n, j in program.weights().items()}
        return Program(self.traced, self.plan, {**self.subject.state, **weights}, self.subject.device)


def _output_name(i: int, value: torch.Tensor, call: _Call) -> str:
    return "loss" if i == 0 and value.ndim == 0 else f"output {i}"


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Joined]:
    return {n: Joined(t, 0.0) for n, t in tensors.items()}


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
