"""Statistics of runs: noise, expected gains, and the bounds of the same training."""
