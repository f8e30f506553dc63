"""The compiled loops: cached ahead of the first plan, and usable where nothing can be cached."""
from __future__ import annotations

from autoshard.search import evaluate
from autoshard.search.dual import messages
from autoshard.search.dual.jit import compiled
from autoshard.search.warm import dense_problem, warm


def test_warm_uses_the_loops_on_a_problem_that_fits():
    assert warm() > 0 and messages.ascend.signatures and messages.decouple.signatures
    problem = dense_problem()
    assert evaluate(problem, [0] * problem.n) < float("inf")


def test_a_function_without_a_place_for_a_cache_still_compiles():
    space: dict = {}
    exec(compile("def double(x):\n    return 2 * x\n", "<no file>", "exec"), space)  # numba refuses to cache this
    assert compiled(space["double"])(21) == 42
