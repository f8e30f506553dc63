"""docs/coverage.md from what the two coverage commands found."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Results = Mapping[str, Mapping[str, Any]]
STAGES = {"verified": "verified on all meshes", "wrong": "wrong numbers",
          "other": "computes something else when traced or compiled than in eager mode",
          "failed": "traced; refused when planned or run",
          "built": "built; refused by the trace", "no model": "no small model that trains by itself",
          "limit": "stopped by the limits on time or memory"}
TRIED = ("verified", "wrong", "other", "failed", "built")


def write(path: Path, models: Results, known: Mapping[str, Any], ops: Mapping[str, Any] | None, commit: str) -> None:
    """`models`: a result per family; `known`: all families; `ops`: what coverage_ops.py wrote, if it ran."""
    lines = ["# Coverage", "",
             f"{time.strftime('%Y-%m-%d %H:%M')} UTC, commit {commit}, torch {torch.__version__}, transformers "
             f"{transformers.__version__}. Written by `python benchmarks/coverage_models.py --table docs/coverage.md`.", "",
             *op_section(ops, models), *model_section(models, known)]
    path.write_text("\n".join(lines) + "\n")


# ---- ops

def op_section(ops: Mapping[str, Any] | None, models: Results) -> list[str]:
    head = ["## Sharding rules against torch's op samples", "",
            "`python benchmarks/coverage_ops.py` traces every sample of torch's `op_db` forward and backward, as it would a",
            "model, and tries each row of each distinct call on mesh axes of every size that divides it, and pairs of rows on two",
            "axes: inputs cut by the row (contiguous and not; Partial ones into random parts), the op run on every piece, outputs",
            "put together and compared, shapes first. Random ops and unset memory: shapes only.", ""]
    if ops is None:
        return [*head, "Not run.", ""]
    tallies = ops["ops"]
    rows = [[origin, *(str(n) for n in sums([t for t in tallies.values() if t["origin"] == origin]))]
            for origin in ("own", "dtensor", "replicate")]
    used = sorted({t for r in models.values() for t in r.get("targets", ())})
    reached = [t for t in used if t in tallies]
    return [*head, f"`{ops['command']}`:", "",
            *table(("rules", "ops", "calls", "rows", "checks", "wrong", "missing"), rows), "",
            "Samples: " + ", ".join(f"{n:,} {what}" for what, n in ops["samples"].items()) + ".", "",
            "*missing*: rows that the oracle accepts and the rule lacks, found by a short search; the price of each is a slower",
            "plan, not a wrong one. *replicate*: no rule; such an op runs whole on every rank and the report says what it costs.",
            "A row that no tried size divides counts as a row and makes no checks.", "",
            f"The models below use {len(used)} ops; {len(reached)} of them were tried, with "
            f"{sum(tallies[t]['wrong'] for t in reached)} wrong rows."
            + (f" Not tried: {', '.join(f'`{t}`' for t in used if t not in tallies)}." if len(reached) < len(used) else ""), ""]


def sums(tallies: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{len(tallies):,}", *(f"{sum(t[k] for t in tallies):,}" for k in ("calls", "rows", "checks", "wrong", "missing"))]


# ---- models

def model_section(models: Results, known: Mapping[str, Any]) -> list[str]:
    counts = Counter(r["stage"] for f, r in models.items() if f in known)
    tried = sum(counts[s] for s in TRIED)
    share = f", {counts['verified'] / tried:.0%} of them verified" if tried else ""
    unclear = sum(r.get("clear") is False or any(m.get("clear") is False for m in r.get("meshes", {}).values())
                  for r in models.values())
    return ["## Architecture families of transformers", "",
            "A family is a folder of `transformers.models`. Each is built small and random from its config class (2 layers, width",
            "64 and the like), by the first of its heads on which one training step runs by itself; dropout is off. That step is",
            "traced, planned for a made-up device so slow that splitting always pays, and run with all ranks in one process;",
            "the loss, outputs, every gradient and every weight after an SGD step are compared with the model's own.", "",
            f"{len(known)} families; {tried} built and tried{share}, {counts['wrong']} wrong; "
            f"{len(known) - sum(counts.values())} not run yet. Errors that are not autoshard's own: {unclear}.", "",
            *table(("outcome", "families"), [[text, str(counts[s])] for s, text in STAGES.items()]), "",
            "*error*: the largest difference of a tensor over its norm. *collectives*: planned, per mesh. *loss*: the model's own,",
            "or the mean square of its outputs where it has none or its own was refused.", "",
            *model_table(models, known), "",
            "### Not verified", "", *reasons(models, known, ("wrong", "other", "failed", "built", "limit")), "",
            "### Loss left out", "", "The model was traced and verified without labels, because its own loss cannot be one graph:", "",
            *listed((f, r["loss_refused"]) for f, r in sorted(models.items()) if r.get("loss_refused")), "",
            "### Not built from a config alone", "", *reasons(models, known, ("no model",)), "",
            "### Not run yet", "", ", ".join(f for f in known if f not in models) or "None."]


def model_table(models: Results, known: Mapping[str, Any]) -> list[str]:
    meshes = next((tuple(r["meshes"]) for r in models.values() if r.get("meshes")), ())
    rows = []
    for family in known:
        r = models.get(family)
        if r is None or "class" not in r:
            continue
        found = r.get("meshes", {})
        verdicts = [found[m]["outcome"] if m in found else "" for m in meshes]
        errors = [m["error"] for m in found.values() if "error" in m]
        rows.append([family, r["class"], ", ".join(r["inputs"]), "own" if r["own_loss"] else "mean square", str(r.get("ops", "")),
                     *verdicts, f"{max(errors):.0e}" if errors else "",
                     ", ".join(str(n) for m in found.values() for n in m.get("collectives", ()))])
    return table(("family", "class", "inputs", "loss", "ops", *meshes, "error", "collectives"), rows)


def reasons(models: Results, known: Mapping[str, Any], stages: Sequence[str]) -> list[str]:
    return listed((f, models[f]["why"]) for f in known if f in models and models[f]["stage"] in stages) or ["None."]


def listed(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"* **{family}**: {tidy(why)}" for family, why in pairs]


def tidy(why: str) -> str:
    """One line without the machine's paths and without the advice that every such error repeats."""
    why = why.split(" replace Python control flow")[0]
    parts = [w.split("site-packages/")[-1] for w in why.split()]
    text = " ".join(parts).replace("|", "\\|").replace("<", "\\<")
    return text[:280] + ("..." if len(text) > 280 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
