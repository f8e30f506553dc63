"""The user's source around a read of data: the condition it decides, and what happens then."""
from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from autoshard.program.reads.rewritten_asserts import path_of_rewritten

Place = tuple[int | None, int | None, int | None, int | None]
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "masked_fill", "minimum", "maximum", "zeros_like", "finfo"})
"""Functions and methods that a selected branch may call: none writes, draws numbers, or has an infinite derivative where it is not taken."""
ASKS = frozenset({"max", "min", "amax", "amin", "any", "all", "sum", "abs", "isnan", "isinf", "isfinite", "size", "dim", "numel"})
"""Methods that a checked condition may call: it is computed twice."""
TORCH_CHECKS = frozenset({"_check", "_check_index", "_check_not_implemented", "_check_type", "_check_value"})
"""Functions of torch that raise unless their first argument holds."""
PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.UnaryOp, ast.expr_context, ast.unaryop, ast.keyword)


@dataclass(frozen=True)
class Condition:
    """A statement that tests something (`if`, `assert`, a call of `torch._check`), and the part of its test that is a truth value by itself.
    `path`: what combines it with others, from the outside in, each with whether the part is in its last operand."""

    statement: ast.stmt
    part: ast.expr
    path: tuple[tuple[ast.expr, bool], ...]

    def wanted(self, whole: bool) -> bool | None:
        """What the part must be for the test to be `whole`, whatever comes after it; None where that cannot be said."""
        for node, is_last in self.path:
            if isinstance(node, ast.UnaryOp):
                whole = not whole
            elif isinstance(node, ast.BoolOp) and not is_last and whole != isinstance(node.op, ast.And):
                return None
        return whole

    @property
    def decides(self) -> bool:
        """Whether the test's value is that of the part, or the opposite: what stands before it has been seen."""
        return all(is_last for _, is_last in self.path)

    @property
    def raises(self) -> bool | None:
        """The value of the test for which the statement raises; None where it does not, or does more."""
        if not isinstance(self.statement, ast.If):
            return False
        return True if len(self.statement.body) == 1 and isinstance(self.statement.body[0], ast.Raise) else None

    @property
    def error(self) -> str:
        """The code that raises, where it is a line of its own."""
        return ast.unparse(self.statement.body[0]) if isinstance(self.statement, ast.If) else ""

    @property
    def clamped(self) -> tuple[str, ...]:
        """The local names that the statement gives new values, if that is all it does and it is made of CLAMPS; else ()."""
        if not isinstance(self.statement, ast.If) or self.statement.orelse or not all(_is_clamp(s) for s in self.statement.body):
            return ()
        return tuple(dict.fromkeys(s.targets[0].id for s in self.statement.body))

    @property
    def fills(self) -> tuple[str, ...]:
        """The local names of the mask, and of all x, in `if mask.any(): x[mask] = value`, which does nothing where the mask is empty; else ()."""
        test = self.statement.test if isinstance(self.statement, ast.If) and not self.statement.orelse else None
        if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "any" and not test.args
                and not test.keywords and isinstance(test.func.value, ast.Name)):
            return ()
        mask, body = test.func.value.id, self.statement.body
        return (mask, *(s.targets[0].value.id for s in body)) if all(_is_fill(s, mask) for s in body) else ()

    def as_tensor(self, put: ast.expr | None = None) -> ast.expr | None:
        """The part with the tensor that `.item()` is called on in its place, or with `put`; None where the part cannot be computed again."""
        found = _Items(put)
        part = found.visit(ast.parse(ast.unparse(self.part), mode="eval").body)
        fine = all(isinstance(n, (*PLAIN, ast.Compare, ast.cmpop, ast.BinOp, ast.operator))
                   or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ASKS) for n in ast.walk(part))
        chained = any(isinstance(n, ast.Compare) and (len(n.ops) > 1 or isinstance(n.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)))
                      for n in ast.walk(part))
        return part if fine and not chained and found.count == 1 else None


class _Items(ast.NodeTransformer):
    """Replaces calls of `.item()`."""

    def __init__(self, put: ast.expr | None) -> None:
        self.put, self.count = put, 0

    def visit_Call(self, node: ast.Call) -> Any:
        node = self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            self.count += 1
            return node.func.value if self.put is None else self.put
        return node


def condition_of(frame: FrameType, is_item: bool) -> Condition | None:
    """The condition that decides on what `frame` reads now: as its truth value, or by `.item()` inside of it. None where there is none,
    or no source."""
    place = _place_read(frame.f_code, frame.f_lasti, is_item)
    if place is None or None in place or frame.f_code.co_name.startswith("<"):
        return None
    for statement, test in _statements(frame.f_code.co_filename):
        if _covers(test, place):
            path, part = _path_to(test, place)
            return Condition(statement, part, path) if is_item or _place(part) == place and not _is_chain(part) else None
        if isinstance(statement, ast.Assert) and not is_item and _place(statement) == place:
            path = path_of_rewritten(test, _negates(frame.f_code, frame.f_lasti))
            return None if path is None else Condition(statement, test, path)
    return None


def _place_read(code: CodeType, at: int, is_item: bool) -> Place | None:
    """Where the expression stands whose truth is looked at by the instruction `at`, or the call of `.item()` that this is. None where something else
    looks (`in`, `max`). The instruction that tests a truth may have the place of another expression; the one before it made the value, but for a
    comparison of Python 3.13 on that looks at its own. (A call is PRECALL in Python 3.11 once the function has run a few times.)"""
    found, now = _running(code, at)
    if any(word in found[now].opname for word in ("JUMP", "TO_BOOL", "UNARY_NOT")):
        return found[max(now - 1, 0)].positions
    if is_item or _compares_for_truth(found[now]):
        return found[now].positions
    return found[now].positions if "CALL" in found[now].opname and _names_bool(code, found[now].positions) else None


def _negates(code: CodeType, at: int) -> bool:
    """Whether the instruction `at` looks at the truth of what a `not` stands before. (From Python 3.13 on the next one computes the `not`.)"""
    found, now = _running(code, at)
    looks_ahead = found[now].opname == "TO_BOOL" or _compares_for_truth(found[now])
    return any(one.opname == "UNARY_NOT" for one in found[now:now + 1 + looks_ahead])


def _compares_for_truth(one: dis.Instruction) -> bool:
    """Whether it compares, and looks at the truth of what comes out: from Python 3.13 on, `if x > 0`."""
    return one.opname == "COMPARE_OP" and one.argrepr.startswith("bool(")


@lru_cache(maxsize=64)
def _instructions(code: CodeType) -> Sequence[dis.Instruction]:
    return tuple(dis.get_instructions(code))


def _running(code: CodeType, at: int) -> tuple[Sequence[dis.Instruction], int]:
    """All instructions, and which of them is at the offset `at`."""
    found = _instructions(code)
    return found, next((i for i, one in enumerate(found) if one.offset == at), 0)


def _names_bool(code: CodeType, place: Place) -> bool:
    """Whether `bool(...)` stands there."""
    return place[0] is not None and linecache.getline(code.co_filename, place[0]).encode()[place[2]:].startswith(b"bool(")


def _is_chain(part: ast.expr) -> bool:
    """Whether it looks at several truths."""
    return isinstance(part, ast.Compare) and len(part.ops) > 1


@lru_cache(maxsize=64)
def _statements(filename: str) -> Sequence[tuple[ast.stmt, ast.expr]]:
    """All statements of a file that test something, with what they test."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return [(node, test) for node in ast.walk(tree) if (test := _tested(node)) is not None]


def _tested(node: ast.AST) -> ast.expr | None:
    if isinstance(node, (ast.If, ast.Assert)):
        return node.test
    call = node.value if isinstance(node, ast.Expr) else None
    is_check = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in TORCH_CHECKS and call.args
    return call.args[0] if is_check and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" else None


def _path_to(test: ast.expr, place: Place) -> tuple[tuple[tuple[ast.expr, bool], ...], ast.expr]:
    """What combines truth values on the way from `test` to the part that `place` lies in, each with whether that part is its last."""
    path: list[tuple[ast.expr, bool]] = []
    while isinstance(test, ast.BoolOp) or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        parts = list(_truths(test))
        inner = next((p for p in parts if _covers(p, place)), None)
        if inner is None:
            break
        path.append((test, inner is parts[-1]))
        test = inner
    return tuple(path), test


def _truths(test: ast.expr) -> Iterator[ast.expr]:
    yield from test.values if isinstance(test, ast.BoolOp) else [test.operand]


def _place(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _covers(node: ast.expr, place: Place) -> bool:
    line, end, column, end_column = _place(node)
    return (line, column) <= (place[0], place[2]) and (place[1], place[3]) <= (end, end_column)


def _is_clamp(statement: ast.stmt) -> bool:
    """Whether it gives one local name a value that CLAMPS, sums and differences make of others."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)):
        return False
    return all(isinstance(n, PLAIN) or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in CLAMPS)
               or isinstance(n, (ast.BinOp, ast.Add, ast.Sub)) for n in ast.walk(statement.value))


def _is_fill(statement: ast.stmt, mask: str) -> bool:
    """Whether it is `x[mask] = value`, with a value that can be computed for any mask."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if not (isinstance(target, ast.Subscript) and all(isinstance(n, ast.Name) for n in (target.value, target.slice)) and target.slice.id == mask):
        return False
    nodes = list(ast.walk(statement.value))
    return all(isinstance(n, (*PLAIN, ast.Subscript)) and getattr(n, "id", "") != mask
               or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in CLAMPS | {"to"}) for n in nodes)
