"""Ranks that generate together: equal settings before, equal random numbers, one end for all, equal tokens after."""
from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.errors import AutoshardError, UsageError
from autoshard.runtime.carriers.gloo_messages import failed
from autoshard.runtime.ranks.agree import gathered, stay_away
from autoshard.runtime.ranks.place import Place

T = TypeVar("T")
Said = Mapping[int, Any]
"""What ranks said, by rank; the first one first."""


class Meets(Enum):
    """Where the other ranks wait for this one next."""

    STORE = "an exchange through the store"
    VOTE = "an all-reduce after a token"
    ELSEWHERE = "a collective of the model, or nothing that this rank could answer"


class Turns:
    """One call of `generate` on this rank. Ranks compare settings before the first call of the model, and tokens at the end. In between they make the
    same calls without asking, unless code of the user's (criteria, processors, streamers, loops: `own_code`) or a clock (max_time) may end them
    apart: then they vote between any two calls of the model, and after the last one. As a context, lets the others know of an exception that leaves
    `generate` on this rank."""

    def __init__(self, place: Place, timeout: float, own_code: bool) -> None:
        self.place, self.timeout, self.own_code = place, timeout, own_code
        self.several = place.mesh.size > 1
        self.meets = Meets.STORE
        self.begun = self.votes = self.timed = self.asked = False

    def in_model(self, call: Callable[[], T], settings: Mapping[str, Any]) -> T:
        """`call()`, in which ranks exchange what the model has split. `settings`: those of this `generate`, which are compared before the first call.
        Raises UsageError on all ranks where one is elsewhere: other settings, an end, an exception."""
        if not self.begun:
            self._begin(settings)
        elif self.votes and not self.asked:  # by a loop of the user's, which need not ask
            self._vote(True)
        self.asked, self.meets = False, Meets.ELSEWHERE
        out = call()
        self.meets = Meets.VOTE
        return out

    def go_on(self, unfinished: bool) -> bool:
        """Whether there is another token, on all ranks. A clock that runs out on one ends it for all. Raises UsageError on all ranks where one has
        ended or failed otherwise, and another has not."""
        if not self.begun:  # nothing has been agreed on yet, and nothing may differ
            return unfinished
        going = self._vote(unfinished, one_ends_all=self.timed) if self.votes else unfinished
        self.asked, self.meets = going, Meets.VOTE if going else Meets.STORE
        return going

    def compare(self, tokens: torch.Tensor) -> None:
        """Raises UsageError on all ranks where one has chosen other tokens, as a logits processor of its own makes it."""
        if self.several:
            mine = f"{tuple(tokens.shape)} {hashlib.blake2b(tokens.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()}"
            self._gathered("has ended generate()", mine, self._judge_tokens)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: Any, e: BaseException | None, trace: Any) -> None:
        voting = self.meets is Meets.VOTE and self.votes
        if e is None and voting:  # a loop of the user's that did not ask whether it goes on
            self._vote(False)
        elif not self.several or not isinstance(e, Exception):
            return
        elif self.meets is Meets.STORE:
            stay_away(self.place, e)
        elif voting:
            try:
                self._vote(False, f"{type(e).__name__}: {e}")
            except AutoshardError as told:
                e.add_note(f"autoshard ended generate() on all ranks: {told}")

    def _begin(self, settings: Mapping[str, Any]) -> None:
        """Every rank continues with the random numbers of the first one. Raises UsageError on all ranks where a setting differs: ranks would choose
        other tokens, or end at another one."""
        self.meets, self.begun, self.timed = Meets.ELSEWHERE, True, settings.get("max_time") is not None
        if self.several:
            said = {name: repr(value) for name, value in sorted(settings.items())}
            agreed = json.loads(self._gathered("begins generate()", [said, self.own_code or self.timed], self._judge_settings))
            self.votes = agreed["votes"]
            _draw_like(agreed["random"], self.place.device)

    def _vote(self, going: bool, failure: str = "", one_ends_all: bool = False) -> bool:
        """Whether all go on. Raises UsageError on all ranks where one has failed, or some end and others do not."""
        self.meets = Meets.ELSEWHERE
        votes = torch.tensor([bool(failure), going, not going, not one_ends_all], dtype=torch.int64, device=self.place.device)
        try:
            dist.all_reduce(votes, dist.ReduceOp.MAX, _torch.process_group(self.place.group("+".join(self.place.mesh.names))))
        except RuntimeError as e:
            told = failed(e)
            self.place.pulse.blame(told)
            raise told from e
        some_failed, some_go_on, some_end, some_need_all = votes.tolist()
        if some_failed or some_go_on and some_end and some_need_all:
            self._gathered("is between two tokens", [going, failure], _judge_ends)
        return not some_end

    def _gathered(self, where: str, said: Any, judge: Callable[[Said], str]) -> str:
        """What the first rank's `judge` makes of what all ranks have `said`. Raises UsageError on all ranks where they are not at the same place."""
        def judge_all(found: Iterator[tuple[int, str]]) -> str:
            told = {rank: json.loads(text) for rank, text in found}
            for rank, (there, _) in told.items():
                if there != where:
                    raise UsageError(f"rank {rank} {there}, and rank {self.place.ranks[0]} {where}; every rank must call generate() with the same "
                                     "arguments, and code of yours in it must do the same on every rank")
            return judge({rank: theirs for rank, (_, theirs) in told.items()})

        return gathered(self.place, json.dumps([where, said]), judge_all, self.timeout)

    def _judge_settings(self, said: Said) -> str:
        """Random numbers of the first rank, and whether ranks vote."""
        mine = said[self.place.ranks[0]][0]
        for rank, (theirs, _) in said.items():
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    raise UsageError(f"rank {rank} generates with {name}={theirs.get(name)} and rank {self.place.ranks[0]} with {mine.get(name)}; "
                                     "every rank must call generate() with the same arguments")
        return json.dumps({"votes": any(votes for _, votes in said.values()),
                           "random": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()})

    def _judge_tokens(self, said: Said) -> str:
        odd = [rank for rank, text in said.items() if text != said[self.place.ranks[0]]]
        if odd:
            raise UsageError(f"{_ranks(odd)} chose other tokens than rank {self.place.ranks[0]}, so the caches hold a mixture; logits processors "
                             "and stopping criteria must do the same on every rank")
        return ""


def _judge_ends(said: Said) -> str:
    failed = [f"rank {rank} failed between two tokens ({failure})" for rank, (_, failure) in said.items() if failure]
    if failed:
        raise UsageError(f"{', '.join(failed)}, and generate() ends on all ranks: their next token needs every rank")
    ended, going = ([rank for rank, (goes_on, _) in said.items() if goes_on is way] for way in (False, True))
    raise UsageError(f"{_ranks(ended)} would end after this token, and {_ranks(going)} would go on, which needs every rank; stopping criteria and "
                     "logits processors must do the same on every rank")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _draw_like(state: str, device: torch.device) -> None:
    """Go on with this state of the random numbers, in base64."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(torch.randint(2**62, ())))
