"""Plans made without a search: greedy starting plans, baselines and propagation."""
