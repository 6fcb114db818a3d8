"""Rows of texts as the samples of a task, with the special tokens of the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import text
from distexp.data.base import IGNORE, Samples, TaskData
from distexp.data.tokenization import TokenIds, Tokenizer, load_tokenizer

Row = Mapping[str, Any]
COLUMNS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "masked_lm": {"text": str},
    "seq2seq_lm": {"prompt": str, "answer": str},
    "sequence_classification": {"text": str, "label": (str, int)},
    "token_classification": {"tokens": list, "tags": list},
}
"""Columns of the rows of a task, with their types. Classes are names or numbers from 0."""


def load_rows(
    train: Sequence[Row], evaluation: Sequence[Row], dataset: DatasetConfig, model: ModelConfig, seed: int
) -> TaskData:
    """Return rows with the columns of COLUMNS as the data of the model's task. Raise ConfigError with the wrong row."""
    named = {"training": train, "evaluation": evaluation}
    for name, rows in named.items():
        _check_rows(rows, name, model.task)
    classes = _classes(train, model.task) if model.traits.has_classes else {}
    tokenizer = load_tokenizer(model, (_text_of(row) for row in train))
    encoder = RowEncoder(model.task, tokenizer, text.sequence_length(dataset, model), classes)
    made = {name: encoder.make_samples(rows, name, seed + part) for part, (name, rows) in enumerate(named.items())}
    fixed = dataset.padding == "max_length"
    decoded = [
        int(np.diff(samples.label_ends, prepend=0).max(initial=1))
        for samples in made.values()
        if isinstance(samples, text.LabeledTokens) and samples.label_ends is not None
    ]
    return TaskData(
        task=model.task,
        train=made["training"],
        evaluation=made["evaluation"],
        collate=text.TextCollate(
            tokenizer.pad_id,
            encoder.length if fixed else None,
            task=model.task,
            decoder_length=max(decoded, default=None) if fixed else None,
        ),
        num_classes=len(classes) or tokenizer.size,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer.name,
        notes=encoder.notes,
        class_names=tuple(map(str, classes)),
    )


@dataclass
class RowEncoder:
    """Rows of a task as token ids of at most ``length``, with the special tokens of the tokenizer."""

    task: str
    tokenizer: Tokenizer
    length: int
    classes: Mapping[str | int, int]
    notes: list[str] = field(default_factory=list)

    def make_samples(self, rows: Sequence[Row], name: str, seed: int) -> Samples:
        """Return the samples of a set. Longer texts are cut, which a note states; those of a masked LM are divided."""
        if self.task == "masked_lm":
            return self._masked(self.tokenizer.encode_batch([row["text"] for row in rows]), seed)
        if self.task == "token_classification":
            return self._tagged(rows, name)
        inputs = self._cut(self.tokenizer.encode_batch([_text_of(row, inputs=True) for row in rows]), name, "texts")
        if self.task == "sequence_classification":
            labels = [self._class(row["label"], name, number) for number, row in enumerate(rows)]
            return text.LabeledTokens(*_flatten(inputs), np.asarray(labels, dtype=np.int64))
        answers = self.tokenizer.encode_batch([row["answer"] for row in rows])
        is_ended = self.tokenizer.eos_id in self.tokenizer.affixes[1]
        end = np.asarray([] if is_ended else [self.tokenizer.eos_id], np.int32)
        targets, ends = _flatten([np.append(ids, end) for ids in self._cut(answers, name, "answers")])
        return text.LabeledTokens(*_flatten(inputs), targets.astype(np.int64), ends, for_decoder=True)

    @property
    def _room(self) -> int:
        """Tokens of a text without the special tokens."""
        return self.length - sum(map(len, self.tokenizer.affixes))

    def _enclose(self, ids: TokenIds) -> TokenIds:
        before, after = self.tokenizer.affixes
        return np.concatenate([np.asarray(before, np.int32), ids, np.asarray(after, np.int32)])

    def _cut(self, encoded: Sequence[TokenIds], name: str, what: str) -> list[TokenIds]:
        if cut := sum(len(ids) > self._room for ids in encoded):
            self.notes.append(f"{name} set: {cut} of {len(encoded)} {what} were cut to {self.length} tokens")
        return [self._enclose(ids[: self._room]) for ids in encoded]

    def _masked(self, encoded: Sequence[TokenIds], seed: int) -> Samples:
        tokenizer = self.tokenizer
        if tokenizer.mask_id is None:
            raise ConfigError(
                f"model.tokenizer={tokenizer.name} has no mask token, which model.task=masked_lm needs: use the "
                "tokenizer of a masked LM, or model.tokenizer=byte"
            )
        starts = [range(0, len(ids), self._room) for ids in encoded]
        parts = [self._enclose(ids[i : i + self._room]) for ids, at in zip(encoded, starts, strict=True) for i in at]
        special = [tokenizer.pad_id, tokenizer.mask_id, *tokenizer.affixes[0], *tokenizer.affixes[1]]
        return text.MaskedTokens(*_flatten(parts), special, tokenizer.mask_id, tokenizer.size, seed)

    def _tagged(self, rows: Sequence[Row], name: str) -> Samples:
        """Return words with a tag at the first token of each."""
        before, after = (np.full(len(ids), IGNORE) for ids in self.tokenizer.affixes)
        inputs, labels, cut = [], [], 0
        for number, row in enumerate(rows):
            words = [f" {word}" if position else word for position, word in enumerate(row["tokens"])]
            pieces = self.tokenizer.encode_batch(words)
            tags = [np.full(len(piece), IGNORE) for piece in pieces]
            for tag, value in zip(tags, row["tags"], strict=True):
                tag[:1] = self._class(value, name, number)
            ids, targets = np.concatenate(pieces), np.concatenate(tags)
            cut += len(ids) > self._room
            inputs.append(self._enclose(ids[: self._room]))
            labels.append(np.concatenate([before, targets[: self._room], after]))
        if cut:
            self.notes.append(f"{name} set: {cut} of {len(rows)} texts were cut to {self.length} tokens")
        targets, ends = _flatten(labels)
        return text.LabeledTokens(*_flatten(inputs), targets.astype(np.int64), ends)

    def _class(self, value: str | int, name: str, number: int) -> int:
        if value not in self.classes:
            known = ", ".join(map(str, list(self.classes)[:5]))
            raise ConfigError(
                f"row {number + 1} of the {name} set has the class {value!r}, which no row of the training set has "
                f"({known}, ...): correct it, or add rows of this class"
            )
        return self.classes[value]


def _flatten(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return rows in one array, and one past the last element of each."""
    flat = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)
    return flat, np.cumsum([len(row) for row in rows], dtype=np.int64)


def _text_of(row: Row, *, inputs: bool = False) -> str:
    """Return the text of a row, or only that of its inputs."""
    if "tokens" in row:
        return " ".join(row["tokens"])
    return str(row["text"] if "text" in row else row["prompt"] + ("" if inputs else row["answer"]))


def _check_rows(rows: Sequence[Row], name: str, task: str) -> None:
    for number, row in enumerate(rows, start=1):
        for column, kind in COLUMNS[task].items():
            if not isinstance(row.get(column), kind):
                found = f"{column}={row[column]!r}" if column in row else f"no {column}"
                raise ConfigError(
                    f"row {number} of the {name} set has {found}, but model.task={task} needs the columns "
                    f"{', '.join(COLUMNS[task])}: correct it"
                )
        if task == "token_classification" and (len(row["tokens"]) != len(row["tags"]) or not row["tokens"]):
            raise ConfigError(
                f"row {number} of the {name} set has {len(row['tokens'])} tokens and {len(row['tags'])} tags: give "
                "each token a tag"
            )


def _classes(rows: Sequence[Row], task: str) -> Mapping[str | int, int]:
    """Return the number of each class. Names are sorted. Raise ConfigError for fewer than two classes."""
    values = (
        {row["label"] for row in rows}
        if task == "sequence_classification"
        else {tag for row in rows for tag in row["tags"]}
    )
    numbers = {value for value in values if isinstance(value, int)}
    if numbers == values and min(numbers, default=0) >= 0:
        found: list[str | int] = list(range(max(numbers, default=-1) + 1))
    else:
        found = sorted(map(str, values))
    if len(found) < 2:
        raise ConfigError(f"the rows of the training set have {len(found)} classes: give them at least two")
    return {value: index for index, value in enumerate(found)}
