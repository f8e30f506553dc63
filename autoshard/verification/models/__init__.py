"""The models that a verification runs: copies, smaller ones, other dtypes."""
