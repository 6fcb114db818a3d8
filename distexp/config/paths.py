"""Location of the YAML config groups: next to the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from distexp.config import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def conf_dir() -> Path:
    """Return the folder of the config groups that distexp ships."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"conf/config.yaml is missing in {PACKAGE} and in {PACKAGE.parent}: reinstall distexp")


@lru_cache(maxsize=1)
def config_groups() -> tuple[str, ...]:
    """Return the names of all config groups; nested ones contain a slash."""
    root = conf_dir()
    return tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()))


def options_of(group: str) -> list[str]:
    """Return the options of a group; nested ones contain a slash."""
    root = conf_dir() / group
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
