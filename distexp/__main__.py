"""``python -m distexp``, the same as ``distexp``."""

import sys
from importlib.util import find_spec
from pathlib import Path

REQUIRED = ("omegaconf", "hydra", "torch")
"""Packages without which no command works."""


def missing_package() -> str | None:
    """Return what to do if this Python does not have the packages of distexp. It is often that of the system."""
    missing = next((name for name in REQUIRED if find_spec(name) is None), None)
    if missing is None:
        return None
    activate = Path(__file__).parents[1] / ".venv" / "bin" / "activate"
    solution = f"run 'source {activate}' first" if activate.exists() else "install distexp: see README.md"
    return f"distexp: the package {missing} is not installed in {sys.executable}: {solution}"


if __name__ == "__main__":
    if message := missing_package():
        print(message, file=sys.stderr)
        sys.exit(2)
    from distexp.cli.main import main

    sys.exit(main())
