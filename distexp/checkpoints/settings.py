"""Settings of a training that a resumed training should share, and those that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from distexp.config import Config
from distexp.config.flatten import flatten

Settings = dict[str, Any]
"""Values by their dotted keys."""

SECTIONS = ("model", "dataset", "precision", "train")

UNRELATED = frozenset(
    {
        *("model.keys", "model.init", "model.path"),  # the weights are those of the checkpoint
        *("dataset.keys", "dataset.num_workers", "dataset.answer_tokens"),
        *("train.resume", "train.checkpoint_every", "train.save_model", "train.score_answers", "train.eval_batch_size"),
        *("train.measure_after_step", "train.profile_steps", "train.log_every", "train.on_nan"),
        *("train.global_batch_size", "train.micro_batch_search_s"),  # micro-batch and accumulation show a change
    }
)
"""Keys of these sections that do not change the training."""


def training_settings(config: Config) -> Settings:
    """Return the settings of a training that its checkpoints contain."""
    content = asdict(config)
    pairs = flatten({section: content[section] for section in SECTIONS})
    return {key: value for key, value in pairs if key not in UNRELATED}


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each setting that differs, with the old and the new value."""
    for key, value in current.items():
        if key in saved and saved[key] != value:
            yield f"{key} was {_format(saved[key])} in the checkpoint and is {_format(value)} in this run"


def _format(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)
