"""The training loop and what all engines share: inputs, schedule and metrics."""
