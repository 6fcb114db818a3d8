"""What the user has typed, also inside ``sweep.cells``: only this and the environment can trust a package."""

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from distexp.config import ConfigError
from distexp.config.overrides import is_override, parse, plain_value, values_of
from distexp.system.environment_variables import looks_secret, secret_in

CELLS = "sweep.cells"
TRUSTED = "trusted_packages"
VARIABLE = "DISTEXP_TRUSTED_PACKAGES"
"""Environment variable with the names of packages that the user always trusts, separated by commas."""


def typed_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the overrides of a command line, and those inside its ``sweep.cells``."""
    return _parse_once(tuple(arguments))


@lru_cache(maxsize=2)  # They are needed for each cell of a sweep.
def _parse_once(arguments: tuple[str, ...]) -> list[Override]:
    found = []
    for override in parse([text for text in arguments if is_override(text)]):
        found.append(override)
        if key_of(override) == CELLS:
            texts = [str(plain_value(text)) for cell in _as_list(override.value()) for text in _as_list(cell)]
            found += parse([text for text in texts if is_override(text)])
    return found


def typed_keys(arguments: Sequence[str]) -> set[str]:
    """Return the keys of the overrides on the command line, and of those inside its ``sweep.cells``."""
    return {key_of(override) for override in typed_overrides(arguments)}


def key_of(override: Override) -> str:
    """Return the key of an override without ``+`` and ``~``."""
    return str(override.get_key_element()).lstrip("+~")


def packages_trusted_by_user(arguments: Sequence[str]) -> list[str]:
    """Return the packages that the command line or the environment trusts.

    Overrides of Hydra's configuration are not used, because a file can add to them.
    """
    trusting = [each for each in typed_overrides(arguments) if key_of(each) == TRUSTED and not each.is_delete()]
    values = [plain_value(value) for override in trusting for value in values_of(override)]
    typed = [str(name) for value in values for name in _as_list(value)]
    return list(dict.fromkeys([*packages_of_environment(), *typed]))


def packages_of_environment() -> list[str]:
    """Return the packages in ``$DISTEXP_TRUSTED_PACKAGES``."""
    return [name for text in os.environ.get(VARIABLE, "").split(",") if (name := text.strip())]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


TEXT_KEYS = ("setup", "sbatch", "srun", "python")
ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)=[\"']?(?![\"']?\$)(?=[^\s\"',])")
"""A variable with a literal value in a shell line; ``X=$(cat file)`` has none."""

PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
HINT = "export it in your shell, and the workers get it"


def check_arguments_for_secrets(arguments: Sequence[str]) -> None:
    """Raise a ConfigError if the command line contains the value of a secret variable."""
    for argument in arguments:
        name = secret_in(argument)
        if name is not None:
            raise ConfigError(
                f"{argument.partition('=')[0]}=... contains the value of ${name}, which would be written to files: "
                f"leave it out; {HINT}"
            )


def check_for_secrets(composed: DictConfig) -> None:
    """Raise a ConfigError with all secrets that a composed configuration sets."""
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
    cluster, job = _raw(composed.cluster), _raw(composed.hydra.job)
    yield from (f"cluster.environment.{name}" for name in cluster["environment"] if looks_secret(name))
    for name in filter(looks_secret, job["env_set"]):
        yield f"hydra.job.env_copy=[{name}]" if name in job["env_copy"] else f"hydra.job.env_set.{name}"
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
