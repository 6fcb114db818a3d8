"""The axes of a search: keys with their values, from ``choose.space``, parts of the cluster, and strategies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import QuotedString
from hydra.errors import OverrideParseException

from distexp.choose.candidate import AXES, DEFAULT_VALUES, GROUP_OF_KEY, MICRO_BATCH, OFFLOAD, STRATEGY, STRATEGY_OF
from distexp.config import Config, ConfigError
from distexp.config.fields import info_of
from distexp.config.keys import options_of, schema_fields
from distexp.config.overrides import key_of, parse, value_of, values_of
from distexp.resolve.resources import launcher_traits
from distexp.strategies.base import reference_name, shipped_strategies
from distexp.strategies.traits import Option, Traits


@dataclass(frozen=True)
class Axes:
    """The values to try, by key."""

    values: Mapping[str, tuple[str, ...]]  # of the axes of DEFAULT_VALUES that vary; others keep that of the command
    micro_batches: tuple[int, ...] | None  # micro-batches to try; None for all divisors, empty for that of the command
    further: Mapping[str, tuple[str, ...]]  # values of other keys
    is_micro_batch_named: bool = False  # whether the user requests several micro-batches, or one

    def overrides_of(self, axis: str) -> list[str]:
        """Return the overrides of an axis; one empty override if it does not vary."""
        return [f"{axis}={value}" for value in self.values.get(axis, ())] or [""]


def read_axes(space: Sequence[str], command: Sequence[str]) -> Axes:
    """Return what to vary, by the entries of ``choose.space`` and the overrides of the command.

    ``KEY=VALUE,VALUE`` sets the values of an axis, or adds a key. A key alone keeps its default values; then only the
    named axes vary. A key that is typed on the command line has that value only, unless an entry names it. Raise a
    ConfigError with all entries that are wrong.
    """
    named = {entry.key: entry.values for entry in _read_entries(space)}
    typed = {GROUP_OF_KEY.get(key_of(text), key_of(text)): (value_of(text),) for text in command}
    is_searched = typed.get(MICRO_BATCH) == ("auto",)
    in_command = {axis: value for axis, value in typed.items() if axis in AXES}
    if is_searched:
        del in_command[MICRO_BATCH]
    chosen = in_command | {key: values for key, values in named.items() if values is not None}
    only_named = None in named.values()
    varied = {
        key: chosen.get(key, default)
        for key, default in DEFAULT_VALUES.items()
        if key in chosen or key in named or not only_named
    }
    # A chosen option of strategies, such as a sharding, restricts the strategies to these.
    implied = tuple(name for axis, name in STRATEGY_OF.items() if axis in chosen)
    if implied and STRATEGY not in chosen and STRATEGY in varied:
        varied[STRATEGY] = implied
    _check_strategies(named, varied.get(STRATEGY))
    is_named = is_searched or MICRO_BATCH in named
    micro_batches: tuple[int, ...] | None = None if is_named or not only_named else ()
    if MICRO_BATCH in chosen:
        micro_batches = tuple(map(int, chosen[MICRO_BATCH]))
    further = {key: values for key, values in named.items() if key not in AXES and values}
    return Axes(varied, micro_batches, further, is_named)


def _check_strategies(keys: Iterable[str], tried: Sequence[str] | None) -> None:
    """Raise a ConfigError for keys of strategies that are not tried. None: only the strategy of the command is tried.

    That strategy refuses the keys of other sections when its candidates are composed.
    """
    owners = {kind.section: name for name, kind in shipped_strategies().items() if kind.section}
    if tried is None:
        tried, owners = (), {}
    found = [(key, STRATEGY_OF.get(key, owners.get(key.partition(".")[0]))) for key in keys]
    if errors := [
        f"choose.space: {key} has no effect, because strategy={owner} is not tried: leave it out, or add "
        f"strategy={owner} to choose.space"
        for key, owner in found
        if owner is not None and owner not in tried
    ]:
        raise ConfigError(errors)


def _read_entries(space: Sequence[str]) -> list[SpaceEntry]:
    entries: list[SpaceEntry] = []
    errors: list[str] = []
    for text in space:
        try:
            entry = parse_entry(text)
            check_entry(entry)
        except ConfigError as error:
            errors += error.errors
        else:
            entries.append(entry)
    if errors:
        raise ConfigError(errors)
    return entries


FURTHER_SECTIONS = (*(kind.section for kind in shipped_strategies().values() if kind.section), "offload", "parallel")
FURTHER_KEYS = (
    *("train.logits", "train.loss", "train.loss_chunk_tokens", "train.compile", "train.activation_budget"),
    *("train.compute_weights", "train.fused_update", "train.channels_last"),
    *("model.attention", "dataset.num_workers", "dataset.cache"),
)
"""Keys outside of FURTHER_SECTIONS that ``choose.space`` may add, because the training stays the same."""


def check_entry(entry: SpaceEntry) -> None:
    """Raise a ConfigError with what is possible instead, if the key or a value of an entry cannot vary."""
    fields = list(schema_fields())
    further = [name for name, spec in fields if name not in GROUP_OF_KEY and not info_of(spec).path]
    known = (*AXES, *(name for name in further if name.partition(".")[0] in FURTHER_SECTIONS), *FURTHER_KEYS)
    if entry.key not in known:
        if entry.key in {name for name, _ in fields}:
            raise ConfigError(
                f"choose.space: {entry.text} changes the training or its resources: leave it out, or set it for all "
                "candidates"
            )
        similar = get_close_matches(entry.key, known, n=1) or [key for key in known if key.endswith(f".{entry.key}")]
        hint = f"did you mean {similar[0]}?" if similar else f"use {', '.join(AXES)}"
        raise ConfigError(f"choose.space: {entry.key} is not a key that can vary: {hint}")
    if entry.values is not None:
        _check_values(entry, entry.values)
    elif entry.key not in AXES:
        raise ConfigError(f"choose.space: {entry.text} has no values: write {entry.key}=VALUE,VALUE")


def _check_values(entry: SpaceEntry, values: Sequence[str]) -> None:
    if entry.key == MICRO_BATCH:
        wrong, limits = [value for value in values if not value.isdecimal() or int(value) < 1], "at least 1"
    elif entry.key in DEFAULT_VALUES:
        options = DEFAULT_VALUES[entry.key] if "." in entry.key else _options_of(entry.key)  # a key, or a group
        wrong, limits = [value for value in values if value not in options], ", ".join(options)
    else:
        info = next(info_of(spec) for name, spec in schema_fields() if name == entry.key)
        choices = [str(choice).lower() if isinstance(choice, bool) else choice for choice in info.choices]
        # Values without a list of choices are checked when the candidates are composed.
        is_listed = bool(choices) and not info.at_least
        wrong, limits = [value for value in values if is_listed and value not in (*choices, "null")], info.limits
    if wrong:
        raise ConfigError(f"choose.space: {entry.text}: {entry.key}={wrong[0]} is not possible: use {limits}")


def _options_of(group: str) -> Sequence[str]:
    """Return the options of a config group, also those in a folder of the user (``--config-dir``)."""
    hydra = GlobalHydra.instance()
    found = hydra.config_loader().get_group_options(group) if hydra.is_initialized() else []
    return sorted({*options_of(group), *found})


@dataclass(frozen=True)
class SpaceEntry:
    """An entry of ``choose.space`` as typed, its key, and the values to try; None for an entry without values."""

    text: str
    key: str
    values: tuple[str, ...] | None


def parse_entry(text: str) -> SpaceEntry:
    """Return the key and the values of an entry. Raise a ConfigError for a syntax error in the values."""
    typed_key, equals, _ = text.partition("=")
    key = GROUP_OF_KEY.get(typed_key.strip(), typed_key.strip())
    if not equals:
        return SpaceEntry(text, key, None)
    try:
        (override,) = parse([text])
    except OverrideParseException:
        raise ConfigError(f"choose.space: {text} cannot be read: write KEY=VALUE,VALUE") from None
    values = values_of(override)
    if len(values) == 1 and isinstance(values[0], list):  # ``KEY=[a,b]``
        values = values[0]
    return SpaceEntry(text, key, tuple(map(_as_typed, values)))


def _as_typed(value: object) -> str:
    if isinstance(value, QuotedString):
        return str(value.text)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


@dataclass(frozen=True)
class ClusterSize:
    """A part of the cluster."""

    nodes: int
    workers_per_node: int

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node


def cluster_sizes(base: Config, gpus: Sequence[int]) -> list[ClusterSize]:
    """Return the parts of the cluster to try. Raise a ConfigError if a number of GPUs needs a part of a node."""
    nodes, per_node = base.cluster.nodes, base.cluster.workers_per_node or 1
    if not gpus:
        return [ClusterSize(nodes, per_node)]
    is_one_machine = launcher_traits(base).runs_here and nodes == 1
    errors = [
        f"choose.gpus={number} is no multiple of the {per_node} workers of a node: use {number // per_node * per_node}"
        for number in gpus
        if number > per_node and number % per_node and not is_one_machine
    ]
    if errors:
        raise ConfigError(errors)
    nodes_of = {number: 1 if number <= per_node or is_one_machine else number // per_node for number in gpus}
    return list(dict.fromkeys(ClusterSize(nodes, number // nodes) for number, nodes in nodes_of.items()))


Kinds = Mapping[str, type[Traits]]  # the class of each strategy by its name


def strategy_choices(size: ClusterSize, axes: Axes, kinds: Kinds) -> Iterator[tuple[str, str]]:
    """Yield the overrides of strategy and offloading to try with a number of workers; empty for those of the command.

    A strategy or option that is the only one is tried in any case.
    """
    names = axes.values.get(STRATEGY)
    if names is None:
        yield from (("", offload) for offload in axes.overrides_of(OFFLOAD))
        return
    for name in names:
        kind = kinds[name]
        if name in STRATEGY_OF.values():
            yield from _sharded_choices(name, kind, size, axes)
        # On one worker ``ddp`` is ``single`` with an overhead.
        elif (kind.max_workers is None or size.workers <= kind.max_workers) and (
            len(names) == 1 or kind.is_reference or not (kind.equals_reference and size.workers == 1)
        ):
            yield f"{STRATEGY}={name}", ""


def _sharded_choices(name: str, kind: type[Traits], size: ClusterSize, axes: Axes) -> Iterator[tuple[str, str]]:
    axis = kind.option_group
    values = axes.values.get(axis, ())
    is_only = len(values) <= 1
    # On one worker nothing is sharded, so only offloading makes a difference to the reference.
    equals_reference = kind.equals_reference and size.workers == 1
    needs_offload = equals_reference and reference_name() in axes.values[STRATEGY]
    known = {option.value: option for option in kind.options}
    for value in values or ("",):
        option = known.get(value, Option(value))
        if option.needs_nodes and size.nodes == 1 and not is_only:
            continue
        for offload in axes.overrides_of(OFFLOAD):
            is_useless = offload == f"{OFFLOAD}=false" and needs_offload
            is_impossible = offload == f"{OFFLOAD}=true" and not option.offloads and not is_only
            if not is_useless and not is_impossible:
                yield f"{axis}={value}" if value else f"{STRATEGY}={name}", offload
