"""Keys of the configuration: their names, values and limits, and the YAML files of the config groups."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, ValidationError

from distexp.config import Config, ConfigError
from distexp.config.fields import FieldInfo, info_of
from distexp.system.files import PACKAGE

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
LIST_TYPES = {int: "a list of integers, as in [1,2]", float: "a list of numbers, as in [0.9,0.99]"}


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
    """Return the value of a dotted key, such as ``train.seed``."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section), name)


def set_value(config: Config, key: str, value: Any) -> None:
    """Set the value of a dotted key, such as ``train.seed``."""
    section, _, name = key.rpartition(".")
    setattr(getattr(config, section), name, value)


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
        return "a mapping, as in {key: value}"
    return TYPE_NAMES.get(hint, "a value")


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. A line break would end an option of sbatch, and start a shell line."""


def check_values(config: Config) -> Iterator[str]:
    """Yield an error for each value that is wrong regardless of all other values."""
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


def value_errors(name: str, section: Any) -> Iterator[str]:
    """Yield an error for each field of a section whose value is outside its own limits."""
    for spec in fields(section):
        value = getattr(section, spec.name)
        if isinstance(value, str) and CONTROL.search(value):
            yield f"{name}.{spec.name}={value!r} contains a control character: leave it out"
            continue
        if value == "" and spec.default != "":  # An empty path would be the current folder.
            yield f"{name}.{spec.name}= is empty, as after an unset variable: give a value, or leave it out"
        if error := None if value is None else _error(info_of(spec), value):
            yield f"{name}.{spec.name}={_shown(value)} {error}"


LARGEST, LARGEST_TIME, MAX_DIGITS = 3e38, 1e6, 12
"""Limits of numbers without own limits: the range of fp32, that of times in seconds or minutes, and the
digits of an integer. Libraries overflow above them: a thread waits for at most 9.2e9 s.
"""


def _shown(value: Any) -> str:
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


def options_of(group: str) -> list[str]:
    """Return the options of a group; nested ones contain a slash."""
    root = conf_dir() / group
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
