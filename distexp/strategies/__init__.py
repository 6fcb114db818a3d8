"""Strategies: how a model is distributed over the workers."""
