"""Rows of own texts as the samples of masked LMs, seq2seq models and classifiers, with special tokens.

Unlike the documents of causal LMs, the rows are read into memory.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import text
from distexp.data.base import IGNORE, Samples, TaskData, check_size
from distexp.data.sources.rows import Rows, find_notes
from distexp.data.tokenization import TokenIds, Tokenizer, load_tokenizer

Item = tuple[str, Any, Any]
"""The place of a row for messages, its text (prompt, or words), and its answer, class or tags; None without one."""


def load_task(dataset: DatasetConfig, model: ModelConfig, seed: int, both: tuple[Rows, Rows]) -> TaskData:
    """Return the rows for training and evaluation as the data of the model's task. Raise ConfigError for a wrong row.

    Classes are numbered from 0, or they are names, which are sorted. The training set must have two or more.
    """
    notes = list(find_notes(dataset))
    sizes = (dataset.train_size, dataset.eval_size)
    found = [_read(rows, size, key, notes) for rows, size, key in zip(both, sizes, ("train", "eval"), strict=True)]
    train, held_out = (items[:size] for items, size in zip(found, sizes, strict=True))
    classes: dict[str, int] = {}
    names: Sequence[str] = ()
    if model.traits.has_classes:
        known = both[0].class_names(both[0].form.columns(dataset)[1])
        classes, names = _number_classes(train, model.task, known, len(found[0]), notes)
    tokenizer = load_tokenizer(model, _corpus(train, answers=model.task == "seq2seq_lm"))
    encoder = RowEncoder(model.task, tokenizer, text.sequence_length(dataset, model), classes, notes)
    made = [encoder.make_samples(items, rows.name) for items, rows in zip((train, held_out), both, strict=True)]
    is_masked = model.task == "masked_lm"
    sets = [encoder.mask(each, seed + part) for part, each in enumerate(made)] if is_masked else made
    ends = [samples.label_ends for samples in made if samples.for_decoder and samples.label_ends is not None]
    return text.text_data(
        dataset,
        tokenizer,
        sets,
        length=encoder.length,
        notes=notes,
        task=model.task,
        classes=names,
        decoder_length=max((int(np.diff(each, prepend=0).max(initial=1)) for each in ends), default=None),
    )


def _read(rows: Rows, size: int | None, key: str, notes: list[str]) -> list[Item]:
    """Return the rows that are not empty; note how many are. Raise ConfigError if there are fewer than ``size``."""
    columns = rows.form.columns(rows.dataset)
    read = [(row.place, *(row.values[column] for column in columns)) for row in rows]
    items = [(place, values[0], values[1] if len(values) > 1 else None) for place, *values in read]
    kept = [item for item in items if all(_has_content(value) for value in item[1:])]
    if len(kept) < len(items):
        notes.append(f"left out, because they are empty: {len(items) - len(kept)} of {len(items)} {rows.name} rows")
    check_size(key, size, len(kept), f"{rows.name} rows")
    return kept


def _has_content(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value != []


def _corpus(items: Iterable[Item], *, answers: bool) -> Iterable[str]:
    """Return the texts that train a byte tokenizer."""
    for _, first, second in items:
        yield first if isinstance(first, str) else " ".join(first)
        if answers:
            yield second


@dataclass
class RowEncoder:
    """Rows of a task as at most ``length`` token ids, with the special tokens of the tokenizer around them."""

    task: str
    tokenizer: Tokenizer
    length: int
    classes: Mapping[str, int]  # number of each class by its name
    notes: list[str] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens of a text without the special tokens."""
        return self.length - sum(map(len, self.tokenizer.affixes))

    def make_samples(self, items: Sequence[Item], name: str) -> text.LabeledTokens:
        """Return the samples of a set. Longer texts are cut, which a note states; those of masked_lm are divided."""
        if self.room < 1:
            raise ConfigError(
                f"dataset.max_length={self.length} has no room next to the special tokens of {self.tokenizer.name}: "
                f"set at least {self.length - self.room + 1}"
            )
        if self.task == "token_classification":
            return self._tag(items, name)
        encoded = self.tokenizer.encode_batch([first for _, first, _ in items])
        if self.task == "masked_lm":
            starts = [range(0, len(ids), self.room) for ids in encoded]
            parts = [self._enclose(ids[i : i + self.room]) for ids, at in zip(encoded, starts, strict=True) for i in at]
            return text.LabeledTokens(*_flatten(parts), np.zeros(0, dtype=np.int64))
        inputs = self._cut(encoded, name, "texts", self.room)
        if self.task == "sequence_classification":
            labels = [self._class(value, place) for place, _, value in items]
            return text.LabeledTokens(*_flatten(inputs), np.asarray(labels, dtype=np.int64))
        is_ended = self.tokenizer.eos_id in self.tokenizer.affixes[1]
        end = np.asarray([] if is_ended else [self.tokenizer.eos_id], np.int32)
        encoded = self.tokenizer.encode_batch([answer for _, _, answer in items])
        answers = self._cut(encoded, name, "answers", self.room - len(end))
        targets, ends = _flatten([np.append(ids, end) for ids in answers])
        return text.LabeledTokens(*_flatten(inputs), targets.astype(np.int64), ends, for_decoder=True)

    def mask(self, samples: text.LabeledTokens, seed: int) -> Samples:
        """Return samples of which a masked LM predicts some tokens. Raise ConfigError if there is no mask token."""
        tokenizer = self.tokenizer
        if tokenizer.mask_id is None:
            raise ConfigError(
                f"model.tokenizer={tokenizer.name} has no mask token, which model.task=masked_lm needs: use the "
                "tokenizer of a masked LM, or model.tokenizer=byte"
            )
        special = [tokenizer.pad_id, tokenizer.mask_id, *tokenizer.affixes[0], *tokenizer.affixes[1]]
        return text.MaskedTokens(samples.tokens, samples.ends, special, tokenizer.mask_id, tokenizer.size, seed)

    def _enclose(self, ids: TokenIds) -> TokenIds:
        before, after = (np.asarray(special, dtype=np.int32) for special in self.tokenizer.affixes)
        return np.concatenate([before, ids, after])

    def _cut(self, encoded: Sequence[TokenIds], name: str, what: str, room: int) -> list[TokenIds]:
        if cut := sum(len(ids) > room for ids in encoded):
            self.notes.append(f"cut to dataset.max_length={self.length} tokens: {cut} of {len(encoded)} {name} {what}")
        return [self._enclose(ids[:room]) for ids in encoded]

    def _tag(self, items: Sequence[Item], name: str) -> text.LabeledTokens:
        """Return words whose class is a label at the first token. All but the first start with a space."""
        space = self.tokenizer.space
        spaced = [space + each if place else each for _, row, _ in items for place, each in enumerate(row)]
        pieces = iter(self.tokenizer.encode_batch(spaced))
        before, after = (np.full(len(special), IGNORE) for special in self.tokenizer.affixes)
        inputs, labels = [], []
        for place, row, tags in items:
            own = [next(pieces) for _ in row]
            targets = [np.full(len(piece), IGNORE) for piece in own]
            for target, tag in zip(targets, tags, strict=True):
                target[:1] = self._class(tag, place)
            inputs.append(np.concatenate(own))
            labels.append(np.concatenate([before, np.concatenate(targets)[: self.room], after]))
        tokens, ends = _flatten(self._cut(inputs, name, "texts", self.room))
        return text.LabeledTokens(tokens, ends, _flatten(labels)[0].astype(np.int64), ends)

    def _class(self, value: str | int, place: str) -> int:
        if str(value) not in self.classes:
            known = ", ".join(list(self.classes)[:5])
            raise ConfigError(
                f"{place}: the class {value!r} is not in the training set, which has {known}: correct it, or train on "
                "rows of this class"
            )
        return self.classes[str(value)]


def _flatten(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return rows in one array, and one past the last element of each."""
    flat = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)
    return flat, np.cumsum([len(row) for row in rows], dtype=np.int64)


FEW_CLASSES = 1000
"""Numbers below it are class numbers, even with few rows, because a head of this size costs little."""


def _number_classes(
    items: Sequence[Item], task: str, known: list[str], rows: int, notes: list[str]
) -> tuple[dict[str, int], Sequence[str]]:
    """Return the number of each class by its value in the rows, and the names of the classes.

    Files of CSV have numbers as texts. ``known`` are the names of the numbers, if the data have names for them.
    Large numbers of ``rows`` or more, such as postal codes, are names: most numbers below them would have no row.
    """
    labels = [value for _, _, value in items]
    values = {str(tag) for tags in labels for tag in tags} if task == "token_classification" else set(map(str, labels))
    names: list[str] = sorted(values)
    if values and all(re.fullmatch("0|[1-9][0-9]*", value) for value in values):  # not 01, which is a name
        largest = max(values, key=lambda value: (len(value), value))
        if len(largest) < 10 and int(largest) < max(rows, len(known), FEW_CLASSES):
            names = [str(number) for number in range(max(len(known), int(largest) + 1))]
        else:
            limit = f"{FEW_CLASSES:,} or the {rows} training rows"
            notes.append(f"classes are names and not numbers, because {largest} is not below {limit}")
    if len(names) < 2:
        raise ConfigError(f"the training rows have the classes {', '.join(names) or 'none'}: use rows of two or more")
    classes = {name: number for number, name in enumerate(names)}
    return classes, known if len(known) == len(names) else names
