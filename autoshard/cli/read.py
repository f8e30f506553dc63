"""Text of the command line -> values."""
from __future__ import annotations

from typing import Any

from autoshard.errors import UsageError


def parse_seeds(texts: list[str]) -> dict[str, tuple[Any, ...]]:
    """`["wq.weight=tp,-", "x=dp*tp,?"]` -> `{"wq.weight": ("tp", None), "x": (("dp", "tp"), "?")}`. Raises UsageError."""
    seeds: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, _, dims = text.rpartition("=")
        if not key or not dims:
            raise UsageError(f"cannot read seed {text!r}; write for example 'layers.*.wq.weight=tp,-'")
        if key in seeds:
            raise UsageError(f"seed {key!r} is given twice; keep one of them")
        seeds[key] = tuple(_seed_dim(d.strip()) for d in dims.strip("[]").split(","))
    return seeds


def _seed_dim(text: str) -> Any:
    if text in ("-", ""):
        return None
    return tuple(text.strip("()").split("*")) if "*" in text else text


def parse_precision(text: str | None) -> Any:
    """`"bf16"` or `"param=bf16,master=fp32,reduce=fp32"` -> Precision. Raises UsageError."""
    if text is None:
        return None
    from autoshard.precision import Precision

    pairs = [part.partition("=") for part in text.split(",")] if "=" in text else [("param", "=", text)]
    roles = {role.strip(): name.strip() for role, _, name in pairs}
    unknown = sorted(set(roles) - {"param", "master", "reduce"})
    if unknown:
        raise UsageError(f"precision has no part {unknown[0]!r}; write for example param=bf16,master=fp32,reduce=fp32")
    return Precision(**roles)
