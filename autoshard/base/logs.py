"""Logging: the standard logger "autoshard", with one child per phase (autoshard.trace, autoshard.search, ...).

    AUTOSHARD_LOGS=all            every phase with its seconds
    AUTOSHARD_LOGS=+search,trace  only these; + shows every step (debug), - only errors

The same text goes to `autoshard --logs` and to `configure`. Programs that set up `logging` themselves need none of it.
"""
from __future__ import annotations

import logging

from autoshard.errors import UsageError

VARIABLE = "AUTOSHARD_LOGS"
PHASES = ("all", "trace", "strategies", "costs", "formulate", "search", "propagate", "assemble", "baselines", "runtime")
LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def configure(text: str) -> None:
    """Show what `text` asks for on standard error. Raises UsageError for a phase that does not exist."""
    asked = [part.strip() for part in text.split(",") if part.strip()]
    for part in asked:
        if part.lstrip("+-") not in PHASES:
            raise UsageError(f"{VARIABLE}={text!r}: no phase {part.lstrip('+-')!r}; there are {', '.join(PHASES)}, with + for more "
                             "and - for errors only")
    root = logging.getLogger("autoshard")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    for part in asked:
        name, level = part.lstrip("+-"), LEVELS.get(part[0], logging.INFO)
        (root if name == "all" else root.getChild(name)).setLevel(level)
