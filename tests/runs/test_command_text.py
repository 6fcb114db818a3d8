"""Commands that messages suggest."""

from __future__ import annotations

from pathlib import Path

from distexp.config.overrides import suggest_command


def test_the_directory_of_a_command_is_quoted() -> None:
    assert suggest_command("status", Path("/my sweeps/a")) == "distexp status '/my sweeps/a'"
