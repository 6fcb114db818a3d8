"""DeepSpeed's C++ operators: whether they are compiled, and ``distexp doctor --build``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from distexp.console.operator_build import COMPILE_MIN, build_message
from distexp.data.cache import cache_dir
from distexp.doctor.check_result import CheckResult, missing, ok, warning
from distexp.launch.operator_build import OperatorError, build_operators
from distexp.launch.operator_marks import current_environment, missing_operators
from distexp.runs.jsonl import Entry
from distexp.strategies.ds_operators import DEFAULT_OPERATORS

NAME = "DeepSpeed operators"


def check_operators(device: str) -> CheckResult:
    """Check whether the operators that usual runs need are compiled.

    Args:
        device: ``cpu`` or ``cuda``.
    """
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
