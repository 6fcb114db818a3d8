"""Checks of a machine: what can be trained on it. ``distexp doctor [--json]``.

Each check reports what it found and, if something is wrong, a hint. Steps that may crash or hang (importing torch,
collectives, Slurm commands) run in a subprocess with a timeout.
"""
