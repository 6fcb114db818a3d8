"""Hydra's loader of configurations, with checks of foreign YAML files before Hydra acts on them.

Files are foreign if they are outside of the config groups of distexp, as with ``--config-dir``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra._internal.hydra as hydra_app
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from distexp.config import ConfigError
from distexp.config.boolean_values import refuse_numbers_as_booleans
from distexp.config.paths import conf_dir
from distexp.launch.trust.chosen_files import chosen_files, source_folders
from distexp.launch.trust.hydra_values import UnsafeValue, unsafe_values
from distexp.launch.trust.packages import packages_trusted_by_user
from distexp.launch.trust.secret_checks import check_for_secrets, refuse_secret_interpolations
from distexp.launch.trust.shell_values import TRACKER_URI, unsafe_commands
from distexp.launch.trust.typed_overrides import typed_keys

SEARCH_PATH = "hydra.searchpath"
OWN_PACKAGES = ("distexp", "hydra")


class _CheckedRepository(ConfigRepository):
    """The YAML files of all sources. It names a file that is not in UTF-8."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a file.

        Raises:
            ConfigError: the file is not in UTF-8.
        """
        try:
            return super().load_config(config_path)
        except UnicodeDecodeError as error:
            file = f"{config_path.removesuffix('.yaml')}.yaml"
            raise ConfigError(f"{file} is not in UTF-8 ({error}): save it in UTF-8") from error


class CheckedConfigLoader(ConfigLoaderImpl):
    """Loader that refuses a foreign file with values that could run code."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _CheckedRepository(config_search_path)
        self._foreign = False

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration and check it, if a foreign file may be part of it.

        Raises:
            ConfigError: a file contains values that could run code, or the configuration contains a secret, or a file
                is not in UTF-8.
        """
        composed = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        if config_name is not None:  # --hydra-help has only Hydra's own configuration.
            self.check(composed)
        return composed

    def check(self, composed: DictConfig) -> None:
        """Check a configuration for secrets, and for values of foreign files that could run code.

        Raises:
            ConfigError: a file contains values that could run code, or the configuration contains a secret.
        """
        check_for_secrets(composed)
        if self._foreign:
            check_foreign(composed)

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: list[Override], repo: Any) -> None:
        """Check the search path before Hydra imports its packages."""
        loaded = repo.load_config(config_path=config_name) if config_name else None
        folders = OmegaConf.select(loaded.config, SEARCH_PATH) if loaded and OmegaConf.is_dict(loaded.config) else None
        values = [item.value() for item in parsed_overrides if item.get_key_element() == SEARCH_PATH]
        paths = [str(path) for value in (folders, *values) if isinstance(value, Sequence) for path in value]
        if paths:
            _check_search_path(paths)
        super()._process_config_searchpath(config_name, parsed_overrides, repo)
        self._foreign = any(_is_foreign(source.provider, source.path) for source in repo.get_sources())


def use_checked_loader() -> None:
    """Make Hydra load configurations with the checks."""
    refuse_secret_interpolations()
    refuse_numbers_as_booleans()
    vars(hydra_app)["ConfigLoaderImpl"] = CheckedConfigLoader


def check_foreign(composed: DictConfig) -> None:
    """Check a configuration that contains foreign files.

    Raises:
        ConfigError: with an error for each value that could run code.
    """
    typed = typed_keys(sys.argv[1:])
    found = [
        *unsafe_values(composed, packages_trusted_by_user(sys.argv[1:])),
        *unsafe_commands(composed, typed, source_folders(composed)),
    ]
    errors = [_explain(unsafe, composed) for unsafe in found if not _is_typed(unsafe.key, typed)]
    if errors:
        raise ConfigError(errors)


def _is_typed(key: str, typed: set[str]) -> bool:
    """Return whether a key or a section that contains it is on the command line; the name of a group is neither."""
    return any(key == name or key.startswith(f"{name}.") for name in typed if "." in name)


def _is_foreign(provider: str, path: str) -> bool:
    if provider in ("main", "command-line"):
        return Path(path) != conf_dir()
    return provider.startswith(SEARCH_PATH)


def _check_search_path(paths: list[str]) -> None:
    allowed = {*OWN_PACKAGES, *packages_trusted_by_user(sys.argv[1:])}
    if SEARCH_PATH in typed_keys(sys.argv[1:]):
        return
    packages = {path: path.removeprefix("pkg://").partition(".")[0] for path in paths if path.startswith("pkg://")}
    errors = [
        f"{SEARCH_PATH} contains {path}, but a file cannot import a package: if you trust its code, add "
        f"trusted_packages=[{package}] to the command"
        for path, package in packages.items()
        if package not in allowed
    ]
    if errors:
        raise ConfigError(errors)


def _explain(unsafe: UnsafeValue, composed: DictConfig) -> str:
    source = next(_files_with(unsafe.value, composed), None)
    origin = f"is set by {source}" if source else "is not from the command line"
    override = f"{unsafe.key}={unsafe.value}"
    if unsafe.package is not None:
        hint = f"if you trust its code, add trusted_packages=[{unsafe.package}] to the command"
    elif (group := unsafe.key.partition(".")[0]) in ("cluster", "tracker"):
        hint = f"if you trust it, choose its file with {group}=NAME, or add '{override}' to the command"
    else:
        hint = f"if you trust it, add '{override}' to the command"
    danger = "would get the results and your credentials" if unsafe.key == TRACKER_URI else "could run code"
    return f"{override} {origin}, and {danger}: {hint}"


def _files_with(value: str, composed: DictConfig) -> Iterator[Path]:
    text = value.strip("[]").partition(",")[0]
    return (path for path in chosen_files(composed) if text in path.read_text(errors="replace"))
