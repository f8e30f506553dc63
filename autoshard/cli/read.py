"""Text of the command line -> values."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.errors import UsageError


def parse_seeds(texts: list[str], file: Path | None = None) -> dict[str, Any]:
    """`["wq.weight=tp,-"]` -> `{"wq.weight": Seed("tp,-", "--seed")}`, and the seeds of a YAML file before them.
    Raises UsageError, also for a key that is given twice."""
    seeds: dict[str, Any] = {}
    if texts or file:
        from autoshard.seeds.grammar import Seed
        from autoshard.seeds.yaml_file import load_seeds

        seeds |= load_seeds(str(file)) if file else {}
    for text in texts:
        key, _, dims = text.rpartition("=")
        if not key or not dims:
            raise UsageError(f"cannot read seed {text!r}; write for example 'layers.*.wq.weight=tp,-'")
        if key in seeds:
            raise UsageError(f"seed {key!r} is given twice, at {seeds[key].where} and on the command line; keep one of them")
        seeds[key] = Seed(dims, "on the command line")
    return seeds


def parse_precision(text: str | None) -> Any:
    """`"bf16"` or `"param=bf16,master=fp32,reduce=fp32"` -> Precision. Raises UsageError."""
    if text is None:
        return None
    from autoshard.base.precision import Precision

    pairs = [part.partition("=") for part in text.split(",")] if "=" in text else [("param", "=", text)]
    roles = {role.strip(): name.strip() for role, _, name in pairs}
    unknown = sorted(set(roles) - {"param", "master", "reduce"})
    if unknown:
        raise UsageError(f"precision has no part {unknown[0]!r}; write for example param=bf16,master=fp32,reduce=fp32")
    return Precision(**roles)


def parse_count(option: str, text: str) -> Any:
    """`"4"` -> 4; `"auto"` stays. Raises UsageError."""
    if text == "auto":
        return text
    if not (text.isdecimal() and int(text) >= 1):
        raise UsageError(f"{option} {text!r}: give a positive whole number, or auto")
    return int(text)


def parse_amounts(option: str, texts: list[str], example: str, whole: bool = False) -> dict[str, float]:
    """`["nvlink=0.5"]` -> `{"nvlink": 0.5}`; `whole`: names are whole numbers. Raises UsageError, also for a name that is given twice."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            value = float(amount)
        except ValueError:
            raise UsageError(f"{option} {text!r}: write for example {option} {example}") from None
        if not name or whole and not name.isdecimal():
            raise UsageError(f"{option} {text!r}: write for example {option} {example}")
        if name in found:
            raise UsageError(f"{option} names {name} twice; keep one")
        found[name] = value
    return found
