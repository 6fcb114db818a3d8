"""The command ``distexp plan [--json] [--multirun] [OVERRIDES]``: predict the memory of trainings, without a GPU."""

import sys
from collections.abc import Sequence

from distexp.cli.run import main as run
from distexp.config import Command
from distexp.exceptions import run_until_pipe_closes

USAGE = """usage: distexp plan [--json] [--multirun] [GROUP=OPTION ...] [KEY=VALUE ...]

Predict the GPU and CPU memory of the runs that the same arguments would start.
Nothing is trained, no weights are loaded, and no GPU is needed.

  plan.gpu=a100-80gb        predict for this GPU (default: that of this machine)
  plan.gpu_memory_gb=80     predict for a GPU with this memory
  cluster.device=cpu        predict a run on CPUs
  --json                    print JSON for programs

examples:
  distexp plan model=bloom_3b dataset.max_length=512 cluster.workers_per_node=4
  distexp plan --multirun zero_stage=0,1,2,3 offload=true,false model=bloom_1b7"""

JSON = "--json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and print; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    output = ["plan.output=json"] if JSON in given else []
    return run([text for text in given if text != JSON], Command.PLAN, output)


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
