"""Secrets in environment variables: recognized by their names, and kept out of all files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_NAME = re.compile(
    r"(^|_)(\w*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|(API|ACCESS|PRIVATE)?KEYS?|PASS|PAT)(_|$)"
    r"|_(PWD|AUTH)$",
    re.I,
)

MIN_LETTERS = 8
"""Shorter values are not searched in texts, because they may be there by coincidence."""


def looks_secret(name: str) -> bool:
    """Return whether the name of an environment variable is that of a secret, such as ``WANDB_API_KEY``."""
    return bool(SECRET_NAME.search(name))


def secret_in(text: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the name of a secret variable whose value is in a text; None if there is none."""
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= MIN_LETTERS and value in text and looks_secret(name):
            return name
    return None
