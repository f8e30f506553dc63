"""Plans kept on disk between runs, found by what they depend on: the program, the mesh, the options, the numbers of the cluster
profile (not its name or path), and the code that makes plans."""
from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard import errors
from autoshard.base.files import write_atomically
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster
from autoshard.errors import AutoshardError, UsageError
from autoshard.rules.outside import given_rules

log = logging.getLogger("autoshard")


def cache_folder(cache: bool | str | os.PathLike[str] = True) -> Path | None:
    """`$AUTOSHARD_CACHE` or ~/.cache/autoshard; a path as given; None when `cache` is False."""
    if cache is False:
        return None
    if cache is True:
        return Path(os.environ.get("AUTOSHARD_CACHE") or Path.home() / ".cache" / "autoshard")
    return Path(cache)


class HasText(Protocol):
    """What a plan was asked with, as text."""

    @property
    def text(self) -> str: ...


def planner_key(options: HasText, profile: Cluster) -> str:
    """Text of everything that decides a plan besides program and mesh, for `key_of` and for messages where ranks differ. Lines:
    the options without the profile's path, the profile's numbers, the code, rules of other packages if there are any."""
    numbers = hashlib.sha256(json.dumps(profile.snapshot(), sort_keys=True).encode()).hexdigest()[:16]
    own = f"{options.text}\ncluster {profile.name} with numbers {numbers}\nautoshard {source_digest()} on torch {torch.__version__}"
    return "\nrules of other packages ".join(filter(None, (own, given_rules())))


@cache
def source_digest(package: Path = Path(errors.__file__).parent) -> str:
    """Digest of the package's Python files, read once a process (about 20 ms). A constant to raise by hand would be forgotten when
    a rule or a price changes; which files can change a plan is not sorted out, since planning once more is cheap."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


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
