"""Start of runs: composing the cells of a sweep, starting agents, and writing records."""
