"""Memory of a plan: plays a schedule and records live bytes over time."""
