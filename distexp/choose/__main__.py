"""The command ``distexp choose [--json] [OVERRIDES]``: find the best configuration of a training on this machine."""

import sys
from collections.abc import Sequence

from distexp.cli.run import main as run
from distexp.config import Command
from distexp.config.keys import is_key
from distexp.exceptions import run_until_pipe_closes

USAGE = """usage: distexp choose [--json] [GROUP=OPTION ...] [KEY=VALUE ...]

Find the fastest configuration of a training: strategy, sharding, stage,
offloading, micro-batch, checkpointing and kernels. Model, data, precision and
global batch stay as given. Configurations that do not fit are left out by
prediction. The most promising ones are tried in short runs, and the losses of
the winner are compared with those of strategy=single.

  choose.objective=memory         throughput (default), energy, cost or memory
  choose.budget_min=20            time for the trials (default: 10 minutes)
  choose.gpus=1,2                 numbers of workers to try
  choose.space=strategy           vary only these keys ...
  choose.space=sharding=full_shard,no_shard           ... or set their values
  choose.dry_run=true             print what would be tried and its cost
  hydra.sweep.dir=DIR             directory of the trials
  --json                          print JSON for programs

A key that is set on the command line does not vary. An interrupted search
continues with `distexp resume DIR`.

examples:
  distexp choose model=bloom_1b1 dataset=squad train.global_batch_size=64
  distexp choose model=gpt_tiny train.global_batch_size=16 choose.gpus=1,2
  distexp choose cluster=slurm cluster.workers_per_node=4 choose.dry_run=true
  distexp choose plan.gpu=a100-80gb cluster.workers_per_node=4 \\
      choose.dry_run=true"""

JSON = "--json"
LISTS = ("choose.gpus", "choose.space")
"""Keys with several values. Hydra would sweep over them, because they have no brackets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    output = ["choose.output=json"] if JSON in given else []
    name = [] if any(text.startswith("name=") for text in given) else ["name=choose"]
    return run([with_brackets(text) for text in given if text != JSON], Command.CHOOSE, [*output, *name])


def with_brackets(argument: str) -> str:
    """Return ``choose.gpus=[1,2]`` for ``choose.gpus=1,2``; any other argument as it is.

    An entry with values is one: ``choose.space=["strategy=ddp,fsdp"]`` for ``choose.space=strategy=ddp,fsdp``.
    """
    key, _, value = argument.partition("=")
    if key not in LISTS or not value or value[0] in "[\"'":
        return argument
    name, _, values = value.partition("=")
    if not values:
        return f"{key}=[{value}]"
    is_one_entry = "," not in name and not set("=\"'") & set(values) and not any(map(is_key, values.split(",")))
    return f'{key}=["{value}"]' if is_one_entry else argument


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
