"""The command ``distexp verify [--quick] [--json] [--multirun] [OVERRIDES]``: compare a training with ``single``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from distexp.cli.run import main as run
from distexp.config import Command, ConfigError
from distexp.exceptions import SweepFailedError, run_until_pipe_closes
from distexp.verify import RECORDED, compare_recordings

USAGE = """usage: distexp verify [--quick] [--json] [--multirun] [OVERRIDES ...]
       distexp verify --recorded REFERENCE VARIANT [--json]

Check that a strategy trains exactly as strategy=single does, and name what is
wrong if not. Short trainings compare every gradient, weight and optimizer
state, the samples, the learning rate, the evaluation, and a resumed training.
Model, data, precision and strategy are those of the overrides. Batch sizes,
length and optimizer are set by each phase.

  --quick           run the core phases only
  --recorded        compare recordings of a script with distexp.verify.watch,
                    by one process and by several: two folders
  --json            print JSON for programs

The exit code is 0 if the trainings are equal, 1 if they differ, and 2 if they
cannot be compared.

examples:
  distexp verify strategy=fsdp
  distexp verify sharding=hybrid_shard cluster.workers_per_node=4
  distexp verify --multirun strategy=ddp,fsdp
  distexp verify --config-dir conf strategy=mine trusted_packages=[mine]
  distexp verify engine=hf_trainer strategy=fsdp"""

OPTIONS = {"--quick": "verify.quick=true", "--json": "verify.output=json"}


def compare_folders(given: Sequence[str]) -> int:
    """Compare two recordings; return the exit code. Raise ConfigError if they cannot be compared."""
    folders = [text for text in given if text != "--json"]
    if len(folders) != 2:
        raise ConfigError(f"{RECORDED} compares two folders, not {len(folders)}: distexp verify {RECORDED} single ddp")
    try:
        compare_recordings(*map(Path, folders), as_json="--json" in given)
    except SweepFailedError:
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    if RECORDED in given:
        return compare_folders([text for text in given if text != RECORDED])
    added = [override for option, override in OPTIONS.items() if option in given]
    name = [] if any(text.startswith("name=") for text in given) else ["name=verify"]
    return run([text for text in given if text not in OPTIONS], Command.VERIFY, [*added, *name])


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
