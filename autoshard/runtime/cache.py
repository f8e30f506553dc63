"""Plans kept on disk between runs, found by what they depend on."""
from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, UsageError
from autoshard.base.plan import Plan, write_atomically

log = logging.getLogger("autoshard")


def cache_folder(cache: bool | str | os.PathLike[str] = True) -> Path | None:
    """`$AUTOSHARD_CACHE` or ~/.cache/autoshard; a path as given; None when `cache` is False."""
    if cache is False:
        return None
    if cache is True:
        return Path(os.environ.get("AUTOSHARD_CACHE") or Path.home() / ".cache" / "autoshard")
    return Path(cache)


def key_of(*parts: Any) -> str:
    """Digest of graph hash, mesh, cluster, settings and fixed placements. Parts need a stable repr."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cached(folder: Path | None, key: str, make: Callable[[], Plan], check: Callable[[Plan], None] = lambda plan: None) -> Plan:
    """The plan stored under `key`, or `make()`, stored. A file that is no plan, or one that `check` raises AutoshardError
    for, is ignored with a warning, and a folder that cannot be written costs a warning, not the run."""
    if folder is None:
        return make()
    path = folder / f"{key}.json"
    if path.exists():
        try:
            plan = Plan.load(path)
            check(plan)
            log.info("plan from the cache: %s", path)
            return plan
        except AutoshardError as e:
            log.warning("ignoring cached plan %s: %s", path, e)
    plan = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, plan.to_json())
    except (OSError, UsageError) as e:
        log.warning("plan not cached: %s", e)
    return plan
