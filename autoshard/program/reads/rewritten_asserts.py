"""Asserts that pytest has rewritten (test files, plugins, conftest): `assert a.max() < 3 and ok` becomes

    @py_assert5 = a.max() < 3              (several statements)
    if @py_assert5: ...                    reads the truth of a part
    if not @py_assert0: ...; raise         reads that of the last part

The values of comparisons, and the last of several parts, have the place of the whole statement, so it cannot be told from the place which part is
read. Where the parts are joined by `and` alone this need not be known: all of them must hold, or not hold under a `not`, for the assert to pass.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator


def path_of_rewritten(test: ast.expr, negates: bool) -> tuple[tuple[ast.expr, bool], ...] | None:
    """What lies between the test of such an assert and the part whose truth is read with the place of the statement: as `Condition.path`.
    `negates`: the read computes a `not`. None where parts are not equal in this."""
    parts = list(_joined(test))
    inside = [part.operand if _is_not(part) else part for part in parts]
    if any(_combines(node) for part in inside for node in ast.walk(part) if node is not part or not _is_chain(part)):
        return None
    if any(_is_not(part) and _is_chain(part.operand) for part in parts):
        return None
    return ((ast.UnaryOp(ast.Not(), test), True),) if negates else ()


def _joined(test: ast.expr) -> Iterator[ast.expr]:
    """What `and` joins, as one list."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _joined(part)
    else:
        yield test


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_chain(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and len(node.ops) > 1


def _combines(node: ast.AST) -> bool:
    """Whether it reads truth values for a value of its own, as an argument does: `f(a and b)`, `f(0 < a < b)`; or is an `or`."""
    return isinstance(node, ast.BoolOp) or _is_not(node) or _is_chain(node)
