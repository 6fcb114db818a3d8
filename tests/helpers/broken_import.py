"""A module that cannot be imported, for messages about custom packages."""

raise RuntimeError("the license server is down")
