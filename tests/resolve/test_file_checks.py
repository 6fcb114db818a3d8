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


NO_QUESTION = '{"data": [{"paragraphs": [{"context": "a", "qas": []}]}]}'
NO_ANSWER = '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "1", "question": "b", "answers": []}]}]}]}'


def test_text_data_without_a_tokenizer_is_refused() -> None:
    assert error("strategy=single", "model.tokenizer=null") == (
        "model.tokenizer is null, but dataset=squad_sample needs one: set byte, a hub id or a folder"
    )


def test_small_question_files_of_another_format_are_refused(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("train", "eval")}
    overrides = ["dataset=squad", "strategy=single", *(f"dataset.{name}_path={path}" for name, path in paths.items())]
    paths["train"].write_text("question,answer")
    paths["eval"].write_text("[1]")
    form = '{"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "...", "question": "...", "answers": '
    form += '[{"text": "..."}]}]}]}]}'
    assert error(*overrides).splitlines() == [
        f"dataset.train_path={paths['train']} is not JSON (Expecting value: line 1 column 1 (char 0)): use a file of "
        f"the form {form}",
        f"dataset.eval_path={paths['eval']} is not in the format of SQuAD v1.1: the file is a list and not an object. "
        f"Use the form {form}",
    ]
    paths["train"].write_text(form)
    empty = f"dataset.eval_path={paths['eval']} has no examples: use data with at least one question"
    for content in ('{"data": []}', '{"data": [{"paragraphs": []}]}', NO_QUESTION):
        paths["eval"].write_text(content)
        assert error(*overrides) == empty
    paths["eval"].write_text(NO_ANSWER)
    assert error(*overrides) == (
        f"dataset.eval_path={paths['eval']} has no question with an answer: use data with at least one answer"
    )
    paths["eval"].write_text(form)
    assert resolve_cell(*overrides).dataset.train_path == str(paths["train"])
