"""Resources of a run: device, workers, GPUs and CPU threads. The launcher of the configuration decides them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import ClassVar, TypeVar

from distexp.config import ClusterConfig, Config, ConfigError
from distexp.config.custom_code import PAGE, check_not_abstract, shorten_errors
from distexp.config.field_info import info_of
from distexp.config.targets import check_target, locate

MIN_BUSBW_GBPS = 5.0
"""Default limit of the preflight on GPUs; an interconnect that is slower than this is broken."""


class LauncherTraits(ABC):
    """What a launcher states about its machines. ``distexp.launch.launcher.Launcher`` also starts runs on them."""

    runs_here: ClassVar[bool] = False
    """Whether this machine runs all nodes, so that its GPUs, CPU cores and memory are those of a run."""

    queues: ClassVar[bool] = False
    """Whether runs wait in a queue. Then several may run at the same time, and each one imports the libraries."""

    reads: ClassVar[Collection[str]] = ()
    """Names of the keys of ``cluster`` that it uses although they are for Slurm, such as ``dry_run``."""

    @abstractmethod
    def decide_resources(self, config: Config) -> list[str]:
        """Set device, workers per node and threads that the user left open. Return the errors."""

    def key_errors(self, config: Config) -> Iterator[str]:
        """Yield an error for each key of ``cluster`` that this launcher ignores, or does not support."""
        cluster, defaults = config.cluster, ClusterConfig()
        for spec in fields(ClusterConfig):
            value = getattr(cluster, spec.name)
            is_ignored = info_of(spec).slurm_only and spec.name not in self.reads
            if is_ignored and value != getattr(defaults, spec.name):
                yield f"cluster.{spec.name}={value} is for Slurm only: leave it out, or choose cluster=slurm"


Traits = TypeVar("Traits", bound=LauncherTraits)


def launcher_traits(config: Config) -> LauncherTraits:
    """Return what the launcher of a configuration states about its machines.

    Raises:
        ConfigError: ``cluster._target_`` is not a launcher, or is in a package that is not trusted.
    """
    return find_launcher(config.cluster._target_, config.trusted_packages, LauncherTraits)  # type: ignore[type-abstract]


def find_launcher(target: str, trusted: Sequence[str], kind: type[Traits]) -> Traits:
    """Return the launcher with a dotted name.

    Args:
        target: Dotted name of the class.
        trusted: Packages from which it may be imported.
        kind: Its base class.

    Raises:
        ConfigError: It is not a launcher, or is in a package that is not trusted.
    """
    if error := check_target(target, trusted):
        raise ConfigError(error)
    launcher = _make(target)
    if not isinstance(launcher, kind):
        raise ConfigError(_wrong_class(target))
    return launcher


@cache
def _make(target: str) -> LauncherTraits:
    found = locate(target)
    if not (isinstance(found, type) and issubclass(found, LauncherTraits)):
        raise ConfigError(_wrong_class(target))
    check_not_abstract(found, LauncherTraits, f"cluster._target_={target}")
    with shorten_errors(target, "the constructor"):
        return found()


def _wrong_class(target: str) -> str:
    return (
        f"cluster._target_={target} is not a launcher: derive the class from distexp.launch.launcher.Launcher, "
        f"as in {PAGE}"
    )


def decide_resources(config: Config) -> list[str]:
    """Decide device, workers and threads as the launcher does, and return the errors."""
    errors = launcher_traits(config).decide_resources(config)
    if config.cluster.device == "cuda" and config.preflight.min_busbw_gbps is None:
        config.preflight.min_busbw_gbps = MIN_BUSBW_GBPS
    return errors
