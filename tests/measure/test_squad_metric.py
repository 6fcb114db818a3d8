"""SQuAD's exact match and F1: what the official script of v1.1 gives, worked out by hand."""

from __future__ import annotations

import pytest

from distexp.measure.squad_metric import exact_match, f1, normalise, score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick,\n brown-fox!", "quick brownfox"),
        ("an apple a day in the theatre", "apple day in theatre"),
        ("U.S.A.", "usa"),
        ("A.", ""),  # punctuation goes first, and leaves an article
        ("a-the", "athe"),
        ("“Café”", "“café”"),  # neither quotes nor accents beyond ASCII are touched
        ("24\u201310", "24\u201310"),
        ("$1,000.50", "100050"),
    ],
)
def test_normalising(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "shared"),
    [
        ("the Denver Broncos.", "Denver Broncos", True, 1),
        ("Denver Broncos team", "Denver Broncos", False, 4 / 5),
        ("Santa Clara", "Santa Clara, California", False, 4 / 5),
        ("Oslo Oslo", "Oslo", False, 2 / 3),  # a word counts as often as both have it
        ("green tea", "tea green", False, 1),
        ("1999", "1976", False, 0),
        ("", "1976", False, 0),
        ("the", "a", True, 0),  # so in the script of v1.1: two empty answers are equal and share no word
    ],
)
def test_one_reference(answer: str, reference: str, exact: bool, shared: float) -> None:
    assert exact_match(answer, reference) is exact
    assert f1(answer, reference) == pytest.approx(shared)


def test_the_best_reference_counts_and_the_mean_is_in_percent() -> None:
    found = score(
        [
            ("Levi's Stadium", ["Santa Clara", "Levi's Stadium in Santa Clara", "levis stadium"]),
            ("gold", ["golden anniversary", "gold and black"]),
            ("1976", ["1999"]),
        ]
    )
    assert found.exact_match == pytest.approx(100 / 3)
    assert found.f1 == pytest.approx(100 * (1 + 1 / 2) / 3)


def test_the_best_of_each_measure_may_be_another_reference() -> None:
    found = score([("the", ["an", "the the"])])
    assert (found.exact_match, found.f1) == (100, 0)


def test_nothing_has_no_score() -> None:
    with pytest.raises(ValueError, match="there is nothing to score"):
        score([])
