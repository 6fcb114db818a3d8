"""The command ``distexp preflight [OVERRIDES]``: test the machines that a run with the same cluster.* would use."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distexp.cli.run import main as run

FORCED = ("preflight.enabled=true", "preflight.only=true", "name=preflight", "measure.enabled=false")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test and return the exit code."""
    return run([*FORCED, *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
