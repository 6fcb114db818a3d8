"""What the imports of a run depend on: runs share a start-up only if their own imports would give the same result."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

from distexp.config.paths import PACKAGE
from distexp.launch.node import worker_environment
from distexp.runs.spec import RunSpec
from distexp.worker.preload import COMPILER, declared_preloads, own_modules, own_modules_of


@dataclass(frozen=True)
class ImportConditions:
    """Conditions under which a node's workers import their libraries. Equal ones give equal processes.

    Attributes:
        environment: Environment variables.
        folder: Working directory, from which Python imports packages.
        libraries: Modules that decide which libraries are imported.
        newest_source_ns: Time of the latest change to a source file of distexp.
    """

    environment: dict[str, str]
    folder: str
    libraries: tuple[str, ...]
    newest_source_ns: int

    @classmethod
    def of(cls, spec: RunSpec, node: int) -> ImportConditions:
        """Return the conditions of a node's workers."""
        return cls(worker_environment(spec, node), os.getcwd(), _libraries(spec), _newest_source_ns())

    def describe_change(self, before: ImportConditions) -> str:
        """Return what differs from earlier conditions. Values are not named, because they may be secret."""
        names = self.environment.keys() | before.environment.keys()
        changes = sorted(name for name in names if self.environment.get(name) != before.environment.get(name))
        if self.libraries != before.libraries:
            changes.append("the libraries")
        if self.folder != before.folder:
            changes.append("the working directory")
        if self.newest_source_ns != before.newest_source_ns:
            changes.append("the source files of distexp")
        return ", ".join(changes)

    def is_outdated(self, new: ImportConditions) -> bool:
        """Return whether no run after one with the new conditions can have these."""
        return (self.folder, self.newest_source_ns) != (new.folder, new.newest_source_ns)


def _libraries(spec: RunSpec) -> tuple[str, ...]:
    """Return the modules that decide which libraries are imported.

    Strategies that need only torch share a start-up. A group imports the rest of what its strategy needs.
    """
    config = spec.config
    strategies = own_modules_of([config.strategy._target_])
    modules = [module for module in own_modules(config) if module not in (*strategies, COMPILER)]
    for strategy in strategies:
        found = importlib.import_module(strategy)  # The launcher may import it, because it imports no torch.
        preloaded = declared_preloads(found, config.cluster.device)
        modules += [module for module in preloaded if not module.startswith("torch.")]
    return tuple(modules)


def _newest_source_ns() -> int:
    # lstat, because editors mark open files by links that lead nowhere.
    return max(path.lstat().st_mtime_ns for path in PACKAGE.rglob("*.py"))
