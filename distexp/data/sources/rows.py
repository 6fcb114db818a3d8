"""Rows of own data for training and evaluation: from files, ``save_to_disk`` folders, or the hub. Imports no torch."""

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, DatasetConfig
from distexp.config.overrides import format_count
from distexp.data.sources.formats import (
    KINDS,
    READ_ROWS,
    Row,
    RowFormat,
    kind_of,
    read_file,
    read_footer,
    read_plain,
    refuse_column,
    refuse_wrong_rows,
)
from distexp.exceptions import first_line
from distexp.system.cache_dir import cache_dir, offline_if_unreachable
from distexp.system.files import read_or_none

SPLIT_WORDS = {
    "validation": frozenset(("validation", "valid", "dev", "val")),
    "test": frozenset(("test", "testing", "eval", "evaluation")),
}
TRAIN_WORDS = frozenset(("train", "training"))
"""Parts of the names of files and folders with a split, as in the library datasets. Those above are for evaluation."""

DEFAULT_SHARE = 0.1
"""Share of the rows for evaluation, if the data has no split for it."""

MAX_DOCUMENT = 1_000_000
"""Most characters of a document of a plain text file, so that its tokens need little memory."""

CHECKED_FILES, CHECKED_ROWS, CHECKED_BYTES = 10, 100, 2_000_000
"""Before a run starts, smaller files are read as a whole, and the first rows of larger ones."""

COMPRESSIONS = (".bz2", ".xz", ".zst", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar", ".tgz", ".tar.gz")
"""Endings of compressed files and archives that are not read."""

FormatChoice = Callable[[DatasetConfig, Sequence[str]], RowFormat]
"""Function of a dataset and the columns of its first rows."""


@dataclass(frozen=True)
class Table:
    """Rows of one file, or of one split of the library datasets."""

    label: str  # for messages
    file: Path | None = None
    data: Any = None  # a ``datasets.Dataset`` in place of a file

    @property
    def fingerprint(self) -> str:
        """Return what changes if the rows change."""
        if self.file is None:
            return f"{self.label} {self.data._fingerprint}"
        found = self.file.stat()
        return f"{self.label} {found.st_size} {found.st_mtime_ns}"


@dataclass(frozen=True)
class Rows:
    """The rows of the training or the evaluation set. Each iteration reads them again, with little memory.

    An iteration yields correct rows. After the first wrong one it yields none, counts all wrong ones, and raises
    ConfigError with the place of the first.
    """

    name: str  # training or evaluation
    tables: tuple[Table, ...]
    dataset: DatasetConfig
    form: RowFormat
    share: float = 0.0  # share of the rows of the tables that are held out for evaluation
    is_held_out: bool = False  # whether these are the held out rows, or the others

    @property
    def fingerprint(self) -> str:
        """Return a hash that changes if the rows change."""
        texts = [table.fingerprint for table in self.tables]
        settings = [self.form.columns(self.dataset), self.dataset.documents, self.share, self.is_held_out]
        return hashlib.sha256(json.dumps([texts, settings]).encode()).hexdigest()[:24]

    def class_names(self, column: str) -> list[str]:
        """Return the names that the library datasets knows for the numbers of a column; empty without such names."""
        for table in self.tables:
            if table.file is not None and kind_of(table.file) != "parquet":
                continue
            data = table.data if table.file is None else _stream_parquet(table.file, [column])
            feature = (data.features or {}).get(column)
            names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list of classes, or of a class
            if names:
                return list(names)
        return []

    def __iter__(self) -> Iterator[Row]:
        first, wrong, total, kept = "", 0, 0, 0
        every = (row for table in self.tables for row in _read(table, self.dataset, self.form))
        for index, row in enumerate(every):
            total += 1
            if row.error is not None:
                wrong, first = wrong + 1, first or f"{row.place}: {row.error}"
            elif not wrong and (not self.share or is_held_out(index, self.share) is self.is_held_out):
                kept += 1
                yield row
        if wrong:
            raise refuse_wrong_rows(first, wrong, f"{total} rows")
        if total and not kept and self.share:
            raise ConfigError(
                f"{self.dataset.path} has {format_count(total, 'row')}, and all are held out for "
                "evaluation: add rows, or set dataset.eval_path"
            )


def is_held_out(index: int, share: float) -> bool:
    """Return whether a row is for evaluation: one of each ``1 / share`` rows, at a fixed random place.

    It does not depend on the number of rows, so that they can be read as a stream. The first row always is.
    """
    parts = 10**12
    taken = min(max(1, round(share * parts)), parts - 1)
    group = index * taken // parts
    start, end = (-(-number * parts // taken) for number in (group, group + 1))
    drawn = (group * 2_654_435_761 % 2**32) * (end - start) >> 32
    return index == start + drawn


def open_rows(dataset: DatasetConfig, choose_format: FormatChoice) -> tuple[Rows, Rows]:
    """Return the rows of the training and of the evaluation set. Raise ConfigError if they cannot be found.

    The evaluation set is ``eval_path``, ``eval_split``, the split of the data for it, or a share of the training rows.
    """
    if dataset.path is None:
        raise ConfigError(f"dataset={dataset.name} needs data: set dataset.path to a file, a folder or a hub id")
    splits = _open_splits(dataset.path, dataset.subset)
    name = dataset.split or ("train" if "train" in splits or len(splits) > 1 else next(iter(splits)))
    tables = _choose(splits, name, "split", dataset.path)
    make = partial(Rows, dataset=dataset, form=choose_format(dataset, columns_of(tables[0])))
    if dataset.eval_path is not None:
        splits = _open_splits(dataset.eval_path, dataset.subset)
    others = [split for split in SPLIT_WORDS if split in splits and (dataset.eval_path or split != name)]
    known = [split for split in others if _with_rows(splits[split])]
    first = next(iter(splits)) if dataset.eval_path else None
    wanted = dataset.eval_split or (None if dataset.eval_share else next(iter(known), first))
    if wanted is not None:
        evaluation = _choose(splits, wanted, "eval_split", dataset.eval_path or dataset.path)
        return make("training", tables), make("evaluation", evaluation)
    share = dataset.eval_share or DEFAULT_SHARE
    return make("training", tables, share=share), make("evaluation", tables, share=share, is_held_out=True)


def _choose(splits: Mapping[str, tuple[Table, ...]], name: str, key: str, path: str) -> tuple[Table, ...]:
    if name not in splits:
        raise ConfigError(f"{path} has no split {name}: set dataset.{key} to one of {', '.join(splits)}")
    if not (found := _with_rows(splits[name])):
        raise _refuse_empty(splits[name][0].label)
    return found


def _with_rows(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables without empty Parquet files."""
    return tuple(table for table in tables if table.file is None or not _is_empty_parquet(table.file))


@lru_cache(maxsize=4096)
def _is_empty_parquet(file: Path) -> bool:
    """Return whether a Parquet file has no row, as some of those that Spark writes. A large file is not opened."""
    is_small = kind_of(file) == "parquet" and file.stat().st_size <= CHECKED_BYTES
    return is_small and read_footer(file).num_rows == 0


def _refuse_empty(label: str) -> ConfigError:
    return ConfigError(f"{label} has no row: add rows, or use other data")


def _open_splits(path: str, subset: str | None = None) -> dict[str, tuple[Table, ...]]:
    """Return the tables of each split. A file, and files without a split in their names, are the split train."""
    if is_local(path) and not is_saved(path):
        return {name: tuple(Table(str(file), file) for file in files) for name, files in find_files(path).items()}
    offline_if_unreachable(path)
    from datasets import DatasetDict, load_dataset, load_from_disk

    try:
        found = load_from_disk(path) if is_local(path) else load_dataset(path, name=subset)
    except Exception as error:  # The library has many, also those of the hub and of Arrow.
        what = "cannot be read" if is_local(path) else "does not exist here, and is not available from the hub"
        raise ConfigError(f"dataset.path={path} {what} ({first_line(error)}): correct dataset.path") from error
    splits = dict(found) if isinstance(found, DatasetDict) else {"train": found}
    return {name: (Table(f"{path}, split {name}", data=data),) for name, data in splits.items()}


def is_local(path: str) -> bool:
    """Return whether a path, or a pattern such as ``data/*.jsonl``, exists on this machine."""
    return os.path.exists(path) or bool(glob.glob(path, recursive=True))


def is_saved(path: str) -> bool:
    """Return whether a path is a folder written by ``save_to_disk``."""
    return any(Path(path, name).is_file() for name in ("state.json", "dataset_dict.json"))


def find_files(path: str) -> dict[str, list[Path]]:
    """Return the data files of a file, a folder or a pattern by split, sorted. Raise ConfigError if there are none."""
    root = Path(path)
    found = [root] if root.is_file() else sorted(map(Path, glob.glob(path, recursive=True)))
    if root.is_dir():
        found = [file for file in sorted(map(Path, walk_files(root))) if kind_of(file)]
        found = [file for file in found if not _describes_data(file)]
    if not found or not all(map(kind_of, found)):
        wrong = next((f"{file} is not a" for file in found if kind_of(file) is None), f"{path} has no")
        left = map(Path, walk_files(root)) if root.is_dir() else found
        raise ConfigError(f"{wrong} data file{_compression_hint(left)}: use files that end in {', '.join(KINDS)}")
    if broken := [file for file in found if not file.exists()]:
        raise ConfigError(f"{broken[0]} is a link to nothing: restore its file, or remove it")
    if special := [file for file in found if not (file.is_file() or file.is_dir())]:
        raise ConfigError(f"{special[0]} is a pipe or a device: write its content into a file")
    if empty := [file for file in found if not file.stat().st_size]:
        raise ConfigError(f"{empty[0]} is empty: add rows to it, or remove it")
    splits: dict[str, list[Path]] = {}
    base = root if root.is_dir() else os.path.dirname(re.split(r"[*?[]", path)[0])  # the folder of a pattern
    for file in found:
        relative = file.relative_to(base) if len(found) > 1 else file
        words = words_of(str(relative)) if len(found) > 1 else set[str]()
        name = next((name for name, known in SPLIT_WORDS.items() if words & known), "train")
        splits.setdefault(name, []).append(file)
    return splits


def words_of(name: str) -> set[str]:
    """Return the words in the name of a file or a folder, in lower case."""
    return set(re.split("[^a-z]+", name.lower()))


def _describes_data(file: Path) -> bool:
    return file.name.split(".")[0] in ("README", "LICENSE", "dataset_info", "dataset_infos")


def _compression_hint(files: Iterable[Path]) -> str:
    """Return what to do with files whose compression is not read; nothing without any."""
    names = [file.name.lower() for file in files]
    found = [ending for ending in COMPRESSIONS if any(name.endswith(ending) for name in names)]
    return f" ({', '.join(found)} cannot be read: decompress such files, or write them as .gz)" if found else ""


def find_notes(dataset: DatasetConfig) -> Iterator[str]:
    """Yield a note about the files of each path that are left out: descriptions, no data, or no rows."""
    for path in filter(None, dict.fromkeys((dataset.path, dataset.eval_path))):
        if not is_local(path) or is_saved(path):
            continue
        files = sorted(map(Path, walk_files(Path(path)))) if os.path.isdir(path) else []
        described = [file for file in files if _describes_data(file)]
        unknown = [file for file in files if kind_of(file) is None and file not in described]
        empty = [file for split in find_files(path).values() for file in split if _is_empty_parquet(file)]
        reasons = {"they describe the data": described, "they are no data files": unknown, "they have no row": empty}
        for why, found in reasons.items():
            if found:
                names = [os.path.relpath(file, path) if os.path.isdir(path) else file.name for file in found]
                yield note_left_out(why + _compression_hint(found), names, path)


def note_left_out(why: str, names: Sequence[str], place: str | Path, unit: str = "file") -> str:
    """Return the note about files that are left out: why, how many, and one of them."""
    return f"left out, because {why}: {format_count(len(names), unit)} of {place}, as {names[0]}"


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths of the files in a folder, at any depth and behind links, without hidden files and folders.

    Each folder is entered once. Raise ConfigError for a link that leads to the folder itself, or above it.
    """
    entered, start = set[str](), os.path.realpath(root)
    for place, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        if place != str(root) and Path(start).is_relative_to(real):
            raise ConfigError(f"{place} is a link to the folder above it, {real}: remove the link")
        # os.walk enters only the folders that are left in this list.
        folders[:] = [] if real in entered else sorted(name for name in folders if not name.startswith("."))
        if real not in entered:
            yield from (os.path.join(place, name) for name in names if not name.startswith("."))
        entered.add(real)


def find_errors(dataset: DatasetConfig, choose_format: FormatChoice) -> Iterator[str]:
    """Yield what is wrong with local data: files, columns and first rows, as far as it needs no large library."""
    for path in filter(None, (dataset.path, dataset.eval_path)):
        try:
            columns = first_columns(path)
            form = choose_format(dataset, columns)
            check_columns(path, columns, dataset, form)
            if is_local(path) and not is_saved(path):
                for file in (file for files in find_files(path).values() for file in files[:CHECKED_FILES]):
                    check_columns(str(file), columns_of(Table(str(file), file)), dataset, form)
                    _check_first_rows(file, file.stat().st_mtime_ns, form, form.columns(dataset))
                if dataset.eval_path is None:
                    _check_held_out(open_rows(dataset, choose_format)[0])
        except ConfigError as error:
            yield from error.errors


def first_columns(path: str) -> list[str]:
    """Return the columns of local data; none if it is not local, or has no description."""
    if is_saved(path):
        described = sorted(Path(path).glob("**/dataset_info.json"))
        return list(read_or_none(described[0], "features") or ()) if described else []
    return columns_of(Table("", next(iter(find_files(path).values()))[0])) if is_local(path) else []


def first_rows(path: str) -> list[Row]:
    """Return the first rows of local data. One that cannot be read has an error."""
    table = next(iter(_open_splits(path).values()))[0]
    rows = read_file(table.file, columns_of(table)) if table.file else _read_batches(table.data, path)
    return list(islice(rows, CHECKED_ROWS))


def _check_held_out(train: Rows) -> None:
    """Raise ConfigError if all rows of a small file are held out for evaluation."""
    file = train.tables[0].file
    if train.share and file and kind_of(file) != "parquet" and file.stat().st_size <= CHECKED_BYTES:
        next(iter(train))


@lru_cache
def _check_first_rows(file: Path, _changed_at: int, form: RowFormat, columns: tuple[str, ...]) -> None:
    """Raise ConfigError if one of the first rows is wrong. They are read once for all cells of a sweep."""
    is_small, is_parquet = file.stat().st_size <= CHECKED_BYTES, kind_of(file) == "parquet"
    rows = list(islice(read_file(file, columns), None if is_small else CHECKED_ROWS))
    has_values = any(row.error or any(map(str.strip, map(str, row.values.values()))) for row in rows)
    if is_small and not is_parquet and not has_values:
        raise ConfigError(f"{file} has no row with a value: add rows, or use other data")
    found = ((row.place, row.error or form.check(row.values, columns)) for row in rows)
    if wrong := [f"{place}: {error}" for place, error in found if error]:
        raise refuse_wrong_rows(wrong[0], len(wrong), f"{'' if is_small else 'the first '}{len(rows)} rows")


def columns_of(table: Table) -> list[str]:
    """Return the columns of a table. Those of a plain file are the columns of its first rows."""
    if table.file is None:
        return list(table.data.column_names)
    if kind_of(table.file) != "parquet":
        rows = islice(read_plain(table.file), CHECKED_ROWS)
        return list(dict.fromkeys(name for row in rows for name in row.values))
    return list(read_footer(table.file).schema.to_arrow_schema().names)


def check_columns(label: str, found: Sequence[str], dataset: DatasetConfig, form: RowFormat) -> None:
    """Raise ConfigError if a column does not exist, with those that do. Without any, the first rows are wrong."""
    for key, column in zip(form.keys, form.columns(dataset), strict=True):
        if found and column not in found:
            raise refuse_column(label, column, f"dataset.{key}", found, form.columns(dataset))


def _read(table: Table, dataset: DatasetConfig, form: RowFormat) -> Iterator[Row]:
    """Yield the rows of a table, with the error of each wrong one. Raise ConfigError if it lacks a column."""
    check_columns(table.label, columns_of(table), dataset, form)
    columns, row = form.columns(dataset), None
    if table.file is None:
        rows = _read_batches(table.data, table.label)
    elif kind_of(table.file) == "parquet":
        rows = _read_batches(_stream_parquet(table.file, columns), table.label)
    else:
        rows = read_plain(table.file)
        rows = _join_lines(rows, dataset.documents) if kind_of(table.file) == "text" else rows
    for row in rows:
        yield row if row.error is not None else row._replace(error=form.check(row.values, columns))
    if row is None:
        raise _refuse_empty(table.label)


def _stream_parquet(file: Path, columns: Sequence[str]) -> Any:
    """Return some columns of a Parquet file. The library datasets has no type for some others, such as maps."""
    import pyarrow
    from datasets import Features, load_dataset

    whole, names = read_footer(file).schema.to_arrow_schema(), list(dict.fromkeys(columns))
    features = Features.from_arrow_schema(pyarrow.schema(map(whole.field, names), metadata=whole.metadata))
    folder, name = str(cache_dir() / "datasets"), glob.escape(str(file))  # The library takes a name as a pattern.
    # The library's batch size is the number of rows of the first row group, which may be 0.
    files = {"data_files": name, "split": "train", "streaming": True, "columns": names, "features": features}
    return load_dataset("parquet", **files, cache_dir=folder, batch_size=READ_ROWS)


def _read_batches(data: Any, label: str) -> Iterator[Row]:
    """Yield the rows of a dataset of the library datasets."""
    number = 0
    for batch in data.iter(batch_size=READ_ROWS):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield Row(f"{label}, row {number}", dict(zip(batch, values, strict=True)))


def _join_lines(lines: Iterator[Row], unit: str) -> Iterator[Row]:
    """Join the lines of a plain text file to documents: each line, the lines between empty ones, or all."""
    place, parts, size = "", list[str](), 0
    for row in lines:
        text = row.values.get("text", "")
        ends = unit == "line" or row.error or (unit == "paragraph" and not text.strip())
        if parts and (ends or size + len(text) > MAX_DOCUMENT):
            yield Row(place, {"text": "\n".join(parts)})
            parts, size = [], 0
        if row.error:
            yield row
        elif parts or text.strip():
            place, start = (place if parts else row.place), 0
            for start in range(0, len(text) - MAX_DOCUMENT, MAX_DOCUMENT):
                yield Row(place, {"text": text[start : start + MAX_DOCUMENT]})
            parts.append(text[-(len(text) % MAX_DOCUMENT or MAX_DOCUMENT) :])
            size += len(parts[-1])
    if parts:
        yield Row(place, {"text": "\n".join(parts).rstrip("\n")})
