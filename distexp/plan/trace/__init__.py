"""The trace of one training step with fake tensors, from which the memory is predicted."""
