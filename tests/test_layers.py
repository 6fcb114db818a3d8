"""Tests of the import rules and of the size of files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distexp.config.keys import options_of
from tests.helpers.runs import REPOSITORY

LAUNCHER = (
    "distexp.cli.main",
    "distexp.cli.help_topics",
    "distexp.launch.agent",
    "distexp.cli.dispatch",
    "distexp.launch.local.runner",
    "distexp.launch.local.sweep",
)
LIGHT = (
    *LAUNCHER,
    "distexp.cancel",
    "distexp.forecast.command",
    "distexp.launch.slurm.node_task",
    "distexp.report",
    "distexp.resume",
    "distexp.status",
    "distexp.memory",
    "distexp.resolve",
    "hydra_plugins.distexp_plugin.launcher",
)
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "pyarrow", "altair", "vl_convert")


@pytest.mark.parametrize("module", LIGHT)
def test_the_launcher_layer_never_imports_torch(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checks_of_all_trainers_and_strategies_do_not_import_torch() -> None:
    program = (
        "import sys; from tests.helpers.runs import resolve_cell\n"
        "for e in ('native', 'hf_trainer'):\n"
        "    for s in ('single', 'ddp', 'fsdp', 'deepspeed'): resolve_cell(f'engine={e}', f'strategy={s}')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "False"


ORDER = (
    "commands",
    "cli",
    "doctor",
    "verify",
    "choose",
    "launch",
    "console",
    "report",
    "tracking",
    "forecast",
    "explain",
    "plan",
    "compose",
    "worker",
    "resolve",
    "engines",
    "checkpoints",
    "training",
    "preflight",
    "measure",
    "strategies",
    "models",
    "data",
    "distributed",
    "guard",
    "runs",
    "config",
    "hardware",
    "tables",
    "statistics",
    "system",
    "exceptions",
)
"""The packages from top to bottom. A package imports only what is below it."""

PROCESSES = {"distexp.worker.__main__", "distexp.tracking.__main__"}
"""Programs that are no commands, so they belong to their package."""

REPORT_READS = {"report", "runs", "config", "statistics", "tables", "system", "exceptions"}
"""Packages that the report may use: it reads only what is on disk."""


def package_of(module: str) -> str:
    """Return the package of a module, or ``commands`` for the entry of a command."""
    parts = module.split(".")
    if module not in PROCESSES and (parts[-1] == "__main__" or (parts[1:2] and parts[1] in COMMANDS)):
        return "commands"
    return parts[1] if len(parts) > 1 else "exceptions"


def package_imports() -> Iterator[tuple[str, str]]:
    """Yield each import between two modules of the package, also those in functions and for annotations."""
    for path in (REPOSITORY / "distexp").rglob("*.py"):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        yield from ((module, name) for name in imports(path) if f"{name}.".startswith("distexp."))


def test_a_package_imports_only_what_is_below_it() -> None:
    upward = [
        f"{module} imports {name}"
        for module, name in package_imports()
        if ORDER.index(package_of(name)) < ORDER.index(package_of(module))
    ]
    assert upward == []


def test_the_report_reads_only_what_is_on_disk() -> None:
    found = {(module, package_of(name)) for module, name in package_imports() if package_of(module) == "report"}
    assert {(module, package) for module, package in found if package not in REPORT_READS} == set()


def test_the_worker_and_the_analysis_of_a_step_do_not_need_the_report() -> None:
    """The commands of ``distexp explain`` print with the tables of the report. What the worker calls does not."""
    packages = ("worker", "training", "strategies", "measure")  # some are loaded by name
    files = [path for name in packages for path in (REPOSITORY / "distexp" / name).rglob("*.py")]
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
    found = reachable("distexp.explain.explanation", "distexp.explain.__main__", *names)
    assert {"distexp.worker.rank", "distexp.training.loop", "distexp.explain.advice"} <= found
    assert {name for name in found if name.startswith("distexp.report")} == set()


def test_the_loop_is_on_a_page_and_names_no_strategy() -> None:
    text = (REPOSITORY / "distexp" / "training" / "loop.py").read_text()
    assert len(text.splitlines()) <= 80
    for strategy in options_of("strategy"):
        assert not re.search(rf"\b{strategy}\b", text, re.IGNORECASE), strategy


COMMANDS = {"archive", "cancel", "experiments", "help", "ls", "memory", "reference", "resume", "rm", "serve", "status"}
NOT_COMMANDS = {"__init__", "__main__", "exceptions"}


def test_a_file_directly_in_the_package_is_a_command() -> None:
    found = {path.stem for path in (REPOSITORY / "distexp").glob("*.py")}
    assert found == COMMANDS | NOT_COMMANDS
    for name in COMMANDS:
        assert "main" in functions(REPOSITORY / "distexp" / f"{name}.py"), name


def test_the_tests_mirror_the_package() -> None:
    packages = {path.name for path in (REPOSITORY / "distexp").iterdir() if (path / "__init__.py").exists()}
    tested = {path.name for path in (REPOSITORY / "tests").iterdir() if (path / "__init__.py").exists()}
    assert tested - packages <= {"benchmarks", "experiments", "helpers", "perf"}


def reachable(*modules: str) -> set[str]:
    """Return all modules of the package that some modules import, directly or through others."""
    found: set[str] = set()
    waiting = set(modules)
    while waiting:
        name = waiting.pop()
        found.add(name)
        source = source_of(name)
        if source is not None:  # otherwise it is a name in a module
            waiting |= {imported for imported in imports(source, names=True) if imported.startswith("distexp")} - found
    return {name for name in found if source_of(name) is not None}


def source_of(module: str) -> Path | None:
    """Return the file of a module of the package; None if there is no such module."""
    path = REPOSITORY.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return source if source.is_file() else None


def imports(path: Path, *, names: bool = False) -> set[str]:
    """Return the modules that a file imports, on request also ``module.name`` of each imported name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if names}
    return found


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
