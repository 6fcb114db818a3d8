"""Files that a run needs are checked before any worker starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.data.tokenization import train_byte_tokenizer
from tests.helpers.runs import resolve_cell

IMAGES = ("model=resnet_tiny", "dataset=tinyimagenet", "strategy=ddp", "cluster.device=cpu")


def error(*overrides: str) -> str:
    """Return the message of a command line that is refused."""
    with pytest.raises(ConfigError) as refused:
        resolve_cell(*overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "wnids.txt, train, val/val_annotations.txt"),
        (("train", "val"), "wnids.txt, val/val_annotations.txt"),
        (("train", "val", "val/val_annotations.txt"), "wnids.txt"),
    ],
)
def test_an_incomplete_folder_of_images_is_refused(present: Sequence[str], missing: str, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    assert error(*IMAGES, f"dataset.root={tmp_path}") == (
        f"dataset.root={tmp_path} contains no {missing}: set it to the top folder of the official archive of "
        "TinyImageNet"
    )


def test_a_complete_folder_of_images_is_accepted(tmp_path: Path) -> None:
    for name in ("train", "val/val_annotations.txt", "wnids.txt"):
        (tmp_path / name).mkdir(parents=True)
    assert resolve_cell(*IMAGES, f"dataset.root={tmp_path}").dataset.root == str(tmp_path)


@pytest.mark.parametrize("tokenizer", ["auto", "FOLDER"])
def test_a_folder_without_a_tokenizer_is_refused(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    chosen = tokenizer.replace("FOLDER", str(tmp_path))
    overrides = ("model=hf", f"model.name={tmp_path}", f"model.tokenizer={chosen}", "strategy=single")
    assert error(*overrides) == (
        f"model.tokenizer={chosen} needs a tokenizer in {tmp_path}, which contains none: set it to byte, a hub id, or "
        "a folder with a tokenizer"
    )
    assert resolve_cell(*overrides[:2], "strategy=single", "model.tokenizer=byte").model.tokenizer == "byte"
    assert resolve_cell(*overrides, "dataset=synthetic").model.tokenizer == chosen, "synthetic data needs none"
    train_byte_tokenizer(["some text"], 300).save(tmp_path)
    assert resolve_cell(*overrides).model.tokenizer == chosen


def test_text_data_without_a_tokenizer_is_refused() -> None:
    assert error("strategy=single", "model.tokenizer=null") == (
        "model.tokenizer is null, but dataset=squad_sample needs one: set byte, a hub id or a folder"
    )
