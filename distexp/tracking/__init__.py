"""Trackers: TensorBoard, Weights & Biases and MLflow, in a separate process.

A tracker reads the files that a run writes, so the workers do not depend on it. If it is slow, hangs or fails, the run
continues.
"""
