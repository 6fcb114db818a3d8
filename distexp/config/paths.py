"""Where the YAML groups are: beside the package in a checkout, inside it when installed from a wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from distexp.config import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def conf_dir() -> Path:
    """The folder of config groups that comes with distexp."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"conf/config.yaml is neither in {PACKAGE} nor beside it: install distexp again")


@lru_cache(maxsize=1)
def config_groups() -> tuple[str, ...]:
    """The names of all config groups, nested ones with a slash."""
    root = conf_dir()
    return tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()))


def options_of(group: str) -> list[str]:
    """The options of a group, nested ones with a slash."""
    root = conf_dir() / group
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
