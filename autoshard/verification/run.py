"""One plan's run: its program on all ranks against the model, and how far rounding excuses a difference.

Where all floats are float64, the reference is the model under torch's autograd. Else three comparisons take its place:

    trace     the graph against the model, both on one device and in the model's dtypes
    sharded   the ranks against the graph on one device, the same ops in float64
    rounded   the same in the model's dtypes, where these are what was asked about (a precision policy, autocast, bfloat16)

What the first and the last may differ by is measured: the rounding error of a tensor is how far the graph in the model's dtypes
is from the same graph in float64, on one device. A mistake of the trace or of the plan is not in there.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from autoshard.base.plan import Plan
from autoshard.base.random import mix
from autoshard.errors import LoweringError
from autoshard.space.cost_table import trained_params
from autoshard.verification.models.forms import Form
from autoshard.verification.models.subject import TOLERANCE, Subject
from autoshard.verification.one_process.bisect import Comparing, Found, norm
from autoshard.verification.one_process.pieces import Joined, distance, joined
from autoshard.verification.one_process.program import MakeOptimizer, Outcome, Program
from autoshard.verification.one_process.ranks import Watch
from autoshard.verification.one_process.stage_programs import StagePrograms
from autoshard.verification.references.microbatches import key_of, op_of
from autoshard.verification.references.reference import Expected, Interpreted, Numbers, Reference, random_ops
from autoshard.verification.report import Check, FirstWrong, Kind, PlanCheck, Run

TINY = 1e-6
"""A gradient is measured against at least this part of the norm of all gradients: some are zero but for rounding."""
ROUNDINGS = 4.0
"""How many times the measured rounding error passes: other orders of summation round otherwise."""
EPSILONS = 4.0
"""The measured error of a single number may be zero by chance, of n numbers hardly: so many units of the last place over sqrt(n)
pass anyway."""
SHAKES = 3
"""How often weights move by chance to see how far results do."""
SEED = 20
"""Of random ops. Step i draws under mix(SEED, i), as a compiled model does whose ranks called torch.manual_seed(SEED)."""


@dataclass(frozen=True, eq=False)
class Ran:
    """What a plan's program made: every step's results, and the weights at the end (none without training)."""

    steps: tuple[Outcome, ...]
    weights: Mapping[str, Joined]


class Elsewhere(Protocol):
    """Runs a plan somewhere else, and brings back the results."""

    def __call__(self, plan: Plan, dtype: torch.dtype, steps: int, training: bool) -> Ran: ...


@dataclass(frozen=True)
class Limits:
    """What passes: `relative` to a tensor's norm, or, with an `epsilon`, what rounding explains: so many times its measured error
    by (kind, name)."""

    relative: float
    epsilon: float = 0.0
    rounding: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, kind: str, name: str, want: torch.Tensor, size: float) -> float:
        unit = torch.finfo(want.dtype).eps if self.epsilon and kind == "weight" else self.epsilon
        return max(self.relative, EPSILONS * unit / max(want.numel(), 1) ** 0.5) * size + ROUNDINGS * self.rounding.get((kind, name), 0.0)


@dataclass(frozen=True, eq=False)
class PlanRun:
    """`tolerance`: the user's, else None; `elsewhere`: what runs the plan instead."""

    subject: Subject
    name: str
    plan: Plan
    steps: int
    make: MakeOptimizer
    tolerance: float | None
    elsewhere: Elsewhere | None

    @property
    def sharp(self) -> Form:
        """The program whose errors are bugs and not rounding, where there is one."""
        return self.subject.exact or self.subject.own

    @cached_property
    def random(self) -> frozenset[str]:
        return random_ops(self.subject.traced.graph)

    @property
    def differs(self) -> bool:
        """Whether the user accepts micro-batches that compute something else than the batch: the model itself is then no reference."""
        return bool(self.subject.traced.graph.notes)

    @cached_property
    def trains(self) -> bool:
        """Whether some parameter gets a gradient: inputs alone may."""
        return bool(trained_params(self.subject.traced.graph))

    @property
    def limit(self) -> float:
        """Of the sharp program."""
        return self.tolerance or (TOLERANCE[torch.float64] if self.subject.exact else self.subject.tolerance)

    def check(self) -> PlanCheck:
        exact, ran = self.subject.exact, None
        if self.elsewhere is not None:
            ran = self.elsewhere(self.plan, self.subject.dtype, self.steps, self.subject.traced.graph.training)
        checks = self._trace_checks() if (self.random or exact) and not self.differs else []
        if ran is None or exact is None:
            checks += self._checked("sharded", self.sharp, ran)
        if exact is not None and (ran is not None or self.subject.rounds):
            checks += self._checked("rounded", self.subject.own, ran)
        checks = self._excused(checks)
        return PlanCheck(self.name, self.plan, tuple(checks), None if all(c.ok for c in checks) else self._first_wrong(checks), bool(self.random))

    def _checked(self, run: Run, form: Form, ran: Ran | None) -> list[Check]:
        """All steps of one form of the program. A rounded one has the exact one beside it."""
        training, checks, limits = form.traced.graph.training, [], Limits(self.limit)
        exact = Interpreted(self.subject.exact.traced, self.subject.exact.state) if run == "rounded" else None
        reference: Reference = (Interpreted(form.traced, form.state) if self.random or self.subject.exact or self.differs
                                else self.subject.call.eager(form.traced))
        with form.active():
            program = self._program(form)
            for step in range(self.steps):
                outcome, numbers = (None, {}) if ran and not self.random else self._step(form, program, step)
                expected = reference.step(form.args, form.kwargs, numbers)
                if exact is not None:
                    limits = self._rounded(expected, self._exactly(exact, numbers))
                checks += self._compare(run, step, ran.steps[step] if ran else outcome, expected, limits)
                if training and self.trains:
                    for trained in (reference, exact, program if outcome is not None else None):
                        if trained is not None:
                            trained.update(self.make)
            if training:
                want = reference.weights()
                if exact is not None:
                    limits = replace(limits, rounding=_differences("weight", want, exact.weights()))
                checks += self._named(run, self.steps - 1, "weight", ran.weights if ran else program.weights(),
                                      {n: want[n] for n in want if n in (ran.weights if ran else program.weights())}, limits)
        return checks

    def _exactly(self, exact: Interpreted, numbers: Numbers) -> Expected:
        form = self.subject.exact
        with form.active():
            return exact.step(form.args, form.kwargs, {n: tuple(_wide(t) for t in drawn) for n, drawn in numbers.items()})

    def _rounded(self, own: Expected, exact: Expected) -> Limits:
        rounding = _differences("gradient", own.grads, exact.grads) | _differences("buffer", own.buffers, exact.buffers)
        rounding |= {("output", _output_name(i, t)): distance(t, x) for i, (t, x) in enumerate(zip(own.users, exact.users, strict=True))}
        return Limits(self.tolerance or 0.0, 0.0 if self.tolerance else self.subject.epsilon, rounding)

    def _excused(self, checks: Sequence[Check]) -> list[Check]:
        """A tensor may be what is left where much larger ones cancel (the gradient of a bias before a batch norm). How far it moves
        when every weight moves by a unit of its last place is rounding, in float64 too. In less than float32 that would excuse mistakes."""
        forms: dict[Run, Form] = {"sharded": self.sharp}
        if self.subject.epsilon <= torch.finfo(torch.float32).eps:
            forms |= {"trace": self.subject.own, "rounded": self.subject.own}
        moved = {run: self._shaken(form) for run, form in forms.items() if any(c.run == run and not c.ok for c in checks)}
        return [c if c.ok or c.run not in moved else replace(c, limit=max(c.limit, ROUNDINGS * moved[c.run].get((c.step, c.kind, c.name), 0.0)))
                for c in checks]

    def _shaken(self, form: Form) -> dict[tuple[int, str, str], float]:
        """How far results move, by (step, kind, name): the most of SHAKES, since a single number may stay by chance."""
        moved: dict[tuple[int, str, str], float] = {}
        rng = torch.Generator().manual_seed(SEED)
        for _ in range(SHAKES):
            state = {n: t + t.abs() * torch.finfo(t.dtype).eps * torch.randn(t.shape, generator=rng, dtype=t.dtype).to(t.device)
                     if t.is_floating_point() else t for n, t in form.state.items()}
            for key, off in self._apart(form, state).items():
                moved[key] = max(moved.get(key, 0.0), off)
        return moved

    def _apart(self, form: Form, state: Mapping[str, torch.Tensor]) -> dict[tuple[int, str, str], float]:
        """How far the results of all steps from `state` are from those of the form's own, by (step, kind, name)."""
        moved: dict[tuple[int, str, str], float] = {}
        one, other = Interpreted(form.traced, form.state), Interpreted(form.traced, state)
        with torch.random.fork_rng(devices=()), form.active():
            torch.manual_seed(SEED)
            for step in range(self.steps):
                a = one.step(form.args, form.kwargs, {})
                b = other.step(form.args, form.kwargs, self._drawn_in(a.values))
                moved |= {(step, *key): off for key, off in self._rounded(a, b).rounding.items()}
                if self.trains:
                    one.update(self.make)
                    other.update(self.make)
        return moved | {(self.steps - 1, *key): off for key, off in _differences("weight", one.weights(), other.weights()).items()}

    def _drawn_in(self, values: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """What random ops drew, of all values of a run."""
        return {key: drawn for key, drawn in values.items() if op_of(key) in self.random}

    def _program(self, form: Form, state: Mapping[str, torch.Tensor] | None = None) -> Program | StagePrograms:
        kind = Program if self.plan.pipeline is None else StagePrograms
        return kind(form.traced, self.plan, form.state if state is None else state, self.subject.device)

    def _step(self, form: Form, program: Program | StagePrograms, step: int, watch: Watch = lambda node, value: None) -> tuple[Outcome, Numbers]:
        """The step's results, and what its random ops drew."""
        drawn: dict[str, dict[int, torch.Tensor]] = {}

        def draw(node: torch.fx.Node, pieces: list[Any]) -> None:
            held = node.meta.get("held")
            if held is not None and held.ref.op in self.random:
                whole = joined(pieces, program.graph.meta(held.ref), held.spec, program.mesh).whole.clone()  # an op may write over it
                drawn.setdefault(key_of(program.graph, held.ref.op, program.microbatch), {})[held.ref.index] = whole
            watch(node, pieces)

        outcome = program.step(form.args, form.kwargs, mix(SEED, step + 1), draw)
        return outcome, {name: tuple(found.get(i) for i in range(max(found) + 1)) for name, found in drawn.items()}

    # --- comparing ---

    def _trace_checks(self) -> list[Check]:
        """The graph on one device against the model, both with torch's generator."""
        own = self.subject.own
        with torch.random.fork_rng(devices=()), own.active():
            torch.manual_seed(SEED)
            want = self.subject.call.eager(own.traced).step(own.args, own.kwargs)
            torch.manual_seed(SEED)
            got = Interpreted(own.traced, own.state).step(own.args, own.kwargs, self._models_numbers())
        limits = Limits(self.tolerance or self.subject.tolerance)
        if self.subject.exact is not None:
            numbers = self._drawn_in(got.values)
            limits = self._rounded(got, self._exactly(Interpreted(self.subject.exact.traced, self.subject.exact.state), numbers))
        outcome = Outcome(tuple(Joined(t, 0.0) for t in got.users), _whole(got.grads), _whole(got.buffers))
        return self._compare("trace", 0, outcome, want, limits)

    def _models_numbers(self) -> Numbers:
        """What random ops draw in the model, where micro-batches or padded dims would draw otherwise."""
        own, before = self.subject.own, self.subject.before
        if not self.random or before.draw_as(own.traced):
            return {}
        return before.numbers(own.traced, self.random, Interpreted(before.whole, own.state).step(own.args, own.kwargs, {}).values)

    def _compare(self, run: Run, step: int, outcome: Outcome, expected: Expected, limits: Limits) -> list[Check]:
        if len(outcome.users) != len(expected.users):
            raise LoweringError(f"the plan's program gives {len(outcome.users)} outputs, the model {len(expected.users)}")
        out = [self._against(run, step, "output", _output_name(i, want), got, want, limits)
               for i, (got, want) in enumerate(zip(outcome.users, expected.users, strict=True))]
        out += self._named(run, step, "gradient", outcome.grads, expected.grads, limits)
        state = self.subject.own.state
        changed = {n: b for n, b in expected.buffers.items() if n in outcome.mutations or not torch.equal(b.to(state[n].dtype), state[n])}
        return out + self._named(run, step, "buffer", outcome.mutations, changed, limits)

    def _named(self, run: Run, step: int, kind: Kind, got: Mapping[str, Joined], want: Mapping[str, torch.Tensor],
               limits: Limits) -> list[Check]:
        """Names must be the same on both sides: what one side lacks is infinitely wrong."""
        floor = TINY * _together(want.values())
        missing = [Check(step, kind, n, float("inf"), 0.0, 0.0, run) for n in sorted(got.keys() ^ want.keys())]
        return missing + [self._against(run, step, kind, n, got[n], want[n], limits, floor) for n in want if n in got]

    def _against(self, run: Run, step: int, kind: Kind, name: str, got: Joined, want: torch.Tensor, limits: Limits, floor: float = 0.0) -> Check:
        size = max(norm(want.detach()), floor)
        if got.whole.shape != want.shape or got.whole.dtype != want.dtype:
            return Check(step, kind, name, float("inf"), 0.0, size, run)
        error = max(distance(got.whole, want.detach()), got.disagreement)
        return Check(step, kind, name, error, limits.of(kind, name, want, size), size, run)

    # --- what is wrong ---

    def _first_wrong(self, checks: Sequence[Check]) -> FirstWrong:
        """Repeat the run beside the graph on one device, and stop at the first wrong value. Before that, compare the graph with the model."""
        traced = [c for c in checks if c.run == "trace"] or ([] if self.differs else self._excused(self._trace_checks()))
        if not all(c.ok for c in traced):
            return FirstWrong("trace", 0)
        found = self._first_off(self.sharp)
        return found or FirstWrong("rounding", next(c.step for c in checks if not c.ok))

    def _first_off(self, form: Form) -> FirstWrong | None:
        with form.active():
            program, reference = self._program(form), Interpreted(form.traced, form.state)
            for step in range(self.steps):
                numbers = self._step(form, self._program_at(form, program), step)[1] if self.random else {}
                expected = reference.step(form.args, form.kwargs, numbers)
                try:
                    self._step(form, program, step, Comparing(program, expected.values, self.limit, step, self.random))
                except Found as found:
                    return found.wrong
                if self.trains:
                    program.update(self.make)
                    reference.update(self.make)
        return None

    def _program_at(self, form: Form, program: Program | StagePrograms) -> Program | StagePrograms:
        """Another program with the same weights."""
        weights = {n: j.whole for n, j in program.weights().items()}
        return self._program(form, {**form.state, **weights})


def _differences(kind: str, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], float]:
    return {(kind, n): distance(a[n].detach(), b[n].detach()) for n in a if n in b}


def _wide(t: Any) -> Any:
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def _together(tensors: Iterable[torch.Tensor]) -> float:
    """The norm of all of them."""
    return sum(norm(t.detach()) ** 2 for t in tensors) ** 0.5


def _output_name(i: int, value: torch.Tensor) -> str:
    return "loss" if i == 0 and value.ndim == 0 else f"output {i}"


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Joined]:
    return {n: Joined(t, 0.0) for n, t in tensors.items()}
