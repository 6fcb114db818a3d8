"""From a composed configuration to a run that can start, or to every reason why it cannot.

Nothing here imports torch: a wrong command line is refused in a fraction of a second.
"""

from distexp.resolve.resolution import resolve, without_hydra

__all__ = ["resolve", "without_hydra"]
