"""Error messages of the command line, with hints for unknown options, durations and misspelled names."""

import difflib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Glob, Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from distexp.cli.foreign_names import ALIASES, OPTION_NAMES
from distexp.config import ConfigError
from distexp.config.fields import info_of
from distexp.config.keys import (
    RESERVED_KEYS,
    config_groups,
    describe_values,
    is_key,
    known_keys,
    options_of,
    schema_fields,
    strategy_groups,
)
from distexp.config.overrides import (
    copyable_overrides,
    home_message,
    parse,
    plain_value,
    quote_for_hydra,
    shell_quote,
    values_of,
    without_plus_prefix,
)
from distexp.data.sources.formats import recognize
from distexp.data.sources.image_folder import ENDINGS
from distexp.data.sources.rows import first_columns, first_rows, is_local, walk_files
from distexp.exceptions import describe_os_error, file_size_hint, first_line
from distexp.runs.texts import NOT_WRITABLE
from distexp.system.files import FULL, lacks_inodes

NEEDS_QUOTES = frozenset("!#&'();<=>^`~")
"""Characters that Hydra's grammar accepts only in quotes."""

BRACKETS = frozenset('"[]{}')
"""Characters that may start a list, a dictionary or a text in quotes."""

FUNCTION = re.compile(r"((?:choice|glob|shuffle|sort)\()?(.*?)((?(1)\)))", re.DOTALL)
"""A value, or the values inside a function of Hydra."""

ARGUMENT = re.compile(r"(list|reverse|include|exclude) *=")
"""The start of a named argument of such a function."""

NO_DIRECTORY = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Numbers of the errors of a path at which no directory can be made."""

SPACE = "choose.space"

UNQUOTED_OVERRIDE = re.compile(
    r"""
    [\w./@+]+=                      # key
    (?:\[[^\[\]]*\] | [^\[\],]*)   # a list, or one value
    (?:,[^\[\],=]+(?=[,\]]))*      # further values of a sweep
    """,
    re.VERBOSE,
)
"""An override without quotes inside a list of overrides, which need them."""

MERGED = "Error merging override "
"""Start of Hydra's message about an override that does not fit."""

NO_SECTION = "list is not a subclass"
"""Part of OmegaConf's message about a YAML file with a list in place of keys."""

IN_FILE = re.compile(r"In '([^']+)': ")
"""Start of Hydra's message about a value in a YAML file."""


def explain(error: Exception) -> list[str]:
    """Return the messages of an error of Hydra, of OmegaConf or of distexp."""
    if isinstance(error, ConfigError):
        return error.errors
    if isinstance(error, MissingConfigException):
        group, slash, option = (error.missing_cfg_file or "").partition("/")
        if group == "hydra":  # Its groups have a slash themselves.
            group, slash, option = str(error.missing_cfg_file).rpartition("/")
        if slash:
            return [explain_option(group, option, sorted({*options_of(group), *(error.options or [])}))]
        hint = "leave --config-name and --config-path out. A folder with your own options goes to --config-dir"
        return [f"{first_line(error).partition('. ')[0]}: {hint}"]
    if isinstance(error, YAMLError):
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        unknown = f"a configuration file is not valid YAML: {first_line(error)}"
        return [unknown if mark is None else f"{mark.name} is not valid YAML in line {mark.line + 1}: {error.problem}"]
    if isinstance(error, OverrideParseException):
        return [_explain_syntax(str(error.override), first_line(error))]
    return [_explain_value(error)]


def explain_os_error(error: OSError, *, resumes: bool, key: str) -> str:
    """Return the message of an error of the file system, with a hint if a directory cannot be written.

    ``resumes``: the command continues in the directory of a sweep, and accepts no other. ``key`` chooses the directory.
    """
    place = f" ({error.filename})" if error.filename else ""
    elsewhere = f"choose another directory with {key}=DIR"
    way = " and repeat the command" if resumes else f", or {elsewhere}"
    if error.errno == errno.ENOSPC and error.filename and lacks_inodes(Path(os.fsdecode(error.filename)).parent):
        return f"no inodes are left{place}: delete files{way}"
    hints = {
        FULL: file_size_hint(error.errno) or f"free space{way}",
        NO_DIRECTORY: elsewhere,
        NOT_WRITABLE: "copy the sweep to a folder that you can write, and resume the copy"
        if resumes
        else f"choose a directory that you can write with {key}=DIR",
    }
    hint = next((hint for numbers, hint in hints.items() if error.errno in numbers), None)
    return f"{error.strerror}{place}: {hint}" if hint else describe_os_error(error)


def _explain_value(error: Exception) -> str:
    text = first_line(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    file = IN_FILE.match(text)
    is_list = isinstance(cause, OmegaConfBaseException) and file is not None and NO_SECTION in first_line(cause)
    if is_list or not isinstance(cause, OmegaConfBaseException):
        wrong = f"{file[1]}.yaml is a list, and not a section: write lines of the form KEY: VALUE" if file else ""
        return wrong if is_list else _explain_composition(text)
    key = str(cause.full_key or "").partition("[")[0]
    origin = f"{file[1]}.yaml: " if file else ""
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key in config_groups():
        # A file of the group that does not set its package sets its section.
        is_section = file is not None and file[1].startswith(f"{key}/")
        section = "is a group and not a section: write '# @package _global_' into the first line of the file"
        return f"{origin}{key} {section if is_section else f'has no keys: write {key}=OPTION'}"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        hint = suggest_key(key, known_keys()) if not key.startswith("hydra.") else ": --info all prints those of Hydra"
        hint = hint or ": --cfg job prints all keys"
        return f"{origin}{key} is not a key{hint}"
    accepted = describe_values(key) if isinstance(cause, ValidationError) else None
    if accepted is None and text.startswith(MERGED):
        return _explain_merging(text.removeprefix(MERGED), first_line(cause))
    if accepted is not None:
        given = text.removeprefix(MERGED).lstrip("+")
        if file or not str(error):
            given = f"{origin}{key}={cause.value}"
        return f"{given} must be {accepted}{explain_duration(key, str(cause.value))}"
    return text if cause is error else f"{text.rstrip('.:')}: {first_line(cause)}"


def _explain_composition(text: str) -> str:
    """Return the error for a message of Hydra that is not about a value."""
    if text.startswith("Additional config directory"):  # A folder that does not exist.
        return f"{text}: give an existing folder to --config-dir"
    if unmatched := re.match(r"Could not override '(.+)'\. No match in the defaults list", text):
        return f"{unmatched[1]} is not a config group: leave it out"
    if added := re.match(r"Could not append to config\. An item is already at '(.+)'", text):
        return f"{added[1]} {_without_plus(added[1])}"
    if repeated := re.match(r"(?:Multiple values for )?([\w/@]+)(?:\. To override| appears more than once in)", text):
        group = repeated[1]
        return f"{group} {_without_plus(group, 'OPTION')}. In a file, write 'override /{group}: OPTION'"
    return text


def _without_plus(key: str, value: str = "VALUE") -> str:
    """Return why a plus in front of a key is wrong, to be printed after the key."""
    return f"has a value already: leave the + out, as in {key}={value}"


def _explain_merging(typed: str, reason: str) -> str:
    """Return the error for an override of another type than its section, an open section, or a key of Hydra."""
    override = typed.lstrip("+")
    key = override.partition("=")[0]
    if "Missing mandatory value: hydra." in reason:  # Hydra has resolved the value that the key has.
        return f"{key[1:]} cannot be deleted: leave {key} out" if key[0] == "~" else f"{key} {_without_plus(key)}"
    if "key type" in reason or reason.startswith("Key "):
        return f"{override} has a key that is not a text: write {key}={{NAME:VALUE}}"
    if accepted := describe_values(key):
        return f"{override} must be {accepted}"
    if key.startswith("cluster.environment."):
        return f"{override} must be a text: give the variable one value"
    return f"{override} is not accepted ({reason.rstrip('.')}): write another value, or leave it out"


def _explain_syntax(override: str, reason: str) -> str:
    override = without_plus_prefix(override)
    key, equals, value = override.partition("=")
    if not equals:
        return (
            f"{override} is not KEY=VALUE: write for example strategy=fsdp. Separate several values with commas alone, "
            "as in zero_stage=1,2, and quote a value with spaces"
        )
    if key in ("sweep.cells", SPACE) and (message := _explain_entries(override)):
        return message
    if value == "~" or value.startswith("~/"):
        return home_message(key, value)
    if mistyped := _explain_signs(override, key, value):
        return mistyped
    is_swept = not key.startswith("hydra.")  # So a comma in another value is part of it.
    if quoted_values := _quote_values(value, is_swept=is_swept):
        return f"{override} needs quotes: write {shell_quote(f'{key}={quoted_values}')}"
    pairs = (("'", "'"), ('"', '"'), ("[", "]"), ("{", "}"))
    odd = (a for a, b in pairs if (value.count(a) % 2 if a == b else value.count(a) != value.count(b)))
    unclosed = next(odd, "")  # A shell has split the value.
    cause = f", because {unclosed} is not closed: quote it for the shell: '{key}=...'" if unclosed else f": {reason}"
    return f"{override} cannot be parsed{cause}"


def _quote_values(value: str, *, is_swept: bool = True) -> str | None:
    """Return a value, or each of a sweep or a list, in the quotes it needs; None if quotes are not what is missing."""
    if value[:1] == "[" and value[-1:] == "]" and (inner := _quote_values(value[1:-1])):
        return f"[{inner}]"
    start, values, end = FUNCTION.fullmatch(value).groups("")  # type: ignore[union-attr]
    # Hydra drops the spaces around a value without quotes.
    parts = [values] if not is_swept or os.path.exists(values) else [part.strip() for part in values.split(",")]
    texts = [part for part in parts if not os.path.exists(part)]  # A file may have any name.
    if any(
        text[:1] in {"'", *BRACKETS} or any(text.count(a) != text.count(b) for a, b in ("[]", "{}")) for text in texts
    ):
        return None  # A list, a dictionary or a text in quotes, or a part of one.
    named = {part for part in parts if start and ARGUMENT.match(part)}
    odd = {part for part in parts if (NEEDS_QUOTES | BRACKETS) & set(part) or not part.isascii()} - named
    quoted = [quote_for_hydra(part) if part in odd else part for part in parts]
    return None if quoted == parts else f"{start}{','.join(quoted)}{end}"


def _explain_signs(override: str, key: str, value: str) -> str | None:
    """Return what to type for an equals sign, a comma or a function of Hydra without a value; None without any."""
    if value.startswith("="):
        single = f"{key}={value.lstrip('=') or 'VALUE'}"
        return f"{override} has more than one =: write {shell_quote(single)}"
    if re.fullmatch(r"(choice|range|interval|glob|shuffle|sort)\(\)", value):
        return f"{override} has no values: write {shell_quote(f'{key}={value[:-1]}VALUE,VALUE)')}"
    typed = re.sub(r",+(?=[],]|$)|(?<=\[),+|^,+", "", value)
    try:
        (parsed,) = parse([f"{key}={typed}"])
    except OverrideParseException:
        return None
    if typed in ("", value):
        return None
    if needed := _length_error(key, parsed):
        return f"{override} has a comma without a value, and {key} {needed}"
    return f"{override} has a comma without a value: add the value, or write {shell_quote(f'{key}={typed}')}"


def _length_error(key: str, parsed: Override) -> str | None:
    """Return why a key does not accept the length of a list; None if it does."""
    values = [plain_value(value) for value in values_of(parsed)] if not isinstance(parsed.value(), Glob) else []
    spec = dict(schema_fields()).get(key)
    length = info_of(spec).length if spec is not None else None
    wrong = [value for value in values if isinstance(value, list) and length not in (None, len(value))]
    return info_of(spec).find_error(wrong[0]) if spec is not None and wrong else None


def _explain_entries(override: str) -> str | None:
    """Return what to type for a list of overrides; None if it still cannot be parsed with each one in quotes."""
    key, _, value = override.partition("=")
    if empty := re.search(r"[\w.]+=(?=[,\]\"']|$)", value):
        return f"{override} has {empty[0]} without a value: write {empty[0]}VALUE"
    if key == SPACE and not value.startswith("["):
        value = f"[{value}]"
    quoted = f"{key}=" + UNQUOTED_OVERRIDE.sub(lambda found: _quote_override(found[0]), re.sub(r"[\"']", "", value))
    try:
        parse([quoted])
    except OverrideParseException:
        return None
    return f"{override} needs quotes: write '{quoted}'"


def _quote_override(text: str) -> str:
    """Return an override in quotes. Keys without values after its own values are other entries, and need none."""
    override, comma, last = text.rpartition(",")
    if comma and is_key(last):
        return f"{_quote_override(override)},{last}"
    return f'"{text}"'


def explain_option(group: str, option: str, options: list[str]) -> str:
    """Return the error for an option that a group does not have."""
    if group == "dataset" and (found := data_overrides(option)):
        other = ", or the same with another model of images" if "model=resnet" in found else ""
        return f"{group}={option} is data and not an option: write {found}{other}"
    near = _suggest_option(group, option, options)
    presets = "distexp experiments lists them. Add --config-dir FOLDER for those of a folder"
    texts = [presets if group == "experiment" else f"Options: {', '.join(options)}"]
    if not near and group in ("model", "dataset", "strategy", "cluster") and option.isidentifier():
        texts.append(f"A custom option, in FOLDER/{group}/{option}.yaml, needs --config-dir FOLDER")
    if group == "model" and option:
        typed = copyable_overrides("model=hf", f"model.name={'FOLDER_OR_HUB_ID' if near else option}")
        texts.append(f"For another model of transformers, from the hub or a folder: {typed}")
    return f"{group}={option} is not an option{near or '.'} {'. '.join(texts)}"


def data_overrides(path: str) -> str | None:
    """Return the overrides for the data at a path, by its images or columns; None if the path is not local."""
    root = Path(path)
    if not is_local(path):
        return None
    if (root / "wnids.txt").is_file():
        return copyable_overrides("model=resnet_tiny", "dataset=tinyimagenet", f"dataset.root={path}")
    if root.is_dir() and any(file.lower().endswith(ENDINGS) and Path(file).parent != root for file in walk_files(root)):
        return copyable_overrides("model=resnet_tiny", "dataset=image_folder", f"dataset.path={path}")
    if root.suffix == ".json" and "data" in first_columns(path):
        evaluation = next(iter(sorted(root.parent.glob("*dev*.json"))), root)
        return copyable_overrides("dataset=squad", f"dataset.train_path={path}", f"dataset.eval_path={evaluation}")
    return _text_overrides(path)


def _text_overrides(path: str) -> str:
    """Return the overrides for texts, prompts with answers, messages or tags. Raise ConfigError if there are none."""
    rows = [row.values for row in first_rows(path)]
    if not any(rows):
        return copyable_overrides("dataset=text", f"dataset.path={path}")  # Its message names what is wrong.
    if (found := recognize(rows)) is None:
        raise ConfigError(
            f"dataset={path} is data and not an option, but no column has texts or messages: write rows with a column "
            "text, with prompt and answer, or with messages"
        )
    option, *further = found
    return copyable_overrides(option, f"dataset.path={path}", *further)


def _suggest_option(group: str, option: str, options: list[str]) -> str:
    """Return ``. Did you mean a or b?``, or an empty text."""
    name = option.lower()
    name = OPTION_NAMES.get(group, {}).get(name, name)
    if name in options:
        return f". Did you mean {name}?"
    if group == "strategy" and (stage := re.fullmatch(r"zero[-_ ]?([0-3])", name)):
        return f". Did you mean zero_stage={stage[1]}?"
    confused = ("strategy", *strategy_groups())  # Groups that choose a strategy.
    elsewhere = [other for other in confused if group in confused and name in options_of(other)]
    return f". Did you mean {elsewhere[0]}={name}?" if elsewhere else suggest(name, options)


UNITS = {"_min": ("minutes", 60), "_s": ("seconds", 1)}
"""Unit of a key, and its length in seconds, by the end of the key."""

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Length of the units that users type, by their first letter."""

PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*(d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?)(?![a-z])\s*")
"""A number with a unit, as in ``30m`` or ``30 minutes``."""


def explain_duration(key: str, value: str) -> str:
    """Return which number to write for a duration, or for steps in ``profile``, as the end of a message; or nothing."""
    if key == "profile" and value.isdecimal():
        return f": for {value} steps write train.profile_steps={value}"
    name, length = next((unit for end, unit in UNITS.items() if key.endswith(end)), ("", 1))
    if not name:
        return ""
    text = value.strip("'\" ").lower()
    if short := re.fullmatch(r"(\d+):(\d{1,2})", text):  # hours and minutes, or minutes and seconds
        first, second = (int(part) for part in short.groups())
        long, brief = 3600 * first + 60 * second, 60 * first + second
        return (
            f", in {name}: write {key}={long / length:g} for {first} h {second} min, or "
            f"{key}={brief / length:g} for {first} min {second} s"
        )
    seconds = _seconds(text)
    return "" if seconds is None else f", in {name}: write {key}={seconds / length:.12g}"


def _seconds(text: str) -> float | None:
    """Return the seconds of a duration with units, or of days, hours, minutes and seconds; None for another text."""
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d{1,2}):(\d{1,2})", text):  # as Slurm writes them
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    parts = PARTS.findall(text)
    if not parts or PARTS.sub("", text):
        return None
    return sum(float(number) * SECONDS[unit[0]] for number, unit in parts)


def suggest(wrong: str, known: Iterable[str]) -> str:
    """Return ``. Did you mean a or b?``, or an empty text if no known name is similar."""
    return _question(difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6))


def suggest_key(wrong: str, known: Iterable[str]) -> str:
    """Return similar keys by their last part, because the right name in a wrong section is a common error."""
    section, _, name = wrong.rpartition(".")
    if name in ALIASES:
        return _question([ALIASES[name]])
    by_name: dict[str, list[str]] = {}
    for key in sorted({*known} - RESERVED_KEYS.keys()):
        if "/" not in key:
            by_name.setdefault(key.rpartition(".")[2], []).append(key)
    containing = [other for other in by_name if name in (other, *other.split("_"))]
    near = containing or difflib.get_close_matches(name, by_name, n=3, cutoff=0.6)
    keys = [key for other in near for key in by_name[other]]
    return _question([key for key in keys if key.rpartition(".")[0] == section] or keys)


def _question(near: Sequence[str]) -> str:
    return f". Did you mean {' or '.join(near[:3])}?" if near else ""
