"""The command ``distexp doctor [--json] [--build]``; exit code 0 if this machine can train, else 1."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distexp.cli.main import CommandParser
from distexp.config.keys import options_of
from distexp.console.run_summary import COMPILE_MIN, build_message
from distexp.doctor import machine, software
from distexp.doctor.machine import CheckResult, missing, ok, warning
from distexp.doctor.software import TorchInfo
from distexp.exceptions import run_until_pipe_closes
from distexp.launch.node_setup import OperatorError, build_operators, current_environment, missing_operators
from distexp.strategies.base import COMMUNICATION, shipped_strategies
from distexp.strategies.zero.ds_operators import DEFAULT_OPERATORS
from distexp.system.cache_dir import cache_dir
from distexp.system.cgroups import visible_gpus
from distexp.system.files import Entry

STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}


@dataclass
class Verdict:
    """Options that work on this machine, and the reasons why others do not."""

    fit: bool  # whether any training is possible
    device: str
    strategies: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    clusters: list[str] = field(default_factory=list)
    not_possible: list[str] = field(default_factory=list)


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
    parser = CommandParser(
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


REQUIRED_CHECKS = ("configuration", "torch", "distexp cache", "current folder")
"""Checks that must not be missing, because every training needs them."""

GPU_ONLY = {"precision": ("fp16", "float8"), "offload": ("pinned",)}
"""Options that ``distexp.resolve.resources`` refuses on the CPU, by config group."""

NAME = "DeepSpeed operators"


def make_verdict(results: Sequence[CheckResult], torch: TorchInfo) -> Verdict:
    """Return what can be trained on this machine, given the results of all checks."""
    states = {result.name: result.state for result in results}
    broken = [name for name in REQUIRED_CHECKS if states[name] == "missing"]
    if broken:
        return Verdict(False, "none", not_possible=[f"any training: fix {', '.join(broken)} first"])
    gpus = len(torch.capabilities) if torch.usable else 0
    needs = ("loopback port", *([] if gpus == 1 else ["nccl all-reduce" if gpus > 1 else "gloo all-reduce"]))
    states[COMMUNICATION] = "ok" if all(states.get(name) == "ok" for name in needs) else "missing"
    unmet = {
        name: next((requirement for requirement in requirements if states.get(requirement) != "ok"), None)
        for name, requirements in strategy_requirements().items()
    }
    return Verdict(
        fit=True,
        device="cuda" if torch.usable else "cpu",
        strategies=[name for name, lacking in unmet.items() if lacking is None],
        precisions=[name for name in _options("precision", torch) if name != "float8" or not _lacks_for_float8(torch)],
        offload=_options("offload", torch),
        clusters=["local", *(["slurm"] if states["Slurm"] == "ok" else [])],
        not_possible=[*_strategy_problems(unmet, needs), *_other_problems(states, torch)],
    )


def strategy_requirements() -> dict[str, tuple[str, ...]]:
    """Return what each strategy requires, those with the fewest requirements first."""
    requirements = {name: strategy.requires for name, strategy in shipped_strategies().items()}
    return dict(sorted(requirements.items(), key=lambda item: len(item[1])))


def _options(group: str, torch: TorchInfo) -> list[str]:
    return [name for name in options_of(group) if torch.usable or name not in GPU_ONLY[group]]


def _lacks_for_float8(torch: TorchInfo) -> str:
    """Return what ``precision=float8`` lacks; empty if nothing."""
    if not all(capability >= (8, 9) for capability in torch.capabilities):
        return "a GPU of compute capability 8.9 or more is required"
    return "" if find_spec("torchao") else "torchao is required: pip install 'distexp[lowbits]'"


def _strategy_problems(unmet: Mapping[str, str | None], communication: Sequence[str]) -> Iterator[str]:
    for requirement in dict.fromkeys(lacking for lacking in unmet.values() if lacking is not None):
        names = ", ".join(name for name, lacking in unmet.items() if lacking == requirement)
        if requirement == COMMUNICATION:
            yield f"strategy={names}: workers cannot communicate (see {', '.join(communication)} above)"
        else:
            yield f"strategy={names}: {requirement} does not work (see {requirement} above)"


def _other_problems(states: Mapping[str, str], torch: TorchInfo) -> Iterator[str]:
    if not torch.usable:
        lacking = (f"{group}={name}" for group, names in GPU_ONLY.items() for name in names)
        yield f"{', '.join(lacking)}: a GPU is required"
        if states["GPUs"] != "missing":
            yield "training on the GPUs: fix torch (see above); until then use cluster.device=cpu"
    elif any(capability < (8, 0) for capability in torch.capabilities):
        yield "precision=bf16 at full speed: this GPU emulates it, use precision=fp16"
    if torch.usable and (reason := _lacks_for_float8(torch)):
        yield f"precision=float8: {reason}"
    if torch.usable and "missing" in (states["C++ compiler"], states["ninja"]):
        yield from filter(None, (strategy.operator_problem for strategy in shipped_strategies().values()))
    if states["Slurm"] != "ok":
        yield "cluster=slurm: see Slurm above"


def format_verdict(verdict: Verdict) -> Iterator[str]:
    """Yield the lines that report a verdict."""
    if verdict.fit:
        device = "GPUs" if verdict.device == "cuda" else "the CPU"
        yield f"This machine can train on {device} with:"
        yield f"  strategy={', '.join(verdict.strategies)}"
        yield f"  precision={', '.join(verdict.precisions)}"
        yield f"  offload={', '.join(verdict.offload)}"
        yield f"  cluster={', '.join(verdict.clusters)}"
    else:
        yield "This machine cannot train."
    for reason in verdict.not_possible:
        yield f"Not possible: {reason}."


def check_operators(device: str) -> CheckResult:
    """Check whether the operators that usual runs need are compiled."""
    try:
        version("deepspeed")
    except PackageNotFoundError:
        return missing(NAME, "DeepSpeed is not installed", "pip install deepspeed")
    absent = missing_operators(DEFAULT_OPERATORS[device], current_environment(device))
    if not absent:
        return ok(NAME, f"compiled: {', '.join(DEFAULT_OPERATORS[device])}")
    hint = (
        f"nothing to do: the first run that needs them compiles them, about {COMPILE_MIN} minutes each. "
        "To do it now: distexp doctor --build"
    )
    return warning(NAME, f"not compiled yet: {', '.join(absent)}", hint)


def build(device: str, console: Console) -> int:
    """Compile the operators that usual runs need, with progress; return the exit code."""
    environment, log = current_environment(device), cache_dir() / "operators.log"
    absent = missing_operators(DEFAULT_OPERATORS[device], environment)
    if absent:
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with console.status("checking DeepSpeed's operators") as status:

                def report(entry: Entry) -> None:
                    message = build_message(entry)
                    if message is not None:
                        console.print(message, highlight=False, markup=False, soft_wrap=True)
                    if "elapsed_s" in entry:
                        status.update(f"compiling, {entry['elapsed_s']} s")

                build_operators(absent, environment, log, report)
        except OperatorError as error:
            console.print(f"distexp: {error}", highlight=False, markup=False, soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("stopped: distexp doctor --build starts again")
            return 130
    console.print(f"compiled: {', '.join(DEFAULT_OPERATORS[device])}", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
