"""Cluster profiles in a terminal: the list, and every number of one with its source."""
from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from rich.console import Console
from rich.markup import escape

from autoshard.base import quantities
from autoshard.cost.cluster import Cluster, available, load_cluster
from autoshard.report.tables import report_console, section, table

HEADINGS = ("name", "version", "description")


def show_all(console: Console | None = None) -> None:
    """One line per built-in profile, and per variant of one."""
    rows = table("!cluster", "device", ">memory", "links (innermost first)")
    for name in available():
        cluster = load_cluster(name)
        rows.add_row(*summary(cluster))
        for variant in cluster.variants:
            rows.add_row(f"{name}:{variant}", load_cluster(f"{name}:{variant}").description, "", "")
    (console or report_console()).print(section("Cluster profiles", rows))


def listed() -> list[dict[str, Any]]:
    """Built-in profiles and variants for machines: name, description, device, bytes of its memory, and links, the innermost first, with bytes/s and
    how many devices one of them joins (None: no limit)."""
    profiles = [profile for name in available() for profile in (name, *(f"{name}:{v}" for v in load_cluster(name).variants))]
    return [_listed(profile, load_cluster(profile)) for profile in profiles]


def _listed(profile: str, cluster: Cluster) -> dict[str, Any]:
    links = [{"name": x.name, "bandwidth": x.bandwidth, "devices": None if x.devices == inf else x.devices} for x in cluster.links]
    return {"name": profile, "description": cluster.description, "device": cluster.device.name, "memory": cluster.device.memory_capacity,
            "links": links}


def summary(cluster: Cluster) -> tuple[str, str, str, str]:
    """(name, device, memory, links) as the list shows them."""
    links = ", ".join(f"{x.name} {quantities.rate(x.bandwidth)}" + (f" x {x.devices:g}" if x.devices != inf else "")
                      for x in cluster.links)
    return cluster.name, cluster.device.name, quantities.size(cluster.device.memory_capacity), links


def show_one(name: str, console: Console | None = None) -> None:
    """Every number of the profile `name` (or of a TOML file) in its own unit. Raises ClusterError."""
    cluster = load_cluster(name)
    rows = table("number", ">value", "source")
    sources = {path.lstrip("."): source for path, source in cluster.sources}
    for path, value in numbers({k: v for k, v in cluster.snapshot().items() if k not in HEADINGS}):
        rows.add_row(escape(path), escape(f"{value:g}" if isinstance(value, float) else str(value)),
                     escape(sources.get(path, "")))
    console = console or report_console()
    console.print(section(cluster.name, escape(cluster.description)))
    console.print(section("Seconds, bytes, bytes/s and FLOP/s", rows))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested tables as (dotted path, value); a measured curve is one leaf."""
    if isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value):
        yield path, f"{len(value)} points"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{i}]")
    else:
        yield path, value
