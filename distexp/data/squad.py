"""SQuAD v1.1: from official JSON files, a folder of the datasets library, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import TaskData
from distexp.data.qa import Example, QASamples, corpus, one_line, tokenise
from distexp.data.text import TextCollate, sequence_length
from distexp.data.tokenization import Tokenizer, load_tokenizer
from distexp.system.hub import offline_if_unreachable


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Questions as prompts and answers for a causal LM.

    Args:
        dataset: ``train_path`` and ``eval_path`` win over ``path``; ``train_size`` and ``eval_size`` take
            the first examples; ``max_length`` in tokens.
        model: says which tokenizer. A byte tokenizer is trained on the whole training set, so that it does
            not change with ``train_size``.
        seed: unused; nothing here is random.

    Raises:
        ConfigError: the data cannot be found or read, or holds fewer examples than asked for.
    """
    max_length = sequence_length(dataset, model)
    training, evaluation = read(dataset)
    tokenizer = load_tokenizer(model, corpus(training))
    train, train_notes = _samples("train", training, dataset.train_size, tokenizer, max_length)
    held_out, eval_notes = _samples("eval", evaluation, dataset.eval_size, tokenizer, max_length)
    return TaskData(
        task="causal_lm",
        train=train,
        evaluation=held_out,
        collate=TextCollate(tokenizer.pad_id, max_length if dataset.padding == "max_length" else None),
        num_classes=tokenizer.size,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer.name,
        notes=[*train_notes, *eval_notes],
    )


def read(dataset: DatasetConfig) -> tuple[list[Example], list[Example]]:
    """The training and the evaluation examples, from wherever ``dataset`` points."""
    if dataset.train_path is not None and dataset.eval_path is not None:
        return read_json(Path(dataset.train_path)), read_json(Path(dataset.eval_path))
    if dataset.train_path is not None or dataset.eval_path is not None:
        given, absent = ("train_path", "eval_path") if dataset.train_path else ("eval_path", "train_path")
        raise ConfigError(
            f"dataset.{given}={getattr(dataset, given)} is set and dataset.{absent} is not: training and "
            f"evaluation come from the same place, so set both or neither"
        )
    if dataset.path is None:
        raise ConfigError(
            "dataset.path is null: set a hub id (rajpurkar/squad), a folder of datasets.save_to_disk, or "
            " dataset.train_path and dataset.eval_path"
        )
    splits = _load_splits(dataset.path)
    return _from_rows(splits["train"]), _from_rows(splits["validation"])


def read_json(path: Path) -> list[Example]:
    """The questions of a file in the official format, in the file's order.

    Raises:
        ConfigError: no such file, or one in another format; the sentence names the place.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return list(_from_articles(json.load(file)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): give a SQuAD v1.1 file") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no {error} where SQuAD v1.1 has one: {_LAYOUT}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is JSON of another shape than SQuAD v1.1 ({error}): {_LAYOUT}") from error


_LAYOUT = "the layout is data[].paragraphs[] with context and qas[], each with id, question and answers[] with text"


def _from_articles(content: Mapping[str, Any]) -> Iterator[Example]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            context = one_line(paragraph["context"])
            for question in paragraph["qas"]:
                texts = [answer["text"] for answer in question["answers"]]
                yield _example(question["id"], question["question"], context, texts)


def _example(identity: str, question: str, context: str, answers: Sequence[str]) -> Example:
    lines = (one_line(answer) for answer in answers)
    return Example(identity, one_line(question), context, tuple(line for line in lines if line))


def _load_splits(path: str) -> Mapping[str, Any]:
    offline_if_unreachable(path)
    from datasets import DatasetDict, load_dataset, load_from_disk

    local = Path(path).expanduser()
    try:
        splits = load_from_disk(str(local)) if local.exists() else load_dataset(path)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_loaded(path, local, error)) from error
    if not isinstance(splits, DatasetDict) or not {"train", "validation"} <= set(splits):
        raise ConfigError(
            f"dataset.path={path} must hold the splits train and validation: save a DatasetDict with both"
        )
    columns = set(splits["train"].column_names) & set(splits["validation"].column_names)
    lacking = {"id", "question", "context", "answers"} - columns
    if lacking:
        raise ConfigError(
            f"dataset.path={path} lacks the columns {', '.join(sorted(lacking))} of SQuAD: give another set"
        )
    return dict(splits)


def _not_loaded(path: str, local: Path, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if local.exists():
        return (
            f"dataset.path={path} is not a folder written by datasets.save_to_disk ({reason}): give one, "
            f"or set dataset.train_path and dataset.eval_path to SQuAD v1.1 JSON files"
        )
    return (
        f"dataset.path={path} is neither a local folder, nor in the local cache, nor to be had from the hub "
        f"({reason}): set dataset.train_path and dataset.eval_path to local files, or choose "
        "dataset=squad_sample"
    )


def _from_rows(rows: Any) -> list[Example]:
    contexts: dict[str, str] = {}  # one string for the several questions of a paragraph
    examples = []
    for batch in rows.iter(batch_size=1000):
        columns = (batch["id"], batch["question"], batch["context"], batch["answers"])
        for identity, question, text, answers in zip(*columns, strict=True):
            line = one_line(text)
            context = contexts.setdefault(line, line)
            examples.append(_example(identity, question, context, answers["text"]))
    return examples


def _samples(
    kind: str, examples: list[Example], size: int | None, tokenizer: Tokenizer, max_length: int
) -> tuple[QASamples, list[str]]:
    name = "training" if kind == "train" else "evaluation"
    if not examples:
        raise ConfigError(f"There are no {name} examples: name data that has some")
    if size is not None and size > len(examples):
        raise ConfigError(
            f"dataset.{kind}_size={size} is more than the {len(examples)} {name} examples that there are: "
            f"set at most {len(examples)}, or null for all"
        )
    chosen = examples[:size]
    samples, counts = tokenise(chosen, tokenizer, max_length, keep_references=kind == "eval")
    if not len(samples):
        raise ConfigError(
            f"None of {len(chosen)} {name} examples can be used with dataset.max_length={max_length}: "
            "raise it, or give examples with answers"
        )
    return samples, list(counts.notes(name, max_length))
