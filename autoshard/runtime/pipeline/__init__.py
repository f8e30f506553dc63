"""Runs the stages of a pipeline: a rank's actions over its lowered windows, and the wires between ranks."""
