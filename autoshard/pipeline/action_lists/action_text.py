"""Action tables as text and CSV, in the grammar of torch.distributed.pipelining: "2F0", "1SEND_F1", "0REDUCE_GRAD".

A row of the CSV is a rank. A file holds either computations alone or computations and transfers; torch calls them "compute_only" and
"compute_comms". UPDATE is a word of autoshard: torch has none, so leave it out of files for torch (`table.only(...)`).
"""
from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.actions import COMPUTE, KINDS, ONCE_A_STEP, Action, ActionTable, Kind

WORDS: dict[Kind, str] = {kind: "REDUCE_GRAD" if kind == "REDUCE" else kind for kind in KINDS}
KIND_OF = {word: kind for kind, word in WORDS.items()}
PATTERN = re.compile(r"(\d+)(" + "|".join(sorted(KIND_OF, key=len, reverse=True)) + r")(\d*)")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD)")


def text_of(action: Action) -> str:
    return f"{action.stage}{WORDS[action.kind]}{'' if action.microbatch is None else action.microbatch}"


def action_of(text: str) -> Action:
    """The action that `text` names; raises ScheduleError with the grammar."""
    match = PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"{text.strip()!r} is no action of a pipeline: write stage, kind and micro-batch, as in 2F0 or 1SEND_F1; "
                            f"kinds are {', '.join(KIND_OF)}")
    stage, word, microbatch = match.groups()
    kind = KIND_OF[word]
    if bool(microbatch) == (kind in ONCE_A_STEP):
        raise ScheduleError(f"{text.strip()!r}: {word} {'has no micro-batch' if microbatch else 'needs a micro-batch'}, "
                            f"as in {'0' + word if microbatch else '0' + word + '3'}")
    return Action(kind, int(stage), int(microbatch) if microbatch else None)


def actions_of(cells: Iterable[str]) -> Iterator[Action]:
    """The actions of one row. Empty cells are waiting; a pair that torch overlaps is two actions in a row; UNSHARD and RESHARD are
    of FSDP, whose gathers a plan places by itself."""
    for cell in (c.strip() for c in cells):
        if pair := PAIR.fullmatch(cell):
            yield from (action_of(part) for part in pair[1].split(";"))
        elif cell and not OF_FSDP.fullmatch(cell):
            yield action_of(cell)


def table_of(rows: Iterable[Iterable[str]]) -> ActionTable:
    """The table whose rank r has the actions of row r. It is not checked yet: see `check`."""
    ranks = tuple(tuple(actions_of(row)) for row in rows)
    computed = [(a, rank) for rank, actions in enumerate(ranks) for a in actions if a.kind in COMPUTE]
    if not computed:
        raise ScheduleError("the schedule computes nothing: a row per rank is needed, with actions as 0F0,0F1,0B0,0B1")
    rank_of = {action.stage: rank for action, rank in computed}
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise ScheduleError(f"the schedule has stage {max(rank_of)} but nothing of stage {missing[0]}: every stage must be computed")
    microbatches = 1 + max(a.microbatch for a, _ in computed if a.microbatch is not None)
    return ActionTable(ranks, tuple(rank_of[s] for s in range(len(rank_of))), microbatches)


def read_csv(path: str | Path) -> ActionTable:
    try:
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        return table_of(rows)
    except OSError as problem:
        raise ScheduleError(f"cannot read schedule {path}: {problem.strerror or problem}") from problem
    except (UnicodeDecodeError, csv.Error, ScheduleError) as problem:
        raise ScheduleError(f"{path}: {problem}") from problem


def write_csv(table: ActionTable, path: str | Path) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([text_of(a) for a in actions] for actions in table.ranks)
