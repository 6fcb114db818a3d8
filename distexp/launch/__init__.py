"""Start of runs: agents, records, and the launchers for this machine and for Slurm."""
