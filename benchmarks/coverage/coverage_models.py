"""Every architecture family of transformers, as a small random model: does it trace, plan, and compute what it should?

    python -m benchmarks.coverage.coverage_models                            # all families: hours on 2 cores; may be interrupted
    python -m benchmarks.coverage.coverage_models --families llama,bert,vit  # some
    python -m benchmarks.coverage.coverage_models --minutes 30 --every 3     # a third of them, for half an hour
    python -m benchmarks.coverage.coverage_models --odd --minutes 30         # with a vocabulary of 251 and 6 heads, which 4 ranks do not divide
    python -m benchmarks.coverage.coverage_models --table docs/coverage.md   # no run: write the page from the results so far

Each family runs in a process of its own with limits on time and memory, and adds one JSON line to zoo/families.jsonl (zoo/families-odd.jsonl), with its
date and commit; the latest line of a family counts, and families that have one are skipped unless they are named. With --fallback a family that the
trace refuses is tried with fallback="replicate" too, which is told apart and not counted. A family is built by the first of its heads and size schemes that runs one training step by itself
(see zoo/). The plans are made for a device so slow that splitting always pays (a plan of a tiny model on a real device
replicates everything, and so tests nothing), and random ones; `autoshard.verify` runs them with all ranks in one process and
compares the loss, the outputs, every gradient and every updated weight with the model's own. Exit code 1 when one is wrong.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from autoshard.errors import AutoshardError
from autoshard.verification.check import verify
from benchmarks import ROOT
from benchmarks.coverage.zoo.build import UNCLEAR, CannotBuild, Example, build, reason, short, traced_variant
from benchmarks.coverage.zoo.families import Candidate, candidates, families
from benchmarks.coverage.zoo.page import write
from benchmarks.coverage.zoo.shrink import NEITHER, ODD, SCHEMES, odd_sizes

MESHES = ("d=4", "dp=2,tp=2")
PLANS = ("split",)
MOST_HEADS = 4
"""Heads of a family to try before giving up."""
RESULTS, ODD_RESULTS = (ROOT / "benchmarks" / "coverage" / "zoo" / name for name in ("families.jsonl", "families-odd.jsonl"))
KEPT = ("family", "stage", "why", "clear", "class", "sizes", "odd", "own_loss", "loss_refused", "inputs", "ops", "meshes", "whole")
"""Of what is known of a family, that which its line says."""


def examine(family: str, types: Sequence[str], meshes: Sequence[str], plans: Sequence[str], ways: Collection[str] = ()) -> dict[str, Any]:
    """What is known of one family as data; `stage` says how far it came. `ways`: which of the options --odd, --fallback and --targets are given."""
    found: dict[str, Any] = {"family": family, "stage": "no model", "why": ""}
    example = None
    for candidate in candidates(tuple(types))[:MOST_HEADS]:
        try:
            example = build(candidate, ODD if "odd" in ways else SCHEMES)
        except CannotBuild as e:
            found["why"] = found["why"] or f"{candidate.class_name}: {e}"
            continue
        found |= described(candidate, example)
        break
    if example is None:
        return found | {"why": found["why"] or "transformers has a config for it and no model class"}
    if "odd" in ways and not found["odd"]:
        return {"family": family, "stage": "no model", "why": NEITHER}
    found |= examined(example, found, meshes, plans)
    if found["stage"] == "built" and "fallback" in ways:
        found["whole"] = {mesh: verified(example, mesh, plans, fallback="replicate") for mesh in meshes}
    return {k: found[k] for k in (*KEPT, *({"targets"} & set(ways))) if k in found}


def examined(example: Example, found: dict[str, Any], meshes: Sequence[str], plans: Sequence[str]) -> dict[str, Any]:
    """The model traced, planned and verified; `found` is what is known of it."""
    example, traced, refused = traced_variant(example)
    if refused:
        found |= {"why": refused, "clear": not refused.startswith(UNCLEAR)}
    if traced is None:
        return found | {"stage": "built"}
    graph = traced.graph
    if example.own_loss < found.get("own_loss", False):
        found |= {"own_loss": False, "loss_refused": refused}
    found |= {"why": "", "inputs": shapes(example)}
    found |= {"stage": "traced", "ops": len(graph.of_kind("call")),
              "targets": sorted({str(op.target) for op in graph.of_kind("call")}), "meshes": {}}
    for mesh in meshes:
        found["meshes"][mesh] = verified(example, mesh, plans)
    outcomes = [m["outcome"] for m in found["meshes"].values()]
    found["stage"] = next((s for s in ("wrong", "other", "failed") if s in outcomes), "verified")
    found["why"] = next((m["why"] for m in found["meshes"].values() if m["why"]), "")
    return found | ({"stage": "limit"} if "can't allocate memory" in found["why"] else {})  # of this run, not of the planner


def described(candidate: Candidate, example: Example) -> dict[str, Any]:
    return {"class": candidate.class_name, "head": candidate.head, "config": candidate.model_type, "sizes": example.scheme,
            "odd": sorted(odd_sizes(example.model.config.to_dict())), "own_loss": example.own_loss, "parameters": sum(p.numel() for p in example.model.parameters()), "why": "", "inputs": shapes(example)}


def shapes(example: Example) -> dict[str, list[int]]:
    return {k: list(v.shape) for k, v in example.inputs.items() if isinstance(v, torch.Tensor)}


def verified(example: Example, mesh: str, plans: Sequence[str], fallback: str = "error") -> dict[str, Any]:
    """One training step on one mesh under every kind of plan."""
    try:
        report = verify(example.model, mesh, example.args, example.inputs, loss_fn=example.loss_fn, plans=plans,
                        time_limit=10.0, optimizer="sgd", fallback=fallback)
    except Exception as e:
        return {"outcome": "failed", "why": reason(e), "clear": isinstance(e, AutoshardError)}
    checks = [c for p in report.plans for c in p.checks]
    bad = next((p for p in report.plans if not p.ok), None)
    why = "" if bad is None else f"{bad.name}: {worst(bad.checks)}; {bad.first_wrong}"
    outcome = "verified" if bad is None else "other" if bad.first_wrong.kind == "trace" else "wrong"
    return {"outcome": outcome, "why": why, "dtype": report.dtype, "checks": len(checks),
            "error": max(c.relative for c in checks), "collectives": [len(p.plan.collectives) for p in report.plans],
            "unruled": sorted({f.target for p in report.plans for f in p.plan.fallbacks}), "random": report.plans[0].random}


def worst(checks: Sequence[Any]) -> str:
    c = max(checks, key=lambda c: c.badness)
    return f"{c.kind} {c.name} is off by {c.relative:.1e}"


# ---- processes

def worker(queue: Any, gigabytes: float, seconds: float, examine: Callable[..., dict[str, Any]], *job: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds + time.process_time()),) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    started = time.process_time()
    try:
        result = examine(*job)
    except BaseException as e:  # also out of memory: the line must be written
        result = {"family": job[0], "stage": "no model", "why": short(e)}
    queue.put(result | {"cpu_s": round(time.process_time() - started, 1)})


def run_one(job: tuple[Any, ...], seconds: float, gigabytes: float, examine: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """`examine(*job)` in a fork, which has the libraries loaded already."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    class Once:
        put = staticmethod(send.send)

    process = context.Process(target=worker, args=(Once, gigabytes, seconds, examine, *job))
    process.start()
    send.close()
    try:
        answer = receive.recv() if receive.poll(10 * seconds) else {"stage": "limit", "why": f"stopped after {10 * seconds:.0f} s"}
    except EOFError:
        answer = {"stage": "limit", "why": f"the process died (more than {seconds:.0f} CPU seconds or {gigabytes:.0f} GiB)"}
    process.kill()
    process.join()
    return {"family": job[0]} | answer


def run_all(jobs: Iterable[tuple[dict[str, Any], tuple[Any, ...]]], options: argparse.Namespace, examine: Callable[..., dict[str, Any]]) -> int:
    """Each (what its line says besides, job) in a process of its own, until the minutes are over; its result is a line in a file and on the
    screen. The exit code."""
    deadline = time.time() + 60 * options.minutes if options.minutes else None
    wrong = 0
    for facts, job in jobs:
        if deadline and time.time() > deadline:
            break
        result = facts | run_one(job, options.time_limit, options.memory, examine)
        wrong += result["stage"] == "wrong"
        with options.results.open("a") as out:
            out.write(json.dumps(result) + "\n")
        print(f"{job[0]:32} {result['stage']:10} {result.get('cpu_s', 0):6.1f} s  {result['why'][:200]}", flush=True)
    return int(wrong > 0)


def warm_up() -> None:
    """Load what is loaded at first use, once, before the forks."""
    verify(torch.nn.Linear(8, 8), MESHES[0], (torch.randn(8, 8),), plans=PLANS)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Architecture families of transformers: traced, planned, verified.")
    parser.add_argument("--families", help="comma separated; default: all")
    parser.add_argument("--every", type=int, default=1, help="every N-th family only (in an order that favours none)")
    parser.add_argument("--offset", type=int, default=0, help="which of those: to share the work between processes")
    parser.add_argument("--mesh", action="append", help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--plans", default=",".join(PLANS), help="kinds of plans of `autoshard verify`")
    parser.add_argument("--minutes", type=float, help="start no family after this long")
    parser.add_argument("--time-limit", type=float, default=90.0, help="CPU seconds for one family (and ten times that of wall clock)")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB for one family")
    parser.add_argument("--odd", action="store_true", help="with a vocabulary of 251 and 6 heads, where a config has them")
    parser.add_argument("--fallback", action="store_true", help="what the trace refuses may run whole; told apart")
    parser.add_argument("--targets", action="store_true", help="note the ops of every graph, for coverage_ops.py --models")
    parser.add_argument("--results", type=Path, help=f"a line for each run of a family; default: {RESULTS.name}, with --odd {ODD_RESULTS.name}")
    parser.add_argument("--again", help="run families whose line has this stage once more; 'failed' includes 'built'")
    parser.add_argument("--ops", type=Path, default=Path("coverage-ops.json"), help="for --table: what coverage_ops.py found")
    parser.add_argument("--table", type=Path, help="write this page from the results, and run nothing")
    options = parser.parse_args(argv)
    options.results = options.results or (ODD_RESULTS if options.odd else RESULTS)
    return options


def earlier(path: Path) -> dict[str, dict[str, Any]]:
    """The latest line of every family."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {r["family"]: r for r in map(json.loads, lines)}


def shuffled(known: Mapping[str, Any]) -> list[str]:
    """A fixed order that is not the alphabet's, so that an interrupted run is a fair sample."""
    return sorted(known, key=lambda family: hashlib.md5(family.encode()).hexdigest())


def todo(options: argparse.Namespace, known: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    done = {f for f, r in earlier(options.results).items() if not options.again or r["stage"] not in options.again.split(",")}
    wanted = options.families.split(",") if options.families else shuffled(known)[options.offset::options.every]
    if unknown := [f for f in wanted if f not in known]:
        sys.exit(f"no such family: {', '.join(unknown)}; families are folders of transformers.models")
    yield from ((f, known[f]) for f in wanted if f not in done or options.families)


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip() or "unknown"


def main() -> int:
    options = arguments()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = families()
    if options.table:
        ops = json.loads(options.ops.read_text()) if options.ops.exists() else None
        write(options.table, earlier(options.results), known, ops, commit(), earlier(ODD_RESULTS))
        return 0
    warm_up()
    meshes, plans, facts = options.mesh or MESHES, options.plans.split(","), {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
    ways = [way for way in ("odd", "fallback", "targets") if getattr(options, way)]
    jobs = ((facts, (family, types, meshes, plans, ways)) for family, types in todo(options, known))
    return run_all(jobs, options, examine)


if __name__ == "__main__":
    sys.exit(main())
