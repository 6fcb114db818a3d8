"""Offline mode for the Hugging Face libraries if the Hub cannot be reached.

Without it, huggingface_hub retries the first file for half a minute, transformers retries the next one, and each
retry is a line in the log. In offline mode the libraries read their local cache at once.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

CONNECT_TIMEOUT_S = 3.0
"""Timeout of one connection attempt; a host may have four addresses. A slow response is not an error."""

RETRY_PAUSE_S = 1.0
"""Pause before the second attempt, because name resolution may fail for a moment."""

CONNECTION_ERRORS = {"ConnectError", "ConnectTimeout"}
"""Names of the exceptions for an unreachable host. They are names because the HTTP library has changed before."""


def offline_if_unreachable(source: str) -> None:
    """Switch the Hugging Face libraries to offline mode if the Hub is needed but cannot be reached.

    Args:
        source: Hub id or local folder that will be read. A local folder needs no Hub.
    """
    if not Path(source).expanduser().exists():
        _go_offline_if_unreachable()


@cache
def _go_offline_if_unreachable() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or connection_error(constants.ENDPOINT) is None:
        return
    time.sleep(RETRY_PAUSE_S)
    reason = connection_error(constants.ENDPOINT)
    if reason is not None:
        print(f"note: {constants.ENDPOINT} cannot be reached ({reason}): only its local cache is used", flush=True)
        # The variable HF_HUB_OFFLINE has no effect anymore: huggingface_hub reads it once, when it is imported, and
        # this check needs its client. huggingface_hub and transformers read the constant at every request.
        # datasets copies it when it is imported.
        constants.HF_HUB_OFFLINE = True


def connection_error(endpoint: str) -> str | None:
    """Return why no connection to an endpoint is possible, or None if it is reachable.

    The request uses huggingface_hub's HTTP client, which applies the configured proxies.
    """
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_TIMEOUT_S)
    except Exception as error:
        # The libraries report all other errors themselves, for example an invalid certificate.
        if type(error).__name__ in CONNECTION_ERRORS and "CERTIFICATE" not in str(error):
            return str(error) or type(error).__name__
    return None
