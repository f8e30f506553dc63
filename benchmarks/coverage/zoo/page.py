"""docs/coverage.md from what the two coverage commands found."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.coverage.zoo.shrink import NEITHER

Results = Mapping[str, Mapping[str, Any]]
STAGES = {"verified": "verified on all meshes", "wrong": "wrong numbers",
          "other": "computes something else when traced or compiled than in eager mode",
          "failed": "traced; refused when planned or run",
          "built": "built; refused by the trace", "no model": "no small model that trains by itself",
          "limit": "stopped by the limits on time or memory"}
OPS, FAMILIES = "## Sharding rules against torch's op samples", "## Architecture families of transformers"
TRIED = ("verified", "wrong", "other", "failed", "built")


def write(path: Path, models: Results, known: Mapping[str, Any], ops: Mapping[str, Any] | None, commit: str, odd: Results | None = None) -> None:
    """`models`: a result per family; `known`: all families; `ops`: what coverage_ops.py wrote, if it ran: else the page keeps what it says of ops;
    `odd`: results with sizes that ranks do not divide."""
    before = path.read_text().splitlines() if path.exists() else []
    lines = ["# Coverage", "",
             f"{time.strftime('%Y-%m-%d %H:%M')} UTC, commit {commit}, torch {torch.__version__}, transformers "
             f"{transformers.__version__}. Written by `python -m benchmarks.coverage.coverage_models --table docs/coverage.md`.", "",
             *(op_section(ops, models) if ops or OPS not in before else before[before.index(OPS):before.index(FAMILIES)]),
             *model_section(models, known), *odd_section(odd or {}, models)]
    path.write_text("\n".join(lines) + "\n")


# ---- ops

def op_section(ops: Mapping[str, Any] | None, models: Results) -> list[str]:
    head = [OPS, "",
            "`python -m benchmarks.coverage.coverage_ops` traces every sample of torch's `op_db` forward and backward, as it would a",
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
    return [FAMILIES, "", *runs(models), "",
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
            *whole_section(models, known),
            "### Loss left out", "", "The model was traced and verified without labels, because its own loss cannot be one graph:", "",
            *listed((f, r["loss_refused"]) for f, r in sorted(models.items()) if r.get("loss_refused")), "",
            "### Not built from a config alone", "", *reasons(models, known, ("no model",)), "",
            "### Not run yet", "", ", ".join(f for f in known if f not in models) or "None."]


def runs(models: Results) -> list[str]:
    """When and at which commits the families were run."""
    counts = Counter((r.get("date", ""), r.get("commit", "")) for r in models.values())
    return ["Families by date and commit of their latest run: " + ", ".join(f"{n} of {day} {commit}" for (day, commit), n in sorted(counts.items())) + "."]


def whole_section(models: Results, known: Mapping[str, Any]) -> list[str]:
    """Families that are not counted as verified, and what fallback="replicate" makes of them."""
    tried = {f: [m["outcome"] for m in models[f]["whole"].values()] for f in known if f in models and models[f].get("whole")}
    good = [f for f, outcomes in tried.items() if set(outcomes) == {"verified"}]
    return ["### With submodules that run whole", "",
            f'Of the families above {len(tried)} were tried with `fallback="replicate"`, where a submodule that reads data runs whole on every rank. They are '
            f"not counted as verified; {len(good)} compute the right numbers on all meshes: {', '.join(good) or 'none'}.", ""] if tried else []


def odd_section(models: Results, friendly: Results) -> list[str]:
    """What vocabularies and heads that ranks do not divide give; `friendly`: what the other sizes gave."""
    if not models:
        return []
    tried = {f: r for f, r in sorted(models.items()) if r["stage"] in (*TRIED, "limit")}
    unbuilt = [(f, r["why"]) for f, r in sorted(models.items()) if f not in tried and r["why"] != NEITHER]
    counts = Counter(r["stage"] for r in tried.values())
    good = {f: r for f, r in tried.items() if r["stage"] == "verified"}
    both = sum(len(r["odd"]) == 2 for r in good.values())
    rest = [f for f, r in sorted(friendly.items()) if r["stage"] == "verified" and f not in models]
    return ["", "## With a vocabulary of 251 and 6 heads", "", *runs(models), "",
            "`python -m benchmarks.coverage.coverage_models --odd`: every vocabulary of at least 251 has 251 words, heads are 6, and features are multiples of 6.",
            "Where a config has only one of both, that one is changed; families with neither, and those that cannot be built so, are left out.", "",
            f"{len(models)} families looked at, {len(tried)} built and tried, {counts['verified']} verified ({both} of them with both sizes), "
            f"{counts['wrong']} wrong: {len(good) / max(len(tried), 1):.1%} of those built. {len(models) - len(tried) - len(unbuilt)} have neither heads nor a "
            f"vocabulary, {len(unbuilt)} cannot be built so. {len(rest)} of the families that verify above were not run so.", "",
            *table(("outcome", "families"), [[text, str(counts[s])] for s, text in STAGES.items() if counts[s]]), "",
            "Verified: " + ", ".join(good) + ".", "",
            *listed((f, r["why"]) for f, r in tried.items() if r["stage"] != "verified"), "",
            "### Not built with these sizes", "", *(listed(unbuilt) or ["None."]), "",
            "### Not run with these sizes", "", ", ".join(rest) or "None."]


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
