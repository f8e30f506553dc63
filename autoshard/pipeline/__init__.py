"""Pipeline parallelism: schedules as data, their player, and what a step of a pipeline costs."""
