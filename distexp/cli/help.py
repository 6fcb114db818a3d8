"""What ``python -m distexp --help`` says."""

from __future__ import annotations

from distexp.config.paths import conf_dir, options_of

GROUPS = (
    ("model", "what is trained"),
    ("dataset", "what it is trained on"),
    ("strategy", "how the training is distributed"),
    ("engine", "whose training loop runs"),
    ("sharding", "what FSDP shards (implies strategy=fsdp)"),
    ("zero_stage", "what DeepSpeed partitions (implies strategy=deepspeed)"),
    ("offload", "states on the CPU"),
    ("precision", "arithmetic"),
    ("cluster", "where it runs"),
    ("tracker", "where else the metrics go"),
    ("scaling", "how the work follows the number of workers"),
    ("experiment", "an exercise of the workshop, with its sweep and its table"),
    ("scale", "how far down it is scaled"),
)

COMMANDS = (
    ("python -m distexp", "tiny BLOOM on all GPUs, else on 2 CPU workers"),
    ("python -m distexp strategy=fsdp sharding=hybrid_shard", "another strategy"),
    ("python -m distexp --multirun zero_stage=1,2,3 offload=true,false", "a sweep, and its table"),
    ("python -m distexp --multirun strategy=single,ddp,fsdp,deepspeed", "the strategies side by side"),
    ("python -m distexp model=resnet_tiny strategy=ddp", "images instead of text"),
    ("python -m distexp dataset=squad dataset.train_path=T.json dataset.eval_path=E.json", "your data"),
    ("python -m distexp train.max_steps=20 train.micro_batch_size=8", "any key; --cfg job shows all"),
    ("python -m distexp cluster.workers_per_node=4", "more workers"),
    ("python -m distexp --multirun cluster=slurm cluster.nodes=2,4 strategy=fsdp", "job arrays on Slurm"),
    ("python -m distexp.status DIR", "where a sweep's runs stand; distexp.cancel ends them"),
    ("python -m distexp.resume DIR", "what is missing or failed, again"),
    ("python -m distexp hydra.run.dir=my_run", "results where you want them"),
    ("python -m distexp --cfg job zero_stage=3", "what would run, without running it"),
)


def help_text() -> str:
    """Groups with their options, and useful commands."""
    lines = [
        "distexp: which way of distributing a training fits, how fast is it, and is it the same training?",
        "",
        "usage: python -m distexp [--multirun] [GROUP=OPTION ...] [KEY=VALUE ...]",
        "",
        "groups:",
    ]
    for group, meaning in GROUPS:
        options = options_of(group) if (conf_dir() / group).is_dir() else []
        lines.append(f"  {group:<11} {meaning}")
        lines.append(f"  {'':<11}   {', '.join(options)}")
    lines += ["", "commands:"]
    lines += [f"  {command}\n      {meaning}" for command, meaning in COMMANDS]
    lines += ["", "Hydra's own: --cfg job, --info, --config-dir DIR, --hydra-help, --shell-completion"]
    return "\n".join(lines)
