"""Cost table -> search problem: nodes, copy nodes, edges and memory rows."""
