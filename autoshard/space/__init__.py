"""What may be chosen: strategies, decision units, repeated layers, the cost table."""
