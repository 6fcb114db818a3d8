"""Prediction of the memory of a training, without running it: ``distexp plan``."""
