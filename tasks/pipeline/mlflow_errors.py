"""Errors of MLflow as those of the outbox: it does not answer, or it refuses a record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tasks.core.redaction import redact
from tasks.pipeline.outbox import RefusedError, UnreachableError

_LATER = (401, 403, 408, 429)
"""Client errors that do not mean that a record is invalid."""


@contextlib.contextmanager
def errors_of_mlflow() -> Iterator[None]:
    """Turn any error of MLflow into `UnreachableError` or `RefusedError`, without passwords."""
    try:
        yield
    except (UnreachableError, RefusedError):
        raise
    except Exception as error:
        status = _status(error)
        text = redact(str(error)).strip().splitlines() or [type(error).__name__]
        if status is None or status >= 500 or status in _LATER:
            raise UnreachableError(_reason(text[0], status)) from None
        raise RefusedError(text[0][:300]) from None


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error; None if there was no answer, 400 for our own errors."""
    if hasattr(error, "get_http_status_code"):  # an MlflowException
        return int(error.get_http_status_code())
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    outside = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy")
    return None if outside else 400


def _reason(text: str, status: int | None) -> str:
    """Return the cause in a few words; texts of MLflow and requests quote it inside of theirs."""
    for cause, words in (
        ("refused", "nothing listens there"),
        ("timed out", "no answer in time"),
        ("timeout", "no answer in time"),
        ("resolve", "there is no host of that name"),
        ("aborted", "it has closed the connection"),
        ("reset", "it has closed the connection"),
        ("disk is full", "the disk is full"),
    ):
        if cause in text.lower():
            return words
    if status in _LATER:
        return f"status {status}: {text[:120]}"
    return text[:200]
