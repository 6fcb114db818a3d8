"""The key ``profile``, which is short for ``train.profile_steps``."""

from __future__ import annotations

from distexp.config import Config

PROFILE_STEPS = 3
"""Profiled steps of ``profile=true``. The median step of three has neither the start nor the end of the profile."""


def choose_profile_steps(config: Config) -> list[str]:
    """Set ``train.profile_steps`` for ``profile=true``, unless it has a value. Return no errors."""
    if config.profile and not config.train.profile_steps:
        config.train.profile_steps = PROFILE_STEPS
    return []
