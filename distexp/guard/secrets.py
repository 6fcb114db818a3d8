"""Checks that no secret is part of a configuration, because the configuration is written to files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distexp.config import ConfigError
from distexp.system.secrets import looks_secret, secret_in

TEXT_KEYS = ("setup", "sbatch", "srun", "python")
ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)=[\"']?(?![\"']?\$)(?=[^\s\"',])")
"""A variable with a literal value in a shell line; ``X=$(cat file)`` has none."""

PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
HINT = "export it in your shell, and the workers get it"


def check_arguments_for_secrets(arguments: Sequence[str]) -> None:
    """Check that the command line does not contain the value of a secret variable.

    Raises:
        ConfigError: with the name of the variable.
    """
    for argument in arguments:
        name = secret_in(argument)
        if name is not None:
            raise ConfigError(
                f"{argument.partition('=')[0]}=... contains the value of ${name}, which would be written to files: "
                f"leave it out; {HINT}"
            )


def check_for_secrets(composed: DictConfig) -> None:
    """Check that a composed configuration sets no secret.

    Raises:
        ConfigError: with an error for each key.
    """
    errors = [f"{key} is a secret, and would be written to files: leave it out; {HINT}" for key in _secrets(composed)]
    if PASSWORD_IN_ADDRESS.search(str(_raw(composed.tracker).get("uri"))):
        errors.append(
            "tracker.uri contains a password, which would be written to files: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in your shell"
        )
    if errors:
        raise ConfigError(errors)


def refuse_secret_interpolations() -> None:
    """Make ``${oc.env:NAME}`` refuse the names of secrets."""
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)


def _read_variable(name: str, *default: Any) -> str | None:
    """Return an environment variable, as OmegaConf's own resolver does."""
    if looks_secret(name):
        raise ConfigError(f"${{oc.env:{name}}} is a secret, and would be written to files: leave it out; {HINT}")
    if name in os.environ:
        return os.environ[name]
    if not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return None if default[0] is None else str(default[0])


def _secrets(composed: DictConfig) -> Iterator[str]:
    """Yield the keys that set a secret."""
    cluster, job = _raw(composed.cluster), _raw(composed.hydra.job)
    yield from (f"cluster.environment.{name}" for name in cluster["environment"] if looks_secret(name))
    yield from (f"hydra.job.env_set.{name}" for name in job["env_set"] if looks_secret(name))
    for key in TEXT_KEYS:
        for name in ASSIGNMENT.findall(_text(cluster[key])):
            if looks_secret(name):
                yield f"{name} in cluster.{key}"


def _raw(section: DictConfig) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(section, resolve=False)
    return content if isinstance(content, dict) else {}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
