"""Checks of the experiment tracker: its library is installed, and its keys are its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from distexp.config import Config

TRACKER_LIBRARIES = frozenset({"tensorboard", "wandb", "mlflow"})
"""Trackers whose name is that of an optional library."""

TRACKER_KEYS = {"online": "wandb", "uri": "mlflow"}
"""Keys of ``tracker`` that only one tracker has."""


def check_tracker(config: Config) -> Iterator[str]:
    """Yield an error for a missing library, and for each key of another tracker."""
    tracker = config.tracker
    if tracker._target_ is not None and tracker.name in TRACKER_LIBRARIES and find_spec(tracker.name) is None:
        yield f"tracker={tracker.name} needs its library: pip install {tracker.name}, or choose tracker=none"
    for key, owner in TRACKER_KEYS.items():
        value = getattr(tracker, key)
        if value and tracker.name in {*TRACKER_LIBRARIES, "none"} - {owner}:
            yield (
                f"tracker.{key}={value} is for tracker={owner}, but this run has tracker={tracker.name}: leave it out"
            )
