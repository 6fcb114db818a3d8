"""The training loop and what all trainers share: inputs, schedule and metrics."""
