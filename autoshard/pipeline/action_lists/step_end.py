"""Adds what happens once a step: REDUCE of a stage behind its last backward, and UPDATE of all stages at the end of a rank."""
from __future__ import annotations

from dataclasses import replace

from autoshard.pipeline.action_lists.actions import Action, ActionTable


def with_step_end(table: ActionTable) -> ActionTable:
    return replace(table, ranks=tuple(_ended(actions) for actions in table.ranks))


def _ended(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    last = {a.stage: place for place, a in enumerate(actions) if a.kind in ("B", "I", "W")}
    ended: list[Action] = []
    for place, action in enumerate(actions):
        ended.append(action)
        if last.get(action.stage) == place:
            ended.append(Action("REDUCE", action.stage))
    return (*ended, *(Action("UPDATE", stage) for stage in sorted(last)))
