"""Settings of records that lack the keys that were added later."""

from __future__ import annotations

import pytest

from distexp.report.data.repeats import group_repeats, varying_settings
from distexp.report.data.rows import Row, read_settings, row_from_record, training_key
from tests.helpers.records import record

REFERENCE = {
    "train__logits": "all", "train__loss": "full", "train__compute_weights": "autocast", "train__channels_last": False,
    "train__compile": False, "dataset__cache": "none",
}  # fmt: skip


def rows(number_of_new_ones: int = 1, **changed: object) -> list[Row]:
    """Return the row of a record that lacks keys, and rows of others."""
    old = record(0, **REFERENCE)
    del old.config["model"]["attention"]
    for name in ("logits", "loss", "loss_chunk_tokens", "compute_weights", "channels_last", "global_batch_size"):
        del old.config["train"][name]
    for name in ("packing", "bucketing", "cache"):
        del old.config["dataset"][name]
    new = [record(n + 1, **{**REFERENCE, **changed}) for n in range(number_of_new_ones)]
    return [row_from_record(other, str(n)) for n, other in enumerate([old, *new])]


def test_a_missing_key_has_its_default() -> None:
    old, new = rows()
    assert old.settings == new.settings
    assert training_key(old.settings) == training_key(new.settings)
    assert varying_settings([old.record, new.record], [old.settings, new.settings]) == []
    assert len(group_repeats([old, new])) == 1


@pytest.mark.parametrize(("key", "value"), [("train__logits", "targets"), ("dataset__packing", True)])
def test_another_value_of_a_missing_key_is_another_training(key: str, value: object) -> None:
    old, new = rows(**{key: value})
    assert len(group_repeats([old, new])) == 2
    assert varying_settings([old.record, new.record], [old.settings, new.settings]) != []


def test_a_record_without_a_section_is_refused() -> None:
    broken = record(0)
    del broken.config["cluster"]
    with pytest.raises(KeyError, match="cluster"):
        read_settings(broken)
