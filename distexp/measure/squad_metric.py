"""SQuAD v1.1's exact match and F1, to the letter of its official evaluation script.

Written here: ``evaluate`` fetches its own from the hub when it is used, and that of torchmetrics follows SQuAD 2.0
where nothing is left of both texts (an F1 of 1 instead of 0).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII alone, as in the official script


@dataclass(frozen=True)
class Score:
    """How right some answers are; both in percent, from 0 to 100."""

    exact_match: float
    f1: float


def score(answers: Iterable[tuple[str, Sequence[str]]]) -> Score:
    """The mean over answers, each beside its references (at least one), of which the best counts.

    Raises:
        ValueError: there is no answer at all.
    """
    exact, shared, count = 0.0, 0.0, 0
    for answer, references in answers:
        exact += max(exact_match(answer, reference) for reference in references)
        shared += max(f1(answer, reference) for reference in references)
        count += 1
    if not count:
        raise ValueError("no answers: there is nothing to score")
    return Score(100 * exact / count, 100 * shared / count)


def normalise(text: str) -> str:
    """Lower case, without punctuation and English articles, words separated by single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> bool:
    """Whether the two are equal once normalised."""
    return normalise(answer) == normalise(reference)


def f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of words, from 0 to 1; 0 where no word is shared."""
    ours, theirs = normalise(answer).split(), normalise(reference).split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
