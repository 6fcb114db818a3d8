"""Composing configurations as the command line does, and starting real processes."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from distexp.config import Command, Config, register_schema
from distexp.config.keys import conf_dir, config_groups
from distexp.config.overrides import quote_choice
from distexp.resolve import resolve, without_hydra
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunInfo
from tests.helpers.forked_cli import TIMEOUT_S, run_forked

REPOSITORY = Path(__file__).resolve().parents[2]
HELPERS = REPOSITORY / "tests" / "helpers"
IMAGE_FOLDER = HELPERS / "image_folder"
"""A folder in the layout of TinyImageNet without images, for configurations that are composed and not run."""


def compose_cell(*overrides: str) -> tuple[DictConfig, dict[str, str | None]]:
    """Compose a command line; return the configuration without the hydra node, and the choices of the groups."""
    content, choices = _compose(overrides)
    return copy.deepcopy(content), dict(choices)


def register_schema_once(command: Command = Command.TRAIN) -> None:
    """Register the schema of a command, unless it is registered: this takes a fifth of the time of a composition."""
    stored = ConfigStore.instance().repo.get("schema.yaml")
    if stored is None or stored.node.command != command:
        register_schema(command)


@functools.cache
def _compose(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str | None]]:
    """Compose each command line only once, because Hydra takes about 0.1 s."""
    register_schema_once()
    quoted = [quote_choice(text, config_groups()) for text in overrides]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("config", quoted, return_hydra_config=True)
    return without_hydra(composed), dict(composed.hydra.runtime.choices)


def resolve_cell(*overrides: str) -> Config:
    """Return the resolved configuration of a command line.

    Raises:
        ConfigError: if it is invalid.
    """
    content, choices = compose_cell(*overrides)
    return resolve(content, choices)


def make_spec(*overrides: str) -> RunSpec:
    """Return the spec of a single run."""
    config = resolve_cell(*overrides)
    return RunSpec(config, RunInfo(id=run_id(config), name=config.name, number=0, overrides=list(overrides)))


def run_distexp(
    *arguments: str, cwd: Path = REPOSITORY, timeout: float = TIMEOUT_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``distexp`` in a process that has imported it; see ``start_distexp``."""
    return run_forked(*arguments, cwd=cwd, env=env, timeout=timeout)


def run_module(
    module: str,
    *arguments: str,
    cwd: Path = REPOSITORY,
    timeout: float = TIMEOUT_S,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module of distexp in a process that has imported it."""
    return run_forked(*arguments, cwd=cwd, env=env, module=module, timeout=timeout)


def start_distexp(
    *arguments: str, cwd: Path = REPOSITORY, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m distexp`` as a user does, with a new interpreter."""
    return start_module("distexp", *arguments, cwd=cwd, env=env)


def start_module(
    module: str, *arguments: str, cwd: Path = REPOSITORY, env: dict[str, str] | None = None, timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a module of Python with a new interpreter."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


RANKS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)}
"""Environment variables of gloo workers of the tests."""


def run_ranks(workers: int, script: Path, *arguments: str, timeout: float = 2 * TIMEOUT_S) -> None:
    """Run a script on local gloo workers; the failure shows its output."""
    options = str(workers), str(script), *arguments
    done = run_forked(*options, module="tests.helpers.forked_ranks", cwd=REPOSITORY, timeout=timeout, env=RANKS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
