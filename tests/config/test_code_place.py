"""The line of code that a record names as the place of an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from distexp.config.custom_code import code_place, custom_code_place

FAILING = "def read(*others):\n    raise ValueError('{}')\n"
CALLING = "\ndef read(function, *others):\n    function(*others)\n"


def load_function(path: str, text: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(text, path, "exec"), names)
    return names["read"]


def raised_by(*paths: str, message: str = "no image") -> ValueError:
    """Return the error of the last file. Each of the others calls the file behind it."""
    functions = [load_function(path, CALLING) for path in paths[:-1]] + [
        load_function(paths[-1], FAILING.format(message))
    ]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        functions[0](*functions[1:])
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without the line of this file


CUSTOM, INSTALLED = "/home/user/mine/dataset.py", "/env/lib/python3.11/site-packages/PIL/Image.py"
PLACES: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "custom": ([CUSTOM], [], "mine/dataset.py:2"),
    "library that custom code calls": ([CUSTOM, INSTALLED], ["mine"], "mine/dataset.py:3"),
    "library alone": ([INSTALLED], [], ""),
    "installed custom package": ([CUSTOM, INSTALLED], ["PIL"], "PIL/Image.py:2"),
    "code without a file": ([CUSTOM, ""], [], "mine/dataset.py:3"),
    "code of exec": (["<string>"], [], ""),
}


@pytest.mark.parametrize("case", PLACES)
def test_the_place_is_in_custom_code(case: str) -> None:
    paths, trusted, expected = PLACES[case]
    assert custom_code_place(raised_by(*paths), trusted) == expected


@pytest.mark.parametrize("case", PLACES)
def test_the_place_of_an_error_in_a_data_loader_process_is_in_custom_code(case: str) -> None:
    """The worker raises the error again. Its message has the traceback of the other process."""
    paths, trusted, expected = PLACES[case]
    error = raised_by(*paths)
    error.__cause__ = raised_by("/home/user/mine/cause.py")
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), "in DataLoader worker process 0")
    with pytest.raises(ValueError, match="no image") as caught:
        wrapper.reraise()
    assert custom_code_place(caught.value, trusted) == expected


@pytest.mark.parametrize(
    "message",
    ["DataLoader worker (pid 7) is killed by signal: Killed. ", "DataLoader worker (pid(s) 7) exited unexpectedly"],
)
def test_the_end_of_a_data_loader_process_has_no_place(message: str) -> None:
    """A signal handler of torch raises the error, at the line that the worker has just reached."""
    assert custom_code_place(raised_by(CUSTOM, message=message), []) == ""


def test_the_place_of_a_model_may_be_in_an_installed_package() -> None:
    assert code_place(raised_by(CUSTOM, INSTALLED)) == "PIL/Image.py:2"
