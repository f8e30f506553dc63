"""The search half: from a traced program, or a batch and what is open about it, to a plan."""
