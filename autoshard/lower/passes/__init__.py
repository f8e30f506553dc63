"""Passes over a lowered graph that is bound to a rank."""
