"""Variants between two that are there: the same program with other sizes, without a trace, a search or lowering."""
