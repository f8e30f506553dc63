"""A cluster as the text of a profile."""
from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from autoshard.cost.cluster import VERSION, Cluster


def profile_text(cluster: Cluster, source: str) -> str:
    """TOML that `load_cluster` reads back; `source` is where every number is from."""
    data = cluster.snapshot()
    lines = [f"version = {VERSION}", f"name = {_text(cluster.name)}", f"description = {_text(cluster.description)}"]
    lines += _table("device", data["device"], source)
    for link in data["links"]:
        lines += _table("links", link, source, "[[{}]]")
    lines += _table("overlap", data["overlap"], source)
    return "\n".join(lines) + "\n"


def _table(path: str, data: Mapping[str, Any], source: str, heading: str = "[{}]") -> list[str]:
    """One table: its own values first, then the tables in it."""
    lines = ["", heading.format(path)]
    for key, value in data.items():
        if not isinstance(value, Mapping):
            lines.append(f"{_key(key)} = {_value(value, source)}")
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += _table(f"{path}.{_key(key)}", value, source)
    return lines


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else _text(name)


def _value(value: Any, source: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return f"{{ value = {_number(value)}, source = {_text(source)} }}"


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_number(v) for v in value) + "]"
    if not isfinite(value):
        raise ValueError(f"{value} cannot be written into a profile")
    return f"{value:.6g}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
