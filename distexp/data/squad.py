"""SQuAD v1.1 from its official JSON files, a ``save_to_disk`` folder, or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import qa
from distexp.data.base import TaskData, check_size
from distexp.data.qa import Example, normalize_whitespace
from distexp.data.squad_json import START, find_format_error, format_error, load_json, no_examples
from distexp.data.text import TextCollate, sequence_length
from distexp.data.tokenization import Tokenizer, load_tokenizer
from distexp.exceptions import first_line
from distexp.system.cache_dir import offline_if_unreachable

SPLITS = {"train": "training", "eval": "evaluation"}
"""The start of a split's keys in ``dataset``, and its name in messages."""


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load questions with answers as training data for a causal LM, the first ones if a size is set.

    A byte tokenizer is trained on the whole training set, so it does not depend on ``train_size``. Raise ConfigError if
    the data cannot be found or read, or has fewer examples than requested. ``seed`` is not used: nothing is random.
    """
    max_length = sequence_length(dataset, model)
    training, evaluation = read_examples(dataset)
    tokenizer = load_tokenizer(model, qa.tokenizer_corpus(training))
    train, train_counts = _tokenize_split("train", training, dataset, tokenizer, max_length)
    held_out, eval_counts = _tokenize_split("eval", evaluation, dataset, tokenizer, max_length)
    return TaskData(
        task="causal_lm",
        train=train,
        evaluation=held_out,
        collate=TextCollate(tokenizer.pad_id, max_length if dataset.padding == "max_length" else None),
        num_classes=tokenizer.size,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer.name,
        notes=list(qa.describe_counts({"training": train_counts, "evaluation": eval_counts}, max_length)),
    )


def read_examples(dataset: DatasetConfig) -> tuple[list[Example], list[Example]]:
    """Read the training and evaluation examples from the source in ``dataset``."""
    if dataset.train_path is not None and dataset.eval_path is not None:
        return read_file(Path(dataset.train_path)), read_file(Path(dataset.eval_path))
    if dataset.train_path is not None or dataset.eval_path is not None:
        given, absent = ("train_path", "eval_path") if dataset.train_path else ("eval_path", "train_path")
        raise ConfigError(
            f"dataset.{given}={getattr(dataset, given)} is set, but dataset.{absent} is null: set both, or neither"
        )
    if dataset.path is None:
        raise ConfigError(
            "dataset.path is null: set a hub id (rajpurkar/squad) or a folder written by datasets.save_to_disk, "
            "or set dataset.train_path and dataset.eval_path"
        )
    splits = _load_splits(dataset.path)
    return _from_rows(splits["train"]), _from_rows(splits["validation"])


def read_file(path: Path) -> list[Example]:
    """Read the questions of an official SQuAD v1.1 file in their order. Raise ConfigError for another file."""
    content = load_json(path)
    try:
        return list(_from_articles(content))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(format_error(path, find_format_error(content) or error)) from error


def _from_articles(content: Mapping[str, Any]) -> Iterator[Example]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            raw = paragraph["context"]
            context = normalize_whitespace(raw)
            for question in paragraph["qas"]:
                answers = question["answers"]
                texts, starts = [answer["text"] for answer in answers], [answer.get(START) for answer in answers]
                misplaced = _find_misplaced(raw, texts, starts)
                yield _make_example(question["id"], question["question"], context, texts, misplaced)


def _make_example(identity: str, question: str, context: str, answers: Sequence[str], misplaced: str | None) -> Example:
    for text in (question, context, *answers):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"question {identity} contains half of a character, {text[error.start : error.end]!r}: correct the "
                "encoding of the data"
            ) from None
    normalized = (normalize_whitespace(answer) for answer in answers)
    usable = tuple(answer for answer in normalized if answer)
    return Example(identity, normalize_whitespace(question), context, usable, misplaced)


def _find_misplaced(context: str, answers: Sequence[str], starts: Sequence[Any]) -> str | None:
    """Describe the first answer that the context does not have at its start, or None; a start of None is unknown."""
    for text, start in zip(answers, starts, strict=True):
        if start is None:
            continue
        if not isinstance(start, int):
            return f"{START}={start!r} is not a number"
        found = context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            return f"at {START}={start} the context has {found!r} instead of {text!r}"
    return None


def _load_splits(path: str) -> Mapping[str, Any]:
    offline_if_unreachable(path)
    from datasets import DatasetDict, load_dataset, load_from_disk

    local = Path(path).expanduser()
    try:
        splits = load_from_disk(str(local)) if local.exists() else load_dataset(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dataset.path={path} is not a folder written by datasets.save_to_disk ({first_line(error)}): use such a "
            "folder, or set dataset.train_path and dataset.eval_path to SQuAD v1.1 JSON files"
            if local.exists()
            else f"dataset.path={path} is neither a local folder nor available from the local cache or the hub "
            f"({first_line(error)}): set dataset.train_path and dataset.eval_path to local files, or use "
            "dataset=squad_sample"
        ) from error
    if not isinstance(splits, DatasetDict) or not {"train", "validation"} <= set(splits):
        raise ConfigError(
            f"dataset.path={path} must have the splits train and validation: save a DatasetDict with both"
        )
    columns = set(splits["train"].column_names) & set(splits["validation"].column_names)
    missing = {"id", "question", "context", "answers"} - columns
    if missing:
        raise ConfigError(
            f"dataset.path={path} lacks the columns {', '.join(sorted(missing))} of SQuAD: use a data set with "
            "id, question, context and answers"
        )
    return dict(splits)


def _from_rows(rows: Any) -> list[Example]:
    contexts: dict[str, str] = {}  # shares one string between the questions of a paragraph
    examples = []
    for batch in rows.iter(batch_size=1000):
        columns = (batch["id"], batch["question"], batch["context"], batch["answers"])
        for identity, question, text, answers in zip(*columns, strict=True):
            normalized = normalize_whitespace(text)
            context = contexts.setdefault(normalized, normalized)
            texts = answers["text"]
            misplaced = _find_misplaced(text, texts, answers.get(START) or [None] * len(texts))
            examples.append(_make_example(identity, question, context, texts, misplaced))
    return examples


def _select(key: str, examples: Sequence[Example], dataset: DatasetConfig) -> Sequence[Example]:
    """Return the first examples of a split, as many as its size in ``dataset``, with checked positions."""
    count, size, name = len(examples), getattr(dataset, f"{key}_size"), f"{SPLITS[key]} examples"
    source = str(getattr(dataset, f"{key}_path") or dataset.path)
    if not count:
        raise ConfigError(no_examples(source, name))
    check_size(key, size, count, name)
    selected = examples[:size]
    wrong = [example for example in selected if example.misplaced is not None]
    if wrong:  # The file is damaged.
        raise ConfigError(
            f"{source}: {len(wrong)} of {len(selected)} {name} have a wrong {START}. The first is question "
            f"{wrong[0].id}: {wrong[0].misplaced}. Correct the positions, or remove all {START} from the data"
        )
    return selected


def _tokenize_split(
    key: str, examples: Sequence[Example], dataset: DatasetConfig, tokenizer: Tokenizer, max_length: int
) -> tuple[qa.QASamples, qa.TokenizationCounts]:
    """Return the tokenized samples of a split, and the numbers of examples that were cut or left out."""
    selected = _select(key, examples, dataset)
    samples, counts = qa.tokenize_examples(selected, tokenizer, max_length, keep_references=key == "eval")
    if not len(samples):
        raise ConfigError(
            f"none of {len(selected)} {SPLITS[key]} examples is usable with dataset.max_length={max_length}: "
            "raise it, or use examples with answers"
        )
    return samples, counts
