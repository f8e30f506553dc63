"""MIP solvers in processes that can be killed."""
