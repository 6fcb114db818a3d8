"""One rank of a run, from the process group to its result."""
