"""Texts of ``distexp help NAME`` for a group, an option, a section or a key, from the YAML files and the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import omegaconf

from distexp.cli.command_keys import reader_of
from distexp.cli.help import describe_groups, wrap
from distexp.cli.suggestions import ALIASES
from distexp.config.field_info import FieldInfo, info_of
from distexp.config.key_info import schema_fields, sections, top_level_fields
from distexp.config.paths import conf_dir, options_of

INDENT = 6 * " "


def topic_text(name: str) -> str | None:
    """Return the help of a group, an option, a section or a key; None for another name.

    Args:
        name: such as ``zero_stage``, ``zero_stage=2``, ``deepspeed/zero_stages``, ``train`` or ``learning_rate``.
    """
    groups = dict(describe_groups())
    group, _, option = name.partition("=")
    if group in groups and not option:
        return _group_text(group, groups[group])
    chosen = [(group, option)] if option else [(owner, name) for owner in groups]
    found = [_option_text(*pair) for pair in chosen if pair[0] in groups and pair[1] in options_of(pair[0])]
    if not found and option and group in groups:
        return None
    if not found and group in sections():
        return _section_text(group)
    return "\n\n".join(found or [_key_text(*pair) for pair in _keys_named(group)]) or None


def head_comment(path: Path) -> tuple[str, list[str]]:
    """Return the sentences of the comment at the top of a YAML file, and its indented commands."""
    sentences: list[str] = []
    commands: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            text = line.removeprefix("#")
            (commands if text.startswith("   ") else sentences).append(text.strip())
    return " ".join(sentences), commands


def first_sentence(group: str, option: str) -> str:
    """Return the first sentence of the comment at the top of an option's YAML file."""
    return head_comment(_path(group, option))[0].partition(". ")[0].rstrip(".") + "."


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


def _group_text(group: str, meaning: str) -> str:
    lines = [wrap(f"{group}: {meaning}"), ""]
    for option in options_of(group):
        lines += [f"  {group}={option}", wrap(first_sentence(group, option), INDENT)]
    example = options_of(group)[0]
    return "\n".join([*lines, "", f"More about an option: distexp help {group}={example}"])


def _option_text(group: str, option: str) -> str:
    text, commands = head_comment(_path(group, option))
    examples = ["", *(f"  {command}" for command in commands)] if commands else []
    return "\n".join([f"{group}={option}", wrap(text, "  "), *examples])


def _section_text(section: str) -> str:
    keys = [(key, spec) for key, spec in schema_fields() if key.startswith(f"{section}.")]
    lines = [line for key, spec in keys for line in (f"  {key}", wrap(describe_meaning(spec), INDENT))]
    return "\n".join([f"{section}: a section of the configuration", "", *lines])


def _key_text(key: str, spec: Field[Any]) -> str:
    lines = [key, wrap(describe_meaning(spec), "  ")]
    if values := describe_range(info_of(spec)):
        lines.append(wrap(f"Values: {values}.", "  "))
    lines.append(wrap(f"Default: {describe_default(spec)}. A model or a preset can have another one.", "  "))
    reader, override = reader_of(key), f"{key}=VALUE"
    shrunk = "scale=tiny " if key.startswith("scale.") else ""
    example = f"distexp {shrunk}{override}" if reader is None else reader.example(key, override)
    return "\n".join([*lines, "", f"  {example}"])


def _keys_named(name: str) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the keys with a name, with or without its section, or with an alias such as ``lr``."""
    wanted = ALIASES.get(name, name)
    known = (*schema_fields(), *top_level_fields())
    return ((key, spec) for key, spec in known if wanted in (key, key.rpartition(".")[2]))


def topic_names() -> Sequence[str]:
    """Return the names of groups, sections and keys, for suggestions."""
    keys = [spec.name for section in sections().values() for spec in fields(section)]
    return list(dict.fromkeys([*dict(describe_groups()), *sections(), *keys]))


def _path(group: str, option: str) -> Path:
    return conf_dir() / group / f"{option}.yaml"


def _shown(value: Any) -> str:
    """Return a value as a user would type it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
