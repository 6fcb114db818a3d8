"""``python -m distexp.doctor [--json]``; exit code 0 where some training is possible, 1 where none is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distexp.doctor.devices import check_collective, check_gpus, check_nccl, check_port
from distexp.doctor.finding import Finding
from distexp.doctor.machine import (
    check_disk,
    check_hub_cache,
    check_limits,
    check_memory,
    check_own_cache,
    check_shm,
)
from distexp.doctor.software import check_conf, check_libraries, check_python, check_torch, probe_torch
from distexp.doctor.tools import check_compiler, check_ninja, check_slurm, check_toolkit
from distexp.doctor.verdict import Verdict, judge, spoken
from distexp.exceptions import run_until_pipe_closes
from distexp.system.hardware import visible_gpus

STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}


def examine() -> tuple[list[Finding], Verdict]:
    """Every check, those that wait for processes side by side, and what they add up to."""
    gpus = len(visible_gpus())
    with ThreadPoolExecutor(4) as pool:
        slurm = pool.submit(check_slurm)
        torch = probe_torch()
        backends = [] if torch.error else ["gloo"]
        if torch.usable and torch.nccl and gpus > 1:
            backends.append("nccl")
        libraries = pool.submit(check_libraries)
        collectives = [pool.submit(check_collective, backend) for backend in backends]
        findings = [
            check_python(), check_conf(), check_torch(torch, gpus), *libraries.result(),
            check_gpus(), check_nccl(torch, gpus), check_port(), *(each.result() for each in collectives),
            check_shm(), check_memory(), check_disk(), check_limits(gpus),
            check_compiler(), check_ninja(), check_toolkit(torch, gpus),
            check_hub_cache(), check_own_cache(), slurm.result(),
        ]  # fmt: skip
    return findings, judge(findings, torch)


def show(console: Console, findings: Sequence[Finding], verdict: Verdict) -> None:
    """The findings as a table, and the verdict below it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in ("check", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.mend:
            text.append(f"\n-> {finding.mend}", style="dim")
        table.add_row(finding.name, Text(finding.state, style=STYLES[finding.state]), text)
    console.print(table)
    console.print()
    for sentence in spoken(verdict):
        console.print(Text(sentence))


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines this machine, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m distexp.doctor",
        description="Says what this machine can be used for, what is amiss and how to mend it.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings for a program")
    options = parser.parse_args(arguments)
    console = Console()
    if options.json:
        findings, verdict = examine()
        content: dict[str, Any] = {**asdict(verdict), "checks": [asdict(finding) for finding in findings]}
        print(json.dumps(content, indent=2))
    else:
        with console.status("examining this machine (about ten seconds)"):
            findings, verdict = examine()
        show(console, findings, verdict)
    return 0 if verdict.fit else 1


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
