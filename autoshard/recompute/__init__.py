"""Activation checkpointing as a graph: recomputation that is decided, and recomputation that is not decided yet."""
