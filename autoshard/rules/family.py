"""What kind of work an op does, and everything that follows from it: a family is one member here.

A family without numbers of its own in cluster profiles is priced like another one (`priced_as`); a profile that has a number for it,
or a measured curve, is followed all the same.
"""
from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Facts(NamedTuple):
    """What holds for every op of a family; `text` is its name in cluster profiles.

    priced_as    the family whose numbers it is priced with where a profile has none of its own; "": every profile must have them
    free         takes no time: the value lies in the buffer of what the op reads
    heavy        counts FLOP, and its time can hide communication; the others are too short or memory-bound
    weighted     reads a parameter that a plan by hand splits on a tensor axis
    cheap        little compute: may join the decision unit of what it reads, and is recomputed first
    repeatable   gives the same values when it runs again, so that backward may recompute it
    any_strides  its kernels are right for tensors with any strides
    any_rows     likewise, for those whose last dim is the innermost in memory
    """

    text: str
    priced_as: str = ""
    free: bool = False
    heavy: bool = False
    weighted: bool = False
    cheap: bool = False
    repeatable: bool = True
    any_strides: bool = False
    any_rows: bool = False


class Family(StrEnum):
    """The families. Facts are attributes: `Family.MATMUL.heavy`."""

    free: bool
    heavy: bool
    weighted: bool
    cheap: bool
    repeatable: bool
    any_strides: bool
    any_rows: bool
    _priced_as: str

    MATMUL = Facts("matmul", heavy=True, weighted=True, any_strides=True)
    ATTENTION = Facts("attention", heavy=True, any_rows=True)
    CONV = Facts("conv", heavy=True, weighted=True)
    POINTWISE = Facts("pointwise", cheap=True, any_strides=True)
    REDUCTION = Facts("reduction", cheap=True, any_strides=True)
    NORM = Facts("norm", cheap=True)
    GATHER = Facts("gather", weighted=True)
    RANDOM = Facts("random", cheap=True, repeatable=False)
    COPY = Facts("copy", cheap=True, any_strides=True)
    VIEW = Facts("view", free=True, cheap=True, any_strides=True)

    def __new__(cls, text: str, priced_as: str, *facts: bool) -> Family:
        member = str.__new__(cls, text)
        member._value_, member._priced_as = text, priced_as
        for name, fact in zip(Facts._fields[2:], facts, strict=True):
            setattr(member, name, fact)
        return member

    @cached_property
    def priced_as(self) -> Family:
        """The family whose numbers every profile has."""
        return next(f for f in Family if f.value == self._priced_as).priced_as if self._priced_as else self

    @property
    def main(self) -> bool:
        """Whether it is what a module is there for: it names the module where one op must stand for it."""
        return self.heavy or self.weighted


PRICED = tuple(f for f in Family if f.priced_as is f and not f.free)
"""The families that have a number in every profile."""
