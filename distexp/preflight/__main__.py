"""``python -m distexp.preflight [OVERRIDES]``: measures where a training of the same cluster.* would run."""

from __future__ import annotations

import sys

from distexp.cli.main import main

FORCED = ("preflight.enabled=true", "preflight.only=true", "name=preflight", "measure.enabled=false")

if __name__ == "__main__":
    sys.exit(main([*FORCED, *sys.argv[1:]]))
