"""Ways to solve a reduced problem, one file per route or helper of one."""
