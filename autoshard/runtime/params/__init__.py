"""Stored parameters and optimizer state of a compiled module."""
