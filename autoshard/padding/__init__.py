"""Dims that do not divide: the graph rewritten so that they do, with what is added masked wherever it could be seen."""
