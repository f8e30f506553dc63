"""`autoshard.verify`: every rank of a plan's program in one process, against the unsharded model."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from autoshard import api
from autoshard.errors import LoweringError, UsageError
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.options import Options, parse_bytes
from autoshard.plan import Plan
from autoshard.seeded import mix
from autoshard.spec import R, Spec, divides
from autoshard.verify.bisect import Found, comparing, norm
from autoshard.verify.copies import default_dtype
from autoshard.verify.optimizers import optimizer_of
from autoshard.verify.pieces import Joined, distance, joined
from autoshard.verify.plans import Plans, check_names
from autoshard.verify.program import MakeOptimizer, Outcome, Program
from autoshard.verify.ranks import Watch
from autoshard.verify.reference import Eager, Expected, Interpreted, Numbers, Reference, random_ops
from autoshard.verify.report import Check, FirstWrong, PlanCheck, VerifyReport
from autoshard.verify.subject import TOLERANCE, Call, Subject, subject_of

TINY, TINY_ROUNDED = 1e-6, 1e-2
"""A gradient is measured against at least this part of the norm of all gradients: some are zero but for rounding. The second
where some values are float32 (or less), whose rounding is 1e-7 of what cancels."""
SEED = 20
"""Of random ops. Step i draws under mix(SEED, i), as a compiled model does whose ranks called torch.manual_seed(SEED)."""
DEFAULT_PLANS = ("searched", "split", "data_parallel", "fully_sharded", "tensor_parallel", "random:0")


def verify(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
           loss_fn: Callable[..., Any] | None = None, plan: Plan | str | os.PathLike[str] | None = None,
           plans: Sequence[str] = DEFAULT_PLANS, steps: int = 1, training: bool | None = None, optimizer: Any = "momentum",
           tolerance: float | None = None, seeds: Mapping[str, Any] | None = None, cluster: str | None = None,
           memory_budget: str | float | None = None, inputs: str = "global", fallback: str = "error", time_limit: float = 60.0, dtype: torch.dtype | None = None, elsewhere: "Elsewhere | None" = None,
           progress: Callable[[str, str], None] = lambda phase, detail: None) -> VerifyReport:
    """Run plans of `model` with real numbers, all ranks in this process, and compare with the model itself: user outputs,
    every gradient (of the outputs' sum), every buffer, and after `steps` optimizer steps every weight.

    model        real weights (they are copied); with real example inputs as for `autoshard.plan`
    plan         a Plan or its file; without one every kind named in `plans` (see verify/plans.py) is made and run
    optimizer    one that treats every element alike: "momentum", "sgd", "adam", "adamw", or a function of the parameters.
                 Adam divides by the gradient's size: where a gradient is zero but for rounding, weights may differ
    dtype        what to compute in: by default float64, else (ops without it, a plan that fits no float64 twin) float32
    tolerance    largest error of a tensor over its norm (or, for gradients, over 1e-6 of the norm of all of them);
                 by default 1e-9 in float64, 1e-6 where the model goes through float32, 1e-5 in float32
    seeds, cluster, memory_budget, fallback, time_limit   as for `autoshard.plan`
    inputs       "local": plans are made for inputs that come in split along dim 0 over the first mesh axis
    elsewhere    what runs the plans instead (real processes); the program in this process then only finds a wrong op

    One process holds every rank: weights, activations and their whole values. Random ops draw on the ranks what they
    would draw in a run; the model's graph is then run whole with those numbers, and without ranks against torch.

    Raises what planning and lowering raise, UsageError for unusable arguments."""
    if steps < 1:
        raise UsageError(f"steps={steps}: give at least 1")
    names, mesh = check_names(plans), api.as_mesh(mesh)
    given = Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
    options = Options(seeds=seeds or {}, cluster=cluster or "cpu-gloo", memory_budget=parse_bytes(memory_budget), inputs=inputs,
                      fallback=fallback, time_limit=time_limit)
    call = Call(model, tuple(example_inputs), dict(example_kwargs or {}), loss_fn, training,
                options.marks or dict(given.seeds if given else {}), given.settings.get("fallback", fallback) if given else fallback)
    progress("trace", "")
    subject = subject_of(call, given, mesh, dtype)
    limit = tolerance if tolerance is not None else subject.tolerance
    with default_dtype(subject.dtype):
        make, checks = optimizer_of(optimizer), []
        for name, chosen in _chosen(subject, given, names, mesh, options, progress):
            progress("run", name)
            checks.append(_Run(subject, name, chosen, steps, make, limit, elsewhere).check())
    return VerifyReport(tuple(checks), str(mesh), str(subject.dtype).removeprefix("torch."), limit, steps, subject.notes)


@dataclass(frozen=True, eq=False)
class Ran:
    """What a plan's program made: every step's results, and the weights at the end (none without training)."""

    steps: tuple[Outcome, ...]
    weights: Mapping[str, Joined]


class Elsewhere(Protocol):
    """Runs a plan somewhere else, and brings back the results."""

    def __call__(self, plan: Plan, dtype: torch.dtype, steps: int, training: bool) -> Ran: ...


def _chosen(subject: Subject, given: Plan | None, names: Sequence[str], mesh: Mesh, options: Options,
            progress: Callable[[str, str], None]) -> Iterator[tuple[str, Plan]]:
    if given is not None:
        yield "the given plan", replace(given, graph_hash=subject.traced.graph.hash)
        return
    progress("costs", "")
    plans = Plans(api.prices(subject.traced, mesh, options, fixed=_as_passed(subject.traced.graph, mesh, options)), options, subject.call.loss_fn is not None)
    for name in names:
        progress("plan", name)
        yield from plans.named((name,))


def _as_passed(graph: Graph, mesh: Mesh, options: Options) -> dict[str, Spec]:
    """Inputs whose placement is how they come in: local ones, split along dim 0 over the first mesh axis. Raises UsageError
    for an input that does not divide."""
    if options.inputs == "global":
        return {}
    split = (0, *(R,) * (mesh.ndim - 1))
    found = {op.target: op.outputs[0] for op in graph.of_kind("input") if op.outputs[0].shape}
    for name, meta in found.items():
        if not divides(meta.logical_shape, split, mesh.sizes):
            raise UsageError(f"{name} of shape {meta.shape} does not split along dim 0 over {mesh.names[0]}={mesh.sizes[0]}; choose a multiple")
    return dict.fromkeys(found, split)


class _Run:
    """One plan's run."""

    def __init__(self, subject: Subject, name: str, plan: Plan, steps: int, make: MakeOptimizer, tolerance: float,
                 elsewhere: Elsewhere | None) -> None:
        self.elsewhere = elsewhere
        self.subject, self.name, self.plan, self.steps, self.make, self.tolerance = subject, name, plan, steps, make, tolerance
        self.tiny = TINY if subject.tolerance <= TOLERANCE[torch.float64] else TINY_ROUNDED
        self.traced, call = subject.traced, subject.call
        self.random = random_ops(self.traced.graph)
        self.args, self.kwargs = call.args, call.kwargs

    def check(self) -> PlanCheck:
        reference: Reference = (Interpreted(self.traced, self.subject.state) if self.random
                                else Eager(self.subject.call.model, self.traced, self.subject.call.loss_fn))
        checks = self._compare_trace() if self.random else []
        training = self.traced.graph.training
        ran = None if self.elsewhere is None else self.elsewhere(self.plan, self.subject.dtype, self.steps, training)
        program = self._program()
        for step in range(self.steps):
            outcome, numbers = (None, {}) if ran and not self.random else self._step(program, step)
            expected = reference.step(self.args, self.kwargs, numbers)
            checks += self._compare(step, ran.steps[step] if ran else outcome, expected)
            if training:
                reference.update(self.make)
                if outcome is not None:
                    program.update(self.make)
        if training:
            checks += self._compare_weights(ran.weights if ran else program.weights(), reference.weights())
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

        outcome = program.step(self.args, self.kwargs, mix(SEED, step + 1), draw)
        return outcome, {name: tuple(found.get(i) for i in range(max(found) + 1)) for name, found in drawn.items()}

    def _compare(self, step: int, outcome: Outcome, expected: Expected) -> list[Check]:
        if len(outcome.users) != len(expected.users):
            raise LoweringError(f"the plan's program gives {len(outcome.users)} outputs, the model {len(expected.users)}")
        out = [self._against(step, "output", _output_name(i, want), got, want)
               for i, (got, want) in enumerate(zip(outcome.users, expected.users, strict=True))]
        everything = _together(expected.grads.values())
        out += self._named(step, "gradient", outcome.grads, expected.grads, self.tiny * everything)
        changed = {n: b for n, b in expected.buffers.items() if n in outcome.mutations or not torch.equal(b, self.subject.state[n])}
        return out + self._named(step, "buffer", outcome.mutations, changed, self.tiny * _together(changed.values()))

    def _compare_weights(self, got: Mapping[str, Joined], want: Mapping[str, torch.Tensor]) -> list[Check]:
        trained = {n: t for n, t in want.items() if n in got}
        return self._named(self.steps - 1, "weight", got, trained, self.tiny * _together(trained.values()))

    def _compare_trace(self) -> list[Check]:
        """The graph on one device against the model, both with torch's generator: with random ops the graph is the reference."""
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
        """Run again beside the graph on one device, and stop at the first value that is off. Before that: is the graph the model?"""
        if not self.random and not all(c.ok for c in self._compare_trace()):
            return FirstWrong("trace", 0)
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


def _together(tensors: Iterable[torch.Tensor]) -> float:
    """The norm of all of them."""
    return sum(norm(t.detach()) ** 2 for t in tensors) ** 0.5


def _output_name(i: int, value: torch.Tensor) -> str:
    return "loss" if i == 0 and value.ndim == 0 else f"output {i}"


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Joined]:
    return {n: Joined(t, 0.0) for n, t in tensors.items()}
