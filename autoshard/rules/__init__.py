"""Sharding rules: what each op can do on one mesh axis."""
