"""A cluster as the text of a profile."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from autoshard.cost.cluster import Cluster


def profile_text(cluster: Cluster, source: str) -> str:
    """TOML that `load_cluster` reads back; `source` is where every number is from."""
    return tomli_w.dumps(_rounded({**cluster.snapshot(), "source": source}))


def _rounded(value: Any) -> Any:
    """Six digits are more than a measurement has."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
