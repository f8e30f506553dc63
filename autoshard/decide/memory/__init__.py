"""Decisions where memory is tight: attempts, rounds against the timeline, offload, and why nothing fits."""
