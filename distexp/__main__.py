"""``python -m distexp``, the same as ``distexp``."""

# Python has imported these before. A file of the current folder may hide any other module.
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

REQUIRED = ("omegaconf", "hydra", "torch")
"""Packages without which no command works."""


def missing_package() -> str | None:
    """Return what to do if this Python does not have the packages of distexp. It is often that of the system."""
    missing = next((name for name in REQUIRED if find_spec(name) is None), None)
    if missing is None:
        return None
    activate = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv", "bin", "activate")
    solution = f"run 'source {activate}' first" if os.path.exists(activate) else "install distexp: see README.md"
    return f"distexp: the package {missing} is not installed in {sys.executable}: {solution}"


def hidden_module() -> str | None:
    """Return that a file of the current folder hides a module of Python or of a package; None if none does."""
    here = os.path.realpath(sys.path[0])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        own = [os.path.join(here, f"{name}.py"), os.path.join(here, name, "__init__.py")]
        if os.path.realpath(file) in own:
            installed = PathFinder.find_spec(name, sys.path[1:])
            other = installed.origin if installed is not None and installed.origin else file
            if name in sys.stdlib_module_names or os.path.realpath(other) != os.path.realpath(file):
                return f"distexp: {file} hides the module {name} of Python or of a package: rename yours"
    return None


def run() -> int:
    """Run the command line. Explain an error of an import if a file of the current folder caused it."""
    if message := missing_package():
        print(message, file=sys.stderr)
        return 2
    try:
        from distexp.cli.main import main

        return main()
    except (ImportError, AttributeError) as error:
        if message := hidden_module():
            print(f"{message} ({error})", file=sys.stderr)
            return 2
        raise


if __name__ == "__main__":
    sys.exit(run())
