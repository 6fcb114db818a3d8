"""Tests of the use of submitit, without a Slurm cluster."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from distexp.launch.slurm import script
from distexp.launch.slurm.script import JobArray
from tests.helpers.runs import resolve_cell

ADVICE = "adapt distexp.launch.slurm.script.render_sbatch, then raise the bound of submitit in pyproject.toml"


def test_submitit_still_has_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version of submitit may rename the function or its parameters."""
    try:
        from submitit.slurm.slurm import _make_sbatch_string
    except ImportError:
        pytest.fail(f"submitit.slurm.slurm has no _make_sbatch_string: {ADVICE}")
    passed: dict[str, Any] = {}
    monkeypatch.setattr(script, "render_sbatch", lambda **options: passed.update(options))
    config = resolve_cell("cluster=slurm")
    JobArray("array0", config, Path("/sweep"), Path("/sweep/snapshot"), ("0",)).render()
    unknown = set(passed) - set(inspect.signature(_make_sbatch_string).parameters)
    assert not unknown, f"submitit's _make_sbatch_string has no parameters {sorted(unknown)}: {ADVICE}"
