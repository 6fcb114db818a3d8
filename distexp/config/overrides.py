"""Overrides and command lines: parsing with Hydra's grammar, quoting, and texts to copy."""

import math
import re
import shlex
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException

from distexp.config import ConfigError
from distexp.config.keys import config_groups, describe_values, is_too_long, takes_list

OPEN_SECTIONS = ("model.options", "dataset.options", "strategy.options", "cluster.environment", "cluster.sbatch")


def is_override(argument: str) -> bool:
    """Return whether an argument is an override, and not an option or the value of an option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def add_plus_prefix(override: str) -> str:
    """Mark what adds keys to an open section as new, which Hydra requires: one key, or several as ``{...}``."""
    return f"++{override}" if _is_open(override) else override


def without_plus_prefix(override: str) -> str:
    """Return an override as the user typed it, without the mark of ``add_plus_prefix``."""
    typed = override.removeprefix("++")
    return typed if _is_open(typed) else override


def _is_open(override: str) -> bool:
    return any(override.startswith((f"{section}.", f"{section}={{")) for section in OPEN_SECTIONS)


MAX_CELLS = 100_000
"""Cells of the largest sweep. More would fill the memory before the first one starts."""

MAX_RANGE = 1e15
"""Limit of the numbers of a range. A list with NaN or infinity would never end."""


def parse(overrides: Sequence[str], parser: OverridesParser | None = None) -> list[Override]:
    """Parse overrides with Hydra's grammar.

    Raise OverrideParseException if an override does not match the grammar, or ConfigError if a number is too long, or a
    range endless.
    """
    found = []
    for text in overrides:
        try:
            found += (parser or OverridesParser.create()).parse_overrides([text])
        except ValueError:  # of Python, which limits the digits of an integer
            raise ConfigError(f"{text[:40]}... has a number with too many digits: write a shorter one") from None
    for override in found:
        check_cell_count([override])
    return found


def check_cell_count(overrides: Iterable[Override]) -> None:
    """Raise ConfigError if the product of some overrides has too many cells, before any list is made of them."""
    listed = list(overrides)
    count = math.prod(map(_count_values, listed))
    if count > MAX_CELLS:
        shown = " ".join(str(override.input_line) for override in listed if _count_values(override) > 1)
        raise ConfigError(f"{shown} makes {count:,.0f} cells: start a sweep with at most {MAX_CELLS:,} cells")


def _count_values(override: Override) -> float:
    """Return how many values a sweep has; 1 for a single value, and for a pattern, which is short."""
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        raise ConfigError(
            f"{override.input_line} is for other sweepers: list the values, or use range(START,STOP,STEP)"
        )
    if not isinstance(value, RangeSweep):
        return len(value.list) if isinstance(value, ChoiceSweep) else 1
    start, stop, step = value.start or 0, value.stop or 0, value.step
    if not step or not all(abs(number) < MAX_RANGE for number in (start, stop, step)):
        raise ConfigError(
            f"{override.input_line} has no end: use finite numbers and a step other than 0, as in range(0,10,1)"
        )
    return max(0, (stop - start) / step)


def quote_choice(text: str, groups: Container[str]) -> str:
    """Return an override with its int, float and bool choices quoted, if its key is a group.

    Raise ConfigError if a list is given, of which Hydra would silently use the last option only, or null, or
    OverrideParseException if the override does not match the grammar.
    """
    prefix, equals, _ = text.partition("=")
    key = prefix.lstrip("+").split("@", 1)[0].removeprefix("/")
    if not equals or key not in groups:
        return text
    override = parse([text])[0]
    if isinstance(override.value(), Glob):
        return text
    values = values_of(override)
    if any("${" in str(plain_value(item)) for item in values):
        raise ConfigError(f"{text} is a reference, but {key} takes an option: write {key}=OPTION")
    if any(is_too_long(str(plain_value(item))) for item in values):
        raise ConfigError(f"{text} is not an option: distexp help {key} lists them")
    if any(isinstance(item, dict) for item in values):
        raise ConfigError(f"{text} is a section, but {key} takes an option: write {key}=OPTION")
    if None in values:
        raise ConfigError(f"{text} chooses no option of {key}: write {key}=OPTION, or leave it out")
    if any(isinstance(item, list) for item in values):
        listed = [option for item in values for option in (item if isinstance(item, list) else [item])]
        options = [_quote(option).strip("'") for option in listed]
        hint = f"write {key}={options[0] if options else 'OPTION'}"
        if len(options) > 1:
            hint = f"add --multirun {key}={','.join(options)} to compare them"
        raise ConfigError(f"{text} is a list, but {key} takes one option: {hint}")
    return f"{prefix}=" + ",".join(_quote(item) for item in values)


def values_of(override: Override) -> list[Any]:
    """Return the value of an override, or all values of a sweep."""
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def plain_value(value: Any) -> Any:
    """Return a value of an override without its quotes, also inside of lists and mappings."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    return {plain_value(key): plain_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def home_message(key: str, value: str) -> str:
    """Return the error for a path with ``~``, which shells replace only at the start of an argument."""
    return f"{key}={value} starts with ~, which the shell does not replace there: write {key}=$HOME{value[1:]}"


def _quote(value: Any) -> str:
    value = plain_value(value)
    if isinstance(value, bool):
        value = str(value).lower()
    text = str(value)
    bare = text.replace("_", "").replace("/", "").replace("-", "")
    is_plain = bare.isascii() and bare.isalpha()  # Hydra's grammar accepts other letters in quotes only.
    return text if is_plain and text.lower() not in ("true", "false", "null", "nan", "inf") else quote_for_hydra(text)


def sbatch_name(option: object) -> str:
    """Return the name of an option of sbatch, which users write as ``--cpus-per-gpu`` or ``cpus_per_gpu`` too."""
    return str(option).lstrip("-").replace("_", "-")


def key_of(override: str) -> str:
    """Return the key of an override, without the ``+`` or ``~`` in front of it."""
    return override.partition("=")[0].lstrip("+~")


def value_of(override: str) -> str:
    """Return the value of an override as text, without quotes around it; empty if there is none."""
    return override.partition("=")[2].strip("'\"")


def sets_key(overrides: Iterable[str], key: str) -> bool:
    """Return whether one of some overrides sets a key."""
    return any(key_of(text) == key and "=" in text for text in overrides)


TYPED_BOOLEAN = re.compile(r"(?<=[=,\[:])(True|False)(?=[,\]}]|$)")
"""A boolean as Hydra writes it in the overrides of a sweep."""


def format_override(text: str) -> str:
    """Return an override as it is typed: without Hydra's quotes, and with ``true`` for ``True``."""
    if "'" in text and ("\\'" in text or '"' in text) and (override := _parse(text)) is not None:
        value = override.value()
        if isinstance(value, str) and "'" in value:
            return f"{text.partition('=')[0]}={value}"
        if _has_apostrophe(value):  # A list with it needs its quotes.
            return text
    return TYPED_BOOLEAN.sub(lambda found: found[0].lower(), text.replace("'", ""))


def _has_apostrophe(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_apostrophe, value if isinstance(value, list) else (*value, *value.values())))
    return "'" in str(plain_value(value))


def suggest_command(name: str, directory: Path) -> str:
    """Return the command line of a sub-command: ``distexp status DIR``."""
    return f"distexp {name} {shlex.quote(path_argument(directory))}"


def path_argument(path: Path) -> str:
    """Return a path that no command takes for an option, as it would ``-x``."""
    return f"./{path}" if str(path).startswith("-") else str(path)


SIMPLE = re.compile(r"[\w./@+~]+=[\w./+-]+", re.ASCII)
"""An override without quotes, brackets and commas, which needs no check."""


def copyable_command(overrides: Iterable[str], *, command: str = "distexp", may_sweep: bool = False) -> str:
    """Return a command line that bash splits into a command and its overrides; ``may_sweep``: with several values."""
    return f"{command} {copyable_overrides(*overrides, may_sweep=may_sweep)}".rstrip()


def copyable_overrides(*overrides: str, may_sweep: bool = False) -> str:
    """Return overrides as they are typed in bash, also if their values contain spaces or quotes."""
    return " ".join(shell_quote(copyable_override(text, may_sweep=may_sweep)) for text in overrides)


def shell_quote(text: str) -> str:
    """Return a text as bash needs it, in double quotes if it has single ones and bash reads it unchanged."""
    if "\n" in text:  # $'...' keeps it in one line
        return "$'" + text.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n") + "'"
    is_unchanged = not re.search(r"""["$`!\n]|\\(?!')""", text)
    return f'"{text}"' if "'" in text and is_unchanged else shlex.quote(text)


def copyable_override(text: str, *, may_sweep: bool = False) -> str:
    """Return an override that Hydra reads as the original one, without the quotes that it does not need.

    Records keep overrides without quotes. So a value that Hydra would not read as one text gets them back.
    """
    if text.startswith("-") or "=" not in text:
        return text
    key, _, value = text.partition("=")
    if "'" not in text and _is_misread(text):
        return f"{key}={quote_for_hydra(value)}"
    plain = format_override(text)
    if "'" not in text and SIMPLE.fullmatch(plain):
        return plain
    original, found = _parse(text), _parse(plain)
    if _is_valid(found, may_sweep) and ("'" not in text or _values(original) == _values(found)):
        return plain
    if _is_valid(original, may_sweep):
        return text
    key, _, value = (text if original is None else plain).partition("=")  # else its apostrophes are part of it
    is_list = re.fullmatch(r"\[.*\]", value) and takes_list(key.lstrip("+"))
    return override_of(key, value[1:-1].split(",")) if is_list else f"{key}={quote_for_hydra(value)}"


@lru_cache(maxsize=4096)
def _is_misread(text: str) -> bool:
    """Return whether a key takes a text that Hydra reads as something else, as ``dataset.column=1.50`` as 1.5."""
    key, _, value = text.partition("=")
    accepted = describe_values(key.lstrip("+"))
    override = _parse(text) if accepted in ("a string", "a string or null") else None
    if override is None:
        return False
    found = override.value()
    if found is None:
        return accepted == "a string"
    return not isinstance(found, str | QuotedString | Sweep) or value != value.strip()


SINGLE_RUN = "hydra.sweep.subdir=."
"""Override that the command of a single run with ``hydra.run.dir`` gets: a sweep of one cell without a subfolder."""


def sweep_dir_override(path: Path, key: str = "hydra.sweep.dir") -> str:
    """Return the override that sets a directory, in quotes if Hydra would read it as something else."""
    plain = f"{key}={path}"
    return plain if SIMPLE.fullmatch(plain) else f"{key}={quote_for_hydra(str(path))}"


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def is_sweep(text: str) -> bool:
    """Return whether an argument is an override that needs ``--multirun``, which a range of one value does too."""
    override = _parse(text) if is_override(text) else None
    return override is not None and override.is_sweep_override()


def _is_valid(override: Override | None, may_sweep: bool) -> bool:
    return override is not None and (may_sweep or not override.is_sweep_override())


def _values(override: Override | None) -> list[Any]:
    """Return the values of an override. Those of a group are texts, because ``zero_stage='2'`` is ``zero_stage=2``."""
    if override is None:
        return []
    value: Any = override.value()
    values = list(override.sweep_iterator()) if isinstance(value, ChoiceSweep) else [value]
    is_group = override.get_key_element().lstrip("+~").partition("@")[0] in config_groups()
    plain = [plain_value(value) for value in values]
    # With their types, ``1`` and ``true`` differ.
    return [str(value).lower() if is_group else (type(value).__name__, value) for value in plain]


def override_of(key: str, value: Any) -> str:
    """Return the override that sets a key to a text, a number or a list of them, with the quotes that Hydra needs."""
    plain = f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={value}"
    found = _parse(plain)
    if found is not None and not found.is_sweep_override() and found.value() == value:
        return plain
    quoted = [quote_for_hydra(str(item)) for item in (value if isinstance(value, list) else [value])]
    return f"{key}=[{','.join(quoted)}]" if isinstance(value, list) else f"{key}={quoted[0]}"


def quote_for_hydra(value: str) -> str:
    """Return a value in quotes, which Hydra reads as this text."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    ending = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f"'{escaped}{ending}'"


def join_first(items: Iterable[str], limit: int = 8) -> str:
    """Join the first items with commas and count the others: ``a, b and 3 more``."""
    known = list(items)
    rest = len(known) - limit
    return ", ".join(known[:limit]) + (f" and {rest} more" if rest > 0 else "")


def format_ids(numbers: Sequence[int]) -> str:
    """Join run numbers: ``0-5, 8, 9``. Three or more consecutive numbers become a range."""
    # The difference between a number and its position is the same for consecutive numbers.
    groups = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    blocks = [[number for _, number in group] for _, group in groups]
    return join_first(
        text for block in blocks for text in ([f"{block[0]}-{block[-1]}"] if len(block) > 2 else map(str, block))
    )


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural: ``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_runs(numbers: Sequence[int]) -> str:
    """Name runs by number: ``run 3``, ``runs 0-5, 8``."""
    return f"run{'' if len(numbers) == 1 else 's'} {format_ids(numbers)}"
