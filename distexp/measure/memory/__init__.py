"""Memory and utilization of GPUs and processes over time."""
