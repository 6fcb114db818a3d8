"""Methods of classes that are replaced for some time, and then restored exactly as they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Method = Callable[..., Any]


class MethodReplacements:
    """Replaced methods. The classes may be written in C++."""

    def __init__(self) -> None:
        # What the classes themselves have. The attribute of a class in C++ is another object, which gets no self.
        self._originals: list[tuple[type[Any], str, Any]] = []

    @property
    def active(self) -> bool:
        """Return whether methods are replaced."""
        return bool(self._originals)

    def replace(self, owner: type[Any], name: str, make: Callable[[Method], Method]) -> None:
        """Replace a method by what ``make`` returns for it."""
        original = getattr(owner, name)
        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wraps(original)(make(original)))

    def restore(self) -> None:
        """Restore all methods."""
        while self._originals:
            owner, name, own = self._originals.pop()
            if own is None:
                delattr(owner, name)  # The owner inherits it.
            else:
                setattr(owner, name, own)
