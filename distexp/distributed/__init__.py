"""The process group of a run and the position of each worker in it."""
