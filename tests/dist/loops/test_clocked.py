"""A step by the clock on two processes: it computes what it did, and its tracks are the program that runs."""
from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.errors import UsageError
from autoshard.simulation.trace import COMPUTE, trace_events
from models import gpt
from tests.dist.harness import on_ranks


def compiled():
    torch.manual_seed(0)
    model, batch = gpt.build("tiny", layers=1, vocab=251, batch=4)
    seeds = {"input:0": ("d", None), "input:1": ("d", None), "h.*.mlp.c_fc.weight": ("d", None)}
    return autoshard.compile(copy.deepcopy(model), f"d={dist.get_world_size()}", batch, loss_fn=gpt.loss, seeds=seeds, cache=False), model, batch


def one_step():
    fast, model, batch = compiled()
    before = fast(*batch)
    before.backward()
    gradients = [p.grad.clone() for p in fast.parameters()]
    fast.zero_grad()
    with autoshard.clocked(fast) as clock:
        loss = fast(*batch)
        loss.backward()
        with clock.span("update"):
            pass
    same = torch.equal(loss, before) and all(torch.equal(a, p.grad) for a, p in zip(gradients, fast.parameters(), strict=True))
    many = len(clock.moments)
    fast(*batch)
    assert len(clock.moments) == many, "outside of the block nothing is clocked"
    issued = Counter((c.kind, c.axis, c.nbytes) for c in fast._current.issues)
    said = [[(m.what.call.kind, m.what.call.axis, m.what.call.nbytes) for m in clock.moments if getattr(m.what, "kind", "") == kind]
            for kind in ("call", "wait")]
    ops = {m.what.name for m in clock.moments if getattr(m.what, "kind", "") == "op"}
    tracks, simulated = clock.tracks(), autoshard.simulate(fast.plan, model, batch, loss_fn=gpt.loss, executed=True)
    return same, issued, said, ops, tracks, {w.name for t in simulated.tracks for w in t.spans if w.category == "op"}, simulated.tracks


def test_what_has_no_clock() -> None:
    lazy = autoshard.compile(torch.nn.Linear(4, 4), "d=1", cache=False)
    with pytest.raises(UsageError, match="there is no variant of the model to run; call it, or prepare"):
        with autoshard.clocked(lazy):
            pass
    lazy(torch.ones(2, 4))
    with autoshard.clocked(lazy) as clock:
        lazy(torch.ones(2, 4))
    (track,) = clock.tracks()
    assert {s.category for s in track.spans} == {"op"} and track.title == "rank 0, measured"


@pytest.mark.dist
def test_a_clocked_step_is_the_step() -> None:
    for same, issued, (calls, waits), ops, tracks, played, simulated in on_ranks(2, one_step):
        assert same, "loss and gradients to the bit"
        assert Counter(calls) == Counter(waits) == issued and issued
        assert played <= ops | {""}, f"ops that are simulated and never ran: {played - ops}"
        assert [(t.rank, t.measured, t.title) for t in tracks] == [(0, True, "rank 0, measured"), (1, True, "rank 1, measured")]
        for track in tracks:
            assert min(s.begin for s in track.spans) >= 0.0 and track.spans[-1].name == "update"
            for stream in {s.stream for s in track.spans}:
                spans = sorted((s.begin, s.end) for s in track.spans if s.stream == stream)
                assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:])), "one after the other"
            assert sum(s.stream != COMPUTE for s in track.spans) == len(calls)
        for a, b in zip(*([s for s in t.spans if s.category == "communication"] for t in tracks), strict=True):
            assert a.name == b.name and all(1e6 * x.end >= y.details["ready"] for x, y in ((a, b), (b, a))), "no rank has it before the other starts it"
        events = [*trace_events([*simulated, *tracks])]
        named = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name"}
        assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named, "simulated and measured ranks are processes of their own"
        assert len({e["pid"] for e in events}) == len(simulated) + 2
