"""A fake DeepSpeed with C++ operators that are built without a compiler."""

from __future__ import annotations

import os
from pathlib import Path

FAKE_DEEPSPEED = """
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace


class Operator:
    def __init__(self, name):
        self.folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name
        self.library = self.folder / (name + ".so")
        self.plan = self.folder / "build.ninja"

    def is_compatible(self):
        return True

    def load(self, verbose):
        assert verbose
        assert not (self.folder / "lock").exists(), "torch would wait for the lock of a killed build"
        plan = "build one.o: compile " + str(Path(__file__).parents[2] / "one.cpp") + "\\n"
        if not self.library.exists() or self.plan.read_text() != plan:
            self.plan.write_text(plan)
            print("[1/2] c++ one.cpp")
            print("[2/2] c++ -shared one.o", flush=True)
            self.library.write_text("library")
        if self.library.read_text() == "cut":
            raise ImportError(str(self.library) + ": file too short")
        return SimpleNamespace(__file__=str(self.library))


class Unsupported(Operator):
    def is_compatible(self):
        return False


class Broken(Operator):
    def is_compatible(self):
        print("one.cpp:3:1: fatal error: no omp.h", flush=True)
        raise RuntimeError("Error building extension")


class Unwritten(Operator):
    def is_compatible(self):
        symbol = "x" * 400
        print("a.s: Fatal error: can't write to section " + symbol + " of a.o: 'No space left on device'")
        raise RuntimeError("Error building extension")


ALL_OPS = {
    "adam": Operator("adam"),
    "gpu": Unsupported("gpu"),
    "broken": Broken("broken"),
    "unwritten": Unwritten("unwritten"),
}
"""


def fake_deepspeed(folder: Path) -> dict[str, str]:
    """Write a fake DeepSpeed; return an environment with it, and with an empty cache of extensions.

    Its operators: ``adam`` can be built, ``gpu`` is not supported here, ``broken`` does not compile, and
    ``unwritten`` has a full disk.
    """
    package = folder / "fake/deepspeed/ops/op_builder"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "all_ops.py").write_text(FAKE_DEEPSPEED)
    return {**os.environ, "PYTHONPATH": str(folder / "fake"), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
