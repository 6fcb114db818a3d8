"""Text of ``distexp --help``."""

from __future__ import annotations

import shutil
import textwrap

from distexp.cli.commands import COMMANDS
from distexp.config.paths import options_of
from distexp.resolve.implied_strategy import implied_strategy

INDENT = 17 * " "
MIN_WIDTH, MAX_WIDTH = 50, 120

GROUPS = {
    "model": "model to train",
    "dataset": "dataset to train on",
    "strategy": "how the model is distributed",
    "engine": "trainer, that is, the training loop",
    "sharding": "what FSDP shards",
    "zero_stage": "what DeepSpeed partitions",
    "offload": "offload states to CPU memory",
    "precision": "arithmetic",
    "kernels": "options of speed, set together",
    "cluster": "where it runs",
    "tracker": "experiment tracker",
    "plan": "prediction of memory before a run",
    "scaling": "how the work changes with the number of workers",
    "experiment": "presets: the 21 exercises of the workshop (docs/workshop.md), each with its sweep and its table",
    "scale": "limits that shrink a run",
}
"""Config groups and their meaning."""

EXAMPLES = {
    "distexp": "train a tiny BLOOM on all GPUs, or on 2 CPU workers",
    "distexp strategy=fsdp sharding=hybrid_shard": "choose a strategy",
    "distexp --multirun zero_stage=1,2,3 offload=true,false": "run a sweep and print its table",
    "distexp --multirun strategy=single,ddp,fsdp,deepspeed": "compare strategies",
    "distexp --multirun strategy=ddp,fsdp repeats=3": "run each cell three times, to know the noise",
    "distexp model=resnet_tiny strategy=ddp": "train on images",
    "distexp dataset=squad dataset.train_path=T.json dataset.eval_path=E.json": "use your data",
    "distexp train.max_steps=20 train.micro_batch_size=8": "set any key",
    "distexp cluster.workers_per_node=4": "use more workers",
    "distexp --multirun cluster=slurm cluster.nodes=2,4 strategy=fsdp": "submit job arrays to Slurm",
    "distexp hydra.run.dir=my_run": "choose the run directory",
    "distexp plan model=bloom_3b dataset.max_length=512 plan.gpu=a100-80gb": "predict the memory, also without a GPU",
    "distexp forecast RUN cluster.nodes=1,2,4": "forecast how a profiled run scales",
    "distexp choose model=bloom_1b1 train.global_batch_size=64": "find the fastest configuration",
    "distexp --cfg job zero_stage=3": "print the configuration and run nothing",
}
"""Commands with what they do."""


def describe_groups() -> list[tuple[str, str]]:
    """Return the groups with their meaning and the strategy that they imply."""
    described = []
    for group, meaning in GROUPS.items():
        implied = {implied_strategy(group, option) for option in options_of(group)} - {None}
        suffix = "".join(f" (implies strategy={strategy})" for strategy in sorted(map(str, implied)))
        described.append((group, meaning + suffix))
    return described


def help_text() -> str:
    """Return the usage, the commands, the groups with their options, and examples."""
    lines = [
        "distexp: compare distributed training with PyTorch, DDP, FSDP2 and DeepSpeed",
        "",
        "usage: distexp [run] [--multirun] [GROUP=OPTION ...] [KEY=VALUE ...]",
        "       distexp COMMAND [ARGUMENT ...]",
        "       distexp help [COMMAND | GROUP | KEY]",
        "",
        "commands:",
    ]
    lines += [_entry(name, command.help) for name, command in COMMANDS.items()]
    lines += ["", "groups:"]
    for group, meaning in describe_groups():
        lines += [_entry(group, meaning), wrap(", ".join(options_of(group)), INDENT)]
    lines += ["", "examples:"]
    lines += [f"  {command}\n      {meaning}" for command, meaning in EXAMPLES.items()]
    lines += ["", wrap("options of Hydra: --cfg job, --info, --config-dir DIR, --hydra-help, --shell-completion")]
    lines += ["options: --help, --version"]
    return "\n".join(lines)


def _entry(name: str, meaning: str) -> str:
    """Return a name with its meaning in a second column."""
    return f"  {name:<12} " + wrap(meaning, INDENT[2:]).lstrip()


def wrap(text: str, indent: str = "") -> str:
    """Wrap a text at the width of the terminal."""
    width = min(max(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MIN_WIDTH), MAX_WIDTH)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
