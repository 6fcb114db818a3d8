"""JSON lines: torn lines are left out, and a tail reads each whole line once."""

from __future__ import annotations

from pathlib import Path

from distexp.system.files import END_BYTES, Tail, read_entries, read_last_entry


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st{"step": 2}\n[3]\n\xff\n{"step": 4}\n{"step')
    assert [entry["step"] for entry in read_entries(path)] == [1, 4]
    assert read_last_entry(path) == {"step": 4}


def test_a_missing_or_empty_file_has_no_entries(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert (read_entries(path), read_last_entry(path), Tail(path).read_lines()) == ([], {}, [])
    path.touch()
    assert (read_entries(path), read_last_entry(path), Tail(path).read_lines()) == ([], {}, [])


def test_the_last_entry_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(END_BYTES)))
    assert read_last_entry(path) == {"step": END_BYTES - 1}


def test_a_tail_reads_whole_lines_once_and_restarts_with_a_shorter_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    tail = Tail(path)
    seen = []
    for text in ("one\ntwo", "", " half\n\nthree\n"):
        with path.open("a") as file:
            file.write(text)
        seen.append(tail.read_lines())
    assert seen == [["one"], [], ["two half", "", "three"]]
    path.write_text("new\n")
    assert (tail.read_lines(), tail.restarts) == (["new"], 1)
