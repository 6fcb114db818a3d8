"""Tests of runs on Slurm; most start a real test cluster on this machine."""
