"""How a local graph is executed: eager or inductor, and passes applied when a graph is bound to a rank."""
