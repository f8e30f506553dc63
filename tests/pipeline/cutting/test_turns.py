"""Turns of all ranks against each other: every value arrives as itself, and no rank waits for ever, though values skip stages."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.base.turns import HERE, UNDER_WAY, Turn
from autoshard.cost.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut import Cut, cut
from autoshard.pipeline.cutting.cut_points import balanced
from autoshard.pipeline.cutting.split import split_backward
from autoshard.pipeline.microbatches.batch import traced
from autoshard.pipeline.pipelined import pipelined
from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.turns import turns_of
from tests.pipeline.cut_models import subject


@pytest.fixture(scope="module")
def model():
    """Every table's rows are read by the last stages alone."""
    return subject("dlrm", 8, 4)


def cut_into(model, stages: int) -> Cut:
    graph = model.traced.graph
    blocks = Blocks.of(graph)
    return cut(graph, balanced(blocks, load_cluster("cpu-gloo"), stages, None), blocks)


def stuck(made: Cut, turns: Sequence[Sequence[Turn]]) -> list[tuple[int, Turn]]:
    """Where ranks wait for ever, if a send is done when its receive is posted and at most `UNDER_WAY` are begun before. Fails where what
    arrives is another value than the one that is waited for."""
    channel = {hop.name: hop.channel for hop in made.hops}
    at, posted, sent = [0] * len(turns), defaultdict(list), defaultdict(list)

    def may_go(rank: int, turn: Turn) -> bool:
        value, key = (turn.value, turn.microbatch), (rank, turn.other, channel.get(turn.value))
        if turn.kind == "post":
            posted[turn.other, rank, key[2]].append(value)
        elif turn.kind == "send" and turn.other != HERE:
            if not turn.skips and len(sent[key]) - len(posted[key]) >= UNDER_WAY:
                return False
            sent[key].append(value)
        return all(arrived((name, turn.microbatch), rank) for name in turn.takes)

    def arrived(value: tuple[str, int], rank: int) -> bool:
        for key, waited in posted.items():
            if key[1] == rank and value in waited:
                place = waited.index(value)
                assert sent[key][place:place + 1] in ([], [value]), f"{sent[key][place]} arrives in place of {value}"
                return place < len(sent[key])
        return True  # of a stage on this rank

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(turns):
            while at[rank] < len(own) and may_go(rank, own[at[rank]]):
                at[rank] += 1
                moved = True
    return [(rank, own[at[rank]]) for rank, own in enumerate(turns) if at[rank] < len(own)]


@pytest.mark.parametrize(("ranks", "schedule", "chunks"), [
    (2, "zbv", 2), (2, "interleaved", 2), (2, "interleaved", 4), (3, "zbv", 2), (3, "interleaved", 2), (4, "1f1b", 1), (4, "zb1p", 1), (4, "zb2p", 1),
    (4, "gpipe", 1), (4, "interleaved", 2)])
def test_every_value_arrives_as_itself_and_no_rank_waits_for_ever(model, ranks: int, schedule: str, chunks: int) -> None:
    whole = cut_into(model, ranks * chunks)
    assert any(hop.skips for hop in whole.hops), "nothing skips a stage"
    for microbatches in (1, 2, 3, 4, 5, 8):
        table = with_transfers(make_schedule(schedule, ranks, microbatches, chunks))
        made = split_backward(whole) if table.split_backward else whole
        turns = [turns_of(table, made.stages, rank) for rank in range(ranks)]
        assert not stuck(made, turns), f"{microbatches} micro-batches"


def test_a_schedule_in_which_two_stages_have_another_order_is_refused(model, tmp_path) -> None:
    """Stage 0 begins with micro-batch 0, and stage 2, which reads of it, with 1."""
    rows = ["0F0,0F1,0B1,0B0", "1F1,1F0,1B1,1B0", "2F1,2F0,2B1,2B0", "3F1,3F0,3B1,3B0"]
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(rows) + "\n")
    what, blocks = subject("dlrm", 8, 2), Blocks.of(model.traced.graph)
    options = Pipeline(microbatches=2, schedule=str(path), cuts=tuple(blocks.names[i] for i in balanced(blocks, load_cluster("cpu-gloo"), 4, None)))
    graph = traced(what.model, what.batch, {}, options, loss_fn=what.loss).graph
    with pytest.raises(UsageError, match=r"stage \d reads .* of stage 0, and the schedule runs micro-batches of one in the order \[0, 1\] and of the "):
        pipelined(graph, parse_mesh("pp=4"), options)
