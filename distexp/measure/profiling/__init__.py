"""Communication time of training steps, from the trace of the PyTorch profiler."""
