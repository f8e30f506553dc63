"""Models of timm, torchvision and diffusers, small and random: does each trace, plan, and compute what it should?

    pip install --no-deps timm diffusers 'torchvision==0.28.*' && pip install pillow
    python -m benchmarks.coverage.coverage_libraries                            # what has no line yet; may be interrupted
    python -m benchmarks.coverage.coverage_libraries --library diffusers        # one library
    python -m benchmarks.coverage.coverage_libraries --models resnet18,vgg11    # some models
    python -m benchmarks.coverage.coverage_libraries --table docs/coverage-libraries.md    # no run: write the page from the results so far

Of timm one model for each of its modules, of torchvision two, without detection (the number of boxes depends on the numbers), of diffusers ten classes;
two blocks of each run of equal ones (zoo/shorten.py). Each is verified as coverage_models.py does it: one training step with the mean square of the
outputs as loss, planned for a device so slow that splitting always pays, all ranks in one process, losses, gradients and updated weights compared. Exit code 1
when one is wrong. torchvision's wheel is for torch with CUDA, and transformers does not load beside it: install these into an environment of their own,
or with `pip install --target FOLDER` and run with PYTHONPATH=FOLDER.

A model's result is a line of zoo/libraries.jsonl, with its date and commit; several runs add lines, and the page has the latest of each model.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.coverage.coverage_models import PLANS, commit, examined, run_all, shuffled, warm_up
from benchmarks.coverage.zoo.build import Example, short
from benchmarks.coverage.zoo.libraries import libraries
from benchmarks.coverage.zoo.page import STAGES, table
from benchmarks.coverage.zoo.shorten import shortened, without_noise

MESHES = ("d=4", "dp=2,tp=2")
RESULTS = ROOT / "benchmarks" / "coverage" / "zoo" / "libraries.jsonl"
KEPT = ("family", "stage", "why", "meshes")
"""Of what is known of a model, that which its line says."""
PIP = "    pip install --no-deps timm diffusers 'torchvision==0.28.*' && pip install pillow"


def examine(name: str, library: str, meshes: Sequence[str], plans: Sequence[str]) -> dict[str, Any]:
    """Everything about one model as data; `stage` says how far it came."""
    found: dict[str, Any] = {"family": name, "stage": "no model", "why": ""}
    torch.manual_seed(0)
    try:
        model, inputs = libraries()[library]()[name]()
    except Exception as e:
        return found | {"why": short(e)}
    model = shortened(without_noise(model), inputs)
    result = examined(_Called(model, {}, library, own_loss=False, positional=inputs), found, meshes, plans)
    return {k: result[k] for k in KEPT if k in result}


class _Called(Example):
    """An example with positional inputs before the target of its loss."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], scheme: str, own_loss: bool, positional: tuple[Any, ...] = ()) -> None:
        super().__init__(model, inputs, scheme, own_loss)
        object.__setattr__(self, "positional", positional)

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.positional, torch.zeros(()))


def earlier(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest line of every model, by library and name: several have a resnet18."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(r["library"], r["family"]): r for r in map(json.loads, lines)}


def page(path: Path, results: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """docs/coverage-libraries.md."""
    lines = ["# Models of other libraries", "",
             "Written by `python -m benchmarks.coverage.coverage_libraries --table docs/coverage-libraries.md` from `benchmarks/coverage/zoo/libraries.jsonl`, which has a line",
             "for each run of a model; the latest counts.", "",
             "Of timm one model for each of its modules, of torchvision two (without detection, where the number of boxes depends on the numbers), of diffusers",
             "ten classes; small images, random weights, no dropout, two blocks of each run of equal ones. One training step is traced, planned for a made-up device",
             "so slow that splitting always pays, and run with all four ranks in one process; loss, gradients and updated weights are compared with the model's own.", "",
             PIP, "    python -m benchmarks.coverage.coverage_libraries --library torchvision --mesh d=4", "",
             "Models that have no row were not run. torchvision's own compiled ops (boxes) are not loaded: its wheels are for torch with CUDA.", ""]
    for library in sorted({library for library, _ in results}):
        lines += _section(library, {name: r for (of, name), r in sorted(results.items()) if of == library})
    path.write_text("\n".join(lines))


def _section(library: str, mine: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of one library: how many reached each stage, which were verified, and why the others were not."""
    dates, of = sorted({r["date"] for r in mine.values()}), max(r["of"] for r in mine.values())
    commits = sorted({f"`{r['commit']}`" for r in mine.values()})
    lines = [f"## {library}", "", f"{len(mine)} of {of} models were run, {dates[0]}{f' to {dates[-1]}' if dates[1:] else ''}, commit{'s' * (len(commits) > 1)} "
             f"{', '.join(commits)}.", "",
             *table(("stage", "models"), [[text, str(n)] for stage, text in STAGES.items() if (n := sum(r["stage"] == stage for r in mine.values()))]), ""]
    for tried in sorted({tuple(r["meshes"]) for r in mine.values() if r["stage"] == "verified"}):
        names = [f"`{n}`" for n, r in mine.items() if r["stage"] == "verified" and tuple(r["meshes"]) == tried]
        lines += [f"Verified on {' and '.join(f'`{m}`' for m in tried)}: {', '.join(names)} ({len(names)}).", ""]
    whole = sorted({op for r in mine.values() for m in r.get("meshes", {}).values() for op in m.get("unruled", ())})
    lines += [f"Ops without a rule, which run whole: {', '.join(f'`{op}`' for op in whole)}.", ""] if whole else []
    rest = [[f"`{n}`", STAGES[r["stage"]], _here(r["why"])[:240].replace("|", "\\|")] for n, r in mine.items() if r["stage"] != "verified"]
    return lines + ([*table(("model", "stage", "why"), rest), ""] if rest else [])


def _here(why: str) -> str:
    """Files of the libraries without where they are installed."""
    return re.sub(r"\S*/(?=(torchvision|timm|diffusers)/)", "", why)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Models of timm, torchvision and diffusers: traced, planned, verified.")
    parser.add_argument("--library", action="append", choices=tuple(libraries()), help="default: all three")
    parser.add_argument("--models", help="comma separated; default: all")
    parser.add_argument("--mesh", action="append", help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--minutes", type=float, help="start no model after this long")
    parser.add_argument("--time-limit", type=float, default=120.0, help="CPU seconds for one model")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB for one model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line for each run of a model; default: %(default)s")
    parser.add_argument("--again", help="run models whose line has this stage once more")
    parser.add_argument("--table", type=Path, help="write this page from the results, and run nothing")
    return parser.parse_args()


def chosen(known: Mapping[str, Any], wanted: str | None) -> list[str]:
    """The models asked for, in the order asked for; all, if none are."""
    return [name for name in wanted.split(",") if name in known] if wanted else shuffled(known)


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    if options.table:
        page(options.table, earlier(options.results))
        return 0
    done = {n for n, r in earlier(options.results).items() if not options.again or r["stage"] not in options.again.split(",")}
    todo = [(name, library) for library in options.library or libraries()
            for name in chosen(libraries()[library](), options.models) if options.models or (library, name) not in done]
    warm_up()
    today = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit()}
    facts = {library: {"library": library, "of": len(libraries()[library]()), **today} for library in {library for _, library in todo}}
    return run_all(((facts[library], (name, library, options.mesh or MESHES, PLANS)) for name, library in todo), options, examine)



if __name__ == "__main__":
    sys.exit(main())
