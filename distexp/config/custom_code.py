"""Checks of custom classes, one-sentence errors of the code in them, and what identifies its version."""

import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from distexp.config import Config, ConfigError
from distexp.exceptions import first_line, leaf_errors, text_of
from distexp.system.files import PACKAGE

PAGE = "https://distexp.github.io/distexp/how-to/extend/"


def check_members(found: object, protocol: type, source: str) -> None:
    """Raise ConfigError if a returned object lacks methods or properties of a protocol, or is None or a class."""
    if found is None or isinstance(found, type):
        raise ConfigError(_unexpected(found, protocol, source))
    missing = [name for name in _members(protocol) if not _has(found, name)]
    if missing:
        raise ConfigError(f"{source} returned {describe_type(found)}, which lacks {_lacking(missing, protocol)}")


def check_not_abstract(kind: object, base: type, source: str) -> None:
    """Raise ConfigError if a class lacks abstract methods of its base class."""
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{source} lacks {_lacking(missing, base)}")


def check_returned(found: object, kind: type, source: str) -> None:
    """Check what a function returned. Raise ConfigError if it is of another class."""
    if not isinstance(found, kind):
        raise ConfigError(_unexpected(found, kind, source))


CONSTRUCTOR = "the constructor"


@contextmanager
def shorten_errors(target: str, call: str) -> Iterator[None]:
    """Raise the errors of custom code as ConfigError, which names the method and the line. Keep those of distexp."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        name = type(error).__name__
        reason = f"{name}: {first_line(error)}" if text_of(error).strip() else name
        if target.startswith("distexp."):
            if call == CONSTRUCTOR and isinstance(error, TypeError):
                raise ConfigError(
                    f"{target} cannot be used here ({reason}): name another class, as in {PAGE}"
                ) from error
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise ConfigError(
            f"{target}: {call} raised {reason} ({place}): correct the code. HYDRA_FULL_ERROR=1 prints the traceback"
        ) from error


def _unexpected(found: object, kind: type, source: str) -> str:
    """Return the message for an object of the wrong class."""
    is_builtin = kind.__module__ in ("builtins", "collections.abc")
    prefix = "" if is_builtin else f"{kind.__module__.removesuffix('.modules.module')}."  # as users import it
    expected = _with_article(f"{prefix}{kind.__qualname__}")
    return f"{source} returned {describe_type(found)} instead of {expected}: return one, as in {PAGE}"


def describe_type(found: object) -> str:
    """Return what an object is, in a few words."""
    if found is None:
        return "None"
    return f"the class {found.__qualname__}" if isinstance(found, type) else _with_article(type(found).__qualname__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _members(protocol: type) -> list[str]:
    """Return the public names that a protocol and the protocols below it define."""
    classes = [kind for kind in protocol.__mro__ if kind.__module__.startswith("distexp.")]
    return sorted({name for kind in classes for name in vars(kind) if not name.startswith("_")})


def _has(found: object, name: str) -> bool:
    """Return whether an object has a member, without calling a property that may need a running process group."""
    try:
        inspect.getattr_static(found, name)
    except AttributeError:
        return hasattr(found, name)
    return True


def _lacking(missing: list[str], protocol: type) -> str:
    """Return the end of the message: the missing names, their owner, and what to do."""
    names = ", ".join(missing)
    return (
        f"{names} of {protocol.__module__}.{protocol.__qualname__}: add {'it' if len(missing) == 1 else 'them'}, as in "
        f"{PAGE}"
    )


def code_place(error: BaseException) -> str:
    """Return the innermost line outside of Python, torch, triton and distexp: ``transformers/modeling.py:12``."""
    return _innermost(_places(error))


def custom_code_place(error: BaseException, trusted: Collection[str]) -> str:
    """Return the innermost line of custom code, also if ``trusted`` packages are installed; empty if there is none."""
    return _innermost(_custom_places(error, trusted))


def is_raised_by_custom_code(error: BaseException, trusted: Collection[str]) -> bool:
    """Return whether the innermost line of a traceback is custom code, and not code of a library that it calls."""
    calls = [(Path(name), line) for name, line in _calls(error)]
    return bool(calls) and calls[-1] in _custom_places(error, trusted)


def _custom_places(error: BaseException, trusted: Collection[str]) -> Iterator[tuple[Path, int]]:
    return ((path, line) for path, line in _places(error) if _installed_package(path) in ("", *trusted))


def _innermost(places: Iterator[tuple[Path, int]]) -> str:
    return next((f"{'/'.join(path.parts[-2:])}:{line}" for path, line in reversed(list(places))), "")


LOADER_ERROR = re.compile(
    r"Caught (\w+) in DataLoader worker process.*Traceback \(most recent call last\):(.*)", re.DOTALL
)
"""Message of an error that torch raises again for a data loader process: its class, and the last traceback in it."""


LOST_LOADER = "DataLoader worker (pid"
"""Start of the message of an error that a data loader process was killed. torch may raise it at any line."""


def error_type(error: BaseException) -> str:
    """Return the class of an error; of one in a data loader process its own, for which torch may raise RuntimeError."""
    found = LOADER_ERROR.match(text_of(error))
    return found[1] if found else type(error).__name__


def _calls(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield file and line of the calls in the traceback of an error, or in that of the data loader process it is of."""
    message = text_of(error)
    if message.startswith(LOST_LOADER):
        return
    if found := LOADER_ERROR.match(message):
        for name, line in re.findall(r'^[ |]*  File "(.+)", line (\d+)', found[2], re.MULTILINE):
            yield name, int(line)
    else:
        first = leaf_errors(error)[0]  # The first error of a group is its cause.
        for raised in (error,) if first is error else (error, first):
            yield from ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(raised.__traceback__))


def _places(error: BaseException) -> Iterator[tuple[Path, int]]:
    """Yield the lines of the traceback that are in files outside of Python, torch, triton and distexp."""
    for name, line in _calls(error):
        if not name or name.startswith("<"):
            continue
        file, python = Path(name).resolve(), Path(sysconfig.get_path("stdlib")).resolve()
        in_python = file.is_relative_to(python) and not _installed_package(file.relative_to(python))
        if not in_python and not any(file.is_relative_to(folder) for folder in _library_folders()):
            yield Path(name), line


def hidden_library(error: BaseException) -> str:
    """Return that a module of the user, which lacks what an import needs, hides one of a library; else nothing."""
    found = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    name = str(getattr(error, "name", None) or "") if isinstance(error, ImportError) else getattr(found, "__name__", "")
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or (found is not None and not isinstance(found, ModuleType)):
        return ""
    own = Path(file).resolve()
    folder = own.parent.parent if own.stem == "__init__" else own.parent
    hidden = PathFinder.find_spec(top, [entry for entry in sys.path if Path(entry).resolve() != folder])
    other = Path(hidden.origin).resolve() if hidden is not None and hidden.origin else own
    is_hidden = _is_library(other) and not _is_library(own)
    return f"{file} hides the module {top} of {other}: rename yours" if is_hidden else ""


def _is_library(file: Path) -> bool:
    """Return whether a module belongs to Python or is installed."""
    return bool(_installed_package(file)) or file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _installed_package(path: Path) -> str:
    """Return the installed package or module of a file; empty if the file is not installed."""
    folders = (name for name in ("site-packages", "dist-packages") if name in path.parts)
    return next((Path(path.parts[path.parts.index(name) + 1]).stem for name in folders), "")


@lru_cache(maxsize=1)
def _library_folders() -> tuple[Path, ...]:
    """Return the folders of distexp, torch and triton, whose lines are never named."""
    specs = [spec for name in ("torch", "triton") if (spec := find_spec(name)) is not None]
    folders = (Path(folder).resolve() for spec in specs for folder in spec.submodule_search_locations or ())
    return (PACKAGE, *folders)


def check_target(target: str, trusted: Sequence[str]) -> str | None:
    """Return an error if a target is neither in distexp nor in a package that the user trusts."""
    package = target.split(".", 1)[0]
    if package == "distexp" or package in trusted:
        return None
    return f"_target_={target} is outside distexp: add trusted_packages=[{package}] to allow code of that package"


def locate(target: str) -> Any:
    """Import a dotted name and return the function or class. Raise ConfigError if that is not possible."""
    module, _, name = target.rpartition(".")
    try:
        with shorten_errors(target, "its import"):
            found = getattr(importlib.import_module(module), name)
    except (ConfigError, ImportError, AttributeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, (ImportError, AttributeError, ValueError)):
            raise
        raise ConfigError(f"_target_={target} cannot be imported ({cause}): correct the name") from cause
    if not callable(found):
        raise ConfigError(
            f"_target_={target} is {describe_type(found)}, which cannot be called: name a function or class, as in "
            f"{PAGE}"
        )
    return found


def custom_packages(config: Config) -> list[str]:
    """Return the packages outside of distexp whose code a training depends on."""
    targets = (config.model._target_, config.dataset._target_, config.strategy._target_)
    return sorted({target.partition(".")[0] for target in targets} - {"distexp"})


@lru_cache(maxsize=16)
def package_hash(name: str) -> str:
    """Return a hash of the names, sizes and times of a package's modules, which are not imported."""
    digest = hashlib.sha256(name.encode())
    with suppress(ImportError, ValueError, OSError):  # The process that traces reports what cannot be imported.
        spec = find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        modules = [Path(spec.origin)] if spec and spec.origin else []
        for path in sorted({*modules, *(path for folder in folders for path in Path(folder).rglob("*.py"))}):
            found = path.stat()
            digest.update(f"{path}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "peft"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
