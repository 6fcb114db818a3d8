"""The training loop and what all trainers share: data, schedule and metrics."""
