"""Exact match and F1 of SQuAD v1.1, identical to its official evaluation script.

Why not a library: ``evaluate`` downloads its metric from the Hub, and torchmetrics follows SQuAD 2.0, whose F1 of two
empty texts is 1 instead of 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in the official script


@dataclass(frozen=True)
class Score:
    """Mean exact match and F1 of answers, in percent from 0 to 100."""

    exact_match: float
    f1: float


def score(answers: Iterable[tuple[str, Sequence[str]]], unanswered: int = 0) -> Score:
    """Return the mean score of answers; for each, the best of its references counts.

    Args:
        answers: Pairs of an answer and its references (at least one).
        unanswered: Further questions, without an answer. Each has the score 0, as in the official script.

    Raises:
        ValueError: There are no answers.
    """
    exact, overlap, count = 0.0, 0.0, unanswered
    for answer, references in answers:
        exact += max(exact_match(answer, reference) for reference in references)
        overlap += max(f1(answer, reference) for reference in references)
        count += 1
    if not count:
        raise ValueError("no answers: there is nothing to score")
    return Score(100 * exact / count, 100 * overlap / count)


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation and English articles, with single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> bool:
    """Return whether two texts are equal after normalization."""
    return normalize(answer) == normalize(reference)


def f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of words, from 0 to 1."""
    ours, theirs = normalize(answer).split(), normalize(reference).split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
