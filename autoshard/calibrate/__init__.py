"""Measure this machine and write a cluster profile: see docs/calibrate.md."""
