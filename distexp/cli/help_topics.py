"""Text of ``distexp --help``."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import omegaconf

from distexp.cli.command_warnings import reader_of
from distexp.cli.foreign_names import ALIASES
from distexp.cli.main import COMMANDS
from distexp.config.fields import FieldInfo, info_of
from distexp.config.keys import RESERVED_KEYS, conf_dir, options_of, schema_fields, sections, top_level_fields
from distexp.resolve.resolution import implied_strategy

INDENT = 17 * " "
MIN_WIDTH, MAX_WIDTH = 50, 120

GROUPS = {
    "model": "model to train",
    "dataset": "dataset to train on",
    "adapter": "train adapters of a frozen model (LoRA)",
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
    "experiment": "presets: the exercises of the workshop (docs/workshop.md), each with its sweep and its table",
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


def describe_groups() -> dict[str, str]:
    """Return the groups with their meaning and the strategy that they imply."""
    described = {}
    for group, meaning in GROUPS.items():
        implied = {implied_strategy(group, option) for option in options_of(group)} - {None}
        suffix = "".join(f" (implies strategy={strategy})" for strategy in sorted(map(str, implied)))
        described[group] = meaning + suffix
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
    for group, meaning in describe_groups().items():
        lines += [_entry(group, meaning), wrap(", ".join(options_of(group)), INDENT)]
    lines += ["", "examples:"]
    lines += [f"  {command}\n      {meaning}" for command, meaning in EXAMPLES.items()]
    lines += ["", wrap("options of Hydra: --cfg job, --info, --config-dir DIR, --hydra-help, --shell-completion")]
    lines += ["options: --help, --version"]
    return "\n".join(lines)


def _entry(name: str, meaning: str) -> str:
    return f"  {name:<12} " + wrap(meaning, INDENT[2:]).lstrip()


def wrap(text: str, indent: str = "") -> str:
    """Wrap a text at the width of the terminal."""
    width = min(max(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MIN_WIDTH), MAX_WIDTH)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


# Texts of ``distexp help NAME`` for a group, an option, a section or a key, from the YAML files and the schema.


TOPIC_INDENT = 6 * " "


def topic_text(name: str, folder: Path | None = None) -> str | None:
    """Return the help of a group, an option, a section or a key; None for another name.

    The options in a folder, of ``--config-dir``, count too.
    """
    groups = describe_groups()
    group, _, option = name.partition("=")
    if group in groups and not option:
        return _group_text(group, groups[group], folder)
    chosen = [(group, option)] if option else [(owner, name) for owner in groups]
    known = {owner: _folders(owner, folder) for owner, _ in chosen if owner in groups}
    found = [option_text(*pair, known[pair[0]][pair[1]]) for pair in chosen if pair[1] in known.get(pair[0], ())]
    if not found and option and group in groups:
        return None
    if not found and group in sections():
        return _section_text(group)
    return "\n\n".join(found or [_key_text(*pair) for pair in _keys_named(group)]) or None


def _folders(group: str, folder: Path | None) -> dict[str, Path | None]:
    """Return the options of a group with their folder: None for those of distexp, which Hydra finds first."""
    own = dict.fromkeys(options_of(group, folder), folder)
    return dict(sorted({**own, **dict.fromkeys(options_of(group))}.items()))


def head_comment(path: Path) -> tuple[str, list[str]]:
    """Return the sentences of the comment at the top of a YAML file, and its indented commands."""
    sentences: list[str] = []
    commands: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            text = line.removeprefix("#")
            (commands if text.startswith("   ") else sentences).append(text.strip())
    return " ".join(sentences), commands


def first_sentence(group: str, option: str, conf: Path | None = None) -> str:
    """Return the first sentence of the comment at the top of an option's YAML file, of distexp or in ``conf``."""
    return head_comment(_path(group, option, conf))[0].partition(". ")[0].rstrip(".") + "."


def describe_range(info: FieldInfo) -> str:
    """Return the accepted values of a key and its unit."""
    return ", in ".join(filter(None, (info.limits, info.unit)))


def describe_meaning(spec: Field[Any]) -> str:
    """Return what a key means, also if it is null."""
    info = info_of(spec)
    null = f" Null: {info.null}." if info.null else ""
    if info.reference is not None:
        null = f" Null: `{_shown(info.reference)}`, or what `kernels=fast` chooses."
    slurm = " Slurm only." if info.slurm_only else ""
    return f"{info.help}{null}{slurm}"


def describe_default(spec: Field[Any]) -> str:
    """Return a default as a user would type it."""
    value = spec.default if spec.default_factory is MISSING else spec.default_factory()
    if value == omegaconf.MISSING or isinstance(value, str):
        return str(value)
    return json.dumps(value) if isinstance(value, (bool, type(None), list, dict)) else str(value)


def _group_text(group: str, meaning: str, folder: Path | None) -> str:
    lines = [wrap(f"{group}: {meaning}"), ""]
    for option, conf in _folders(group, folder).items():
        text = first_sentence(group, option, conf)
        lines += [f"  {group}={option}", *([] if text == "." else [wrap(text, TOPIC_INDENT)])]
    example = options_of(group)[0]
    return "\n".join([*lines, "", f"More about an option: distexp help {group}={example}"])


def option_text(group: str, option: str, conf: Path | None = None) -> str:
    """Return the comment at the top of an option's YAML file, of distexp or in ``conf``."""
    text, commands = head_comment(_path(group, option, conf))
    examples = ["", *(f"  {command}" for command in commands)] if commands else []
    return "\n".join([f"{group}={option}", wrap(text, "  "), *examples])


def _section_text(section: str) -> str:
    keys = [(key, spec) for key, spec in schema_fields() if key.startswith(f"{section}.")]
    lines = [line for key, spec in keys for line in (f"  {key}", wrap(describe_meaning(spec), TOPIC_INDENT))]
    return "\n".join([f"{section}: a section of the configuration", "", *lines])


def _key_text(key: str, spec: Field[Any]) -> str:
    lines = [key, wrap(describe_meaning(spec), "  ")]
    if values := describe_range(info_of(spec)):
        lines.append(wrap(f"Values: {values}.", "  "))
    lines.append(wrap(f"Default: {describe_default(spec)}. A model or a preset can have another one.", "  "))
    return "\n".join([*lines, "", f"  {_key_example(key)}"])


def _key_example(key: str) -> str:
    """Return how to set a key: what chooses it, if it cannot be set itself."""
    section, _, name = key.rpartition(".")
    if key in RESERVED_KEYS:
        return f"{key} cannot be set: {RESERVED_KEYS[key]}"
    if section in GROUPS and name in ("name", "_target_"):
        return f"distexp {section}=OPTION" if key != "model.name" else f"distexp model=hf {key}=VALUE"
    reader, override = reader_of(key), f"{key}=VALUE"
    shrunk = "scale=tiny " if section == "scale" else ""
    return f"distexp {shrunk}{override}" if reader is None else reader.example(key, override)


def _keys_named(name: str) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the keys with a name, with or without its section, or with an alias such as ``lr``."""
    wanted = ALIASES.get(name, name)
    known = (*schema_fields(), *top_level_fields())
    return ((key, spec) for key, spec in known if wanted in (key, key.rpartition(".")[2]))


def topic_names() -> Sequence[str]:
    """Return the names of groups, sections and keys, for suggestions."""
    keys = [spec.name for section in sections().values() for spec in fields(section)]
    return list(dict.fromkeys([*describe_groups(), *sections(), *keys]))


def _path(group: str, option: str, conf: Path | None = None) -> Path:
    return (conf or conf_dir()) / group / f"{option}.yaml"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
