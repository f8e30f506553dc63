"""What the partition search asks of a schedule: the facts that its bound needs, and the true price of a partition by the player."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard.pipeline.action_lists.actions import KINDS, Action, ActionTable
from autoshard.pipeline.action_lists.network import NUMBER, Network, network_of
from autoshard.pipeline.action_lists.play import makespans
from autoshard.pipeline.action_lists.step_end import with_step_end
from autoshard.search.partition import Chain, Course
from autoshard.search.partition.chain import whole

STEPS = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
"""What an action adds to the micro-batches that wait for backward, and to those that wait for their weight part."""


def course_of(table: ActionTable) -> Course:
    stages_of = [[s for s in range(table.stages) if table.rank_of[s] == rank] for rank in range(len(table.ranks))]
    loads = tuple(_loads(actions, stages) for actions, stages in zip(table.ranks, stages_of))
    in_flight = np.ones(table.stages)
    for stages, rows in zip(stages_of, loads):
        in_flight[stages] = rows[:, 0].max(0)
    turns = np.stack([_turns(table, stage) for stage in range(table.stages)])
    drains = np.array([turns[stage, 1, 0, stage] > 0 for stage in range(table.stages)])
    return Course(table.rank_of, table.microbatches, in_flight, turns, drains, loads)


def _turns(table: ActionTable, stage: int) -> np.ndarray:
    """[part, kind, stage]; see `Course.turns`."""
    actions = table.ranks[table.rank_of[stage]]
    mine = [(a.kind, place) for place, a in enumerate(actions) if a.stage == stage]
    first_backward = min(place for kind, place in mine if kind in ("B", "I"))
    last_forward = max(place for kind, place in mine if kind == "F")
    turns = np.zeros((3, 3, table.stages))
    for place, action in enumerate(actions):
        part = (place >= first_backward) + (place > max(last_forward, first_backward - 1))
        turns[part, "FBW".index("B" if action.kind == "I" else action.kind), action.stage] += 1
    return turns


def _loads(actions: tuple[Action, ...], stages: list[int]) -> np.ndarray:
    """The counts that a rank holds after each forward and each input part of a backward, without those that another row has in full. A weight part,
    and a backward that has none, leave less than there was."""
    now = np.zeros((2, len(stages)), dtype=np.int64)
    rows = []
    for action in (a for a in actions if a.kind in STEPS):
        place = stages.index(action.stage)
        now[0, place] += STEPS[action.kind][0]
        now[1, place] += STEPS[action.kind][1]
        if action.kind in ("F", "I"):
            rows.append(now.copy())
    return uncovered(np.array(rows).reshape(len(rows), -1)).reshape(-1, 2, len(stages))


def uncovered(rows: np.ndarray) -> np.ndarray:
    """Those of distinct rows that no other one has in full."""
    distinct = np.unique(rows, axis=0)
    covered = (distinct[:, None] <= distinct[None]).all(2) & ~np.eye(len(distinct), dtype=bool)
    return distinct[~covered.any(1)]


def price_by_play(chain: Chain, table: ActionTable) -> Callable[[np.ndarray], np.ndarray]:
    """Makespans of rows of cuts, with what is done once a step."""
    return price_on(chain, network_of(with_step_end(table)))


def price_on(chain: Chain, network: Network) -> Callable[[np.ndarray], np.ndarray]:
    """The same on a network that is made already, with REDUCE and UPDATE in its table."""
    stages = network.table.stages

    def price(cuts: np.ndarray) -> np.ndarray:
        seconds = np.zeros((len(cuts), len(KINDS), stages))
        forward, backward, weight, once = (whole(t, cuts) for t in (chain.forward, chain.backward, chain.weight, chain.once))
        parts = {"F": forward, "B": backward + weight, "I": backward, "W": weight, "UPDATE": once}
        for kind, values in parts.items():
            seconds[:, NUMBER[kind]] = values
        seconds[:, NUMBER["SEND_F"], :-1] = chain.hop_forward[cuts[:, 1:-1]]
        seconds[:, NUMBER["SEND_B"], 1:] = chain.hop_backward[cuts[:, 1:-1]]
        return makespans(network, seconds)

    return price
