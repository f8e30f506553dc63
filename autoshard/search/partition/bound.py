"""A bound on the seconds of a step: these stages cannot be faster in this schedule.

With f, b, w the seconds of forward, backward and its weight part, c the hops, M micro-batches, at most n_s of them in flight at stage s:

    early(s) = sum_{k<s} f_k + c_k    passes before stage s can begin;   late(s) = sum_{k<s} b_k + c_k    after it has ended
    away(s)  = sum_{k>s} (f_k + b_k) and the hops behind s: from the end of a forward of s to the begin of its backward, at least
    work     early + M sum (f + b + w) + once, of a rank from its first stage on
    path     early + M sum (f + b) + late + once of stage 0: the last gradient still goes back to the begin
    turns    early + max(work before its first backward, f + away) + work from there to its last forward
             + max(work after that, away + b) + late: the first backward waits for a gradient, and so does the last
    Little   early + M (f + b + away) / n + late: M stays of so many seconds, at most n at a time

The largest of them over stages and ranks is the bound.
"""
from __future__ import annotations

import numpy as np

from autoshard.search.partition.chain import Chain, Course, whole


def bounds(chain: Chain, course: Course, cuts: np.ndarray) -> np.ndarray:
    """Of each row of `cuts`."""
    forward, backward, weight, once = (whole(t, cuts) for t in (chain.forward, chain.backward, chain.weight, chain.once))
    to_next = np.where(course.crosses, chain.hop_forward[cuts[:, 1:-1]], 0.0)
    to_last = np.where(course.crosses, chain.hop_backward[cuts[:, 1:-1]], 0.0)
    early, late = _before(forward, to_next), _before(backward, to_last)
    both, m = forward + backward, course.microbatches
    away = _behind(both, to_next + to_last)
    end = late + once[:, :1]
    terms = [early + m * both + end, early + m * (both + away) / course.in_flight + end]
    firsts = np.zeros(course.stages, dtype=np.int64)
    for stages in course.of_rank:
        first, busy = stages[0], both[:, stages].sum(1)
        terms.append((early[:, first] + m * busy + end[:, first])[:, None])
        terms.append((early[:, first] + m * (busy + weight[:, stages].sum(1)) + once[:, stages].sum(1))[:, None])
        firsts[stages] = first
    done = np.einsum("nt,sjt->jns", forward, course.turns[:, :, 0]) + np.einsum("nt,sjt->jns", backward, course.turns[:, :, 1])
    weights = np.einsum("nt,sjt->jns", weight, course.turns[:, :, 2])
    begun = np.maximum(early[:, firsts] + done[0] + weights[0], early + forward + away)
    drained = np.where(course.drains, away + backward + end, 0.0)
    ended = np.maximum.reduce([done[2] + weights[2], done[2] + end[:, firsts], drained])
    return np.concatenate([*terms, begun + done[1] + weights[1] + ended], 1).max(1)


def _before(stage: np.ndarray, hop: np.ndarray) -> np.ndarray:
    """Per stage, the sum over stages and hops before it."""
    return np.concatenate([np.zeros((len(stage), 1)), np.cumsum(stage[:, :-1] + hop, 1)], 1)


def _behind(stage: np.ndarray, hop: np.ndarray) -> np.ndarray:
    """Per stage, the sum over stages and hops behind it."""
    steps = stage[:, 1:] + hop
    return np.concatenate([np.cumsum(steps[:, ::-1], 1)[:, ::-1], np.zeros((len(stage), 1))], 1)
