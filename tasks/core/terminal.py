"""Text on its way to a terminal, a log or a page.

A token, a file name or a tensor name can hold sequences that move the cursor, clear the screen,
rename the window or reverse the order of letters, so that a terminal shows another text than the
one that was written. `plain` removes them, and secrets (`redaction.py`). It is applied where text
leaves the program: in every `PlumblineError`, every log record (`clean_logging`), the output of
child processes and reports.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import traceback
from typing import Any

from tasks.core.redaction import redact

_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?")
"""Escape sequences of ECMA-48: colours and cursor movements; the start of all others."""
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # order of letters
    "\u2028\u2029\ufeff]"  # line ends that only some programs know
)
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Bytes of file names that are not UTF-8, and halves of characters in JSON: not printable."""


STARTED = "PLUMBLINE_STARTED"
"""Variable that `plumbline` sets, for commands in the texts of its children, too."""


def plain(text: str) -> str:
    """Return a text without secrets, escape sequences and control characters.

    Lines and tabs stay. Halves of characters become U+FFFD, so that the result can be encoded.
    """
    text = redact(text)
    if text.isascii() and text.isprintable():
        return text
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub("", _ESCAPES.sub("", text)))


def command(program: str, **settings: object) -> str:
    """Return a command line of a program of `flows/`, quoted for the shell, as this one was typed.

    A setting of None is left out.
    """
    start = f"python flows/{program}.py"
    if STARTED in os.environ:
        start = "plumbline train" if program == "rlhf" else f"plumbline {program}"
    words = (typed(key, value) for key, value in settings.items() if value is not None)
    return " ".join([start, *words])


def in_words(size: int) -> str:
    """Return a size with its unit, such as 14.2 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def to_stderr(line: str) -> None:
    """Print a line about the command itself."""
    print(line, file=sys.stderr, flush=True)


def json_text(document: object) -> str:
    """Return JSON as `plain` text."""
    return plain(json.dumps(document, indent=1))


def typed(key: str, value: object) -> str:
    """Return `key=value`, quoted for the shell; a placeholder such as `<folder>` is not quoted."""
    word = f"{key}={str(value).lower() if isinstance(value, bool) else value}"
    return word if re.fullmatch(r"<[a-z ]+>", str(value)) else shlex.quote(word)


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar, whatever characters it has."""
    text = re.sub(r"(\\*)('|\Z)", r"\1\1\2", text)  # before a quote, backslashes escape
    return "'" + text.replace("'", "\\'").replace("${", "\\${") + "'"


def clean_logging() -> None:
    """Let every log record of this process be `plain`, whatever handler writes it.

    The same holds for its traceback, and for the traceback of an error that ends the process.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "is_plain", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        try:
            message = made.getMessage()
        except Exception:  # a wrong format string: the handler reports it
            return made
        cleaned = plain(message)
        if cleaned != message:
            made.msg, made.args = cleaned, ()
        if made.exc_info and made.exc_info[1] is not None:
            made.exc_text = _traceback(made.exc_info[1])  # handlers write this if it is set
        return made

    record.is_plain = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)
    sys.excepthook = lambda kind, error, frames: print(_traceback(error), file=sys.stderr)


def _traceback(error: BaseException) -> str:
    return plain("".join(traceback.format_exception(error)).rstrip())
