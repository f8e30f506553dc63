"""A cluster profile with one of its numbers changed: what a faster link or a larger memory would be worth is asked of it.

Numbers go by their path: `device.memory_bandwidth`, `device.peak` (of all dtypes), `device.peak.bfloat16`, `links.infiniband.bandwidth`.
Where a profile has measured curves, these decide instead of a bandwidth or a peak rate. Then a curve changes with the number that it stands for:
its first point is taken as the fixed part, and what is above it is divided by the factor. A link's in-switch reductions change with its bandwidth.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from math import inf
from typing import Any

from autoshard.base.typed_data import as_data
from autoshard.cost.cluster import VERSION, Cluster
from autoshard.errors import ClusterError, UsageError
from autoshard.rules.family import Family

Change = Callable[[float], float]
"""From a number to what it would be."""
TABLES = ("device.peak", "device.efficiency", "device.bandwidth_efficiency")
"""Tables whose numbers may change together."""
MAY_BE_ZERO = ("overlap.eta", "overlap.interference", "device.allocator_slack")
SHOWN = 3
ALSO_CALLED = {"flops": "device.peak", "flop": "device.peak", "capacity": "device.memory_capacity", "memory": "device.memory_capacity"}
"""What people write at the end of a path, and what they mean."""


def changeable(cluster: Cluster) -> tuple[str, ...]:
    """Paths of the numbers that may be changed."""
    return (*(t for t in TABLES if _at(_tables(cluster), t)), *(path for path, _ in _leaves(_tables(cluster), "")))


def number_at(cluster: Cluster, path: str) -> float | None:
    """The number at a path; None for a table. Raises UsageError for a path that is not there, naming those that are near."""
    found = _at(_tables(cluster), path)
    if isinstance(found, (int, float)):
        return float(found)
    if path not in changeable(cluster):
        raise UsageError(f"{path!r} is no number of cluster {cluster.name}: {nearest(path, changeable(cluster))}")
    return None


def nearest(path: str, known: tuple[str, ...]) -> str:
    """`"did you mean ...? There are ..."`."""
    last = path.rpartition(".")[2]
    alike = (*get_close_matches(path, known, SHOWN, 0.7), *(k for k in known if k.rpartition(".")[2] == last))
    near = [ALSO_CALLED[last]] if last in ALSO_CALLED else list(dict.fromkeys(alike))[:SHOWN]
    all_there_are = ", ".join(k for k in known if k.rpartition(".")[0] not in TABLES)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}There are {all_there_are}; of a table also one number, as device.peak.float32"


def changed(cluster: Cluster, path: str, change: Change) -> Cluster:
    """The profile with the number at `path` (or all numbers of a table) changed. Raises UsageError for a path that is not there, ClusterError for
    a number that is not physical."""
    number_at(cluster, path)
    tables = _tables(cluster)
    home, _, name = path.rpartition(".")
    inside = _at(tables, home) if home else tables
    old = inside[name]
    factors = {path: _factor(path, old, change)} if not isinstance(old, dict) else {
        f"{path}.{k}": _factor(f"{path}.{k}", v, change) for k, v in old.items()}
    inside[name] = change(old) if not isinstance(old, dict) else {k: change(v) for k, v in old.items()}
    for each, factor in factors.items():
        _follow(tables, each, factor)
    links = [{"name": name, **{k: v for k, v in link.items() if v != inf}} for name, link in tables["links"].items()]
    return Cluster.from_snapshot({"version": VERSION, "name": f"{cluster.name} with other numbers", "description": cluster.description,
                                  **tables, "links": links})


def _factor(path: str, old: float, change: Change) -> float:
    new = change(old)
    if path in MAY_BE_ZERO and new >= 0:
        return 1.0
    if new <= 0:
        raise ClusterError(f"{path} would be {new:g}; it was {old:g}, and must stay positive")
    return new / old


def _follow(tables: dict[str, Any], path: str, factor: float) -> None:
    """What changes with a number: measured curves that stand in its place, reductions in a switch. Raises ClusterError."""
    room, _, rest = path.partition(".")
    if room == "links":
        name, _, number = rest.partition(".")
        link = tables["links"][name]
        if number == "bandwidth":
            link["measured"] = {kind: _faster(points, factor) for kind, points in link["measured"].items()}
            if link["in_network"]:
                link["in_network"]["bandwidth"] *= factor
        elif link["measured"] and number in ("overhead", "efficiency", "oversubscription"):
            raise ClusterError(f"{path} plays no part: collectives of this link are measured; change links.{name}.bandwidth or .latency")
    if room == "device":
        _follow_device(tables["device"], rest, factor)


def _follow_device(device: dict[str, Any], number: str, factor: float) -> None:
    curves = device["measured"]
    if not curves or number in ("memory_capacity", "allocator_slack") or number.startswith("host_link"):
        return
    single = [key for key in curves if "::" in key]
    if single or not (number.startswith("peak.") or number == "memory_bandwidth"):
        raise ClusterError(f"device.{number} plays no part where ops are measured ({', '.join(single or curves)}); change device.peak or "
                           "device.memory_bandwidth of a profile without curves of single ops")
    dtype, heavy = number.partition(".")[2], {f.value for f in Family if f.heavy}
    for key, points in curves.items():
        family, _, own = key.partition("/")
        if (family in heavy) == bool(dtype) and (not dtype or not own or own == dtype):
            curves[key] = _faster(points, factor)


def _faster(points: list[list[float]], factor: float) -> list[list[float]]:
    """A curve whose seconds above those of its first point are divided."""
    first = points[0][1]
    return [[amount, first + (seconds - first) / factor] for amount, seconds in points]


def _tables(cluster: Cluster) -> dict[str, Any]:
    """The numbers as nested tables, links by name."""
    data = as_data(cluster, Cluster)
    links = {link["name"]: {k: v for k, v in link.items() if k != "name"} for link in data["links"]}
    return {"device": data["device"], "links": links, "overlap": data["overlap"]}


def _leaves(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for key, inner in value.items():
        place = f"{path}.{key}".lstrip(".")
        if isinstance(inner, dict) and key != "measured":
            yield from _leaves(inner, place)
        elif isinstance(inner, (int, float)) and not isinstance(inner, bool) and inner != inf:
            yield place, inner


def _at(tables: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(tables, dict) or part not in tables:
            return None
        tables = tables[part]
    return tables
