"""Formats numbers for reports. Inside autoshard all numbers are in seconds and bytes; only reports round."""
from __future__ import annotations

from math import isfinite


def seconds(value: float | None) -> str:
    """`0.00123` -> `"1.23 ms"`."""
    if value is None:
        return "-"
    if not isfinite(value):
        return "infinite"
    if value == 0:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns"


def size(value: float | None) -> str:
    """Bytes with a binary prefix: `1536` -> `"1.5 KiB"`."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.95:
            return f"{value:.0f} B" if unit == "B" else f"{_three(value)} {unit}"
        value /= 1024
    return f"{_three(value)} TiB"


def rate(value: float) -> str:
    """Bytes per second with a decimal prefix, as data sheets write them: `9e11` -> `"900 GB/s"`."""
    for scale, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{value:.0f} B/s"


def share(part: float, whole: float) -> str:
    """Percent of `whole`; "" when there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""


def shape(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims)) if dims else "scalar"


def dtype(name: str) -> str:
    """`"bfloat16"` -> `"bf16"`; integers keep their name."""
    return "bf16" if name == "bfloat16" else name.replace("float", "fp") if name.startswith("float") else name


def amount(count: int | None) -> str:
    """A number of things with a decimal prefix: `124_000_000` -> `"124 M"`; "-" for none."""
    if not count:
        return "-"
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{_three(count / scale)} {unit}"
    return str(count)


def times(count: int) -> str:
    return f"x {count}" if count > 1 else ""


def _three(value: float) -> str:
    """About three significant digits, never in exponent form."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
