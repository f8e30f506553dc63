"""Rules for ops of other packages, those of `torch.library`: given by a call, or by an entry point that autoshard finds by itself."""
from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_args

import torch

from autoshard.base.graph import Call
from autoshard.errors import UsageError
from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.rules.notation import NotationMismatch, Passes, parse, rule
from autoshard.rules.types import LocalImpl

log = logging.getLogger("autoshard")
TORCH = ("aten", "prims", "autoshard")
ENTRY_POINTS = "autoshard.rules"
"""Group of entry points: each names a function without arguments, which calls `register_rule`."""


def register_rule(op: Any, notation: str | Callable[[Call], str], *, partial: Passes = "none", family: str = "pointwise", reduce: str = "sum",
                  flops: Callable[..., Any] | None = None, local: LocalImpl | None = None, sizes: dict[str, str] | None = None) -> None:
    """Say how an op of another package may be split: `register_rule("mylib::scale", "... d!, ~d! -> ... d!")`. Once per process and
    op, before a model with it is planned; see docs/custom-ops.md.

    op        "mylib::scale", "mylib::scale.overload", torch.ops.mylib.scale, an overload of it, or what torch.library.custom_op returned
    notation  a line of docs/rules.md, or a function from the call to one
    partial   whether sums that are not complete pass: "none", "each" operand of a product alone, "all" together
    family    what kind of work it is, for its price: "pointwise", "matmul", "reduction", "norm", "gather", "attention", "copy" ...
    reduce    what a dim that only inputs have does to the result: "sum", "max", "min"
    flops     (call, local input shapes, local output shapes) -> FLOP; a matmul's follow from the line
    local     what runs on pieces, where the op itself does not; see docs/add-an-op-rule.md
    sizes     arguments of the op that are shapes: {"size": "out0"} replaces it by the local shape of output 0

    Raises UsageError for an op that is not there, one that has a rule of its own, a malformed line, and unknown words."""
    target = overload(op)
    if target.namespace in TORCH or target in registry.table() and target not in registry.outside():
        raise UsageError(f"{target} has a rule of autoshard's own; a second one would hide it")
    if partial not in get_args(Passes) or reduce not in ("sum", "max", "min"):
        raise UsageError(f"partial={partial!r}, reduce={reduce!r}: partial is one of {', '.join(get_args(Passes))}, reduce of sum, max, min")
    known = {f.value: f for f in Family}
    if family not in known:
        raise UsageError(f"family={family!r} is not one of {', '.join(known)}")
    _check_forms(target, notation, flops, local, sizes or {})
    if target._schema.is_mutable:
        raise UsageError(f"{target} writes its arguments; a graph has ops that return new tensors: register a functional form with torch.library")
    try:
        line = notation if isinstance(notation, str) else _told(target, notation)
        made = rule(line, partial=partial, family=known[family], reduce=reduce, flops=flops, local=local, sizes=tuple((sizes or {}).items()))
    except ValueError as e:
        raise UsageError(f"the rule of {target}: {e}") from None
    says = f"{notation if isinstance(notation, str) else _text(notation)}|{partial}|{family}|{reduce}|{sizes}|{_text(flops)}|{_text(local)}"
    registry.add(target, made, says)


def _check_forms(target: Any, notation: Any, flops: Any, local: Any, sizes: dict[str, str]) -> None:
    """Raises UsageError for what would end in the middle of a search or of a lowering."""
    if not isinstance(notation, str) and not callable(notation):
        raise UsageError(f"the rule of {target} is {notation!r:.80}; give a line, 'm k, k n -> m n', or a function from the call to one")
    for name, given in (("flops", flops), ("local", local)):
        if given is not None and not callable(given):
            raise UsageError(f"{name}={given!r:.80} of the rule of {target} is no function")
    arguments = [a.name for a in target._schema.arguments]
    for name in sizes:
        if name not in arguments:
            raise UsageError(f"sizes={sizes}: {target} has no argument {name!r}; it has {', '.join(arguments)}")


def _told(target: Any, notation: Callable[[Call], str]) -> Callable[[Call], str]:
    """The function from the call to a line. What it raises, and lines that are none, are told with the op and where the function is."""
    def line(call: Call) -> str:
        code = getattr(notation, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        try:
            made = notation(call)
        except NotationMismatch:
            raise
        except Exception as e:
            raise UsageError(f"the rule of {target}{where} raised {type(e).__name__}: {e}") from e
        if not isinstance(made, str):
            raise UsageError(f"the rule of {target}{where} gave {made!r:.80} for a call, and not a line, 'm k, k n -> m n'")
        try:
            parse(made)
        except ValueError as e:
            raise UsageError(f"the rule of {target}{where}: {e}") from None
        return made

    return line


def check_rule(op: Any, *args: Any, **kwargs: Any) -> list[str]:
    """What is wrong with an op's rule for these arguments: by every row of it the op runs on pieces of them, and what comes out is
    compared with the op on whole tensors. [] where all rows hold. Sizes that 2 and 4 divide try most; real float64 tensors are exact enough.

    Raises UsageError for an op that is not there."""
    from autoshard.rules.check.oracle import wrong_rows
    from autoshard.rules.check.samples import Fixed, build, sample

    found = (Fixed(a) if isinstance(a, torch.Tensor) else a for a in args)
    named: dict[str, Any] = {k: Fixed(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    call, tensors = build(sample(overload(op), *found, **named))
    if registry.origin(call) == "replicate":
        return [f"{call.target} has no rule for arguments of these shapes, and runs whole on every rank"]
    return [str(wrong) for wrong in wrong_rows(call, tensors)]


def overload(op: Any) -> Any:
    """The op overload that a user names. Raises UsageError."""
    op = getattr(op, "_opoverload", op)  # of what torch.library.custom_op returned
    if isinstance(op, str):
        space, _, name = op.partition("::")
        op = getattr(getattr(torch.ops, space, None), name.partition(".")[0], None) if name else None
        op = getattr(op, name.partition(".")[2] or "default", None) if op is not None else None
        if op is None:
            raise UsageError(f"there is no op {space}::{name or '?'}; import the package that defines it with torch.library first")
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(op, "default", None) or getattr(op, op.overloads()[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise UsageError(f"{op!r:.80} is no op of torch.library; give \"mylib::scale\" or torch.ops.mylib.scale")
    return op


@cache
def find_packages() -> None:
    """Let installed packages register their rules, once. One that fails is said and left out: its ops run whole on every rank."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()()
        except Exception as e:
            log.warning("rules of %s (%s = %s) are left out: %s: %s", entry.dist.name if entry.dist else "?", entry.name, entry.value,
                        type(e).__name__, e)


def given_rules() -> str:
    """What tells the rules of other packages from others, a line each; "" without any."""
    find_packages()
    return "\n".join(sorted(f"{target} {says}" for target, says in registry.outside().items()))


def _text(function: Callable[..., Any] | None) -> str:
    """What tells one function from another in the key of cached plans."""
    if function is None:
        return ""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(getattr(function, "__qualname__", function))
