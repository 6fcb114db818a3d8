"""The choice between real and generated test data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import datasets
from tests.helpers.datasets import SQUAD, TINYIMAGENET, real_data


def test_a_configured_folder_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_TEST_DATA", str(tmp_path))
    (tmp_path / SQUAD).mkdir()
    with pytest.raises(AssertionError, match=rf"DISTEXP_TEST_DATA=.* has no folder {TINYIMAGENET}"):
        real_data()
    (tmp_path / TINYIMAGENET).mkdir()
    assert real_data() == tmp_path


def test_the_default_is_real_data_next_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTEXP_TEST_DATA", raising=False)
    monkeypatch.setattr(datasets, "NEIGHBOR", tmp_path / "nowhere")
    assert real_data() is None
    monkeypatch.setattr(datasets, "NEIGHBOR", tmp_path)
    assert real_data() == tmp_path
    monkeypatch.setenv("DISTEXP_TEST_DATA", "")
    assert real_data() is None
