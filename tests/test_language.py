"""The project's language: the field's words, imperative docstrings, short sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.language import (
    REPOSITORY,
    Prose,
    banned_words,
    find_problems,
    measure_prose,
    noun_docstrings,
)

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
GENERATED = "/report/results.md"
FEW_SENTENCES = 10
"""A shorter page has no meaningful mean."""


def test_code_comments_docs_and_messages_use_the_terms_of_the_field() -> None:
    problems = list(find_problems())
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_sentences_of_a_page_are_short(page: Path) -> None:
    prose = measure_prose(page.read_text())
    if prose.sentences < FEW_SENTENCES or page.as_posix().endswith(GENERATED):
        pytest.skip("no prose to measure")
    assert prose.words_per_sentence <= 18, prose
    assert prose.marks_per_100 <= 140, prose


def test_prose_is_measured_without_code_tables_and_links() -> None:
    text = "# Title, with; marks\n\nOne, 2,000: three `a, b`. Four [five](x,y.md).\n\n    code, code;\n\n| a, b |\n"
    assert measure_prose(text) == Prose(sentences=2, words=6, marks=2)


@pytest.mark.parametrize(
    "line",
    ["# a run is begun anew", "message = 'nobody asked for it'", "def went_on_from(): ...", "behaviour, colour"],
)
def test_a_banned_word_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "code.py"
    path.write_text(line + "\n")
    assert list(banned_words(path))


@pytest.mark.parametrize(
    "line", ["a segmentation fault", "by default", "arises", "understand", "JobState.CANCELLED", '{"chance": 1}']
)
def test_similar_words_are_allowed(tmp_path: Path, line: str) -> None:
    path = tmp_path / "code.py"
    path.write_text(line + "\n")
    assert not list(banned_words(path))


def test_a_docstring_without_a_verb_is_found(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text('def f():\n    """The sum."""\n\ndef g():\n    """Return the sum."""\n')
    assert [problem.text for problem in noun_docstrings(path)] == ["The sum."]
