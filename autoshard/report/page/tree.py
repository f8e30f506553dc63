"""The modules of a plan as a tree, equal repeated layers folded: what the HTML report opens and closes."""
from __future__ import annotations

from typing import Any

from autoshard.base import quantities
from autoshard.base.plan import Plan
from autoshard.report.collapse import Folded, is_folded
from autoshard.report.what import TensorRow, tensor_row, tensors

ACTIVATION = "(layer)"
LONE = {"input": "inputs", "output": "results"}


def tree(plan: Plan) -> list[dict[str, Any]]:
    """Nodes with `name`, `copies`, `output` (what the module makes, or null), `tensors` (its weights) and `children`."""
    root = _node("")
    for row in tensors(plan):
        *path, leaf = steps(row)
        node = root
        for name in path:
            node = node["children"].setdefault(name, _node(name))
        drawn = _tensor(tensor_row(plan, row, leaf))
        node["copies"] = max(node["copies"], row.copies if any(map(_repeats, path)) else 1)
        if leaf == ACTIVATION:
            node["output"] = drawn
        else:
            node["tensors"].append(drawn)
    return _listed(root)["children"]


def steps(row: Folded) -> list[str]:
    """The names from the root down to a tensor; the number of a layer stays with its list: `layers.*`, `attn`, `weight`."""
    if row.payload[0] in LONE:
        return [LONE[row.payload[0]], row.name]
    out: list[str] = []
    for part in row.parts:
        if out and (is_folded(part) or part.isdigit()):
            out[-1] += f".{part}"
        else:
            out.append(part)
    return out if len(out) > 1 else ["parameters", *out]


def _repeats(name: str) -> bool:
    return any(map(is_folded, name.split(".")))


def _node(name: str) -> dict[str, Any]:
    return {"name": name, "copies": 1, "output": None, "tensors": [], "children": {}}


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "children": [_listed(child) for child in node["children"].values()]}


def _tensor(row: TensorRow) -> dict[str, Any]:
    return {"name": row.name, "kind": row.kind, "shape": row.shape, "dtype": quantities.dtype(row.dtype), "spec": row.spec,
            "placement": row.placement, "copies": row.copies}
