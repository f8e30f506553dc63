"""Variants of a cluster profile: the same machine under other software, named `profile:variant`.

`[variants.NAME]` in a profile's file holds the numbers that differ, at the places that they have in the file; tables of links go by the
link's name: `[variants.captured.links.nvlink.one_shot]`.
"""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from autoshard.errors import ClusterError

SEPARATOR = ":"


def split_name(text: str) -> tuple[str, str]:
    """(profile, variant or nothing) of `h100-dgx:captured` or `mine.toml:captured`. A colon of a path (`C:\\mine.toml`) is none of these.

    >>> split_name("mine.toml:captured")
    ('mine.toml', 'captured')
    """
    profile, _, variant = text.rpartition(SEPARATOR)
    return (profile, variant) if profile and variant.replace("-", "_").isidentifier() else (text, "")


def variants_of(raw: dict[str, Any], origin: str) -> dict[str, dict[str, Any]]:
    """Whole profiles by variant, as their file would hold them; takes `variants` out of `raw`. Raises ClusterError."""
    changes = raw.pop("variants", {})
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        raise ClusterError(f"{origin}: variants is not a table of tables; write [variants.NAME.device] with the numbers that differ")
    return {name: {**_changed(raw, change, f"{origin}: variants.{name}"), "name": f"{raw.get('name')}{SEPARATOR}{name}"}
            for name, change in changes.items()}


def pick(variants: Mapping[str, Any], name: str, origin: str) -> Any:
    """Raises ClusterError where there is no variant `name`."""
    if name not in variants:
        near = difflib.get_close_matches(name, variants, n=1, cutoff=0.3)
        have = f"did you mean {near[0]}?" if near else f"it has {', '.join(variants) or 'none'}"
        raise ClusterError(f"{origin} has no variant {name!r}; {have} (docs/add-a-cluster.md says how to add one)")
    return variants[name]


def _changed(table: Mapping[str, Any], change: Mapping[str, Any], where: str) -> dict[str, Any]:
    out = dict(table)
    for key, value in change.items():
        old = out.get(key)
        if isinstance(old, list) and isinstance(value, dict):
            out[key] = _changed_items(old, value, f"{where}.{key}")
        elif isinstance(value, dict) and "value" not in value and isinstance(old, dict):
            out[key] = _changed(old, value, f"{where}.{key}")
        else:
            out[key] = value
    return out


def _changed_items(items: list[Any], changes: Mapping[str, Any], where: str) -> list[Any]:
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if unknown := [name for name in changes if name not in names]:
        raise ClusterError(f"{where} changes {unknown[0]!r}, and the profile has {', '.join(map(str, names))}")
    return [_changed(item, changes.get(item.get("name"), {}), f"{where}.{item.get('name')}") if isinstance(item, dict) else item for item in items]
