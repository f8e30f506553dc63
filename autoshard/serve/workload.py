"""What is served: how many sequences, how long a prompt, how many new tokens; and the levels of service that are asked for."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import UsageError

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LEVELS = ("tpot", "ttft")
"""Time per output token, and time to the first token."""


@dataclass(frozen=True)
class Workload:
    """Requests of a prompt of `prompt` tokens and `new` tokens each; caches hold `context` tokens. Raises UsageError."""

    prompt: int
    new: int
    context: int

    def __post_init__(self) -> None:
        for name in ("prompt", "new", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r}: give a positive number of tokens")
        if self.prompt + self.new - 1 > self.context:
            raise UsageError(f"a prompt of {self.prompt} tokens and {self.new} new ones need caches for {self.prompt + self.new - 1} tokens (the "
                             f"last one is not kept), and the context is {self.context}; give a larger context, or fewer tokens")

    @property
    def steps(self) -> int:
        """Calls of one token: the prompt gives the first new token."""
        return self.new - 1


@dataclass(frozen=True)
class Slo:
    """Levels of service in seconds; None: any."""

    tpot: float | None = None
    ttft: float | None = None

    def met_by(self, token_s: float, first_s: float) -> bool:
        return token_s <= (self.tpot or float("inf")) and first_s <= (self.ttft or float("inf"))

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`tpot=20ms,ttft=0.5s`. Raises UsageError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9.]+)\s*(us|ms|s)\s*", part)
            if not match or match[1] not in LEVELS or match[1] in found or not _positive(match[2]):
                raise UsageError(f"cannot read the service level {part.strip()!r}; write tpot=20ms (time per output token), ttft=500ms (time to the "
                                 "first token), or both with a comma, each with us, ms or s")
            found[match[1]] = float(match[2]) * UNITS[match[3]]
        return cls(**found)


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def parse_batches(text: str | Sequence[int]) -> tuple[int, ...]:
    """`"1,8,64"`, in rising order. Raises UsageError."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    try:
        found = sorted({int(part) for part in parts})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"cannot read the batches {text!r}; write numbers of sequences with commas: 1,8,64")
    return tuple(found)
