"""What an output of the graph is for, and what it belongs to: the only place that knows the text of it.

Plans and messages name outputs by that text ("user:0", "grad:wq.weight", "mutation:bn.running_mean"); code asks for `role` and `name`.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Role(StrEnum):
    """Why a value leaves the graph; the value of a member is its name in plans."""

    GRADIENT = "grad"
    """Of the parameter or input with the output's name."""
    USER = "user"
    """A result of the model; the output's name is its index."""
    MUTATION = "mutation"
    """The new value of the buffer or parameter with the output's name."""
    SEND = "send"
    """What one stage of a pipeline sends to another; the output's name is that of the wire."""


AS_STORED = (Role.GRADIENT, Role.MUTATION)
"""Of outputs that lie, and are padded, as the parameter (input, buffer) with their name."""


@dataclass(frozen=True)
class Output:
    """The target of an output op."""

    role: Role
    name: str | int

    @cached_property
    def _text(self) -> str:
        return f"{self.role}:{self.name}"

    def __str__(self) -> str:
        return self._text

    @property
    def shown(self) -> str:
        """The name for users, in seeds and reports: results of the model are "output:0", "output:1" and so on."""
        return f"output:{self.name}" if self.role is Role.USER else str(self)

    @staticmethod
    def parse(text: str) -> Output:
        """The output with this text."""
        role, _, name = text.partition(":")
        return Output(Role(role), int(name) if role == Role.USER else name)
