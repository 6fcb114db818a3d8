"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio, in a separate process."""
