"""What a verification found."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.base.notebook import grid
from autoshard.base.plan import Plan

Kind = Literal["output", "gradient", "buffer", "weight"]
Run = Literal["sharded", "rounded", "trace"]


@dataclass(frozen=True)
class Check:
    """One tensor of one step (0: the first) against the unsharded model.

    run     what was compared, see verify/run.py
    error   norm of the difference, or of the difference between ranks that should agree, whichever is larger
    limit   the largest error that passes;  size  norm of the expected tensor"""

    step: int
    kind: Kind
    name: str
    error: float
    limit: float
    size: float
    run: Run = "sharded"

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    @property
    def relative(self) -> float:
        """The error in units of the expected tensor's norm, or of what stands for it where that is tiny."""
        return self.error / self.size if self.size else self.error

    @property
    def badness(self) -> float:
        """Error over limit; above 1 is a mismatch."""
        return self.error / self.limit if self.limit else 0.0 if self.error == 0 else float("inf")

    @property
    def module(self) -> str:
        """The module whose parameter or buffer this is; "" for outputs and inputs."""
        return self.name.rpartition(".")[0] if self.kind in ("gradient", "buffer", "weight") else ""


@dataclass(frozen=True)
class FirstWrong:
    """Where the numbers first go wrong, in the order of execution.

    kind    "op": the op's inputs agree and its output does not; "redistribution": a value agrees and its copy in
            another placement does not; "trace": on one device already the traced graph is not the model; "rounding": every
            op is right within the tolerance of a single one, and the results are off by more than rounding
            Of a pipeline, "wire": a stage receives another value than the one that was sent for this micro-batch; "weight": the backward of a
            micro-batch begins with another part of the loss
    stage, microbatch, matched   of a pipeline: where it is, and (stage, how many of its values were compared before, and right)
    rule    where the op's sharding rule comes from: own, dtensor (borrowed) or replicate (none)
    inputs, outputs   specs as text;  where  op, module path and the user's file:line"""

    kind: Literal["op", "redistribution", "trace", "rounding", "wire", "weight"]
    step: int
    op: str = ""
    target: str = ""
    where: str = ""
    rule: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    error: float = 0.0
    stage: int | None = None
    microbatch: int | None = None
    matched: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        if self.stage is None:
            return self._said()
        right = ", ".join(f"{count} of stage {stage}" for stage, count in self.matched) or "none"
        return f"stage {self.stage}, micro-batch {self.microbatch}: {self._said()}\n  values that agree before it: {right}"

    def _said(self) -> str:
        if self.kind == "wire":
            return (f"first wrong value: {self.op}, received from {self.target}, is not what {self.where} made for this micro-batch, off by "
                    f"{self.error:.3g} in step {self.step}: messages are out of order, or another value was sent")
        if self.kind == "weight":
            return f"first wrong value: its backward begins with {self.target} as its part of the loss, in step {self.step}"
        if self.kind == "trace":
            return ("the traced graph disagrees with the model on one device already: either the model takes another path while it is "
                    "traced or compiled (torch.compiler.is_compiling(), as in the attention masks of some transformers models), and "
                    "then torch.compile changes its numbers too, or the trace is wrong")
        if self.kind == "rounding":
            return (f"no op is wrong, and together they are off in step {self.step} by more than rounding explains: under a precision policy "
                    "a sum over ranks may be in a dtype too narrow (see --precision reduce=); else please report it")
        specs = f"{' | '.join(self.inputs)} -> {' | '.join(self.outputs)}"
        if self.kind == "op":
            names = {"own": "autoshard's own rule", "dtensor": "the rule borrowed from DTensor", "replicate": "no rule (runs whole)"}
            return (f"first wrong op: {self.where}\n  its inputs agree, its output is off by {self.error:.3g} in step {self.step}\n"
                    f"  {names.get(self.rule, self.rule)}, strategy {specs}")
        return f"first wrong value: the redistribution {specs} of {self.where}, off by {self.error:.3g} in step {self.step}"


@dataclass(frozen=True, eq=False)
class PlanCheck:
    """One plan's verdict. `random`: the model draws random numbers, so the reference is the graph with the ranks' numbers."""

    name: str
    plan: Plan
    checks: tuple[Check, ...]
    first_wrong: FirstWrong | None = None
    random: bool = False

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    @property
    def worst(self) -> Check:
        return max(self.checks, key=lambda c: c.badness)

    @property
    def split(self) -> int:
        """How many ops the plan splits over some mesh axis: a plan that splits nothing tests nothing."""
        return sum(any(p >= 0 for s in (*o.inputs, *o.outputs) for p in s) for o in self.plan.ops.values())

    def worst_per_module(self) -> dict[str, Check]:
        return worst_per_module(self.checks)


@dataclass(frozen=True, eq=False)
class VerifyReport:
    """Every plan that was run. dtype: what the comparison ran in; tolerance: see `verify`; notes: what to know."""

    plans: tuple[PlanCheck, ...]
    mesh: str
    dtype: str
    tolerance: float
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(p.ok for p in self.plans)

    def as_data(self) -> dict[str, Any]:
        """Plain JSON-able data."""
        return {"ok": self.ok, "mesh": self.mesh, "dtype": self.dtype, "tolerance": self.tolerance, "steps": self.steps,
                "notes": list(self.notes), "plans": [_plan_data(p) for p in self.plans]}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = [("pass" if p.ok else "MISMATCH", p.name, f"{p.split} of {len(p.plan.ops)}", f"{p.worst.kind} {p.worst.name}", f"{p.worst.error:.2g}",
                 f"{p.worst.limit:.2g}") for p in self.plans]
        columns = ("", "plan", "ops split", "worst", "error", "allowed")
        return grid(f"Plans for {self.mesh} against one device, in {self.dtype}", columns, rows, self.notes)

    def __str__(self) -> str:
        lines = [f"{'pass' if p.ok else 'MISMATCH'}  {p.name}: {len(p.checks)} tensors, {p.split} of {len(p.plan.ops)} ops split, "
                 f"worst {p.worst.kind} {p.worst.name}: error {p.worst.error:.2g}, allowed {p.worst.limit:.2g}" for p in self.plans]
        lines += [str(p.first_wrong) for p in self.plans if p.first_wrong]
        return "\n".join([*lines, *self.notes])


def worst_per_module(checks: Iterable[Check]) -> dict[str, Check]:
    """The check nearest to its limit, or farthest beyond, per module."""
    out: dict[str, Check] = {}
    for check in checks:
        if check.module not in out or check.badness > out[check.module].badness:
            out[check.module] = check
    return out


def _plan_data(p: PlanCheck) -> dict[str, Any]:
    return {"name": p.name, "ok": p.ok, "random": p.random, "ops": len(p.plan.ops), "ops_split": p.split,
            "objective_s": p.plan.objective_s, "first_wrong": p.first_wrong and asdict(p.first_wrong),
            "modules": {m or "(model)": {**asdict(c), "ok": c.ok} for m, c in sorted(p.worst_per_module().items())}}
