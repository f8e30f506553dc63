"""The numeric oracle for sharding rules, and its samples."""
