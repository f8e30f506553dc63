"""The public contest's JSON (IOPDDL) as a Problem, and solutions as JSON.

Costs are whole numbers; those around 10**18 mean "forbidden" and become infinite, the others are exact in float64."""
from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from autoshard.errors import ProblemError
from autoshard.search.problem import Edge, Intervals, Problem, Solution

T = TypeVar("T")
FORBIDDEN = 1e17
EXACT = 2.0**53


def read_problem(path: str | Path) -> Problem:
    """Read `problem.json` or `problem.json.gz`.

    Raises ProblemError when the file cannot be read, is not JSON, lacks a key, or its tables do not fit together."""
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise ProblemError(f"{path} is empty; a problem in the contest's JSON is needed")
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(f"{path} is not JSON: {error}") from error
    del text
    try:
        return parse_problem(data)
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error


def parse_problem(data: object) -> Problem:
    """A Problem from the parsed JSON. Raises ProblemError that names the node or edge."""
    body = _member(data, "problem", dict)
    nodes, edges = _member(body, "nodes", dict, "problem"), _member(body, "edges", dict, "problem")
    costs = _member(nodes, "costs", list, "nodes")
    sizes = _sizes(costs)
    flat = _costs(costs, "nodes.costs")
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    node_costs = tuple(flat[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    intervals = _intervals(nodes, sizes, body.get("usage_limit"))
    return Problem(node_costs, _edges(edges, sizes), intervals=intervals)


def _member(data: object, key: str, kind: type[T], where: str = "the file") -> T:
    if not isinstance(data, dict) or key not in data:
        raise ProblemError(f"{where} has no {key!r}")
    found = data[key]
    if not isinstance(found, kind):
        raise ProblemError(f"{key!r} in {where} must be a JSON {'object' if kind is dict else 'array'}")
    return found


def _sizes(lists: list[Any]) -> np.ndarray:
    for i, entry in enumerate(lists):
        if not isinstance(entry, list) or not entry:
            raise ProblemError(f"nodes.costs[{i}] must be a list with one cost per strategy")
    return np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))


def _numbers(lists: list[Any], what: str) -> np.ndarray:
    """All numbers of a list of lists, as float64."""
    try:
        return np.array(list(chain.from_iterable(lists)), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ProblemError(f"{what} must be lists of numbers{_first_odd(lists)}") from None


def _first_odd(lists: list[Any]) -> str:
    for i, entry in enumerate(lists):
        if not isinstance(entry, list) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in entry):
            return f"; look at entry {i}"
    return ""


def _costs(lists: list[Any], what: str) -> np.ndarray:
    flat = _numbers(lists, what)
    if np.isnan(flat).any():
        raise ProblemError(f"{what} contains NaN")
    finite = flat[flat < FORBIDDEN]
    if len(finite) and np.abs(finite).max() >= EXACT:
        raise ProblemError(f"{what}: {np.abs(finite).max():.0f} is neither below 2**53 nor around 10**18 (forbidden)")
    flat[flat >= FORBIDDEN] = np.inf
    return flat


def _intervals(nodes: dict[str, Any], sizes: np.ndarray, limit: object) -> Intervals | None:
    raw, usages = _member(nodes, "intervals", list, "nodes"), _member(nodes, "usages", list, "nodes")
    if len(raw) != len(sizes) or len(usages) != len(sizes):
        raise ProblemError(f"nodes has {len(sizes)} costs, {len(raw)} intervals and {len(usages)} usages: the counts must agree")
    spans = _pairs(raw, "nodes.intervals", "[from, to]")
    bad = np.flatnonzero((spans[:, 0] < 0) | (spans[:, 1] < spans[:, 0]))
    if len(bad):
        raise ProblemError(f"nodes.intervals[{bad[0]}] = {raw[bad[0]]}: times must not be negative, nor end before they begin")
    ragged = [i for i, (u, k) in enumerate(zip(usages, sizes, strict=True)) if not isinstance(u, list) or len(u) != k]
    if ragged:
        raise ProblemError(f"nodes.usages[{ragged[0]}] must have {sizes[ragged[0]]} entries, one per strategy")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
        raise ProblemError(f"usage_limit must be a number that is not negative, not {limit!r}")
    node = np.repeat(np.arange(len(sizes)), sizes)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    amount = _numbers(usages, "nodes.usages")
    if len(amount) and (amount.min() < 0 or not np.isfinite(amount).all()):
        raise ProblemError("nodes.usages contains a negative or infinite usage")
    strategy = np.arange(len(node)) - first
    used = (spans[node, 0] < spans[node, 1]) & (amount > 0)
    node, strategy, amount = node[used], strategy[used], amount[used]
    return Intervals(float(limit), node, strategy, spans[node, 0], spans[node, 1], amount)


def _pairs(raw: list[Any], what: str, shape: str) -> np.ndarray:
    for i, pair in enumerate(raw):
        if not isinstance(pair, list) or len(pair) != 2 or any(type(x) is not int for x in pair):
            raise ProblemError(f"{what}[{i}] must be two whole numbers {shape}")
    try:
        return np.array(raw, dtype=np.int64).reshape(-1, 2)
    except OverflowError:
        raise ProblemError(f"{what} contains a number beyond 64 bits") from None


def _edges(edges: dict[str, Any], sizes: np.ndarray) -> tuple[Edge, ...]:
    raw, costs = _member(edges, "nodes", list, "edges"), _member(edges, "costs", list, "edges")
    if len(raw) != len(costs):
        raise ProblemError(f"edges has {len(raw)} nodes and {len(costs)} costs: the counts must agree")
    ends = _pairs(raw, "edges.nodes", "[u, v]")
    bad = np.flatnonzero(((ends < 0) | (ends >= len(sizes))).any(axis=1) | (ends[:, 0] == ends[:, 1]))
    if len(bad):
        raise ProblemError(f"edges.nodes[{bad[0]}] = {raw[bad[0]]}: two different nodes from 0 to {len(sizes) - 1} are needed")
    expected = sizes[ends[:, 0]] * sizes[ends[:, 1]] if len(ends) else np.zeros(0, dtype=np.int64)
    for i, (table, count) in enumerate(zip(costs, expected.tolist(), strict=True)):
        if not isinstance(table, list) or len(table) != count:
            raise ProblemError(f"edges.costs[{i}] must have {count} entries, strategies of {raw[i][0]} x strategies of {raw[i][1]}")
    flat = _costs(costs, "edges.costs")
    index = {int(k): np.arange(k) for k in np.unique(sizes)}
    starts = np.concatenate([[0], np.cumsum(expected)]).tolist()
    out = []
    for i, (u, v) in enumerate(ends.tolist()):
        rows, cols = index[int(sizes[u])], index[int(sizes[v])]
        out.append(Edge(u, v, flat[starts[i]:starts[i + 1]].reshape(len(rows), len(cols)), rows, cols))
    return tuple(out)


def solution_json(solution: Solution) -> dict[str, Any]:
    """The keys of a solution file; numbers that do not exist (no choice, no bound) are null."""
    return {
        "choice": None if solution.choice is None else solution.choice.tolist(),
        "cost": _number(solution.cost),
        "bound": _number(solution.bound),
        "gap": _number(solution.gap),
        "status": solution.status.value,
        "seconds": round(solution.seconds, 3),
    }


def _number(x: float) -> int | float | None:
    if not np.isfinite(x):
        return None
    return int(x) if float(x).is_integer() and abs(x) < EXACT else float(x)


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file so that at any moment there is the old one, none, or a complete new one.

    Raises ProblemError when the place cannot be written."""
    path = Path(path)
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise ProblemError(f"{path} cannot be written: {error}") from error
