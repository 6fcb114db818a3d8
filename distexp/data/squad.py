"""SQuAD v1.1 from its official JSON files, a ``save_to_disk`` folder, or the hub."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import TaskData, TooFewSamplesError
from distexp.data.squad_json import (
    SPLITS,
    START,
    find_format_error,
    find_misplaced,
    format_error,
    load_json,
    misplaced_answers,
    no_examples,
    too_few_examples,
)
from distexp.data.text import TokenSamples, sequence_length, text_data
from distexp.data.tokenization import TokenIds, Tokenizer, load_tokenizer
from distexp.exceptions import first_line
from distexp.system.cache_dir import build_once, cache_dir, offline_if_unreachable


@dataclass(frozen=True)
class Example:
    """One question with its context and answers.

    Texts have no line breaks and no repeated spaces. The first answer is the training target.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    misplaced: str | None = None  # what is wrong with the position of an answer in the context, or None


Counts = Mapping[str, int]
"""Number of ``examples``, of those ``cut`` and ``lost`` (the context no longer contains the answer), and of those that
were ``left_out`` (question and answer alone are too long) or are ``unanswered``."""


@dataclass(frozen=True, eq=False)
class QASamples(TokenSamples):
    """Tokenized examples with the reference answers that score generated ones."""

    references: tuple[tuple[str, ...], ...]  # accepted answers of each sample; empty for a training set
    ids: tuple[str, ...]  # ids of the questions; empty for a training set
    too_long: int = 0  # questions of an evaluation set that were left out, because question and answer are too long

    def prompt(self, index: int) -> TokenIds:
        """Return the token ids of a sample up to ``Answer:``, shape (prompt length,)."""
        start = int(self.ends[index - 1]) if index else 0
        return self.tokens[start : start + int(self.prompt_lengths[index])]


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load questions with answers as training data for a causal LM, the first ones if a size is set.

    A byte tokenizer is trained on the whole training set, so it does not depend on ``train_size``. Raise ConfigError if
    the data cannot be found or read, or has fewer examples than requested. ``seed`` is not used: nothing is random.
    """
    max_length = sequence_length(dataset, model)
    training, evaluation = read_examples(dataset)
    tokenizer = load_tokenizer(model, tokenizer_corpus(training))
    train, train_counts = _tokenize_split("train", training, dataset, tokenizer, max_length)
    held_out, eval_counts = _tokenize_split("eval", evaluation, dataset, tokenizer, max_length)
    notes = describe_counts({"training": train_counts, "evaluation": eval_counts}, max_length)
    return text_data(dataset, tokenizer, (train, held_out), length=max_length, notes=notes)


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
                misplaced = find_misplaced(raw, texts, starts)
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
            misplaced = find_misplaced(text, texts, answers.get(START) or [None] * len(texts))
            examples.append(_make_example(identity, question, context, texts, misplaced))
    return examples


def _select(key: str, examples: Sequence[Example], dataset: DatasetConfig) -> Sequence[Example]:
    """Return the first examples of a split, as many as its size in ``dataset``, with checked positions."""
    count, size = len(examples), getattr(dataset, f"{key}_size")
    source = str(getattr(dataset, f"{key}_path") or dataset.path)
    if not count:
        raise ConfigError(no_examples(source, f"{SPLITS[key]} examples"))
    if size is not None and size > count:
        raise TooFewSamplesError(too_few_examples(source, key, size, count), key, count)
    selected = examples[:size]
    wrong = [example for example in selected if example.misplaced is not None]
    if wrong:  # The file is damaged.
        first = f"question {wrong[0].id}: {wrong[0].misplaced}"
        raise ConfigError(f"{source}: {misplaced_answers(len(wrong), len(selected), key, first)}")
    return selected


def _tokenize_split(
    key: str, examples: Sequence[Example], dataset: DatasetConfig, tokenizer: Tokenizer, max_length: int
) -> tuple[QASamples, Counts]:
    """Return the tokenized samples of a split, and the numbers of examples that were cut or left out."""
    selected = _select(key, examples, dataset)
    samples, counts = tokenize_examples(selected, tokenizer, max_length, keep_references=key == "eval")
    if not len(samples):
        raise ConfigError(
            f"none of {len(selected)} {SPLITS[key]} examples is usable with dataset.max_length={max_length}: "
            "raise it, or use examples with answers"
        )
    if dataset.targets == "all":
        samples = replace(samples, is_target=np.broadcast_to(True, samples.tokens.shape))
    return samples, counts


FORMAT = "tokens-v3"
"""Prefix of cache entries; a change of the stored arrays needs a new version."""


def describe_counts(splits: Mapping[str, Counts], max_length: int) -> Iterator[str]:
    """Yield one note about each kind of example that was cut or left out, over all splits."""
    limit = f"dataset.max_length={max_length}"
    if cut := _count("cut", splits):
        lost = sum(counts["lost"] for counts in splits.values())
        held = (
            f"{lost} of these contexts no longer contain the answer. Raise dataset.max_length to keep it"
            if lost
            else "all of them still contain the answer"
        )
        yield f"{cut} are longer than {limit} tokens: the end of their context was cut; {held}"
    if left_out := _count("left_out", splits):
        yield f"{left_out} were left out: question and answer alone exceed {limit} tokens"
    if unanswered := _count("unanswered", splits):
        yield f"{unanswered} were left out: they have no answer"


def _count(name: str, splits: Mapping[str, Counts]) -> str:
    """Return ``3 of 90 training and 1 of 20 evaluation examples``; empty if there are none."""
    found = [f"{counts[name]} of {counts['examples']} {split}" for split, counts in splits.items() if counts[name]]
    return f"{' and '.join(found)} examples" if found else ""


def normalize_whitespace(text: str) -> str:
    """Replace every run of white space by one space."""
    return " ".join(text.split())


def tokenizer_corpus(examples: Iterable[Example]) -> Iterator[str]:
    """Yield questions, first answers, and each context once, to train a tokenizer."""
    seen = set()
    for example in examples:
        if example.context not in seen:
            seen.add(example.context)
            yield f" {example.context}"
        answer = f" {example.answers[0]}" if example.answers else ""
        yield f"Question: {example.question} Context: Answer:{answer}"


def tokenize_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, *, keep_references: bool
) -> tuple[QASamples, Counts]:
    """Tokenize examples, or read their tokens from the cache. Unusable examples are left out and counted."""
    digest = hashlib.sha256(f"{tokenizer.fingerprint} {tokenizer.eos_id} {max_length}".encode())
    for example in examples:
        parts = ("", example.question, example.context, *example.answers[:1])
        digest.update("\x1f".join(parts).encode("utf-8", "surrogatepass"))
    key = digest.hexdigest()[:24]
    write = partial(_write_tokens, examples=examples, tokenizer=tokenizer, max_length=max_length)
    folder = build_once(cache_dir() / f"{FORMAT}-{key}", write)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "ends", "prompt_lengths")}
    kept = np.load(folder / "kept.npy").tolist() if keep_references else []
    counts = json.loads((folder / "counts.json").read_text())
    samples = QASamples(
        **arrays,
        references=tuple(examples[index].answers for index in kept),
        ids=tuple(examples[index].id for index in kept),
        too_long=counts["left_out"] if keep_references else 0,
    )
    return samples, counts


def _write_tokens(folder: Path, *, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int) -> None:
    encoder = _ExampleEncoder(examples, tokenizer, max_length)
    sequences, prompt_lengths, kept = [], [], []
    for index, example in enumerate(examples):
        encoded = encoder.encode(example)
        if encoded is not None:
            sequences.append(np.concatenate(encoded))
            prompt_lengths.append(len(encoded[0]))
            kept.append(index)
    folder.mkdir()
    flat = np.concatenate(sequences) if sequences else np.zeros(0)
    np.save(folder / "tokens.npy", flat.astype(np.int32))
    np.save(folder / "ends.npy", np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64))
    np.save(folder / "prompt_lengths.npy", np.asarray(prompt_lengths, dtype=np.int32))
    np.save(folder / "kept.npy", np.asarray(kept, dtype=np.int64))
    (folder / "counts.json").write_text(json.dumps({"examples": len(examples), **encoder.counts}))


def _parts(example: Example, space: str) -> tuple[str, str, str]:
    """Return question, context and answer as they are tokenized; the answer is empty if there is none."""
    answer = f"{space}{example.answers[0]}" if example.answers else ""
    return f"Question: {example.question} Context:", f"{space}{example.context}", answer


class _ExampleEncoder:
    """An encoder of ``Question: <question> Context: <context> Answer: <answer></s>``.

    It tokenizes each distinct part of the examples only once. Because the parts are tokenized separately, a long
    context can be cut without touching the question or the answer.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        parts = [_parts(example, tokenizer.space) for example in examples]
        self._questions = self._encode(question for question, _, _ in parts)
        self._contexts = self._encode(context for _, context, _ in parts)
        self._answers = self._encode(answer for _, _, answer in parts if answer)
        self._answer_mark = tokenizer.encode_batch([f"{tokenizer.space}Answer:"])[0]
        self._end = np.asarray([tokenizer.eos_id], dtype=np.int32)
        self.counts = dict.fromkeys(("cut", "lost", "left_out", "unanswered"), 0)

    def encode(self, example: Example) -> tuple[TokenIds, TokenIds] | None:
        """Return the prompt and the answer with its end token; None if unusable."""
        if not example.answers:
            self.counts["unanswered"] += 1
            return None
        question_text, context_text, answer_text = _parts(example, self._tokenizer.space)
        question, context = self._questions[question_text], self._contexts[context_text]
        answer = np.concatenate([self._answers[answer_text], self._end])
        room = self._max_length - len(question) - len(self._answer_mark) - len(answer)
        if room < 0:
            self.counts["left_out"] += 1
            return None
        if len(context) > room:
            context = context[:room]
            self.counts["cut"] += 1
            self.counts["lost"] += example.answers[0] not in self._tokenizer.decode(context.tolist())
        return np.concatenate([question, context, self._answer_mark]), answer

    def _encode(self, texts: Iterable[str]) -> dict[str, TokenIds]:
        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, self._tokenizer.encode_batch(distinct), strict=True))
