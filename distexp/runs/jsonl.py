"""Files of JSON lines: writing, reading, and following one that grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from distexp.runs.json_files import nan_to_none, parse_json
from distexp.runs.regular_files import open_file

END_BYTES = 4096

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
            whole = file.read().rpartition(b"\n")[0]
    except OSError:
        return {}
    last = _parse([whole.rpartition(b"\n")[2].decode(errors="replace")])
    return last[0] if last else {}


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
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:
                    self._offset, self.restarts = 0, self.restarts + 1
                if size == self._offset:
                    return []
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole[0]) + len(whole[1])
        return whole[0].decode(errors="replace").split("\n") if whole[1] else []

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
