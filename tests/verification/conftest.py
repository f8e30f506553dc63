"""Rules that lie, for the tests that must catch them."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from autoshard.rules import registry
from autoshard.rules.types import Row

CACHES = (registry.rule_of, registry.rows, registry._resolve)


@pytest.fixture
def broken_rule() -> Callable[..., Any]:
    """`with broken_rule(op, Row(...), ...)`: the op's rule claims these rows too."""
    @contextmanager
    def breaking(op: Any, *rows: Row) -> Iterator[None]:
        rule = registry.rule_of(op)
        registry.table()[op] = replace(rule, rows=lambda call: (*rule.rows(call), *rows))
        try:
            _forget()
            yield
        finally:
            registry.table()[op] = rule
            _forget()

    return breaking


def _forget() -> None:
    for cache in CACHES:
        cache.cache_clear()
