"""Refusal of numbers for keys that are true or false, from the command line and from YAML files alike."""

from __future__ import annotations

from typing import Any

from omegaconf import BooleanNode, ValidationError

_convert = BooleanNode._validate_and_convert_impl


def refuse_numbers_as_booleans() -> None:
    """Make OmegaConf refuse ``profile=5``. It takes every number except 0 as true."""
    BooleanNode._validate_and_convert_impl = _convert_checked  # type: ignore[assignment, method-assign]


def _convert_checked(node: BooleanNode, value: Any) -> bool:
    """Return a value as true or false. The texts 0 and 1 are accepted, because environment variables have them.

    Raises:
        ValidationError: the value is a number, or a text without such a meaning.
    """
    if value in ("0", "1"):
        return bool(value == "1")
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
    return _convert(node, value)
