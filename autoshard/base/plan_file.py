"""A plan as the text of its file: sorted-key JSON. The same plan gives the same bytes."""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from autoshard.base.plan import FORMAT, Plan
from autoshard.base.typed_data import as_data, read_as
from autoshard.errors import MeshError

OF_A_STAGE = ("memory", "timeline", "largest")
"""Fields of a stage that format 1, which has no stages, lists as fields of the plan."""
OLD_NAMES = {"in": "inputs", "out": "outputs"}
"""Of the specs of an op in format 1."""


def write_plan(plan: Plan) -> str:
    """The JSON text. Run times are left out."""
    data = as_data(replace(plan, timings={}), Plan)
    del data["timings"]
    if not plan.finer:
        del data["finer"]
    return msgspec.json.format(msgspec.json.encode(data, order="sorted"), indent=1).decode() + "\n"


def read_plan(text: str) -> Plan:
    """The inverse. Raises ValueError for text that is not a plan of this format or of an earlier one."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not JSON ({e})") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version not in (1, FORMAT) or type(version) is not int:
        raise ValueError(f"its format is {version!r:.60}; {FORMAT} is needed")
    plan = read_as(Plan, _with_stages(data) if version == 1 else data)
    wrong = [what for what, here in (("ops", plan.ops), ("stages", plan.stages)) if not here]
    if wrong:
        raise ValueError(f"it has no {wrong[0]}")
    if "notes" not in data:
        raise ValueError("notes is missing")
    try:
        plan.spec_mesh  # noqa: B018
    except MeshError as e:
        raise ValueError(f"finer: {e}") from None
    axes = {*plan.mesh.names, *plan.spec_mesh.names}
    for i, call in enumerate(plan.collectives):
        if not axes.issuperset(call.axis.split("+")):
            raise ValueError(f"collectives[{i}] runs over {call.axis!r}, and the axes are {', '.join(plan.mesh.names)}")
    if plan.finer and plan.pipeline is not None:
        raise ValueError("finer: axes of a plan with pipeline stages have no parts")
    device = plan.cluster.get("device", {})
    if not isinstance(device, dict) or not isinstance(device.get("name", ""), str):
        raise ValueError(f"cluster['device'] is {device!r:.60}")
    return plan


def _with_stages(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of format 1 as format 2 has it: one stage, of which the file does not say how long its windows take."""
    stage = {name: data.pop(name) for name in OF_A_STAGE if name in data}
    for op in data["ops"].values() if isinstance(data.get("ops"), dict) else ():
        if isinstance(op, dict):
            op |= {new: op.pop(old) for old, new in OLD_NAMES.items() if old in op}
    return {**data, "stages": [stage], "format": FORMAT}
