"""Rows of text, JSON and CSV files, and what is wrong with them. Imports no torch.

The readers of pandas and Arrow do not report the place of a wrong row. They also repair some rows without notice:
numbers become texts, and a quote that is not closed joins rows.
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

from distexp.config import ConfigError, DatasetConfig
from distexp.config.overrides import copyable_overrides
from distexp.exceptions import first_line

KINDS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}
"""Kinds of files by their ending, which may be followed by ``.gz``. The library datasets reads those of Parquet."""

READ_ROWS = 1000
"""Rows of Parquet and of the library datasets that are read together."""

BUFFER_BYTES = 1_000_000
"""Bytes of a Parquet file that are read together, and not all of a column, so that its first rows need few."""

BROKEN = re.compile("[\ud800-\udfff]")
"""A byte that is not UTF-8, in a text that was read with ``surrogateescape``, or half of a character."""

TYPES = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "a truth value",
    type(None): "null",
    bytes: "binary data",
}
CLASS = "a class, which is a name or a number from 0"
ROLES = ("system", "developer", "user", "assistant", "tool")
TURN_KEYS, SHAREGPT_KEYS = ("role", "content"), ("from", "value")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MESSAGES_COLUMNS = ("messages", "conversation", "conversations")
"""Usual names of a column of messages. The first one is the default."""


class Row(NamedTuple):
    """A row of a table; without values if it cannot be read."""

    place: str  # for messages: ``my.jsonl, row 3``
    values: dict[str, Any]
    error: str | None = None


RowCheck = Callable[[Mapping[str, Any], tuple[str, ...]], str | None]
"""Function of a row and the names of its needed columns. It returns what is wrong, as ``text is null``, or None."""


@dataclass(frozen=True)
class RowFormat:
    """What a dataset needs of each row."""

    keys: tuple[str, ...]  # keys of ``dataset`` that name the columns
    check: RowCheck

    def columns(self, dataset: DatasetConfig) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(getattr(dataset, key) for key in self.keys)


def text_error(values: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return what is wrong with the texts in some columns of a row. An empty text is not wrong."""
    for column in columns:
        value = values.get(column)
        if not isinstance(value, str):
            return _wrong_value(values, column, "a text")
        if BROKEN.search(value):
            return f"{column} contains half of a character"
    return None


def messages_error(values: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return what is wrong with the list of messages in a row."""
    (column,) = columns
    messages = values.get(column)
    if not isinstance(messages, list) or not messages:
        return _wrong_value(values, column, "a list of messages")
    for index, message in enumerate(messages):
        place = f"{column}[{index}]"
        if not isinstance(message, dict):
            return f"{place} is {describe(message)} and not an object with role and content"
        names = SHAREGPT_KEYS if is_sharegpt(message) else TURN_KEYS
        if error := text_error(message, names):
            return f"{place}.{error}"
        if read_turn(message)["role"] not in ROLES:
            known = (*ROLES, *SHAREGPT_ROLES) if names is SHAREGPT_KEYS else ROLES
            return f"{place}.{names[0]} is {message[names[0]]!r} and not one of {', '.join(known)}"
    has_answer = any(read_turn(message)["role"] == "assistant" for message in messages)
    return None if has_answer else f"{column} has no message of the assistant"


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Return whether a message has the keys of ShareGPT, ``from`` and ``value``."""
    return message.get("role") is None and message.get("from") is not None


def read_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with ``role`` and ``content``, and without keys that are null."""
    if is_sharegpt(message):
        role, content = (message[name] for name in SHAREGPT_KEYS)
        return {"role": SHAREGPT_ROLES.get(role, role), "content": content}
    return {key: value for key, value in message.items() if value is not None}


def class_error(values: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return what is wrong with a text and its class in a row."""
    *texts, label = columns
    if error := text_error(values, tuple(texts)):
        return error
    return None if is_class(values.get(label)) else _wrong_value(values, label, CLASS)


def tags_error(values: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return what is wrong with the words and their tags in a row."""
    words, tags = (values.get(column) for column in columns)
    kinds: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
        ("a list of words", "a word", lambda value: isinstance(value, str)),
        ("a list of classes", CLASS, is_class),
    )
    for column, found, (kind, element, is_right) in zip(columns, (words, tags), kinds, strict=True):
        if not isinstance(found, list):
            return _wrong_value(values, column, kind)
        if wrong := [index for index, value in enumerate(found) if not is_right(value)]:
            return f"{column}[{wrong[0]}] is {describe(found[wrong[0]])} and not {element}"
    if len(words or ()) != len(tags or ()):
        return f"it has {len(words or ())} words, but {len(tags or ())} tags"
    return None


def is_class(value: Any) -> bool:
    """Return whether a value can be a class: a name, or a number from 0."""
    return bool(value) if isinstance(value, str) else type(value) is int and value >= 0


def _wrong_value(values: Mapping[str, Any], column: str, expected: str) -> str:
    return f"{column} is {f'{describe(values[column])} and not {expected}' if column in values else 'missing'}"


TEXT_FORMATS = {
    "sequence_classification": RowFormat(("column", "label_column"), class_error),
    "token_classification": RowFormat(("tokens_column", "tags_column"), tags_error),
}
"""Formats of ``dataset=text`` by task. Those of other tasks have only texts."""


def text_format(dataset: DatasetConfig, columns: Sequence[str], task: str = "causal_lm") -> RowFormat:
    """Return the format of ``dataset=text``. Raise ConfigError if a causal LM gets messages and no texts."""
    messages = next((name for name in MESSAGES_COLUMNS if name in columns), None)
    if messages and task == "causal_lm" and dataset.column not in columns:
        raise ConfigError(f"{dataset.path} has no column {dataset.column}, but {messages}: use dataset=chat")
    return TEXT_FORMATS.get(task, RowFormat(("column",), text_error))


def chat_format(dataset: DatasetConfig, columns: Sequence[str], task: str = "causal_lm") -> RowFormat:
    """Return the format of ``dataset=chat``: messages if there is a column with them, else prompts and answers."""
    if dataset.messages_column in columns:
        if task == "causal_lm":
            return RowFormat(("messages_column",), messages_error)
        if dataset.prompt_column not in columns:
            raise ConfigError(
                f"{dataset.path} has messages, which only causal LMs read: write its rows with a prompt and an answer, "
                "or use a causal LM"
            )
    usual = next((name for name in MESSAGES_COLUMNS if name in columns), None)
    if usual and task == "causal_lm" and dataset.prompt_column not in columns:
        raise ConfigError(
            f"{dataset.path} has no column {dataset.messages_column}: set dataset.messages_column={usual}"
        )
    return RowFormat(("prompt_column", "answer_column"), text_error)


USUAL_COLUMNS = {
    "column": ("text", "content", "body", "document", "article"),
    "prompt_column": ("prompt", "instruction", "question", "input"),
    "answer_column": ("answer", "response", "output", "completion", "reply", "target"),
    "messages_column": MESSAGES_COLUMNS,
    "tokens_column": ("tokens", "words"),
    "tags_column": ("tags", "ner_tags", "pos_tags", "labels"),
}
"""Usual names of columns by the key that names them. The first one is its default."""

TAGGER = ("model=hf", "model.name=FOLDER_OR_HUB_ID", "model.task=token_classification")
LAYOUTS: tuple[tuple[tuple[str, ...], RowCheck, tuple[str, ...]], ...] = (
    (("messages_column",), messages_error, ("dataset=chat", "dataset.chat_template=zephyr")),
    (("prompt_column", "answer_column"), text_error, ("dataset=chat",)),
    (("tokens_column", "tags_column"), tags_error, ("dataset=text", *TAGGER)),
    (("column",), text_error, ("dataset=text",)),
)
"""Keys of columns, what is wrong with them in a row, and the overrides for rows that have them."""


def recognize(rows: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the overrides for rows by their values, without the path; None if no column has a text or messages.

    Usual names come first, then the column with the longest values.
    """
    columns = dict.fromkeys(name for values in rows for name in values)
    longest = tuple(sorted(columns, key=lambda name: -sum(len(str(values.get(name))) for values in rows)))
    # Messages in a column of answers lack their prompts.
    whole = tuple(name for name in longest if name not in USUAL_COLUMNS["answer_column"])
    others = {"messages_column": whole, "column": longest}
    for known, (keys, find_error, overrides) in product((USUAL_COLUMNS, others), LAYOUTS):
        for names in product(*(known.get(key, ()) for key in keys)):
            if any(find_error(values, names) is None for values in rows):
                odd = ((key, name) for key, name in zip(keys, names, strict=True) if name != USUAL_COLUMNS[key][0])
                return [*overrides, *(f"dataset.{key}={name}" for key, name in odd)]
    return None


def describe(value: Any) -> str:
    """Return a value for messages, as ``the number 5``."""
    if isinstance(value, str | list) and not value:
        return "empty"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"the number {value}" if is_number else TYPES.get(type(value), f"a {type(value).__name__}")


def kind_of(file: Path) -> str | None:
    """Return the kind of a data file by its ending; None for another one."""
    name = file.name.lower().removesuffix(".gz")
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def read_file(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a file; of a Parquet file only some columns."""
    return read_parquet(file, columns) if kind_of(file) == "parquet" else read_plain(file)


def read_plain(file: Path) -> Iterator[Row]:
    """Yield the rows of a file of lines, JSON or CSV, with the error of each that cannot be read.

    Raise ConfigError if the file itself cannot be read, as a truncated ``.gz`` file.
    """
    kind = kind_of(file)
    records = partial(_records, separators="\t" if file.name.lower().removesuffix(".gz").endswith(".tsv") else ",;\t|")
    readers: dict[str, Callable[[IO[str]], Iterator[Content]]] = {"text": _lines, "json": _objects, "csv": records}
    reader, unit = readers[str(kind)], "line" if kind == "text" else "row"
    try:
        with _open(file, newline="" if kind == "csv" else None) as lines:
            for number, (values, error) in enumerate(reader(lines), start=1):
                texts = (text for item in values.items() for text in item if isinstance(text, str))
                is_broken = any(map(BROKEN.search, texts))
                reason = "it is not UTF-8" if is_broken and kind != "json" else error
                yield Row(f"{file}, {unit} {number}", {} if reason else values, reason)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error


def read_footer(file: Path) -> Any:
    """Return the metadata of a Parquet file. Raise ConfigError if it cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return read_metadata(file)
    except (OSError, ArrowException) as error:
        raise _unreadable(file, error) from error


def read_parquet(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the values of some columns in each row of a Parquet file. Raise ConfigError if it cannot be read.

    There are no rows if a column has JSON, which only the library datasets decodes.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file, buffer_size=BUFFER_BYTES) as opened:
            names = opened.schema_arrow.names
            if twice := [column for column in columns if names.count(column) > 1]:
                raise ConfigError(f"{file} has {names.count(twice[0])} columns {twice[0]}: rename all but one of them")
            if any("arrow.json" in str(opened.schema_arrow.field(column).type) for column in columns):
                return
            batches = opened.iter_batches(READ_ROWS, columns=list(columns))
            for number, values in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield Row(f"{file}, row {number}", values)
    except (OSError, ValueError, ArrowException) as error:  # ValueError: a text that is not UTF-8
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read ({first_line(error)}): restore the file")


def _open(file: Path, *, newline: str | None = None) -> IO[str]:
    opener: Any = gzip.open if file.name.lower().endswith(".gz") else open
    opened: IO[str] = opener(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    return opened


Content = tuple[dict[str, Any], str | None]
"""The values of a row, and its error."""


def _lines(lines: IO[str]) -> Iterator[Content]:
    return (({"text": line.rstrip("\n")}, None) for line in lines)


def _objects(lines: IO[str]) -> Iterator[Content]:
    """Yield the objects of JSON Lines, or of one list."""
    is_first = True
    for line in filter(str.strip, lines):
        if is_first and line.lstrip().startswith("["):
            try:
                yield from map(_object, json.loads(line + lines.read()))
            except (ValueError, RecursionError) as error:
                yield {}, f"the list is not JSON ({first_line(error)})"
            return
        is_first = False
        try:
            yield ({}, "it is not UTF-8") if BROKEN.search(line) else _object(json.loads(line))
        except (ValueError, RecursionError) as error:
            yield {}, f"it is not JSON ({first_line(error)})"


def _object(value: Any) -> Content:
    return (value, None) if isinstance(value, dict) else ({}, f"it is {describe(value)} and not an object with columns")


def _records(lines: IO[str], separators: str) -> Iterator[Content]:
    """Yield the records of CSV. The first line has the names, and shows which character separates the columns."""
    csv.field_size_limit(sys.maxsize)
    header = next(lines, "")
    headers = [(next(csv.reader([header], delimiter=each), []), each) for each in separators]
    names, separator = max(headers, key=lambda found: len(found[0]))
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        start = reader.line_num + 2
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield {}, f"a quote in line {start} is not closed, or is inside of a text ({error})"
            continue
        if fields:  # not an empty line
            count = f"it has {len(fields)} fields, but the header has {len(names)}"
            repeated = next((f"the header has {name} twice" for name in names if names.count(name) > 1), None)
            yield dict(zip(names, fields, strict=False)), repeated if len(fields) == len(names) else count


def refuse_column(label: str, column: str, key: str, found: Sequence[str], needed: Sequence[str]) -> ConfigError:
    """Return the error about a column that does not exist, with those that no other key names, and one with quotes."""
    left = [name for name in found if name not in needed]
    if not left:
        return ConfigError(f"{label} has no column {column}, but only {', '.join(found)}: add it, or use other data")
    texts = [f"{key}={name}" for name in left]
    quoted = next((typed for text in texts if (typed := copyable_overrides(text)) != text), None)
    hint = f", with quotes as in {quoted}" if quoted else ""
    return ConfigError(f"{label} has no column {column}: set {key} to one of {', '.join(left)}{hint}")


def refuse_wrong_rows(first: str, wrong: int, rows: str) -> ConfigError:
    """Return the error about some rows: the place and the error of the first one, their number, and that of all."""
    return ConfigError(f"{first}; {wrong} of {rows} {'is' if wrong == 1 else 'are'} wrong: correct or remove them")
