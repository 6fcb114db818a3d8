"""A loader of configurations that composes the same options only once in a process."""

from __future__ import annotations

import os
import pickle
from typing import cast

import pytest
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig

from distexp.guard.config_files import CheckedConfigLoader
from tests.helpers import planning

COMPOSED: dict[tuple[object, ...], bytes] = {}


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

    def _has_files(self) -> bool:
        return any(entry.provider == "command-line" for entry in self.config_search_path.get_path())


def remember_compositions(patch: pytest.MonkeyPatch) -> None:
    """Let ``planning.composed`` compose the same options only once."""
    patch.setattr(planning, "CheckedConfigLoader", RememberingLoader)
