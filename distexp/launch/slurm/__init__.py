"""Runs on Slurm: submission, monitoring, and the task that runs on each node."""
