"""Files of JSON lines: writing, reading, and following one that grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from distexp.runs.json_files import nan_to_none, parse_json
from distexp.runs.regular_files import open_file

END_BYTES = 4096
"""Size of the part at the end of a file in which its last line is searched."""

Entry = dict[str, Any]


def append_line(file: TextIO, content: Entry) -> None:
    """Write one JSON line and flush it, so that a crash loses nothing."""
    file.write(json.dumps(nan_to_none(content)) + "\n")
    file.flush()


def read_entries(path: Path) -> list[Entry]:
    """Read the entries of a file; a missing file has none.

    A torn line is left out. A killed writer leaves one at the end, or before the lines of the next writer.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    try:
        with open_file(path) as file:
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return _parse(text.splitlines())


def read_last_entry(path: Path) -> Entry:
    """Read the last whole line of a file from its end, because the file may be large; empty if there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            whole_lines = file.read().rpartition(b"\n")[0]
    except OSError:
        return {}
    last_line = whole_lines.rpartition(b"\n")[2]
    entries = _parse([last_line.decode(errors="replace")])
    return entries[0] if entries else {}


class Tail:
    """Reader of the lines that were added to a file since its last call.

    Attributes:
        restarts: How often the file has become shorter, because a later attempt of the run replaced it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._offset = 0

    def read_lines(self) -> list[str]:
        """Read the new whole lines; none if there is no file.

        Raises:
            OSError: if the file exists and cannot be read.
        """
        try:
            with open_file(self.path) as file:
                added = self._read_added(file)
        except FileNotFoundError:
            return []
        lines, end, _ = added.rpartition(b"\n")  # What follows the last line end is still being written.
        self._offset += len(lines) + len(end)
        return lines.decode(errors="replace").split("\n") if end else []

    def _read_added(self, file: BinaryIO) -> bytes:
        """Read what was added to the file since the last whole line, or all of it if it has become shorter."""
        size = file.seek(0, os.SEEK_END)
        if size < self._offset:
            self._offset, self.restarts = 0, self.restarts + 1
        file.seek(self._offset)
        return file.read()

    def read_entries(self) -> list[Entry]:
        """Read the new lines as JSON; lines that are not a JSON object are left out."""
        return _parse(self.read_lines())


def _parse(lines: Iterable[str]) -> list[Entry]:
    found = []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
