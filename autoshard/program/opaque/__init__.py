"""Submodules that cannot be traced, as one op each."""
