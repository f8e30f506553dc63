"""Ops that give a value as it is. `autoshard.annotate` in a model: in the layout the user wants. Never Partial, but where a collective of
the model says that its operand is. CHECKED: if what it checks is true, which every rank knows whole."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.base.checked import CHECKED
from autoshard.base.graph import Call
from autoshard.base.spec import is_partial, parse_spec
from autoshard.base.windows import ACCUMULATE, HOLD
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.types import LocalContext, Row


def _same(ctx: LocalContext, x: Any, *args: Any) -> Any:
    return torch.ops.aten.alias.default(x)


SAME = rule("... -> ...", family=Family.VIEW, local=_same)


def _rows(call: Call) -> tuple[Row, ...]:
    """A mark with a group (its third argument) has a placement on the group's axis for its spec, which may be Partial."""
    given = parse_spec(call.args[1]) if len(call.args) > 2 else ()
    return (*SAME.rows(call), *(Row((p,), (p,)) for p in given if is_partial(p)))


RULES = {CHECKED: rule("..., -> ...", family=Family.COPY)}
BY_NAME = {"autoshard.annotate.default": replace(SAME, rows=_rows), HOLD: SAME,
           ACCUMULATE: rule("... -> ...", partial="each", local=_same)}
