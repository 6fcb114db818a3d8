"""The command ``distexp preflight [OVERRIDES]``: test the machines that a run with the same cluster.* would use."""

from __future__ import annotations

import sys

from distexp.cli.main import main

FORCED = ("preflight.enabled=true", "preflight.only=true", "name=preflight", "measure.enabled=false")

if __name__ == "__main__":
    sys.exit(main([*FORCED, *sys.argv[1:]]))
