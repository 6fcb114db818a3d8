"""The profiled steps of a training, and what their time went to."""
