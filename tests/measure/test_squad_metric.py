"""Tests of exact match and F1 with results of the official SQuAD v1.1 script, computed by hand."""

from __future__ import annotations

import pytest

from distexp.training.generation import exact_match, f1, normalize, score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick,\n brown-fox!", "quick brownfox"),
        ("an apple a day in the theatre", "apple day in theatre"),
        ("U.S.A.", "usa"),
        ("A.", ""),  # punctuation is removed first, which leaves an article
        ("a-the", "athe"),
        ("“Café”", "“café”"),  # quotes and accents beyond ASCII stay
        ("24\u201310", "24\u201310"),
        ("$1,000.50", "100050"),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "shared"),
    [
        ("the Denver Broncos.", "Denver Broncos", True, 1),
        ("Denver Broncos team", "Denver Broncos", False, 4 / 5),
        ("Santa Clara", "Santa Clara, California", False, 4 / 5),
        ("Oslo Oslo", "Oslo", False, 2 / 3),  # a word counts as often as it is in both texts
        ("green tea", "tea green", False, 1),
        ("1999", "1976", False, 0),
        ("", "1976", False, 0),
        ("the", "a", True, 0),  # as in the script of v1.1: two empty texts are equal and share no word
    ],
)
def test_one_reference(answer: str, reference: str, exact: bool, shared: float) -> None:
    assert exact_match(answer, reference) is exact
    assert f1(answer, reference) == pytest.approx(shared)


def test_score_is_the_mean_over_the_best_references() -> None:
    found = score(
        [
            ("Levi's Stadium", ["Santa Clara", "Levi's Stadium in Santa Clara", "levis stadium"]),
            ("gold", ["golden anniversary", "gold and black"]),
            ("1976", ["1999"]),
        ]
    )
    assert found.exact_match == pytest.approx(100 / 3)
    assert found.f1 == pytest.approx(100 * (1 + 1 / 2) / 3)


def test_questions_without_an_answer_count_as_wrong() -> None:
    found = score([("1976", ["1976"])], unanswered=3)
    assert (found.exact_match, found.f1) == (25, 25)


def test_best_reference_may_differ_between_metrics() -> None:
    found = score([("the", ["an", "the the"])])
    assert (found.exact_match, found.f1) == (100, 0)


def test_score_of_no_answers_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is nothing to score"):
        score([])
