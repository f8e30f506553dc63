"""Tables of sharding rules, one file per op family."""
