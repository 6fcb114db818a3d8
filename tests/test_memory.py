"""Tests of the command ``distexp memory``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distexp.memory import main
from distexp.runs.memory_trace import COLUMNS

GPU_LINE = "[gpu_memory_log - GPU 0] Peak = 21658 MiB, Avg = 18683.53 MiB, Mode = 21658 MiB"
WORKSHOP_OUTPUT = f"""\
GPU Memory Usage
{GPU_LINE}

CPU Memory Usage
   Peak =    3892 MB
   Average = 2276.06 MB
   Mode =    2145, 2177 MB
"""


@pytest.fixture
def gpu_log(tmp_path: Path) -> Path:
    """Write a log of the workshop: 19 samples with the sum 354,987."""
    path = tmp_path / "gpu_memory_log.csv"
    used = [21658] * 16 + [3, 4218, 4238]
    rows = [f"2025/11/20 10:11:{i:02d}.000, 0, Tesla V100, {mib}, 32768\n" for i, mib in enumerate(used)]
    path.write_text("timestamp, index, name, memory.used [MiB], memory.total [MiB]\n" + "".join(rows))
    return path


@pytest.fixture
def cpu_log(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_memory_log.txt"
    used = [2145.2, 2144.9, 2177.0, 2177.3, 3892.0, 1119.96]
    rows = [f"{5.0 * i:12.3f} {100.0:12.3f} {mib:12.3f} {9000.0:12.3f}\n" for i, mib in enumerate(used)]
    path.write_text("# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)\n" + "".join(rows))
    return path


def test_output_is_that_of_the_workshop(gpu_log: Path, cpu_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(gpu_log), str(cpu_log)]) == 0
    captured = capsys.readouterr()
    assert captured.out == WORKSHOP_OUTPUT
    assert captured.err == ""


def test_only_one_kind(gpu_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "node0.csv"
    rest = "," * (len(COLUMNS) - 11)
    trace.write_text(
        f"{','.join(COLUMNS)}\n1.0,train,cpu,0,100.5,1000,,,,,pss{rest}\n1.0,train,gpu,1,2000.0,80000,50,300,,,nvml{rest}\n"
    )
    assert main([str(trace), "--gpu-only"]) == 0
    assert capsys.readouterr().out == (
        "GPU Memory Usage\n[node0 - GPU 1] Peak = 2000 MiB, Avg = 2000.00 MiB, Mode = 2000 MiB\n"
    )
    assert main([str(trace), "--cpu-only"]) == 0
    assert capsys.readouterr().out.splitlines()[1::2] == ["   Peak =    101 MB", "   Mode =    101 MB"]
    assert main([str(gpu_log), "--cpu-only"]) == 2
    assert "has no samples of cpu memory" in capsys.readouterr().err


def test_several_cpu_logs_have_headings(cpu_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text(cpu_log.read_text())
    assert main([str(cpu_log), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], lines[5]) == ("[cpu_memory_log]", "[other]")


def test_logs_of_several_runs_with_one_name_have_their_paths(
    cpu_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "1" / cpu_log.name
    other.parent.mkdir()
    other.write_text(cpu_log.read_text())
    assert main([str(cpu_log), str(other), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], lines[5]) == (f"[{cpu_log}]", f"[{other}]")


def test_logs_whose_names_differ_in_the_suffix_are_all_printed(
    gpu_log: Path, cpu_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, cpu = gpu_log.rename(gpu_log.with_name("ddp.csv")), cpu_log.rename(cpu_log.with_name("ddp.txt"))
    assert main([str(gpu), str(cpu)]) == 0
    assert capsys.readouterr().out == WORKSHOP_OUTPUT.replace("gpu_memory_log", str(gpu))


def test_unreadable_files_are_reported_and_others_printed(
    gpu_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = tmp_path / "notes.txt"
    unknown.write_text("hello\n")
    assert main([str(tmp_path / "missing.csv"), str(unknown), str(tmp_path), str(gpu_log)]) == 1
    captured = capsys.readouterr()
    assert GPU_LINE in captured.out
    missing, format_error, folder = captured.err.splitlines()
    assert "missing.csv cannot be read (No such file or directory): expected a memory/node<k>.csv" in missing
    assert f"{unknown} has an unknown format" in format_error
    assert f"{tmp_path} cannot be read (it is not a regular file)" in folder


def test_incomplete_last_line_is_skipped(gpu_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gpu_log.open("a") as file:
        file.write("2025/11/20 10:12:00.000, 0, Tesla V100, 99999")
    assert main([str(gpu_log)]) == 0
    captured = capsys.readouterr()
    assert GPU_LINE in captured.out
    assert "the last line has no end" in captured.err


def test_command_does_not_import_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distexp.memory", str(tmp_path / "missing.csv")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    loaded = "import sys, distexp.memory, distexp.measure.memory.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
