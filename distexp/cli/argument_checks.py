"""Words of a command line that are neither Hydra's options nor KEY=VALUE, with what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from distexp.config import ConfigError
from distexp.config.key_info import known_keys

ACTIONS = ("run", "multirun", "cfg", "info")
"""What Hydra can be asked to do, by its options' names."""


def check_arguments(words: Sequence[str]) -> None:
    """ConfigError for options that there are not, and for overrides that blanks have torn.

    Hydra's own parser tells its options from overrides; what it would print on its own is a page of usage.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    known, unknown = parser.parse_known_intermixed_args(list(words))
    errors = [_no_option(word, words) for word in unknown if word.startswith("-")]
    actions = [f"--{name}" for name in ACTIONS if getattr(known, name)]
    if len(actions) > 1:
        errors.append(f"{' and '.join(actions)} exclude each other: give one of them")
    if not errors:
        errors = [f"{' '.join(torn)} has a blank too many: write {_mended(torn)}" for torn in _torn(known.overrides)]
    if errors:
        raise ConfigError(errors)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}: --help shows how")


def _no_option(word: str, words: Sequence[str]) -> str:
    """A sentence for ``--strategy`` or ``--strategy=fsdp``, whose value may be the next word."""
    option, equals, value = word.partition("=")
    after = [*words[words.index(word) + 1 :], ""][0]
    if not equals:
        value = after if after and not after.startswith("-") and "=" not in after else "VALUE"
    meant = _keys_called(option.lstrip("-").replace("-", "_"))
    mend = " or ".join(f"{key}={value}" for key in meant)
    return f"{option} is no option: {f'write {mend}' if mend else 'keys are set by KEY=VALUE, and --help shows how'}"


def _keys_called(name: str) -> list[str]:
    """The key of a name, or those of sections that end in it; nothing where they are too many to mean one."""
    keys = known_keys()
    if name in keys:
        return [name]
    ending = sorted(key for key in keys if key.endswith(f".{name}") and not key.startswith("scale."))
    return ending if len(ending) <= 2 else []


def _torn(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The runs of words that were to be one override, as ``strategy= fsdp`` and ``strategy fsdp``."""
    pieces: list[list[str]] = []
    keys = known_keys()
    for word in overrides:
        if pieces and _goes_on(pieces[-1][-1], word, keys):
            pieces[-1].append(word)
        else:
            pieces.append([word])
    return (piece for piece in pieces if len(piece) > 1)


def _goes_on(before: str, word: str, keys: set[str]) -> bool:
    if "=" in word.lstrip("=") or word.startswith(("~", "+")):
        return False  # an override of its own
    return before in keys or before.endswith(("=", ",")) or word.startswith(("=", ","))


def _mended(torn: Sequence[str]) -> str:
    whole = "".join(torn)
    return whole if "=" in whole else f"{torn[0]}={''.join(torn[1:])}"
