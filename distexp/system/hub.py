"""The Hugging Face hub, asked once a process whether it answers.

Where nobody answers, huggingface_hub tries the first file for half a minute, transformers the next one again, and
each try is a line in the log. In its offline mode all of them turn to the local cache at once.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

CONNECT_S = 3.0
"""Most seconds for a connection, and there may be four addresses; a slow answer is an answer, and is waited for."""

PAUSE_S = 1.0
"""Before the second try, for a name that could not be resolved just then."""

UNREACHABLE = {"ConnectError", "ConnectTimeout"}
"""What the hub's HTTP library raises where nobody is there, by name: which library that is has changed before."""


def offline_if_unreachable(source: str) -> None:
    """Before ``source``, a hub id or a folder, is read: sets the libraries offline where the hub does not answer."""
    if not Path(source).expanduser().exists():
        _ask_once()


@cache
def _ask_once() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _silence(constants.ENDPOINT) is None:
        return
    time.sleep(PAUSE_S)
    why = _silence(constants.ENDPOINT)
    if why is not None:
        print(f"note: {constants.ENDPOINT} cannot be reached ({why}): only its local cache is read", flush=True)
        # huggingface_hub and transformers ask this at every request; datasets takes it over when it is imported.
        constants.HF_HUB_OFFLINE = True


def _silence(endpoint: str) -> str | None:
    """Why nobody took the connection, by the libraries' own client, which knows of proxies; None where someone did."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_S)
    except Exception as error:
        # Anything else is for the libraries to meet and to tell: also a certificate that does not hold.
        if type(error).__name__ in UNREACHABLE and "CERTIFICATE" not in str(error):
            return str(error) or type(error).__name__
    return None
