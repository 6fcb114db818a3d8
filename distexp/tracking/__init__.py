"""Trackers: TensorBoard, Weights & Biases and MLflow, in a separate process."""
