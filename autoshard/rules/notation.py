"""One line per op over logical dims: `rule("m k, k n -> m n")`.

A **letter** stands for a dim. In an input and an output: a shard passes. Only in inputs: each shard gives a
part of the output, so the output is Partial. Marks:

    k!     the dim stays whole            ...    any number of dims, aligned from the right, broadcasting
    1      a dim of size 1                ,      next operand of a product
    ~x y   the op is not linear in x y    +      next operand of a sum
    @k     a dim made of parts, or one of its parts: a shard takes its share of each part

Operands are the schema's tensor arguments in order; an argument that is None is skipped, a tensor list
repeats its term. A dim of size 1 broadcasts: it is replicated where its letter is sharded. A dim with several
factors gives one row per factor; operands that disagree share the factors up to and with the first that differs. Where one operand's
dim is made of parts and another's is not, the letter stays whole, unless it has the mark @.

`partial` says whether Partial(sum) passes: "each" operand of a product alone (a sum needs one in every
addend), "all" operands only together, or "none".
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod
from typing import Any, Literal

import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.spec import PMAX, PMIN, PSUM, Placement, R
from autoshard.rules.family import Family
from autoshard.rules.types import LocalImpl, Row, Rule

Passes = Literal["each", "all", "none"]
NAME = re.compile(r"@?\w+|\.\.\.\w*")
REDUCE = {"sum": PSUM, "max": PMAX, "min": PMIN}


def is_number(dtype: torch.dtype) -> bool:
    """Whether values of this dtype may be Partial: never int or bool."""
    return dtype.is_floating_point or dtype.is_complex


class NotationMismatch(ValueError):
    """The notation does not describe this call: wrong number of operands or dims."""


@dataclass(frozen=True)
class Term:
    """One operand: its letters, its addend (position between `+`), whether the op is linear in it."""

    letters: tuple[str, ...]
    addend: int = 0
    linear: bool = True


@dataclass(frozen=True)
class Notation:
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    whole: frozenset[str]
    text: str


@cache
def parse(text: str) -> Notation:
    """Raises ValueError when the line is malformed."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"notation {text!r} lacks '->'; write for example 'm k, k n -> m n'")
    whole: set[str] = set()

    def term(part: str, addend: int = 0) -> Term:
        linear = not part.strip().startswith("~")
        marked = part.strip().lstrip("~").split()
        whole.update(letter[:-1] for letter in marked if letter.endswith("!"))
        letters = tuple(letter.removesuffix("!") for letter in marked)
        if odd := next((letter for letter in letters if not NAME.fullmatch(letter)), ""):
            raise ValueError(f"notation {text!r} has {odd!r}, which is no name of a dim; '!' is behind one, 'k!', and '~' before an operand, '~m k'")
        if len(set(letters) - {"1"}) != len([letter for letter in letters if letter != "1"]):
            raise ValueError(f"notation {text!r} repeats a letter in {part.strip()!r}")
        return Term(letters, addend, linear)

    inputs = tuple(term(part, i) for i, group in enumerate(left.split("+")) for part in group.split(","))
    outputs = tuple(term(part) for part in right.split(","))
    return Notation(inputs, outputs, frozenset(whole | {"1"}), text)


@dataclass(frozen=True)
class Operand:
    """A term bound to a tensor of a call: one letter per tensor dim."""

    meta: TensorMeta
    letters: tuple[str, ...]
    addend: int = 0
    linear: bool = True
    places: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for d, letter in enumerate(self.letters):
            sizes = self.meta.logical_shape
            self.places[letter] = tuple((i, sizes[i]) for i in self.meta.logical_dims(d) if sizes[i] != 1 and i not in self.meta.part_dims)

    def parts(self, letter: str) -> int:
        """How many parts the letter's dim consists of."""
        return self.meta.parts_of(self.letters.index(letter)) if self.meta.part_dims else 1


@dataclass(frozen=True)
class Binding:
    """A notation bound to a call. `inputs[i]` is tensor input i; outputs that are None stay None.
    `constants` are the addends that have a number for an operand."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand | None, ...]
    whole: frozenset[str]
    constants: frozenset[int]

    @property
    def letters(self) -> tuple[str, ...]:
        """Shardable letters in order of appearance."""
        seen = dict.fromkeys(x for o in (*self.inputs, *self.outputs) if o for x in o.letters)
        return tuple(x for x in seen if x not in self.whole)


def bind(notation: Notation, call: Call) -> Binding:
    """Raises NotationMismatch."""
    bound: dict[int, Operand] = {}
    constants: set[int] = set()
    for term, value in zip(notation.inputs, _tensor_arguments(call, notation), strict=True):
        slots = [v for v in (value if isinstance(value, tuple) else (value,)) if v is not None]
        for slot in slots:
            if isinstance(slot, Slot):
                bound[slot.index] = _operand(term, call.inputs[slot.index], call, notation)
            else:
                constants.add(term.addend)
    if len(bound) != len(call.inputs) or len(notation.outputs) != len(call.outputs):
        raise NotationMismatch(f"notation {notation.text!r} does not fit {call.target} with {len(call.inputs)} "
                               f"tensor inputs and {len(call.outputs)} outputs")
    outputs = tuple(_operand(t, m, call, notation) if m is not None else None
                    for t, m in zip(notation.outputs, call.outputs, strict=True))
    inputs = tuple(bound[i] for i in range(len(bound)))
    whole = notation.whole
    if "..." in whole:
        whole |= {x for o in (*inputs, *outputs) if o for x in o.letters if x.startswith("...")}
    return Binding(inputs, outputs, whole, frozenset(constants))


def _tensor_arguments(call: Call, notation: Notation) -> list[Any]:
    """Values of the schema's tensor arguments, one per operand of the notation. An empty left side is one
    0-dim operand, or no operand for an op that takes no tensor."""
    values = [call.argument(a.name) for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    if not values and notation.inputs == (Term(()),):
        return [None]
    if len(values) != len(notation.inputs):
        raise NotationMismatch(f"notation {notation.text!r} has {len(notation.inputs)} operands, "
                               f"{call.target} takes {len(values)} tensors")
    return values


def _operand(term: Term, meta: TensorMeta, call: Call, notation: Notation) -> Operand:
    """Expand `...` to one letter per dim, numbered from the right so that operands align."""
    letters, ndim = term.letters, len(meta.shape)
    if "..." in letters:
        at, n = letters.index("..."), ndim - len(letters) + 1
        letters = letters[:at] + tuple(f"...{i}" for i in range(n, 0, -1)) + letters[at + 1:]
    if len(letters) != ndim:
        raise NotationMismatch(f"notation {notation.text!r} wants dims {' '.join(term.letters)!r} of {call.target}, "
                               f"got shape {meta.shape}")
    return Operand(meta, letters, term.addend, term.linear)


def letter_rows(b: Binding, reduce: Placement) -> Iterator[Row]:
    """One row per factor of every letter that is not whole."""
    for letter in b.letters:
        holding = [o for o in (*b.inputs, *b.outputs) if o and o.places.get(letter)]
        if not letter.startswith("@") and len({o.parts(letter) for o in holding}) > 1:
            continue
        for j in range(_common([o.places[letter] for o in holding])):
            def place(o: Operand | None) -> Placement | None:
                return o.places[letter][j][0] if o and o.places.get(letter) else None

            outputs = tuple(R if o is None else reduce if (p := place(o)) is None else p for o in b.outputs)
            held = [place(o) for o in b.inputs]
            if reduce not in outputs:
                yield Row(tuple(R if p is None else p for p in held), outputs)
                continue
            covered = {o.addend for o, p in zip(b.inputs, held, strict=True) if p is not None}
            for chosen in _partial_choices(b, covered):
                yield Row(tuple(p if p is not None else reduce if i in chosen else R for i, p in enumerate(held)),
                          outputs)


def _common(holders: Sequence[tuple[tuple[int, int], ...]]) -> int:
    """How many leading factors all holders can be sharded on: the equal ones and the first that differs."""
    n = min((len(h) for h in holders), default=0)
    for j in range(n):
        if len({h[j][1] for h in holders}) > 1:
            return j + 1
    return n


def _partial_choices(b: Binding, covered: set[int]) -> Iterator[tuple[int, ...]]:
    """Ways to have one Partial operand in every addend that is not covered yet."""
    addends = sorted({o.addend for o in b.inputs} | b.constants)
    options = [[i for i, o in enumerate(b.inputs) if o.addend == a and o.linear and is_number(o.meta.dtype)]
               for a in addends if a not in covered]
    return product(*options)


def linear_rows(b: Binding, passes: Passes) -> Iterator[Row]:
    """Rows that hand Partial(sum) through."""
    if passes == "none" or not b.inputs:
        return
    outputs = tuple(R if o is None else PSUM for o in b.outputs)
    choices = _partial_choices(b, set()) if passes == "each" else _together(b)
    for chosen in choices:
        yield Row(tuple(PSUM if i in chosen else R for i in range(len(b.inputs))), outputs)


def _together(b: Binding) -> Iterator[tuple[int, ...]]:
    linear = tuple(i for i, o in enumerate(b.inputs) if o.linear and is_number(o.meta.dtype))
    if linear and not b.constants:
        yield linear


def binding_rows(b: Binding, passes: Passes = "none", reduce: str = "sum") -> tuple[Row, ...]:
    """All rows of a bound notation, all-Replicate first."""
    whole = Row((R,) * len(b.inputs), (R,) * len(b.outputs))
    return (whole, *letter_rows(b, REDUCE[reduce]), *linear_rows(b, passes))


def binding_factors(b: Binding) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    """Factors of each output dim: those of the operand that has most of them."""
    def of(letter: str, size: int) -> tuple[int, ...]:
        found = [tuple(n for _, n in o.places[letter]) for o in b.inputs if letter in o.places]
        best = max((f for f in found if prod(f) == size), key=len, default=())
        return best if best else (size,)

    return tuple(None if o is None else tuple(of(x, n) for x, n in zip(o.letters, o.meta.shape, strict=True))
                 for o in b.outputs)


def contraction_flops(b: Binding, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """2 x the product of the local sizes of all letters (a multiply and an add each)."""
    sizes: dict[str, Any] = {}
    for o, local in zip((*b.inputs, *b.outputs), (*inputs, *outputs), strict=True):
        if o is None:
            continue
        for d, letter in enumerate(o.letters):
            if o.places[letter] and letter not in sizes:
                sizes[letter] = prod(local[i] for i in o.meta.logical_dims(d))
    return 2.0 * prod(sizes.values())


def rule(text: str | Callable[[Call], str], *, family: Family = Family.POINTWISE,
         partial: Passes | Callable[[Call], Passes] = "none", reduce: str = "sum",
         flops: Callable[..., Any] | None = None, local: LocalImpl | None = None,
         sizes: tuple[tuple[str, str], ...] = ()) -> Rule:
    """The rule of one notation line, or of a line made from the call (ops whose dims are arguments).

    reduce  what a letter found only in inputs does to the output: "sum", "max" or "min".
    flops   as in Rule; the matmul family gets `contraction_flops` by itself.
    Raises ValueError for a malformed line, NotationMismatch when a call does not fit it.
    """
    if isinstance(text, str):
        parse(text)

    def bound(call: Call) -> Binding:
        return bind(parse(text if isinstance(text, str) else text(call)), call)

    def rows(call: Call) -> tuple[Row, ...]:
        return binding_rows(bound(call), partial if isinstance(partial, str) else partial(call), reduce)

    if flops is None and family is Family.MATMUL:
        def flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
            return contraction_flops(bound(call), inputs, outputs)
    return Rule(rows=rows, factors=lambda call: binding_factors(bound(call)), local=local, sizes=sizes,
                flops=flops, family=family, notation=text if isinstance(text, str) else "")
