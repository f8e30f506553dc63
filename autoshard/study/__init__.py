"""Questions about plans: explain, why not, compare, sweep, diff."""
