"""What a plan says about seeds."""
from __future__ import annotations

from autoshard.seeds.marks import is_user_collective, marks
from autoshard.space.cost_table import CostTable


def seed_notes(table: CostTable) -> tuple[str, ...]:
    """How much every seed matched, and what `annotate` marked."""
    lines = [f"seed {key} holds for {n} tensor{'s' if n > 1 else ''}" for key, n in table.seeds.matches.items()]
    forward = [op for op in marks(table.graph) if op.phase == "forward"]
    given = sum(is_user_collective(op) for op in forward) // 2
    marked = sum(not is_user_collective(op) for op in forward)
    lines += [f"autoshard.annotate holds {marked} activation{'s' if marked > 1 else ''}"] * (marked > 0)
    return (*lines, *[f"{given} collective{'s' if given > 1 else ''} of the model taken as given"] * (given > 0))
