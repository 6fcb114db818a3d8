"""The axes of a search: the keys that vary, and the values of each. ``choose.space`` restricts or extends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import OverrideParseException

from distexp.choose.candidate import MICRO_BATCH
from distexp.cli.overrides import parse
from distexp.config import ConfigError
from distexp.config.field_info import info_of
from distexp.config.key_info import schema_fields
from distexp.config.paths import options_of

CHECKPOINTING = "train.activation_checkpointing"
STRATEGY, SHARDING, STAGE, OFFLOAD, KERNELS = "strategy", "sharding", "zero_stage", "offload", "kernels"

DEFAULT_VALUES: Mapping[str, tuple[str, ...]] = {
    STRATEGY: ("single", "ddp", "fsdp", "deepspeed"),
    SHARDING: ("full_shard", "shard_grad_op", "hybrid_shard"),
    STAGE: ("1", "2", "3"),
    OFFLOAD: ("false", "true"),
    CHECKPOINTING: ("false", "true"),
    KERNELS: ("reference", "fast"),
}
"""Values of each axis, without the micro-batch, whose values are the divisors of a worker's samples."""

FURTHER_SECTIONS = ("ddp", "fsdp", "deepspeed", "offload")
FURTHER_KEYS = (
    *("train.logits", "train.loss", "train.loss_chunk_tokens", "train.compile", "train.activation_budget"),
    *("train.compute_weights", "train.channels_last", "model.attention", "dataset.num_workers", "dataset.cache"),
)
"""Keys outside of FURTHER_SECTIONS that ``choose.space`` may add, because the training stays the same."""

KEY_OF_AXIS = {"fsdp.sharding": SHARDING, "deepspeed.zero_stage": STAGE, "offload.enabled": OFFLOAD}
"""Keys that are typed in place of the group that sets them."""


@dataclass(frozen=True)
class Axes:
    """The values to try, by key.

    Attributes:
        values: Values of the axes of DEFAULT_VALUES that vary. Others keep the value of the command.
        micro_batches: Micro-batches to try; None for all divisors.
        further: Values of other keys.
    """

    values: Mapping[str, tuple[str, ...]]
    micro_batches: tuple[int, ...] | None
    further: Mapping[str, tuple[str, ...]]


def read_axes(space: Sequence[str], command: Sequence[str]) -> Axes:
    """Return what to vary.

    A key that is typed on the command line has that value only, unless ``choose.space`` names it.

    Args:
        space: Entries of ``choose.space``. ``KEY=VALUE,VALUE`` sets the values of an axis, or adds a key. A key alone
            keeps its default values; then only the named axes vary.
        command: Overrides of the command.

    Raises:
        ConfigError: with all entries that are wrong.
    """
    named, errors = {}, []
    for entry in space:
        try:
            key, values = _read_entry(entry)
            named[key] = values
        except ConfigError as error:
            errors += error.errors
    if errors:
        raise ConfigError(errors)
    chosen = {**_typed_values(command), **{key: values for key, values in named.items() if values is not None}}
    only_named = any(values is None for values in named.values())
    varied = {
        key: chosen.get(key, default)
        for key, default in DEFAULT_VALUES.items()
        if key in chosen or key in named or not only_named
    }
    if only_named and MICRO_BATCH not in named and MICRO_BATCH not in chosen:
        chosen[MICRO_BATCH] = ()  # that of the command
    sizes = chosen.get(MICRO_BATCH)
    further = {key: values for key, values in named.items() if key not in (*DEFAULT_VALUES, MICRO_BATCH) and values}
    return Axes(_with_implied(varied, chosen), None if sizes is None else tuple(map(int, sizes)), further)


def _with_implied(varied: Mapping[str, tuple[str, ...]], chosen: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the axes. A chosen sharding restricts the strategies to FSDP, and a chosen stage to DeepSpeed."""
    found = dict(varied)
    implied = [name for axis, name in ((SHARDING, "fsdp"), (STAGE, "deepspeed")) if axis in chosen]
    if implied and STRATEGY not in chosen and STRATEGY in varied:
        found[STRATEGY] = tuple(implied)
    return found


def _typed_values(command: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the axes that the command sets."""
    found: dict[str, tuple[str, ...]] = {}
    for text in command:
        key, _, value = text.lstrip("+").partition("=")
        axis = KEY_OF_AXIS.get(key, key)
        if axis in (*DEFAULT_VALUES, MICRO_BATCH):
            found[axis] = (value.strip("'\""),)
    if found.get(MICRO_BATCH) == ("auto",):
        del found[MICRO_BATCH]
    return found


def _read_entry(entry: str) -> tuple[str, tuple[str, ...] | None]:
    """Return key and values of an entry of ``choose.space``; None for a key alone.

    Raises:
        ConfigError: with a hint.
    """
    key, equals, _ = entry.partition("=")
    key = KEY_OF_AXIS.get(key.strip(), key.strip())
    _check_key(key, entry)
    if not equals:
        if key not in (*DEFAULT_VALUES, MICRO_BATCH):
            raise ConfigError(f"choose.space: {entry} has no values: write {key}=VALUE,VALUE")
        return key, None
    try:
        (override,) = parse([entry])
    except OverrideParseException:
        raise ConfigError(f"choose.space: {entry} cannot be read: write KEY=VALUE,VALUE") from None
    values = _values(override)
    _check_values(key, values, entry)
    return key, values


def _values(override: Override) -> tuple[str, ...]:
    found = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if len(found) == 1 and isinstance(found[0], list):  # ``KEY=[a,b]``
        found = found[0]
    return tuple(map(_text, found))


def _text(value: object) -> str:
    if isinstance(value, QuotedString):
        return str(value.text)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _check_key(key: str, entry: str) -> None:
    if key in (*DEFAULT_VALUES, MICRO_BATCH) or key in further_keys():
        return
    if key in {name for name, _ in schema_fields()}:
        raise ConfigError(
            f"choose.space: {entry} changes the training or its resources: leave it out, or set it for all candidates"
        )
    known = (*DEFAULT_VALUES, MICRO_BATCH, *further_keys())
    near = get_close_matches(key, known, n=1) or [each for each in known if each.endswith(f".{key}")]
    hint = f"did you mean {near[0]}?" if near else f"use {', '.join((*DEFAULT_VALUES, MICRO_BATCH))}"
    raise ConfigError(f"choose.space: {key} is not a key that can vary: {hint}")


def further_keys() -> tuple[str, ...]:
    """Return the keys that ``choose.space`` may add."""
    names = [name for name, _ in schema_fields() if name.partition(".")[0] in FURTHER_SECTIONS]
    taken = ("deepspeed.config_file", *KEY_OF_AXIS)
    return (*(name for name in names if name not in taken), *FURTHER_KEYS)


def _check_values(key: str, values: Sequence[str], entry: str) -> None:
    """Check the values of an axis.

    Raises:
        ConfigError: with the values that are possible.
    """
    if key == MICRO_BATCH:
        wrong = [value for value in values if not value.isdecimal() or int(value) < 1]
        limits = "at least 1"
    elif key in DEFAULT_VALUES:
        options = ("false", "true") if key == CHECKPOINTING else tuple(options_of(key))
        wrong, limits = [value for value in values if value not in options], ", ".join(options)
    else:
        info = next(info_of(spec) for name, spec in schema_fields() if name == key)
        accepted = [str(each).lower() if isinstance(each, bool) else each for each in info.choices]
        wrong = [value for value in values if accepted and not info.at_least and value not in (*accepted, "null")]
        limits = info.limits
    if wrong:
        raise ConfigError(f"choose.space: {entry}: {key}={wrong[0]} is not possible: use {limits}")
