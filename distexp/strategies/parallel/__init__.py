"""Ways to share one model between workers with the same rows, which strategies combine with their own."""
