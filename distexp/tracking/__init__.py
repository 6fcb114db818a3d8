"""Live metrics, summary and files to TensorBoard, Weights & Biases or MLflow, in a process of its own.

A tracker reads what a run writes for itself, so the workers know nothing of it: it can be slow, hang or
fail, and never costs a run.
"""
