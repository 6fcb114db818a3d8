"""JSON files of SQuAD v1.1: how to read one, and what is wrong with a file of another format. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from distexp.config import ConfigError

LAYOUT = (
    '{"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "...", "question": "...", '
    '"answers": [{"text": "..."}]}]}]}]}'
)
"""Smallest file, for messages."""

MAX_CHECKED_BYTES = 2_000_000
"""Largest file that is read before a run starts. The training set of SQuAD has 30 MB, which takes half a second."""

START = "answer_start"
"""Key of the position of an answer in the context, in characters. Positions are optional, and checked if present."""

SPLITS = {"train": "training", "eval": "evaluation"}
"""What the splits are called in messages, by the start of their keys in ``dataset``."""

TYPE_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}


def load_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise ConfigError, which starts with the path, if it is none."""
    try:
        with path.open(encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): correct the path") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{path} is not JSON ({reason}): use a file of the form {LAYOUT}") from error


def format_error(path: str | Path, reason: object) -> str:
    """Return the message about a file of another format."""
    return f"{path} is not in the format of SQuAD v1.1: {reason}. Use the form {LAYOUT}"


def find_format_error(content: Any) -> str | None:
    """Return which part of a file is not in the format of SQuAD v1.1; None if all parts are."""
    try:
        for in_data, article in _entries(content, "data", ""):
            for in_article, paragraph in _entries(article, "paragraphs", in_data):
                _member(paragraph, "context", str, in_article)
                for where, question in _entries(paragraph, "qas", in_article):
                    _member(question, "id", object, where)
                    _member(question, "question", str, where)
                    for place, answer in _entries(question, "answers", where):
                        _member(answer, "text", str, place)
                        # It would be ignored otherwise.
                        near = [] if START in answer else get_close_matches(START, answer, n=1, cutoff=0.8)
                        if near:
                            raise _FormatError(f"{place} has the key {near[0]!r}, which is probably {START!r}")
    except _FormatError as error:
        return str(error)
    return None


def find_small_file_error(path: str, key: str, size: int | None) -> str | None:
    """Return what is wrong with a file, starting with its path; None: nothing, or it is too large to be read here.

    ``key`` is the split, a key of SPLITS, and ``size`` the number of its questions that are used, from the first.
    """
    status = Path(path).stat()
    return _find_error(path, key, size, status.st_mtime_ns) if status.st_size <= MAX_CHECKED_BYTES else None


@lru_cache
def _find_error(path: str, key: str, size: int | None, _changed_at: int) -> str | None:
    """Return what is wrong with a file. It is read once for all cells of a sweep."""
    try:
        content = load_json(Path(path))
    except ConfigError as error:
        return str(error)
    if reason := find_format_error(content):
        return format_error(path, reason)
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    questions = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    return _find_example_error(path, key, size, questions)


def _find_example_error(path: str, key: str, size: int | None, questions: Sequence[tuple[str, Any]]) -> str | None:
    """Return what is wrong with the questions of a file. Each is given with its context."""
    if not questions:
        return no_examples(path, "examples")
    if not any(answer["text"].strip() for _, question in questions for answer in question["answers"]):
        return f"{path} has no question with an answer: use data with at least one answer"
    if size is not None and size > len(questions):
        return too_few_examples(path, key, size, len(questions))
    found = [(question["id"], _misplaced(context, question)) for context, question in questions[:size]]
    if wrong := [f"question {identity}: {reason}" for identity, reason in found if reason]:
        return f"{path}: {misplaced_answers(len(wrong), len(found), key, wrong[0])}"
    return None


def _misplaced(context: str, question: Any) -> str | None:
    answers = question["answers"]
    return find_misplaced(context, [answer["text"] for answer in answers], [answer.get(START) for answer in answers])


def no_examples(source: str, examples: str) -> str:
    """Return the error of data without a question."""
    return f"{source} has no {examples}: use data with at least one question"


def too_few_examples(source: str, key: str, size: int, available: int) -> str:
    """Return the error of data with fewer questions than ``dataset`` asks for."""
    return (
        f"{source} has {available} {SPLITS[key]} examples, fewer than dataset.{key}_size={size}: set at most "
        f"{available}, or null for all"
    )


def find_misplaced(context: str, answers: Sequence[str], starts: Sequence[Any]) -> str | None:
    """Describe the first answer that the context does not have at its start, or None; a start of None is unknown."""
    for text, start in zip(answers, starts, strict=True):
        if start is None:
            continue
        if not isinstance(start, int):
            return f"{START}={start!r} is not a number"
        found = context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            return f"at {START}={start} the context has {found!r} instead of {text!r}"
    return None


def misplaced_answers(wrong: int, selected: int, key: str, first: str) -> str:
    """Return the error of data with wrong positions, to be printed after the path."""
    return (
        f"{wrong} of {selected} {SPLITS[key]} examples have a wrong {START}. The first is {first}. Correct the "
        f"positions, or remove all {START} from the data"
    )


class _FormatError(ValueError):
    """A part of a file that SQuAD v1.1 does not have."""


def _entries(parent: Any, key: str, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the place of each entry of a list, as ``data[0]``, and the entry."""
    place = f"{where}.{key}".removeprefix(".")
    for index, entry in enumerate(_member(parent, key, list, where)):
        yield f"{place}[{index}]", entry


def _member(parent: Any, key: str, kind: type, where: str) -> Any:
    """Return the value of a key. Raise _FormatError if the parent is no object, or has no such value."""
    if not isinstance(parent, dict):
        raise _FormatError(f"{where or 'the file'} is {_describe(parent)} and not an object")
    if key not in parent:
        raise _FormatError(f"{where or 'the file'} has no key {key!r}")
    if not isinstance(parent[key], kind):
        place = f"{where}.{key}".removeprefix(".")
        raise _FormatError(f"{place} is {_describe(parent[key])} and not {TYPE_NAMES[kind]}")
    return parent[key]


def _describe(value: Any) -> str:
    return TYPE_NAMES.get(type(value), "a number")
