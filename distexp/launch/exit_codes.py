"""Exit codes of an agent. The process that writes the record finds the cause of a failed run from them."""

from __future__ import annotations

import signal

HANG_CODE = 75
TERMINATED_CODE = 76
"""The parent process of the workers got SIGTERM from outside."""

TIMEOUT_CODE = 124

SIGNAL_OFFSET = 128
"""The code is this plus N if signal N ended the parent process of the workers."""

STOPPED_CODE = SIGNAL_OFFSET + signal.SIGTERM
"""The agent got SIGTERM itself."""


def encode_group_code(code: int) -> int:
    """Return the exit code of an agent whose workers have ended.

    Args:
        code: Exit code of the parent process of the workers, negative for a signal.
    """
    if code == -signal.SIGTERM:
        return TERMINATED_CODE
    return code if code >= 0 else SIGNAL_OFFSET - code


def decode_group_signal(code: int) -> int | None:
    """Return the signal that ended the parent process of the workers; None if no signal did.

    Args:
        code: Exit code of an agent.
    """
    if code == TERMINATED_CODE:
        return signal.SIGTERM
    return code - SIGNAL_OFFSET if code > SIGNAL_OFFSET and code != STOPPED_CODE else None
