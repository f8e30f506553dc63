"""Pipeline stages: the joint graph cut into stages, schedules of micro-batches over them, and the search for both."""
