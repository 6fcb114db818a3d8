"""Energy and cost of a run."""
