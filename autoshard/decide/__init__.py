"""The decision: attempts to find a plan that fits in memory, offload, and the plan as data."""
