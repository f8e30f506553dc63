"""Every sharding rule, own or borrowed, against torch's own op samples (`op_db`), by the numeric oracle.

    python -m benchmarks.coverage.coverage_ops                                # everything: about half an hour on 2 cores
    python -m benchmarks.coverage.coverage_ops --ops softmax,linalg --dtypes float64,bfloat16
    python -m benchmarks.coverage.coverage_ops --minutes 5 --list missing
    python -m benchmarks.coverage.coverage_ops --models coverage-models.jsonl --results coverage-ops.json   # for docs/coverage.md

Every sample is traced like a model, forward and backward, so rules are tried on the calls they will meet. Each row of
each distinct call is tried on one mesh axis of every size in --sizes that divides it, and pairs of rows on two axes:
inputs are cut by the row, the op runs on every piece, outputs are put together and compared. Ops of the models in --models
(what coverage_models.py --targets found) that no sample reached are tried on the calls of such a model. Exit code 1 when a row is wrong.
"""
from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.base.graph import Call
from autoshard.base.spec import PSUM
from autoshard.base.spec import divides as fits
from autoshard.errors import AutoshardError
from autoshard.program.calling import Traced
from autoshard.program.interpret import values
from autoshard.program.trace import trace
from autoshard.rules import registry
from autoshard.rules.check.oracle import Wrong, check_rows, missing_rows
from autoshard.rules.check.samples import SAMPLES
from autoshard.rules.check.samples import build as build_sample
from autoshard.rules.check.samples_images import IMAGES
from autoshard.rules.check.samples_special import SPECIAL
from autoshard.rules.factors import factor_graph

DTYPES = ("float64", "float32", "bfloat16", "int64", "bool", "complex128")
SIZES = (2, 3, 4, 5)
BIGGEST = 100_000
"""Elements of the largest tensor of a call that is tried."""
UNSET_MEMORY = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "resize")


@dataclass
class Tally:
    """What was tried for one op overload."""

    origin: str = ""
    calls: int = 0
    rows: int = 0
    checks: int = 0
    undivided: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    missing: dict[str, Call] = field(default_factory=dict)
    searched: int = 0


class Sampled(nn.Module):
    """One sample as a model: its tensors are the inputs."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.rest = [None if isinstance(v, torch.Tensor) else v for v in leaves]
        self.at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
        self.tensors = tuple(leaves[i] for i in self.at)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self.rest)
        for i, t in zip(self.at, tensors, strict=True):
            leaves[i] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return [t for t in pytree.tree_leaves(self.op(first, *args, **kwargs)) if isinstance(t, torch.Tensor)]


def calls_of(op: Any, sample: Any, grad: bool) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Every aten call of the sample's forward and backward, with the tensors it meets.

    Raises AutoshardError for what cannot be one graph (its shape depends on data)."""
    model = Sampled(op, sample)
    tensors = tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in model.tensors)
    grad = grad and any(t.requires_grad for t in model.tensors)
    traced = trace(model, tuple(t.requires_grad_(was.requires_grad) for t, was in zip(tensors, model.tensors, strict=True))
                   if grad else tensors, training=grad, raw=True)  # the sample's own ops, also those that simplifying would fold
    yield from values_of_calls(Traced(factor_graph(traced.graph), traced.calling), {}, tuple(t.detach() for t in tensors), {})


def values_of_calls(traced: Traced, state: Any, args: Any, kwargs: Any) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Every call of a graph with the tensors it meets in a run; not those (embedding bags) whose tensors have other
    shapes in a run than in the trace."""
    graph = traced.graph
    tangents = {op.target: torch.randn(op.outputs[0].shape, dtype=op.outputs[0].dtype) for op in graph.of_kind("tangent")}
    found = values(traced, state, args, kwargs, tangents=tangents)
    wrong = {op.name for op in graph.of_kind("call") for t, m in zip(found[op.name], op.outputs, strict=True)
             if m is not None and tuple(t.shape) != m.shape}
    for op in (op for op in graph.of_kind("call") if op.name not in wrong and not wrong & {r.op for r in op.refs}):
        yield graph.calls[op.name], [found[r.op][r.index] for r in op.refs]


class Checker:
    """Tries rows and keeps the tallies; calls already seen are not tried again."""

    def __init__(self, sizes: Sequence[int], pairs: int, searches: int, per_op: int) -> None:
        self.sizes, self.pairs, self.searches, self.per_op = tuple(sizes), pairs, searches, per_op
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.seen: set[Call] = set()

    def check(self, call: Call, tensors: list[torch.Tensor]) -> None:
        tally = self.tallies[str(call.target)]
        tally.origin = tally.origin or registry.rule_of(call.target).origin
        if call in self.seen or tally.calls >= self.per_op or not feasible(call):
            return
        self.seen.add(call)
        tally.calls += 1
        try:
            rows, valued = registry.rows(call)[1:], has_values(call)
        except Exception as e:  # a rule that fails on a call is as wrong as a row
            return self._wrong(tally, Wrong(call, (), f"the rule raises {type(e).__name__}: {e}"))
        for row in rows:
            tally.rows += 1
            sizes = [n for n in self.sizes if divides(call, (row,), (n,))]
            tally.undivided += not sizes
            for n in sizes:
                self._try(tally, call, tensors, (row,), (n,), valued)
            if sizes:
                self._try(tally, call, tensors, (row,), (sizes[0],), valued, strided=True)
        for pair, sizes in self._pairs(call, rows):
            self._try(tally, call, tensors, pair, sizes, valued)
        if tally.searched < self.searches and valued and is_exact(call):
            tally.searched += 1
            self._search(tally, call, tensors)

    def _try(self, tally: Tally, call: Call, tensors: list[torch.Tensor], rows: Any, sizes: Any, valued: bool,
             strided: bool = False) -> None:
        if any(PSUM in row.inputs for row in rows) and any(map(extreme, tensors)):
            return
        tally.checks += 1
        found = check_rows(call, tensors, rows, sizes, valued, strided=strided)
        if found is not None:
            self._wrong(tally, found, f"{' (strided pieces)' if strided else ''} on {sizes}")

    def _wrong(self, tally: Tally, found: Wrong, how: str = "") -> None:
        tally.wrong.append(found)
        print(f"WRONG {found}{how} args {found.call.args} {found.call.kwargs}"[:700], flush=True)

    def _pairs(self, call: Call, rows: Sequence[Any]) -> Iterator[tuple[Any, tuple[int, int]]]:
        both = [(a, b) for a in rows for b in rows]
        random.Random(len(both)).shuffle(both)
        fitting = ((pair, sizes) for pair in both for sizes in ((2, 2), (2, 5), (5, 2)) if divides(call, pair, sizes))
        yield from (found for found, _ in zip(fitting, range(self.pairs)))

    def _search(self, tally: Tally, call: Call, tensors: list[torch.Tensor]) -> None:
        sharded = [n for m in call.inputs for n in m.logical_shape if n > 1]
        size = next((n for n in self.sizes if any(s % n == 0 for s in sharded)), 2)
        for row in missing_rows(call, tensors, size, limit=12):
            tally.missing.setdefault(f"{row.inputs} -> {row.outputs}", call)


def divides(call: Call, rows: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether all tensors divide evenly, and some tensor is cut or Partial."""
    ins, outs = tuple(zip(*(r.inputs for r in rows))), tuple(zip(*(r.outputs for r in rows)))
    metas = (*zip(call.inputs, ins), *zip(call.outputs, outs))
    return all(m is None or fits(m.logical_shape, spec, sizes) for m, spec in metas)


def feasible(call: Call) -> bool:
    """Small enough to try, and of a dtype that torch can add (the parts of a Partial)."""
    metas = [m for m in (*call.inputs, *call.outputs) if m is not None]
    return all(m.numel <= BIGGEST and m.dtype != torch.complex32 for m in metas)


def extreme(t: torch.Tensor) -> bool:
    """Near the largest number of its dtype, where already the parts of a Partial overflow."""
    return t.is_floating_point() and t.numel() > 0 and bool((t.abs() > torch.finfo(t.dtype).max / 1e6).any())


def has_values(call: Call) -> bool:
    """Whether the results are defined: not random, and not memory that nobody wrote."""
    name = call.target._schema.name.split("::")[-1]
    return torch.Tag.nondeterministic_seeded not in call.target.tags and name not in UNSET_MEMORY


def is_exact(call: Call) -> bool:
    return all(m is None or m.dtype not in (torch.bfloat16, torch.float16) for m in (*call.inputs, *call.outputs))


def op_samples(options: argparse.Namespace) -> Iterator[tuple[str, Any, Any, bool]]:
    """(name, op, sample, whether to differentiate) of torch's op_db. Private torch module: a test tool only."""
    from torch.testing._internal.common_methods_invocations import op_db
    words = [w for w in (options.ops or "").split(",") if w]
    for info in op_db:
        if words and not any(w in info.name for w in words):
            continue
        for dtype in options.dtypes.split(","):
            kind = getattr(torch, dtype)
            if kind not in info.dtypes:
                continue
            grad = info.supports_autograd and (kind.is_floating_point or kind.is_complex)
            torch.manual_seed(0)
            try:
                samples = list(info.sample_inputs("cpu", kind, requires_grad=grad))
            except Exception as e:  # some generators need packages or devices this machine lacks
                print(f"no samples of {info.name} {dtype}: {type(e).__name__}", file=sys.stderr)
                continue
            step = max(1, len(samples) // options.samples)
            yield from ((f"{info.name} {dtype}", info.op, s, grad) for s in samples[::step][:options.samples])


def own_samples(options: argparse.Namespace) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """The calls of autoshard's own rule tests."""
    if options.ops:
        return
    for sample in (*SAMPLES, *IMAGES, *SPECIAL):
        yield build_sample(sample)


def model_calls(path: Path, reached: set[str]) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Calls of ops that nothing reached so far, from the first model that uses each."""
    from benchmarks.coverage.zoo.build import CannotBuild, build, traced_variant
    from benchmarks.coverage.zoo.families import Candidate
    for line in path.read_text().splitlines():
        found = json.loads(line)
        wanted = set(found.get("targets", ())) - reached
        if not wanted:
            continue
        try:
            example = build(Candidate(found["config"], found["head"], found["class"]))
        except CannotBuild as e:  # another version of transformers made the file
            print(f"{found['family']} could not be built again: {e}", file=sys.stderr)
            continue
        example, traced, refused = traced_variant(example)
        if traced is None:
            print(f"{found['family']} does not trace any more: {refused}", file=sys.stderr)
            continue
        reached |= wanted
        state = {n: t.detach() for n, t in (*example.model.named_parameters(), *example.model.named_buffers())}
        yield from (c for c in values_of_calls(traced, state, example.args, example.inputs) if str(c[0].target) in wanted)


def sweep(options: argparse.Namespace, checker: Checker) -> Counter[str]:
    """Run everything asked for; what became of the samples."""
    outcome: Counter[str] = Counter()
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    for name, op, sample, grad in op_samples(options):
        if deadline and time.time() > deadline:
            outcome["left out: out of time"] += 1
            continue
        if options.verbose:
            print(name, flush=True)
        try:
            calls = list(calls_of(op, sample, grad))
        except AutoshardError as e:
            outcome["refused by the trace"] += 1
            if options.list == "refused":
                print(f"REFUSED {name}: {' '.join(str(e).split())[:200]}")
            continue
        except Exception as e:  # the sample itself does not run on a functional graph
            outcome["did not run"] += 1
            if options.list == "refused":
                print(f"DID NOT RUN {name}: {type(e).__name__} {' '.join(str(e).split())[:200]}")
            continue
        outcome["traced"] += 1
        for call, tensors in calls:
            checker.check(call, tensors)
    for call, tensors in own_samples(options):
        outcome["of autoshard's own"] += 1
        checker.check(call, tensors)
    if options.models:
        for call, tensors in model_calls(options.models, set(checker.tallies)):
            outcome["calls of models"] += 1
            checker.check(call, tensors)
    return outcome


def save(path: Path, checker: Checker, outcome: Counter[str]) -> None:
    """The figures as data."""
    ops = {op: {"origin": t.origin, "calls": t.calls, "rows": t.rows, "checks": t.checks, "undivided": t.undivided,
                "wrong": len(t.wrong), "missing": len(t.missing)} for op, t in sorted(checker.tallies.items())}
    command = f"python -m {' '.join([__spec__.name, *sys.argv[1:]])}"
    path.write_text(json.dumps({"command": command, "samples": dict(outcome.most_common()), "ops": ops}, indent=1))


def summary(checker: Checker, outcome: Counter[str]) -> str:
    tallies = checker.tallies
    lines = [f"{'rules':>10} {'ops':>6} {'calls':>7} {'rows':>7} {'checks':>8} {'wrong':>6} {'missing':>8}"]
    for origin in ("own", "dtensor", "replicate"):
        mine = [t for t in tallies.values() if t.origin == origin]
        lines.append(f"{origin:>10} {len(mine):6} {sum(t.calls for t in mine):7} {sum(t.rows for t in mine):7} "
                     f"{sum(t.checks for t in mine):8} {sum(len(t.wrong) for t in mine):6} {sum(len(t.missing) for t in mine):8}")
    lines.append("samples: " + ", ".join(f"{n} {what}" for what, n in outcome.most_common()))
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sharding rules against torch's own op samples.")
    parser.add_argument("--ops", help="names in op_db that contain one of these words, comma separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, default=12, help="samples per op and dtype")
    parser.add_argument("--calls", type=int, default=80, help="distinct calls per op overload")
    parser.add_argument("--sizes", type=lambda s: tuple(map(int, s.split(","))), default=SIZES)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of rows on two mesh axes per call")
    parser.add_argument("--searches", type=int, default=2, help="calls per op overload whose missing rows are searched")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--models", type=Path, help="results of coverage_models.py, to reach all ops of its models")
    parser.add_argument("--results", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--list", choices=("missing", "refused"), help="print each of them")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(argv)


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checker = Checker(options.sizes, options.pairs, options.searches, options.calls)
    outcome = sweep(options, checker)
    if options.list == "missing":
        for op, tally in sorted(checker.tallies.items()):
            for row, call in tally.missing.items():
                print(f"missing {op} {tuple(m.shape for m in call.inputs)} {row}")
    print(summary(checker, outcome))
    if options.results:
        save(options.results, checker, outcome)
    return int(any(t.wrong for t in checker.tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
