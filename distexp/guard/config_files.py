"""Foreign YAML files: a value that could run code is refused before Hydra acts on it.

Files are foreign if they are outside of the config groups of distexp, as with ``--config-dir``. The guarded keys are
those that name classes, shell lines, environment variables or servers. Their values have to be those that distexp has
without foreign files, except for the cluster file and the tracker file that the user chooses. What the user types is
accepted.
"""

import hashlib
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra._internal.hydra as hydra_app
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from distexp.config import ConfigError
from distexp.config.keys import conf_dir, options_of, refuse_numbers_as_booleans
from distexp.config.overrides import copyable_override, is_override, join_first, override_of, plain_value, shell_quote
from distexp.exceptions import first_line
from distexp.guard import command_line
from distexp.guard.command_line import TRUSTED, key_of, typed_keys, typed_overrides
from distexp.runs.run_dir import COMMAND
from distexp.system.cache_dir import cache_dir

SEARCH_PATH = "hydra.searchpath"

CLUSTER_KEYS = ("environment", "sbatch", "srun", "modules", "setup", "python")
"""Keys of ``cluster`` with shell lines and environment variables."""

TRACKER_URI = "tracker.uri"
"""The server that gets the results and the user's credentials."""

OUTPUT_SUBDIR = "hydra.output_subdir"
"""The folder in which Hydra overwrites its three files; of another user, it could be any."""

ENV_COPY = "hydra.job.env_copy"
"""Names of variables that Hydra copies to ``hydra.job.env_set``."""

GUARDED = (
    # Hydra and ``logging.config`` create objects from these sections.
    *("hydra.launcher", "hydra.sweeper", "hydra.callbacks", "hydra.job_logging", "hydra.hydra_logging"),
    *("hydra.job.env_set", ENV_COPY, OUTPUT_SUBDIR, *(f"cluster.{key}" for key in CLUSTER_KEYS), TRACKER_URI),
)

MAX_VALUES = 100_000
"""Most values of a foreign file."""

LONG_NUMBER = re.compile(r"[+-]?\.?\d[\w.:+-]{300}")
"""A number without quotes that is too long. Python prints no integer of more than 4,300 digits."""

SWEEP = "hydra.sweeper.params"
"""What a preset sweeps: only texts and numbers are accepted. The cells that they give are checked themselves."""


class _CheckedRepository(ConfigRepository):
    """The YAML files of all sources. It names a file that is not in UTF-8."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a file."""
        try:
            self._check_values(config_path)
            return super().load_config(config_path)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{_file_of(config_path)} is not in UTF-8 ({error}): save it in UTF-8") from error
        except RecursionError as error:
            raise ConfigError(f"{_file_of(config_path)} is nested too deeply, or refers to itself") from error
        except ConfigError:
            raise
        except (ValueError, KeyError, AttributeError) as error:  # of the YAML parser, as for !!int abc
            raise ConfigError(
                f"{_file_of(config_path)} has a value that cannot be read ({first_line(error)[:60]}): write another one"
            ) from error

    def _check_values(self, config_path: str) -> None:
        """Raise a ConfigError for a foreign file with a very long number, or whose aliases multiply its values."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        path = Path(source.path if source and source.scheme() == "file" else "") / _file_of(config_path)
        if source is None or not _is_foreign(source) or not path.is_file():
            return
        with suppress(YAMLError):  # Hydra reports it.
            if (count := _count_values(yaml.compose(path.read_text(encoding="utf-8")), {}, path)) > MAX_VALUES:
                raise ConfigError(
                    f"{path} has {count:.2g} values with its aliases, more than {MAX_VALUES:,}: use fewer"
                )


def _count_values(node: Any, known: dict[int, int], path: Path) -> int:
    """Return the number of values below a YAML node, with those of its aliases, each of which becomes a copy.

    Raise a ConfigError for a number with too many digits.
    """
    if id(node) not in known:
        known[id(node)] = 1
        content = getattr(node, "value", [])
        if isinstance(content, str) and node.style is None and LONG_NUMBER.match(content):
            raise ConfigError(f"{path} has a number of {len(content):,} digits, {content[:20]}...: write a shorter one")
        children = [child for entry in content for child in (entry if isinstance(entry, tuple) else [entry])]
        known[id(node)] += sum(_count_values(child, known, path) for child in children if isinstance(child, yaml.Node))
    return known[id(node)]


def _file_of(config_path: str) -> str:
    return f"{config_path.removesuffix('.yaml')}.yaml"


class CheckedConfigLoader(ConfigLoaderImpl):
    """Loader that refuses a foreign file with values that could run code."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _CheckedRepository(config_search_path)
        self._sources: list[Any] = []
        self._accepted: dict[tuple[str, ...], dict[str, Any]] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration and check it. Raise ConfigError as ``check``, and for a file that is not in UTF-8."""
        try:
            composed = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        except KeyError as error:
            raise ConfigError(
                f"hydra.job.env_copy contains {error.args[0]}, but there is no such environment variable: set it, or "
                "leave it out"
            ) from error
        if config_name is not None:  # --hydra-help has only Hydra's own configuration.
            self.check(composed)
        return composed

    def check(self, composed: DictConfig) -> None:
        """Raise ConfigError with each secret, or each value of a foreign file that could run code."""
        command_line.check_for_secrets(composed)
        if not any(map(_is_foreign, self._sources)):
            return
        typed = typed_keys(sys.argv[1:])
        accepted = self._accepted_values(composed, typed)
        copied = {f"hydra.job.env_set.{name}" for name in composed.hydra.job.env_copy}
        errors = []
        for section in GUARDED:
            wrong = {
                key: value
                for key, value in _leaves(section, composed)
                if key not in copied  # ``ENV_COPY`` is checked itself.
                and accepted.get(key) != value
                and not _is_typed(key, typed)
                and not _is_plain_sweep(key, value)
            }
            errors += [_explain(section, wrong, composed)] if wrong else []
        if errors:
            raise ConfigError(errors)

    def _accepted_values(self, composed: DictConfig, typed: set[str]) -> dict[str, Any]:
        """Return the guarded values of distexp, with the files of ``cluster=`` and ``tracker=`` that the user chooses.

        Options of distexp and Hydra themselves are accepted from presets too.
        """
        choices = composed.hydra.runtime.choices.items()
        overrides = tuple(
            f"{group}={option}"
            for group, option in choices
            if (group in ("cluster", "tracker") and group in typed)
            or (group.startswith(("cluster", "tracker", "hydra/")) and self._is_own_option(group, option))
        )
        if overrides not in self._accepted:
            loader = ConfigLoaderImpl(_own_first(self._sources))
            own = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN, from_shell=False)
            self._accepted[overrides] = {key: value for section in GUARDED for key, value in _leaves(section, own)}
        return self._accepted[overrides]

    def _is_own_option(self, group: str, option: str) -> bool:
        source = next((source for source in self._sources if source.is_config(f"{group}/{option}")), None)
        return source is not None and not _is_foreign(source)

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: list[Override], repo: Any) -> None:
        """Check the search path before Hydra imports its packages."""
        loaded = repo.load_config(config_path=config_name) if config_name else None
        folders = OmegaConf.select(loaded.config, SEARCH_PATH) if loaded and OmegaConf.is_dict(loaded.config) else None
        values = [item.value() for item in parsed_overrides if item.get_key_element() == SEARCH_PATH]
        _check_search_path([str(path) for value in (folders, *values) if isinstance(value, Sequence) for path in value])
        super()._process_config_searchpath(config_name, parsed_overrides, repo)
        self._sources = repo.get_sources()


def use_checked_loader() -> None:
    """Make Hydra load configurations with the checks."""
    command_line.refuse_secret_interpolations()
    refuse_numbers_as_booleans()
    vars(hydra_app)["ConfigLoaderImpl"] = CheckedConfigLoader


def check_trust(composed: DictConfig, allowed: Sequence[str]) -> None:
    """Add the packages of the environment to ``trusted_packages``. Raise ConfigError if a file trusts a package."""
    wanted = [str(name) for name in composed[TRUSTED]]
    refused = [name for name in wanted if name not in allowed]
    if refused:
        shown = f"{TRUSTED}=[{','.join(refused)}]"
        raise ConfigError(
            f"{shown} {_origin(TRUSTED, composed)}, but a file cannot trust a package: if you trust its code, add "
            f"{shown} to the command"
        )
    with open_dict(composed):
        composed[TRUSTED] = list(dict.fromkeys([*wanted, *command_line.packages_of_environment()]))


def _is_foreign(source: Any) -> bool:
    if source.provider in ("main", "command-line"):
        return Path(source.path) != conf_dir()
    return str(source.provider).startswith(SEARCH_PATH)


def _own_first(sources: Sequence[Any]) -> ConfigSearchPath:
    """Return the search path of the sources in which distexp's own files come before all others."""
    path = ConfigSearchPathImpl()
    for source in sources:
        if source.provider == "main":
            path.append("main", f"file://{conf_dir()}")
        if source.provider != "main" or _is_foreign(source):
            provider = "foreign main" if source.provider == "main" else source.provider
            path.append(provider, f"{source.scheme()}://{source.path}")
    return path


def _check_search_path(paths: Sequence[str]) -> None:
    if not paths or SEARCH_PATH in typed_keys(sys.argv[1:]):
        return
    allowed = {"distexp", "hydra", *command_line.packages_trusted_by_user(sys.argv[1:])}
    packages = {path: path.removeprefix("pkg://").partition(".")[0] for path in paths if path.startswith("pkg://")}
    errors = [
        f"{SEARCH_PATH} contains {path}, but a file cannot import a package: if you trust its code, add "
        f"trusted_packages=[{package}] to the command"
        for path, package in packages.items()
        if package not in allowed
    ]
    if errors:
        raise ConfigError(errors)


def _leaves(section: str, composed: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a section, with their interpolations. A value of a sweep is one leaf."""
    parent, _, name = section.rpartition(".")
    node = OmegaConf.select(composed, parent)
    content: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else {}
    if name in content:
        yield from _leaves_of(section, content[name])


def _leaves_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if value not in (None, []):
            yield key, value
        return
    for name, child in value.items():
        if key == SWEEP:
            yield f"{key}.{name}", child
        else:
            yield from _leaves_of(f"{key}.{name}", child)


def _is_plain_sweep(key: str, value: Any) -> bool:
    """Return whether a value of a preset's sweep is a text, a number or a list of them."""
    values = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, str | int | float) and "${" not in str(item) for item in values)
    return key.startswith(f"{SWEEP}.") and is_plain


def _is_typed(key: str, typed: set[str]) -> bool:
    """Return whether a key or a section that contains it is on the command line; the name of a group is neither."""
    return any(key == name or key.startswith(f"{name}.") for name in typed if "." in name)


def _explain(section: str, values: Mapping[str, Any], composed: DictConfig) -> str:
    texts = [f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value) for value in values.values()]
    shown = [f"{key}={text}" for key, text in zip(values, texts, strict=True)]
    group = section.partition(".")[0]
    file = f"choose its file with {group}=NAME, or " if group in ("cluster", "tracker") else ""
    name = list(values)[-1].rpartition(".")[2]
    origin = _origin((name, texts[-1].strip("[]").partition(",")[0]), composed)
    if section == OUTPUT_SUBDIR:  # The command line may not set it either.
        return f"{shown[0]} {origin}, and would overwrite files in another folder: remove it from the file"
    found = (override_of(key, value) for key, value in values.items())
    typed = " ".join(shell_quote(text) if "'" in text else f"'{text}'" for text in found)
    return f"{', '.join(shown)} {origin}, and {_danger([section])}: if you trust it, {file}add {typed} to the command"


def _danger(keys: Iterable[str]) -> str:
    is_server = any(key.partition(".")[0] == "tracker" for key in keys)
    return "would get the results and your credentials" if is_server else "could run code"


def _origin(texts: Sequence[str], composed: DictConfig) -> str:
    """Return which of the chosen YAML files contains all texts. It is none of distexp, which are not refused."""
    runtime = composed.hydra.runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    folders = [folder for folder in folders if folder != conf_dir()]
    options = [f"{group}/{option}.yaml" for group, option in runtime.choices.items() if isinstance(option, str)]
    paths = [folder / name for folder in folders for name in (*options, f"{composed.hydra.job.config_name}.yaml")]
    contents = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    found = next((path for path, content in contents.items() if all(text in content for text in texts)), None)
    return f"is set by {found}" if found else "is not from the command line"


SAFE_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose")


def remember_file(path: Path) -> None:
    """Mark the content of a ``command.json`` or of a snapshot's marker as this user's own, in the cache.

    A sweep from somebody else has no mark, even in a copy that belongs to the user. Without a writable cache, a file
    stays foreign.
    """
    with suppress(OSError, ConfigError):
        mark = _mark(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_own_file(path: Path) -> bool:
    """Return whether distexp has written this content for this user."""
    with suppress(ConfigError):
        return path.is_file() and _mark(path).exists()
    return False


def _mark(path: Path) -> Path:
    return cache_dir() / "commands" / hashlib.sha256(path.read_bytes()).hexdigest()


def check_stored_command(path: Path, stored: Sequence[str], typed: Sequence[str]) -> None:
    """Raise a ConfigError with all overrides of a stored command that need trust, unless the user repeats them."""
    repeated = {key_of(override) for override in typed_overrides(typed)}
    errors = [
        f"{path} contains {_shown(argument)}, which {_danger(_unsafe_keys(argument))}: if you trust it, add "
        f"{_shown(argument)} to the command"
        for argument in stored
        if is_override(argument) and _unsafe_keys(argument) - repeated
    ]
    if errors:
        raise ConfigError(errors)


def _shown(argument: str) -> str:
    """Return an argument as a shell needs it, without the quotes that distexp has added."""
    return shell_quote(copyable_override(argument, may_sweep=True))


def _unsafe_keys(argument: str) -> set[str]:
    """Return the keys of an override, and of those inside ``sweep.cells``, that need trust."""
    return {key_of(override) for override in typed_overrides([argument]) if _is_unsafe(argument, override)}


def _is_unsafe(argument: str, override: Override) -> bool:
    key = key_of(override)
    if key == TRUSTED:
        trusted = command_line.packages_trusted_by_user([argument])
        return not set(trusted) <= set(command_line.packages_of_environment())
    if key in ("cluster", "tracker"):
        return str(plain_value(override.value())) not in options_of(key)
    if key.startswith(("hydra.", "hydra/")):
        return key not in SAFE_HYDRA_KEYS
    return key == TRACKER_URI or any(f"{key}.".startswith(f"cluster.{name}.") for name in CLUSTER_KEYS)


def check_working_directory(path: Path, directory: str) -> None:
    """Raise a ConfigError if a foreign command was started in another folder: Python imports packages from there."""
    if os.path.isdir(directory) and not os.path.samefile(directory, os.curdir):
        raise ConfigError(
            f"{path} was started in {directory}, and Python would import packages from there: if you trust its "
            f"code, run cd {shlex.quote(directory)} and resume again"
        )


def check_files(sweep_dir: Path) -> None:
    """Raise a ConfigError if a foreign sweep has links out of it, pipes or devices: runs could write outside of it."""
    if is_own_file(sweep_dir / COMMAND) or not sweep_dir.is_dir():
        return
    found = list(_unsafe_files(sweep_dir))
    if found:
        shown = join_first(map(str, found), limit=3)
        raise ConfigError(
            f"{sweep_dir} contains {shown}, which are not files of the sweep: remove them, or start the sweep again "
            "in another directory"
        )


def _unsafe_files(sweep_dir: Path) -> Iterator[Path]:
    """Yield the links that lead out of a folder, and what is neither a file nor a folder."""
    root = sweep_dir.resolve()
    for where, folders, names in os.walk(sweep_dir):
        for path in (Path(where, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    yield path
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield path
