"""A verification for people."""
from __future__ import annotations

from math import ceil, inf, log10
from typing import Any

from rich.text import Text

from autoshard.report.collapse import collapse
from autoshard.report.tables import report_console, section, table

MOST_ROWS = 40


def show(report: Any, ran_as: str) -> None:
    """Print a `verify.report.VerifyReport`."""
    console = report_console()
    console.print(section("Verified" if report.ok else "MISMATCH", _verdicts(report)))
    console.print(section("Largest error per module, as a part of what it is measured against", _modules(report)))
    for plan in report.plans:
        if plan.first_wrong:
            console.print(section(f"Plan {plan.name}", Text(str(plan.first_wrong))))
    for note in (f"Ran {ran_as}, {report.steps} step{'s' if report.steps > 1 else ''}, in {report.dtype} on mesh {report.mesh}; "
                 f"allowed: {report.tolerance:.0e}{_rounding(report)}.", *report.notes):
        console.print(Text(note[:1].upper() + note[1:]))


def _rounding(report: Any) -> str:
    """What else is allowed where the program has floats that round."""
    rounds = any(c.run != "sharded" and c.limit > report.tolerance * c.size for p in report.plans for c in p.checks)
    return " of layouts in float64, and the measured rounding where the program runs in its own dtypes" if rounds else ""


def _verdicts(report: Any) -> Any:
    out = table("Plan", "Verdict", ">Ops split", ">Tensors", "Worst", ">Error", ">Allowed")
    for p in report.plans:
        worst = p.worst
        out.add_row(p.name, Text("pass", style="green") if p.ok else Text("MISMATCH", style="bold red"),
                    f"{p.split} of {len(p.plan.ops)}", str(len(p.checks)), f"{worst.kind} {worst.name}", f"{worst.error:.1e}",
                    f"{worst.limit:.1e}")
    return out


def _modules(report: Any) -> Any:
    """One row per module, equal rows of repeated layers folded; a column per plan."""
    per_plan = [p.worst_per_module() for p in report.plans]
    names = sorted({m for found in per_plan for m in found}, key=_natural)
    rows = collapse((name or "(outputs)", tuple(_cell(found.get(name)) for found in per_plan)) for name in names)
    out = table("Module", *(f">{p.name}" for p in report.plans))
    for row in rows[:MOST_ROWS]:
        out.add_row(row.name, *row.payload)
    if len(rows) > MOST_ROWS:
        out.add_row(f"... {len(rows) - MOST_ROWS} more, see --json", *("" for _ in per_plan))
    return out


def _cell(check: Any) -> str:
    """The next power of ten: more says nothing, and folds less."""
    if check is None:
        return "-"
    text = "0" if check.error == 0 else f"1e{ceil(log10(check.relative)):+03d}" if check.relative < inf else "inf"
    return text if check.ok else f"{text} !"


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")] if name else []
