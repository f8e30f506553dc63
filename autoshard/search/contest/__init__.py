"""Reads and solves public contest instances: `autoshard solve`."""
