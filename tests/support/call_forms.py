"""Random signatures, and random ways to write one call of them. Every argument enters the result in a way of its own, so that two
that trade places, or one that is lost, change it."""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

BATCH, WIDTH = 4, 6
NAMES = ("x", "mask", "a", "weight", "labels", "bias", "k", "z")
DTYPES = (torch.float64, torch.float64, torch.float32, torch.int64, torch.bool, torch.bfloat16)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Mix(nn.Module):
    """`forward` is made for each instance's class; it calls `fold` with what it got, in the order of the signature."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        scale = torch.linspace(0.5, 1.5, 16, dtype=torch.float64)
        if trainable:
            self.scale, self.last = nn.Parameter(scale), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        else:
            self.register_buffer("scale", scale)
            self.last = nn.Tanh()

    def fold(self, given: Mapping[str, Any]) -> torch.Tensor:
        total = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
        for i, (name, value) in enumerate(given.items()):
            turn = self.scale[i] + NAMES.index(name.rstrip("0123456789")) if name.rstrip("0123456789") in NAMES else self.scale[i]
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    rows = leaf.to(torch.float64)
                    total = total * turn + (rows.sum(0) if leaf.ndim == 2 and leaf.shape[0] != BATCH else rows)
                elif leaf is None:
                    total = total - turn
                else:
                    total = total * (turn + float(leaf))
        return self.last(total)


@dataclass(frozen=True)
class Parameter:
    """`kind`: "/" by position only, "" either way, "*" by name only. `default`: source text, "" where there is none."""

    name: str
    kind: str
    default: str
    make: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """`contents`: what is passed, by name; `calls`: per content several ways to write it."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    calls: tuple[tuple[Call, ...], ...]


def loss_of(result: torch.Tensor, target: torch.Tensor, power: int = 2) -> torch.Tensor:
    return ((result - target) ** power).mean()


def case(seed: int, empty: bool = True, contents: int = 2, forms: int = 3) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    parameters, extra, named = signature(rng, empty)
    model = made(parameters, extra, named, rng.random() < 0.8)
    loss_fn = rng.choice((None, loss_of))
    calls = []
    for _ in range(contents):
        values = {p.name: p.make() for p in parameters if not p.default or rng.random() < 0.6}
        rest = tuple(tensor(rng, empty) for _ in range(rng.randrange(3))) if extra else ()
        names = {f"k{i}": tensor(rng, empty) for i in rng.sample(range(9), rng.randrange(3))} if named else {}
        target = None if loss_fn is None else torch.randn(BATCH, WIDTH, dtype=torch.float64)
        calls.append(tuple(form(rng, parameters, values, rest, names, target, named) for _ in range(forms)))
    return Case(model, loss_fn, tuple(calls))


def signature(rng: random.Random, empty: bool) -> tuple[list[Parameter], bool, bool]:
    """Parameters in order, and whether there are *args and **kwargs."""
    names = rng.sample(NAMES, rng.randint(1, 5))
    names[0] = "x" if "x" not in names else names[0]
    kinds = sorted(rng.choice(("/", "", "", "", "*")) for _ in names)
    kinds = [k for k in kinds if k == "/"] + [k for k in kinds if k == ""] + [k for k in kinds if k == "*"]
    parameters, defaults = [], False
    for name, kind in zip(names, kinds, strict=True):
        has = rng.random() < 0.5 or (defaults and kind != "*")
        defaults = defaults or (has and kind != "*")
        parameters.append(parameter(rng, name, kind, has, empty))
    return parameters, rng.random() < 0.25, rng.random() < 0.3


def parameter(rng: random.Random, name: str, kind: str, has_default: bool, empty: bool) -> Parameter:
    tensors = (lambda: tensor(rng, empty)), (lambda: {"b": tensor(rng, empty), "a": tensor(rng, empty)})
    if not has_default:
        return Parameter(name, kind, "", rng.choice((*tensors[:1] * 3, tensors[1])))
    default, make = rng.choice((("None", lambda: rng.choice((None, tensor(rng, empty)))), ("None", tensors[0]), ("1.5", lambda: rng.choice((1.5, 0.5))),
                                ("True", lambda: rng.choice((True, False, 1))), ("2", lambda: rng.choice((2, 3)))))
    return Parameter(name, kind, default, make)


def tensor(rng: random.Random, empty: bool) -> torch.Tensor:
    shape = rng.choice(((BATCH, WIDTH),) * 5 + ((WIDTH,), (), (0, WIDTH) if empty else (BATCH, WIDTH)))
    dtype = rng.choice(DTYPES)
    t = torch.randint(0, 2, shape).bool() if dtype is torch.bool else (3 * torch.randn(shape)).to(dtype)
    return t.requires_grad_(dtype.is_floating_point and rng.random() < 0.4)


def made(parameters: list[Parameter], extra: bool, named: bool, trainable: bool) -> nn.Module:
    """A module with this signature."""
    words, previous = [], "/"
    for p in parameters:
        if previous == "/" != p.kind and words:
            words.append("/")
        if p.kind == "*" != previous and not extra:
            words.append("*")
        elif p.kind == "*" != previous:
            words.append("*args")
        words.append(f"{p.name}={p.default}" if p.default else p.name)
        previous = p.kind
    if previous == "/":
        words.append("/")
    if extra and "*args" not in words:
        words.append("*args")
    words += ["**rest"] * named
    given = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
    parts = f"{{{given}}}" + (" | {f'args{i}': v for i, v in enumerate(args)}" if extra else "") + (" | rest" if named else "")
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {', '.join(words)}):\n    return self.fold({parts})\n", scope)
    return type("Made", (Mix,), {"forward": scope["forward"]})(trainable)


def form(rng: random.Random, parameters: list[Parameter], values: dict[str, Any], rest: tuple[Any, ...], names: dict[str, Any],
         target: Any, named: bool) -> Call:
    """One way to write the call: how many come by position, in which order the others."""
    positional = [p for p in parameters if p.kind != "*"]
    values = dict(values)
    most = next((i for i, p in enumerate(positional) if p.name not in values), len(positional))
    if rest or any(p.kind == "/" and p.name in values for p in positional[most:]):  # those in between are written out
        last = len(positional) if rest else max(i for i, p in enumerate(positional) if p.kind == "/" and p.name in values) + 1
        values |= {p.name: eval(p.default) for p in positional[:last] if p.name not in values}
        most = next((i for i, p in enumerate(positional) if p.name not in values), len(positional))
    least = most if rest else sum(p.kind == "/" and p.name in values for p in positional)
    n = rng.randint(least, most)
    args = [values[p.name] for p in positional[:n]] + list(rest)
    by_name = [(p.name, values[p.name]) for p in parameters if p.name in values and p not in positional[:n]]
    rng.shuffle(by_name)
    at = rng.randint(0, len(by_name))
    kwargs = dict(by_name[:at]) | names | dict(by_name[at:])
    if target is not None and (named or rng.random() < 0.6):
        args.append(target)
    elif target is not None:
        kwargs = dict(rng.sample(sorted({**kwargs, "target": target}.items(), key=lambda item: item[0]), len(kwargs) + 1))
    return tuple(args), kwargs
