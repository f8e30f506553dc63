"""Asserts in a file that pytest rewrites, which this one is, as checks of data."""
import ast

import pytest
import torch
from reading_models import Body

from autoshard.errors import CheckError, TraceError
from autoshard.program.interpret import run
from autoshard.program.reads.rewritten_asserts import path_of_rewritten
from autoshard.program.trace import trace


def compares(m, x):
    assert x.max() < m.bound
    return m.linear(x)


def compares_two(m, x):
    assert x.isnan().sum() == 0 and x.max() < m.bound, "too large"
    return m.linear(x)


def calls_last(m, x):
    h = m.linear(x)
    assert x.dim() == 2 and (x > -1).all() and (x < m.bound).all()
    return h


def lies_between(m, x):
    assert -1 < x.max() < m.bound
    return m.linear(x)


def denies(m, x):
    assert not x.max() > m.bound and x.min() > -9
    return m.linear(x)


def by_item(m, x):
    assert x.max().item() < m.bound
    return m.linear(x)


def one_of_two(m, x):
    assert x.max() < m.bound or x.min() < 0
    return m.linear(x)


def not_both(m, x):
    assert not (x.max() > m.bound and x.min() > 0)
    return m.linear(x)


def as_argument(m, x):
    assert torch.as_tensor(x.max() > 1 and x.min() > 0) is not None
    return m.linear(x)


def chain_as_argument(m, x):
    assert torch.as_tensor(1 < x.max() < 2) is not None
    return m.linear(x)


def test_this_file_is_rewritten():
    assert "@py_assert1" in compares.__code__.co_varnames


@pytest.mark.parametrize("body", [compares, compares_two, calls_last, lies_between, denies, by_item])
def test_an_assert_is_a_check(body):
    model, x = Body(body), torch.rand(4, 8)
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    traced = trace(model, (x,))
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))
    bad = x.clone()
    bad[2, 3] = 5.0
    with pytest.raises(AssertionError):
        model(bad)
    with pytest.raises(CheckError, match=r"(?s)does not hold.*test_rewritten_asserts.py:\d+"):
        run(traced, state, (bad,))


@pytest.mark.parametrize("body", [one_of_two, not_both, as_argument, chain_as_argument])
def test_what_decides_for_others_is_refused(body):
    with pytest.raises(TraceError, match="depends on the data of a tensor"):
        trace(Body(body), (torch.rand(4, 8),))


@pytest.mark.parametrize(("test", "negates", "flips"), [
    ("a > 1", False, 0), ("a > 1 and (b > 2 and c)", False, 0), ("not a > 1", True, 1), ("0 < a < 1 and not b", True, 1),
    ("a > 1 or b", False, None), ("not (a and b)", True, None), ("not 0 < a < 1", True, None), ("f(a and b) and c", False, None),
    ("f(0 < a < 1)", False, None), ("f(not a)", True, None), ("(a or b) and c", False, None),
])
def test_parts_are_alike_or_refused(test, negates, flips):
    path = path_of_rewritten(ast.parse(test, mode="eval").body, negates)
    assert path is None if flips is None else len(path) == flips
