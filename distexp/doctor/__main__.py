"""The command ``distexp doctor [--json] [--build]``; exit code 0 if this machine can train, else 1."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distexp.doctor import machine, software
from distexp.doctor.machine import CheckResult
from distexp.doctor.verdict import Verdict, build, check_operators, format_verdict, make_verdict
from distexp.exceptions import run_until_pipe_closes
from distexp.system.cgroups import visible_gpus

STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}


Report = Callable[[str], None]
"""A function that shows what is being checked."""


def run_checks(report: Report = lambda _: None) -> tuple[list[CheckResult], Verdict]:
    """Run every check, those in subprocesses concurrently, and return the results with the verdict."""
    gpus = len(visible_gpus())
    with ThreadPoolExecutor(4) as pool:
        slurm = pool.submit(software.check_slurm)
        report("torch")
        torch = software.probe_torch()
        backends = [] if torch.import_error else ["gloo"]
        if torch.usable and torch.nccl and gpus > 1:
            backends.append("nccl")
        libraries = pool.submit(software.check_libraries)
        collectives = [pool.submit(software.check_collective, backend) for backend in backends]
        report("libraries, which are imported")
        results = [
            software.check_python(),
            software.check_bytecode(),
            software.check_conf(),
            software.check_torch(torch, gpus),
            *libraries.result(),
        ]
        report("GPUs, and communication between processes")
        results += [
            software.check_gpus(),
            software.check_nccl(torch, gpus),
            software.check_port(),
            *(each.result() for each in collectives),
        ]
        report("memory, disks, limits and compilers")
        results += [
            machine.check_shm(), machine.check_memory(), machine.check_disk(), machine.check_limits(gpus),
            software.check_compiler(), software.check_ninja(), software.check_toolkit(torch, gpus),
        ]  # fmt: skip
        report("operators of DeepSpeed, caches and Slurm")
        results.append(check_operators("cuda" if torch.usable else "cpu"))
        results += [machine.check_hub_cache(), machine.check_distexp_cache(), slurm.result()]
    return results, make_verdict(results, torch)


@contextmanager
def shown_progress() -> Iterator[Report]:
    """Yield a function that shows what is being checked, on stderr, so that the table can be redirected."""
    console = Console(stderr=True)
    with console.status("checking") as status:
        yield (
            lambda text: (
                status.update(f"checking {text}")
                if console.is_terminal
                else console.print(f"checking {text}", highlight=False, soft_wrap=True)
            )
        )


def print_report(console: Console, results: Sequence[CheckResult], verdict: Verdict) -> None:
    """Print a table of the results, and the verdict below it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in ("check", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("details and hint", overflow="fold")
    for result in results:
        text = Text(result.found)
        if result.hint:
            text.append(f"\n-> {result.hint}", style="dim")
        table.add_row(result.name, Text(result.state, style=STYLES[result.state]), text)
    console.print(table)
    console.print()
    for line in format_verdict(verdict):
        console.print(Text(line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="distexp doctor",
        description="Check this machine: print what can be trained on it, what is missing, and how to fix it.",
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")
    parser.add_argument("--build", action="store_true", help="compile DeepSpeed's operators now, and check nothing")
    options = parser.parse_args(arguments)
    console = Console()
    if options.build:
        return build("cuda" if visible_gpus() else "cpu", console)
    if options.json:
        results, verdict = run_checks()
        content: dict[str, Any] = {**asdict(verdict), "checks": [asdict(result) for result in results]}
        print(json.dumps(content, indent=2))
    else:
        with shown_progress() as report:
            results, verdict = run_checks(report)
        print_report(console, results, verdict)
    return 0 if verdict.fit else 1


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
