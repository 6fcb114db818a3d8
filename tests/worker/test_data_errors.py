"""Errors of the data that a run loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.training.build import load_data
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize(("tokenizer", "errors"), [("auto", 2), ("/nowhere/tokenizer", 1)])
def test_a_wrong_source_of_model_and_tokenizer_is_one_failure(tokenizer: str, errors: int, tmp_path: Path) -> None:
    config = resolve_cell("model=hf", "model.name=absent/absent", "dataset.train_size=8", "cluster.device=cpu")
    config.model.name, config.model.tokenizer = str(tmp_path), tokenizer  # the launcher would refuse the empty folder
    context: Any = None
    with pytest.raises(ConfigError) as caught:
        load_data(config, context)
    assert len(caught.value.errors) == errors
    assert caught.value.errors[0].startswith("model.tokenizer=")
    if errors == 2:
        assert f"model.name={tmp_path} is neither a folder with a model's config.json nor" in caught.value.errors[1]
