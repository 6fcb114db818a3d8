"""Resolution of a composed configuration: types, decisions and checks.

Nothing here imports torch, so that a wrong command line is reported in a fraction of a second.
"""

from distexp.resolve.resolution import resolve, without_hydra

__all__ = ["resolve", "without_hydra"]
