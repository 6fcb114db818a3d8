"""Hydra plugins of distexp: the sweeper and the launchers."""
