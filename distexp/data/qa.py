"""Question answering as token sequences: ``Question: <question> Context: <context> Answer: <answer></s>``.

The parts are tokenized separately, so a long context can be cut without touching the question or the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from distexp.data.text import TokenSamples
from distexp.data.tokenization import TokenIds, Tokenizer
from distexp.system.cache_dir import build_once, cache_dir

FORMAT = "tokens-v2"
"""Prefix of cache entries; a change of the stored arrays needs a new version."""


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


@dataclass(frozen=True)
class TokenizationCounts:
    """Number of examples that were cut or left out."""

    examples: int  # examples in the data
    cut: int = 0  # examples with a shortened context
    lost: int = 0  # cut examples whose context no longer contains the answer
    left_out: int = 0  # examples whose question and answer alone exceed the limit
    unanswered: int = 0  # examples without an answer, which are left out


def describe_counts(splits: Mapping[str, TokenizationCounts], max_length: int) -> Iterator[str]:
    """Yield one note about each kind of example that was cut or left out, over all splits."""
    limit = f"dataset.max_length={max_length}"
    if cut := _count("cut", splits):
        lost = sum(counts.lost for counts in splits.values())
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


def _count(name: str, splits: Mapping[str, TokenizationCounts]) -> str:
    """Return ``3 of 90 training and 1 of 20 evaluation examples``; empty if there are none."""
    found = [
        f"{number} of {counts.examples} {split}"
        for split, counts in splits.items()
        if (number := getattr(counts, name))
    ]
    return f"{' and '.join(found)} examples" if found else ""


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
) -> tuple[QASamples, TokenizationCounts]:
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
    counts = TokenizationCounts(**json.loads((folder / "counts.json").read_text()))
    samples = QASamples(
        **arrays,
        references=tuple(examples[index].answers for index in kept),
        ids=tuple(examples[index].id for index in kept),
        too_long=counts.left_out if keep_references else 0,
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


def _parts(example: Example) -> tuple[str, str, str]:
    """Return question, context and answer as they are tokenized; the answer is empty if there is none."""
    answer = f" {example.answers[0]}" if example.answers else ""
    return f"Question: {example.question} Context:", f" {example.context}", answer


class _ExampleEncoder:
    """An encoder that tokenizes each distinct part of the examples only once."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        parts = [_parts(example) for example in examples]
        self._questions = self._encode(question for question, _, _ in parts)
        self._contexts = self._encode(context for _, context, _ in parts)
        self._answers = self._encode(answer for _, _, answer in parts if answer)
        self._answer_mark = tokenizer.encode_batch([" Answer:"])[0]
        self._end = np.asarray([tokenizer.eos_id], dtype=np.int32)
        self.counts = dict.fromkeys(("cut", "lost", "left_out", "unanswered"), 0)

    def encode(self, example: Example) -> tuple[TokenIds, TokenIds] | None:
        """Return the prompt and the answer with its end token; None if unusable."""
        if not example.answers:
            self.counts["unanswered"] += 1
            return None
        question_text, context_text, answer_text = _parts(example)
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
