"""Keys of the configuration: their names, values and limits, and the YAML files of the config groups."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, DictConfig, ListConfig, MissingMandatoryValue, Node, OmegaConf, ValidationError
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException, UnsupportedInterpolationType

from distexp.config import Config, ConfigError
from distexp.config.fields import FieldInfo, info_of
from distexp.exceptions import first_line
from distexp.system.files import PACKAGE
from distexp.system.typed_values import matches

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
LIST_TYPES = {
    int: "a list of integers, as in [1,2]",
    float: "a list of numbers, as in [0.9,0.99]",
    str: "a list of texts, as in [a,b]",
}


def sections() -> dict[str, type[Any]]:
    """Return the sections of the configuration, by name."""
    made: dict[str, Any] = {spec.name: spec.default_factory for spec in fields(Config)}
    return {name: section for name, section in made.items() if isinstance(section, type) and is_dataclass(section)}


def schema_fields() -> Iterator[tuple[str, Field[Any]]]:
    """Yield every key of a section with its dataclass field."""
    for name, section in sections().items():
        yield from ((f"{name}.{spec.name}", spec) for spec in fields(section))


def top_level_fields() -> Iterator[tuple[str, Field[Any]]]:
    """Yield every key outside of a section, such as ``repeats``, with its dataclass field."""
    return ((spec.name, spec) for spec in fields(Config) if spec.name not in sections() and info_of(spec).help)


def get_value(config: Config, key: str) -> Any:
    """Return the value of a key, such as ``train.seed`` or ``repeats``."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def set_value(config: Config, key: str, value: Any) -> None:
    """Set the value of a key, such as ``train.seed`` or ``repeats``."""
    section, _, name = key.rpartition(".")
    setattr(getattr(config, section) if section else config, name, value)


def speed_references() -> dict[str, Any]:
    """Return the keys that ``kernels=fast`` may set, each with its value for ``kernels=reference``."""
    references = {key: info_of(spec).reference for key, spec in schema_fields()}
    return {key: reference for key, reference in references.items() if reference is not None}


@lru_cache(maxsize=1)
def strategy_sections() -> frozenset[str]:
    """Return the sections that hold the options of one strategy: they have its name."""
    return frozenset(options_of("strategy"))


@lru_cache(maxsize=1)
def strategy_groups() -> Mapping[str, str]:
    """Return the config groups that set the main option of one strategy, each with its key.

    They choose the strategy too: ``sharding`` sets ``fsdp.sharding`` and the strategy ``fsdp``.
    """
    keys = [key for key, _ in schema_fields() if key.partition(".")[0] in strategy_sections()]
    return {name: key for key in keys if (name := key.rpartition(".")[2]) in config_groups()}


def key_of_group(group: str) -> str | None:
    """Return the key that a config group sets, and that takes precedence over it if it is typed; None for others."""
    return {**strategy_groups(), "offload": "offload.enabled"}.get(group)


RESERVED_KEYS = {
    **dict.fromkeys(
        ("hydra/launcher", "hydra.launcher", "cluster.launcher", "cluster._target_"),
        "choose the launcher with cluster=",
    ),
    "command": "type the name of the command first, as in distexp plan",
    "hydra/sweeper": "add cells with sweep.cells",
    **dict.fromkeys(("hydra.mode", "hydra.output_subdir"), "leave it out"),
    **dict.fromkeys(("kernels.compile", "kernels.compile_note"), "set train.compile"),
    "sweep.shared_start": "leave it out, because local runs always share the import of the libraries",
}
"""Keys that distexp sets itself, with hints."""


def known_keys() -> set[str]:
    """Return the names of all groups, sections and keys."""
    return {*config_groups(), *(spec.name for spec in fields(Config)), *(name for name, _ in schema_fields())}


def is_key(text: str) -> bool:
    """Return whether a text can only be a key. ``deepspeed`` is a section, but also a value of ``strategy``."""
    return text in config_groups() or ("." in text and text in known_keys())


def describe_values(key: str) -> str | None:
    """Return the values that a key accepts, as in ``an integer or null``; None for an unknown key."""
    section, _, name = key.rpartition(".")
    owner = sections().get(section) if section else Config
    if owner is None or name not in (specs := {spec.name: spec for spec in fields(owner)}):
        return None
    hint = get_type_hints(owner)[name]
    if is_dataclass(hint):
        return f"a section: set one of its keys, {', '.join(spec.name for spec in fields(hint)[:3])} ..."
    info, accepted = info_of(specs[name]), _describe_type(hint)
    if info.choices and info.at_least is None:
        accepted = f"one of {info.limits}"
    elif info.choices:  # The key takes a number or one of these texts, as train.micro_batch_size does.
        accepted = accepted.replace(TYPE_NAMES[str], ", ".join(map(str, info.choices)))
    return f"{accepted} or null" if NoneType in get_args(hint) else accepted


def takes_list(key: str) -> bool:
    """Return whether the value of a key is a list."""
    return "a list" in (describe_values(key) or "")


def _describe_type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe_type(member) for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is list:
        return LIST_TYPES.get(get_args(hint)[0], "a list, as in [a,b]")
    if get_origin(hint) is dict:
        return f"a mapping{' of texts' if str in get_args(hint)[1:] else ''}, as in {{key: value}}"
    return TYPE_NAMES.get(hint, "a value")


NAMED_MODELS = "distexp.models.task_models."
"""Start of the targets of models that timm and torchvision have by name. Their weights are a file."""


def reference_errors(composed: DictConfig) -> list[str]:
    """Return an error for each reference, such as ``${train.seed}``, that has no value. Required keys may be open."""
    found = {key: error for key, node in _references(composed) if (error := _reference_error(key, node))}
    # The directory contains the name of the runs, which may be the wrong key.
    return [error for key, error in found.items() if not key.startswith("hydra.")] or list(found.values())


def explain_missing(composed: DictConfig, error: Exception) -> str:
    """Return which required keys have no value, or the one that another key refers to, and what to type."""
    is_open = isinstance(error, MissingMandatoryValue)
    missing = OmegaConf.missing_keys(composed) if is_open else {first_line(error).rpartition(": ")[2]}
    source = "a hub id or a folder, for example model.name=bigscience/bloom-560m"
    if str(composed.model.get("_target_")).startswith(NAMED_MODELS):
        source = "the name of a model in this library, for example model.name=resnet18"
    example = f" to {source}" if missing == {"model.name"} else ""
    return f"{', '.join(sorted(missing))} is required: set it{example}"


def _reference_error(key: str, node: Node) -> str | None:
    typed = f"{key}={shown(node._value())}"
    if key in sections():
        return f"{typed} must be {describe_values(key)}"
    try:
        node._dereference_node()
    except InterpolationToMissingValueError:
        return None
    except OmegaConfBaseException as error:
        return f"{typed} {_explain_reference(key, error)}"
    return None


def _references(config: Any, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield each reference with its key. In the section ``hydra`` only the directories are checked."""
    is_list = isinstance(config, ListConfig)
    for name in range(len(config)) if is_list else config:
        node, key = config._get_node(name), f"{prefix}[{name}]" if is_list else f"{prefix}.{name}".lstrip(".")
        if node._is_interpolation():
            if not key.startswith("hydra.") or key in ("hydra.sweep.dir", "hydra.sweep.subdir"):
                yield key, node
        elif isinstance(node, DictConfig | ListConfig) and not (node._is_none() or node._is_missing()):
            yield from _references(node, key)


def _explain_reference(key: str, error: OmegaConfBaseException) -> str:
    """Return why a reference has no value, and what to type, to be printed after ``KEY=VALUE``."""
    reason, name = first_line(error), key.partition("[")[0]
    value = f"write {name}=[...] with values" if name != key else f"write {key}=VALUE"
    if "is a secret" in reason:  # refused by ``distexp.guard``, with what to do
        return f"is not accepted: {reason.partition('interpolation: ')[2] or reason}"
    if missing := re.search("Interpolation key '(.+)' not found", reason):
        near = get_close_matches(missing[1], sorted(known_keys()), n=1)
        hint = f"write ${{{near[0]}}}, or a value" if near else value
        return f"refers to {missing[1]}, which is not a key: {hint}"
    if "Recursive" in reason:
        return f"refers to itself: {value}"
    if variable := re.search("Environment variable '(.+)' not found", reason):
        return f"needs the environment variable {variable[1]}, which is not set: set it, or {value}"
    if isinstance(error, UnsupportedInterpolationType):
        return f"uses {reason.rpartition(' ')[2]}, which is no resolver: {value}, or ${{oc.env:VARIABLE}}"
    accepted = describe_values(key)
    return f"must be {accepted}" if accepted else f"cannot be resolved ({reason.rstrip('.')}): {value}"


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. A line break would end an option of sbatch, and start a shell line."""


@lru_cache(maxsize=1)
def _types() -> Mapping[str, Any]:
    """Return the annotation of each key that is no section."""
    owners = {"": Config, **sections()}
    hints = ((f"{name}.".lstrip("."), get_type_hints(owner)) for name, owner in owners.items())
    return {f"{prefix}{key}": hint for prefix, known in hints for key, hint in known.items() if not is_dataclass(hint)}


def check_types(config: Config) -> None:
    """Raise ConfigError if a value has another type than its key. OmegaConf accepts any item in a list of texts.

    The configuration of the error has a text in place of each wrong value, as the record of an invalid run may have.
    """
    values = {key: (get_value(config, key), hint) for key, hint in _types().items()}
    wrong = {key: shown(value) for key, (value, hint) in values.items() if not matches(value, hint)}
    if wrong:
        for key, text in wrong.items():
            set_value(config, key, text)
        raise ConfigError([f"{key}={text} must be {describe_values(key)}" for key, text in wrong.items()], config)


def check_values(config: Config) -> Iterator[str]:
    """Yield an error for each value that is wrong regardless of all other values. The types are right."""
    for section in sections():
        yield from value_errors(section, getattr(config, section))
    for option, value in config.cluster.sbatch.items():
        if CONTROL.search(f"{option}{value}"):
            yield f"cluster.sbatch.{option}={value!r} contains a control character: leave it out"
    if config.repeats < 1:
        yield f"repeats={config.repeats} must be at least 1"
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f"name={config.name} must be the name of one folder, without a slash"
    if not config.name.isprintable():
        yield f"name={config.name!r} contains a control character: use letters and digits"
    if is_too_long(config.name):
        yield f"name={shown(config.name)} {_too_long(config.name)}: use a shorter one"
    for package in config.trusted_packages:
        if not package.isidentifier():
            top = package.partition(".")[0]
            hint = f"write trusted_packages=[{top}]" if top.isidentifier() else "write the first part of a _target_"
            yield f"trusted_packages contains {shown(package)!r}, which is not the name of a package: {hint}"


def value_errors(name: str, section: Any) -> Iterator[str]:
    """Yield an error for each field of a section whose value is outside its own limits."""
    for spec in fields(section):
        value = getattr(section, spec.name)
        if isinstance(value, str) and CONTROL.search(value):
            yield f"{name}.{spec.name}={value!r} contains a control character: leave it out"
            continue
        if value == "" and spec.default != "":  # An empty path would be the current folder.
            yield f"{name}.{spec.name}= is empty, as after an unset variable: give a value, or leave it out"
        if isinstance(value, list) and "" in value:
            yield f"{name}.{spec.name} contains an empty text, as after an unset variable: leave it out"
        is_path = isinstance(value, str) and (info_of(spec).path or spec.name == "name")
        if is_path and (long := [part for part in value.split("/") if is_too_long(part)]):
            yield f"{name}.{spec.name}={shown(value)} {_too_long(long[0])}: use a shorter one"
            continue
        if error := None if value is None else _error(info_of(spec), value):
            yield f"{name}.{spec.name}={shown(value)} {error}"


MAX_NAME = 255
"""Most bytes of a name in a file system. The kernel refuses to look for longer ones."""


def is_too_long(name: str) -> bool:
    """Return whether a name is too long for a file system. It may have bytes that are not UTF-8."""
    return len(os.fsencode(name)) > MAX_NAME


def _too_long(name: str) -> str:
    return f"has a name of {len(os.fsencode(name)):,} bytes, more than {MAX_NAME}"


LARGEST, LARGEST_TIME, MAX_DIGITS = 3e38, 1e6, 12
"""Limits of numbers without own limits: the range of fp32, that of times in seconds or minutes, and the
digits of an integer. Libraries overflow above them: a thread waits for at most 9.2e9 s.
"""


def shown(value: Any) -> str:
    """Return a value as the text of a message, with the start of a long one."""
    # Python prints no integer of more than 4,300 digits, except in hexadecimal.
    is_long = isinstance(value, int) and value.bit_length() > 200
    text = f"{value:g}" if isinstance(value, float) else hex(value) if is_long else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _error(info: FieldInfo, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    error = info.find_error(value)
    if error is None and isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        return f"has more than {MAX_DIGITS} digits: lower it"
    largest = LARGEST_TIME if info.unit in ("seconds", "minutes") else LARGEST
    if error is None and isinstance(value, float) and abs(value) >= largest:
        return f"is too large: it must be below {largest:g}"
    return error


_convert = BooleanNode._validate_and_convert_impl


def refuse_numbers_as_booleans() -> None:
    """Make OmegaConf refuse ``profile=5``. It takes every number except 0 as true."""
    BooleanNode._validate_and_convert_impl = _convert_checked  # type: ignore[assignment, method-assign]


def _convert_checked(node: BooleanNode, value: Any) -> bool:
    """Return a value as true or false. The texts 0 and 1 are accepted, because environment variables have them.

    Raise ValidationError if the value is a number, or a text without such a meaning.
    """
    if value in ("0", "1"):
        return bool(value == "1")
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
    return _convert(node, value)


@lru_cache(maxsize=1)
def conf_dir() -> Path:
    """Return the folder of the config groups that distexp ships."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"conf/config.yaml is missing in {PACKAGE} and in {PACKAGE.parent}: reinstall distexp")


@lru_cache(maxsize=1)
def config_groups() -> tuple[str, ...]:
    """Return the names of all config groups; nested ones contain a slash."""
    root = conf_dir()
    return tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()))


def options_of(group: str, conf: Path | None = None) -> list[str]:
    """Return the options of a group, of distexp or in a folder ``conf``; nested ones contain a slash."""
    root = (conf or conf_dir()) / group
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
