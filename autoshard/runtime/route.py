"""Redistributions exactly as a plan priced them."""
from __future__ import annotations

from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.schedule import Route


def route_of(plan: Plan) -> Route:
    """From the plan's snapshot of its cluster."""
    return Redistribution(plan.spec_mesh, Cluster.from_snapshot(plan.cluster)).steps
