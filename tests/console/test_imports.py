"""Test of the layers: the console does not depend on the launcher."""

from __future__ import annotations

from tests.helpers.runs import REPOSITORY


def test_console_does_not_import_the_launcher() -> None:
    files = sorted((REPOSITORY / "distexp" / "console").glob("*.py"))
    assert files
    assert [path.name for path in files if "distexp.launch" in path.read_text()] == []
