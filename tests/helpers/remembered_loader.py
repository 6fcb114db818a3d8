"""A loader of configurations that composes the same options only once in a process."""

from __future__ import annotations

import os
import pickle
from typing import cast

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig

from distexp.guard.config_files import CheckedConfigLoader
from tests.helpers import planning

COMPOSED: dict[tuple[object, ...], bytes] = {}
OPTIONS: dict[tuple[object, ...], list[str]] = {}


class RememberingLoader(CheckedConfigLoader):
    """Loader for commands of the tests, most of whose time Hydra would need to compose the same options again.

    Files of ``--config-dir`` differ between tests, so they are composed each time.
    """

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return a new copy of what the same arguments gave before."""
        arguments = (run_mode, from_shell, validate_sweep_overrides)
        if self._has_files():
            return super().load_configuration(config_name, overrides, *arguments)
        command = ConfigStore.instance().repo["schema.yaml"].node.command
        key = (command, os.getcwd(), config_name, *overrides, *arguments)
        if key not in COMPOSED:
            COMPOSED[key] = pickle.dumps(super().load_configuration(config_name, overrides, *arguments))
        return cast(DictConfig, pickle.loads(COMPOSED[key]))

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return what the same arguments gave before. Hydra copies all files that it has read for each call."""
        if self._has_files():
            return super().get_group_options(group_name, results_filter, config_name, overrides)
        key = (group_name, results_filter, config_name, *(overrides or ()))
        if key not in OPTIONS:
            OPTIONS[key] = super().get_group_options(group_name, results_filter, config_name, overrides)
        return list(OPTIONS[key])

    def _has_files(self) -> bool:
        return any(entry.provider == "command-line" for entry in self.config_search_path.get_path())


def remember_compositions(patch: pytest.MonkeyPatch) -> None:
    """Let ``planning.composed`` compose the same options only once."""
    patch.setattr(planning, "CheckedConfigLoader", RememberingLoader)
