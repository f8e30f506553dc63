"""What is asked by `--what-if`, from its text: "links.infiniband.bandwidth=2x,mesh.dp=16".

    2x, 0.5x          times so much                 +10%, -20%       by so much
    400e9, 50GB/s     that number itself            +16GiB, -8GiB    so much more or less

A path is `memory` (bytes a rank may use), `mesh.AXIS` (its ranks), or a number of the cluster profile (`autoshard clusters show NAME` lists them).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from autoshard.base.mesh import Mesh
from autoshard.cost.change import changeable, changed, nearest
from autoshard.cost.cluster import Cluster
from autoshard.decide.options import UNITS, Options
from autoshard.errors import UsageError

MEMORY, AXIS = "memory", "mesh."
OTHER_UNITS = {"tflop": 1e12, "pflop": 1e15, "gflop": 1e9, "gbit": 1e9 / 8, "us": 1e-6, "ms": 1e-3, "s": 1.0}
NUMBER = re.compile(r"([+-]?)([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
EXAMPLE = "write 2x, 0.5x, +10%, -8GiB, or the number itself: 400e9, 96GiB, 50GB/s"


@dataclass(frozen=True)
class Scenario:
    """Changes that hold together, as (path, change of the number there). `text`: as it was asked."""

    text: str
    changes: tuple[tuple[str, Callable[[float], float]], ...]

    def applied(self, mesh: Mesh, options: Options, profile: Cluster) -> tuple[Mesh, Options, Cluster]:
        """Mesh, options and profile as they would be. Raises UsageError, ClusterError, MeshError."""
        for path, change in self.changes:
            if path.startswith(AXIS):
                mesh = _resized(mesh, path.removeprefix(AXIS), change, self.text)
            elif path == MEMORY:
                limit = change(options.memory_limit(profile))
                if limit <= 0:
                    raise UsageError(f"{self.text!r} leaves no memory: a rank may use {options.memory_limit(profile):.4g} bytes")
                options = replace(options, memory_budget=limit)
            else:
                if path == "device.memory_capacity" and options.memory_budget:
                    raise UsageError(f"{self.text!r}: the budget of a rank is given, so the device's capacity decides nothing; write {MEMORY}=...")
                _check_known(path, mesh, profile)
                profile = changed(profile, path, change)
        return mesh, options, profile


def scenario(text: str) -> Scenario:
    """Read a scenario. Raises UsageError."""
    changes: list[tuple[str, Callable[[float], float]]] = []
    for part in text.split(","):
        path, equals, value = (x.strip() for x in part.partition("="))
        if not (path and equals and value):
            raise UsageError(f"cannot read the change {part.strip()!r}; write PATH=CHANGE, for example links.infiniband.bandwidth=2x")
        if path in dict(changes):
            raise UsageError(f"{text!r} changes {path} twice; keep one")
        changes.append((path, _change(value, part.strip())))
    return Scenario(text.replace(" ", ""), tuple(changes))


def scenarios(texts: Iterable[str], mesh: Mesh, options: Options, profile: Cluster) -> tuple[Scenario, ...]:
    """Read scenarios, and see that each can be applied: before the long work. Raises UsageError, ClusterError, MeshError."""
    found = tuple(scenario(text) for text in dict.fromkeys(texts))
    for each in found:
        there, _, then = each.applied(mesh, options, profile)
        then.links_for(there)
    return found


def _change(text: str, where: str) -> Callable[[float], float]:
    """`"2x"` -> twice. Raises UsageError."""
    match = NUMBER.fullmatch(text.removesuffix("/s"))
    if match is None:
        raise UsageError(f"cannot read {text!r} in {where!r}; {EXAMPLE}")
    try:
        sign, number, unit = match[1], float(match[2]), match[3]
    except ValueError:
        raise UsageError(f"cannot read {text!r} in {where!r}; {EXAMPLE}") from None
    signed = -number if sign == "-" else number
    if unit == "x" and not sign and number > 0:
        return partial(_times, number)
    if unit == "%" and sign:
        return partial(_times, 1.0 + signed / 100.0)
    if re.fullmatch(r"[KMGT]b", unit):
        raise UsageError(f"{text!r} in {where!r} may mean bits or bytes; write {match[2]}{unit[0]}B for bytes, or Gbit, such as 400Gbit/s")
    scale = {**UNITS, **OTHER_UNITS}.get(unit.lower())
    if scale is None or unit in ("x", "%"):
        raise UsageError(f"cannot read {text!r} in {where!r}; {EXAMPLE}")
    return partial(_plus, signed * scale) if sign else partial(_instead, number * scale)


def _times(factor: float, value: float) -> float:
    return factor * value


def _plus(more: float, value: float) -> float:
    return value + more


def _instead(other: float, value: float) -> float:
    return other


def _resized(mesh: Mesh, axis: str, change: Callable[[float], float], text: str) -> Mesh:
    at = mesh.index(axis)
    size = change(mesh.sizes[at])
    if size < 1 or size % 1:
        raise UsageError(f"{text!r} gives mesh axis {axis!r} {size:g} ranks; a whole number is needed, and it has {mesh.sizes[at]}")
    return Mesh(mesh.names, tuple(int(size) if i == at else n for i, n in enumerate(mesh.sizes)))


def _check_known(path: str, mesh: Mesh, profile: Cluster) -> None:
    """Raises UsageError with all that may be changed."""
    known = changeable(profile)
    if path not in known:
        ours = (MEMORY, *(f"{AXIS}{name}" for name in mesh.names))
        raise UsageError(f"{path!r} is nothing that can be changed: {nearest(path, (*ours, *known))}")
