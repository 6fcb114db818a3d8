"""Tests of the readers of nvidia-smi and psrecord logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.memory import read_memory_log

STAMP = "2025/11/20 10:11:{:02d}.123"
TABLES = {
    "as the workshops write it": (
        "timestamp, index, name, memory.used [MiB], memory.total [MiB]",
        "{stamp}, {gpu}, Tesla V100-SXM2-32GB, {used}, 32768",
    ),
    "with units": (
        "timestamp, index, name, memory.used [MiB], memory.total [MiB]",
        "{stamp}, {gpu}, Tesla V100-SXM2-32GB, {used} MiB, 32768 MiB",
    ),
    "no header, no units": (None, "{stamp}, {gpu}, Tesla V100-SXM2-32GB, {used}, 32768"),
    "no header, units": (None, "{stamp}, {gpu}, Tesla V100-SXM2-32GB, {used} MiB, 32768 MiB"),
    "utilization first, no header": (None, "{stamp}, {gpu}, 87 %, {used} MiB, 412.30 W"),
    "other columns": (
        "timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W]",
        "{stamp}, {gpu}, 87 %, {used} MiB, 412.30 W",
    ),
    "by uuid": ("uuid, memory.used [MiB]", "GPU-{gpu}, {used} MiB"),
}


@pytest.mark.parametrize(("header", "row"), TABLES.values(), ids=TABLES.keys())
def test_nvidia_smi(tmp_path: Path, header: str | None, row: str) -> None:
    path = tmp_path / "gpu_memory_log.csv"
    rows = [
        row.format(stamp=STAMP.format(second), gpu=gpu, used=1000 * (gpu + 1) + second)
        for second in range(3)
        for gpu in range(2)
    ]
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n")
    trace = read_memory_log(path)
    assert trace.notes == []
    found = [(sample.index, sample.used_mib) for sample in trace.samples]
    assert found == [(gpu, 1000.0 * (gpu + 1) + second) for second in range(3) for gpu in range(2)]
    assert {sample.kind for sample in trace.samples} == {"gpu"}
    if "87" in row:
        assert trace.samples[0].utilization_pct == 87.0
        assert trace.samples[0].power_w == 412.3


def test_nvidia_smi_without_some_values(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "index, memory.used [MiB], power.draw [W]\n0, 10 MiB, [N/A]\n0, [Unknown Error], [N/A]\n\n"
        "index, memory.used [MiB], power.draw [W]\nNVIDIA-SMI has failed\n0, 12 MiB, 3.50 W\n"
    )
    trace = read_memory_log(path)
    assert [sample.used_mib for sample in trace.samples] == [10.0, None, 12.0]
    assert trace.notes == [f"{path}: 1 line(s) are not samples and are left out, the first is line 6"]


def test_ambiguous_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for row in ("{}, 0, 87, 21658\n", "{}, 0, Tesla V100, 87, 412\n", "{}, 0, Tesla V100, 32768, 21658\n"):
        path.write_text(row.format(STAMP.format(1)))
        with pytest.raises(ValueError, match="neither a header nor units"):
            read_memory_log(path)


def test_psrecord(tmp_path: Path) -> None:
    path = tmp_path / "cpu_memory_log.txt"
    path.write_text(
        "# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)\n"
        "       0.000        0.000      120.500     4000.000\n"
        "       5.006      199.900     3892.000    24000.250\n"
    )
    samples = read_memory_log(path).samples
    assert [(sample.unix_time_s, sample.used_mib) for sample in samples] == [(0.0, 120.5), (5.006, 3892.0)]
    assert {sample.kind for sample in samples} == {"cpu"}


def test_psrecord_as_csv_and_with_io(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text("elapsed_time,nproc,cpu,mem_real,mem_virtual\n0.1,3,99.5,256.25,1000.0\n")
    assert read_memory_log(table).samples[0].used_mib == 256.25
    text = tmp_path / "log.txt"
    text.write_text("0.1 99.5 256.25 1000.0 1 2 3 4\n")
    assert read_memory_log(text).samples[0].used_mib == 256.25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("hello\nworld\n", "unknown format"),
        ("a,b\n1,2\n", "unknown format"),
        ("timestamp, memory.used [MiB]\n", "no samples"),
        ("\x00\x01\xff\n", "unknown format"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "some.log"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_memory_log(path)
    assert str(path) in str(caught.value)
    assert "expected" in str(caught.value)
