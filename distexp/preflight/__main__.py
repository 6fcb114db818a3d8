"""The command ``distexp preflight [OVERRIDES]``: test the machines that a run with the same cluster.* would use."""

import sys
from collections.abc import Sequence

from distexp.cli.run import main as run
from distexp.config import Command
from distexp.exceptions import run_until_pipe_closes

USAGE = """usage: distexp preflight [KEY=VALUE ...]

Measure the bandwidth between the workers that a run with the same overrides
would have, as in cluster.nodes=2 cluster.workers_per_node=4. Measure also a
large matrix product with precision=bf16, fp16 or fp32, and store its TFLOP/s:
later runs report their speed as a fraction of it."""

ADDED = ("preflight.enabled=true", "name=preflight", "measure.enabled=false")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    return run(given, Command.PREFLIGHT, [text for text in ADDED if text not in given])


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
