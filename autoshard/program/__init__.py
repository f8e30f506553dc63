"""`nn.Module` -> canonical graph: trace, simplify, report what cannot be traced."""
