"""Warnings about values of a command that the scale lowers, as ``scale=tiny train.micro_batch_size=8`` does."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from distexp.config import Config
from distexp.config.override_text import key_of, value_of
from distexp.launch.cell import Cell

LIMITS = {
    "train.micro_batch_size": ("micro_batch_size",),
    "train.gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "train.global_batch_size": ("micro_batch_size", "gradient_accumulation_steps"),
    "dataset.train_size": ("train_size",),
    "dataset.eval_size": ("eval_size",),
    "dataset.max_length": ("max_length",),
    "dataset.image_size": ("image_size",),
    "model.num_layers": ("layers",),
    "model.num_heads": ("heads",),
    "model.vocab_size": ("vocab_size",),
    "model.seq_length": ("max_length",),
}
"""Keys of ``scale`` that limit a key."""


def lowered_values(cells: Iterable[Cell], given: Container[str]) -> Iterator[str]:
    """Yield a warning for each value that the scale lowers, once for all cells.

    Args:
        cells: The cells of a command.
        given: Keys of the command itself. A preset of the workshop expects that its own values are lowered.
    """
    valid = ((cell.overrides, cell.config) for cell in cells if cell.config is not None)
    yield from dict.fromkeys(text for overrides, config in valid for text in _lowered(overrides, config, given))


def _lowered(overrides: Iterable[str], config: Config, given: Container[str]) -> Iterator[str]:
    if config.scale.name == "full":
        return
    for override in overrides:
        key, value = key_of(override), value_of(override)
        if key not in LIMITS or key not in given or not value.isdecimal():
            continue
        section, name = key.split(".")
        used = getattr(getattr(config, section), name)
        if used is not None and used < int(value):
            limits = [f"scale.{limit}=null" for limit in LIMITS[key] if getattr(config.scale, limit) is not None]
            hint = f": to keep {value}, add {' '.join(limits)}" if limits else ""
            yield f"scale={config.scale.name} lowers {key}={value} to {used}{hint}"
