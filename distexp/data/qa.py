"""Questions with answers as sequences for a causal LM: a masked prompt, then the answer and its end.

One sequence is ``Question: <question> Context: <context> Answer: <answer></s>``. Its parts are tokenised
apart, so that a too long context can be cut without ever touching the question or the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from distexp.data.cache import build_once, cache_dir
from distexp.data.text import TokenSamples
from distexp.data.tokenization import TokenIds, Tokenizer

FORMAT = "tokens-v1"
ARRAYS = ("tokens", "ends", "prompt_lengths")


@dataclass(frozen=True)
class Example:
    """One question; texts are one line with single spaces. Without an answer it cannot be learnt from."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Counts:
    """What became of the examples on their way to tokens."""

    examples: int
    cut: int = 0  # contexts that lost their tail
    lost: int = 0  # of these, contexts that no longer hold the answer
    left_out: int = 0  # questions whose answer alone leaves no room
    unanswered: int = 0  # questions without an answer, left out

    def notes(self, kind: str, max_length: int) -> Iterator[str]:
        """Sentences on what was cut and left out; none when all is as in the data."""
        of = f"of {self.examples} {kind} examples"
        limit = f"dataset.max_length={max_length}"
        if self.cut:
            held = (
                f"{self.lost} of these contexts no longer hold the answer: raise dataset.max_length to keep it"
                if self.lost
                else "all of them still hold the answer"
            )
            yield f"{self.cut} {of} were longer than {limit} tokens: the end of their context was cut, and {held}"
        if self.left_out:
            yield f"{self.left_out} {of} were left out: question and answer alone exceed {limit} tokens"
        if self.unanswered:
            yield f"{self.unanswered} {of} were left out: they have no answer"


@dataclass(frozen=True, eq=False)
class QASamples(TokenSamples):
    """Tokenised examples, with what scoring a generated answer needs."""

    references: tuple[tuple[str, ...], ...]  # of each sample, its right answers
    ids: tuple[str, ...]

    def prompt(self, index: int) -> TokenIds:
        """The ids of a sample up to and with ``Answer:``."""
        start = int(self.ends[index - 1]) if index else 0
        prompt: TokenIds = self.tokens[start : start + int(self.prompt_lengths[index])]
        return prompt


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def corpus(examples: Iterable[Example]) -> Iterator[str]:
    """The texts that a tokenizer is trained on: questions, answers, and every context once."""
    seen = set()
    for example in examples:
        if example.context not in seen:
            seen.add(example.context)
            yield f" {example.context}"
        answer = f" {example.answers[0]}" if example.answers else ""
        yield f"Question: {example.question} Context: Answer:{answer}"


def tokenise(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, *, keep_references: bool
) -> tuple[QASamples, Counts]:
    """Examples as tokens of at most ``max_length``, from the cache where they are known.

    Args:
        examples: in the order of the samples; those that cannot be used are left out, and counted.
        tokenizer: its fingerprint is part of the cache's key.
        max_length: tokens of prompt, answer and end together.
        keep_references: for evaluation; a training set does without the texts.
    """
    key = _key(examples, tokenizer, max_length)
    write = partial(_write, examples=examples, tokenizer=tokenizer, limit=max_length)
    folder = build_once(cache_dir() / f"{FORMAT}-{key}", write)
    parts = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    kept = np.load(folder / "kept.npy").tolist() if keep_references else []
    samples = QASamples(
        **parts,
        references=tuple(examples[index].answers for index in kept),
        ids=tuple(examples[index].id for index in kept),
    )
    return samples, Counts(**json.loads((folder / "counts.json").read_text()))


def _key(examples: Sequence[Example], tokenizer: Tokenizer, max_length: int) -> str:
    digest = hashlib.sha256(f"{tokenizer.fingerprint} {tokenizer.eos_id} {max_length}".encode())
    for example in examples:
        parts = ("", example.question, example.context, *example.answers[:1])
        digest.update("\x1f".join(parts).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:24]


def _write(folder: Path, *, examples: Sequence[Example], tokenizer: Tokenizer, limit: int) -> None:
    encoder = _Encoder(examples, tokenizer, limit)
    sequences, prompt_lengths, kept = [], [], []
    for index, example in enumerate(examples):
        pair = encoder.encode(example)
        if pair is not None:
            sequences.append(np.concatenate(pair))
            prompt_lengths.append(len(pair[0]))
            kept.append(index)
    folder.mkdir()
    flat = np.concatenate(sequences) if sequences else np.zeros(0)
    np.save(folder / "tokens.npy", flat.astype(np.int32))
    np.save(folder / "ends.npy", np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64))
    np.save(folder / "prompt_lengths.npy", np.asarray(prompt_lengths, dtype=np.int32))
    np.save(folder / "kept.npy", np.asarray(kept, dtype=np.int64))
    (folder / "counts.json").write_text(json.dumps(asdict(encoder.counts())))


class _Encoder:
    """Tokenises all parts at once, each distinct one a single time, and then joins them."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._heads = self._encode(f"Question: {example.question} Context:" for example in examples)
        self._contexts = self._encode(f" {example.context}" for example in examples)
        self._answers = self._encode(f" {example.answers[0]}" for example in examples if example.answers)
        self._middle = tokenizer.encode_batch([" Answer:"])[0]
        self._end = np.asarray([tokenizer.eos_id], dtype=np.int32)
        self._tally = dict.fromkeys(("cut", "lost", "left_out", "unanswered"), 0)
        self._examples = len(examples)

    def encode(self, example: Example) -> tuple[TokenIds, TokenIds] | None:
        """Prompt, and answer with its end; None for an example that cannot be used."""
        if not example.answers:
            self._tally["unanswered"] += 1
            return None
        head = self._heads[f"Question: {example.question} Context:"]
        context = self._contexts[f" {example.context}"]
        answer = np.concatenate([self._answers[f" {example.answers[0]}"], self._end])
        room = self._limit - len(head) - len(self._middle) - len(answer)
        if room < 0:
            self._tally["left_out"] += 1
            return None
        if len(context) > room:
            context = context[:room]
            self._tally["cut"] += 1
            self._tally["lost"] += example.answers[0] not in self._tokenizer.decode(context.tolist())
        return np.concatenate([head, context, self._middle]), answer

    def counts(self) -> Counts:
        return Counts(examples=self._examples, **self._tally)

    def _encode(self, texts: Iterable[str]) -> dict[str, TokenIds]:
        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, self._tokenizer.encode_batch(distinct), strict=True))
