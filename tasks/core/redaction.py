"""Remove secrets from texts that are logged, shown or recorded.

`tasks.core.terminal.plain` calls `redact` where text leaves the program: errors, log records, the
output of child processes, plans and summaries. Records for MLflow and manifests pass `redacted`.
Removed are

- passwords and tokens in URLs, tokens of known shapes (`hf_...`), the header Authorization;
- values of environment variables with a secret's name (`HF_TOKEN`, `DB_PASSWORD`);
- values of variables that a configuration reads with `${oc.env:NAME}`, which is shown instead, but
  for numbers, words, and paths that exist;
- passwords of URLs in the settings, wherever else they appear.

Values are found as they are, URL-encoded and in base64. A number, a word in small letters (the
password `plumbline`, say) or a value of fewer than eight characters is removed from URLs only.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
INTERPOLATION = "${oc.env:"
VARIABLES = "PLUMBLINE_HIDDEN_VARIABLES"
"""Variable with the names that `hide_interpolated` was called for, for child processes."""
_PUBLIC = ("PLUMBLINE_RUNS", "MLFLOW_TRACKING_URI")
"""Variables that our own configuration files read; a URL in them is redacted as all others."""
_SHORTEST, _LONGEST_USER = 8, 20
"""Characters. A longer user of a URL is a token: `https://<token>:x-oauth-basic@host`."""

_URL = re.compile(r"(?<=://)([^\s/?#'\"@:]*)(:?)([^\s/?#'\"]*)@")
_QUERY = re.compile(
    r"([?&;#](?:[\w.~%-]*(?:token|secret|password|passwd|passphrase|api_?key|accesskey|signature"
    r"|credentials?)|(?:[\w.~%-]*[-_.])?(?:key|pwd|pass|auth|authorization|sig|code))=)"
    r"([^\s&;#'\"]+)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(authorization['\"]?\s*[:=]\s*b?['\"]?(?:(?:bearer|basic|token)\s+)?)[^\s'\",}]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|AKIA[A-Z0-9]{16})"
)
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|CREDENTIALS?|KEY|AUTH|AUTH_STRING)(_|$)|_PWD$"
    r"|PASSWORD|PASSWD|PASSPHRASE|APIKEY"
)
_VARIABLE = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_]\w*)")
_WORD, _WORDS = re.compile(r"[a-z]+"), re.compile(r"[a-z]+(?:[_-][a-z]+)*")

_shown: dict[str, str] = {}
"""The text to show, by hidden value."""
_values: re.Pattern[str] | None = None
"""All hidden values, the longest first; None before the environment has been read."""


def redact(text: str) -> str:
    """Return a text without secrets."""
    if _values is None:
        hide_environment()
    assert _values is not None
    return _values.sub(lambda match: _shown[match[0]], redact_url(text))


def redact_url(text: str) -> str:
    """Return a text without what looks like a secret, whatever secrets this process knows."""
    if "://" in text:
        text = _URL.sub(_user, text)
    text = _SHAPES.sub(HIDDEN, _QUERY.sub(rf"\1{HIDDEN}", text))
    return _HEADER.sub(rf"\1{HIDDEN}", text)


def redacted(value: Any) -> Any:
    """Return plain JSON values with all texts redacted; keys stay."""
    if isinstance(value, dict):
        return {key: redacted(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(part) for part in value]
    return redact(value) if isinstance(value, str) else value


def redact_error(error: BaseException) -> None:
    """Redact the texts of an error and of its causes, which Prefect records with its state."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.args = tuple(redact(a) if isinstance(a, str) else a for a in current.args)
        current = current.__cause__ or current.__context__


def hide(value: str, shown: str = HIDDEN) -> None:
    """Let `redact` replace a value in all later texts, unless it is ordinary."""
    global _values
    before = len(_shown)
    for form in _forms(value):
        _shown.setdefault(form, shown)
    if len(_shown) > before or _values is None:
        longest_first = sorted(_shown, key=len, reverse=True)
        _values = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def hide_environment() -> None:
    """Hide the secrets in the variables of this process."""
    hide("")
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name.upper()) and not os.path.lexists(value):
            hide(value)
            hide(value.partition(":")[2])  # the password of `user:password`
        hide_in_url(value)
    for name in os.environ.get(VARIABLES, "").split(","):
        _hide_variable(name)


def hide_in_url(text: str) -> None:
    """Hide the secrets of all URLs in a text: of a setting, for example."""
    for user, colon, password in _URL.findall(text):
        if user and (not colon or len(user) >= _LONGEST_USER):
            hide(user)
        if password:
            hide(password)
            hide(unquote(password))
            login = f"{unquote(user)}:{unquote(password)}"
            hide(base64.b64encode(login.encode()).decode())
    for _, value in _QUERY.findall(text):
        hide(value)
        hide(unquote_plus(value))


def hide_interpolated(text: str) -> None:
    """Hide the values of the variables that `${oc.env:NAME}` in a text reads."""
    for name in _VARIABLE.findall(text):
        if name not in _PUBLIC and _hide_variable(name):
            known = filter(None, os.environ.get(VARIABLES, "").split(","))
            os.environ[VARIABLES] = ",".join(dict.fromkeys((*known, name)))


def _hide_variable(name: str) -> bool:
    """Hide the value of a variable. Returns False if it is a number, a word or a path."""
    value = os.environ.get(name, "")
    is_secret = _SECRET_NAME.search(name.upper()) is not None
    if not is_secret and (_WORDS.fullmatch(value) or os.path.lexists(value)):
        return False
    hide(value, f"{INTERPOLATION}{name}}}")
    return True


def _user(match: re.Match[str]) -> str:
    user, colon, _ = match.groups()
    return f"{user}:{HIDDEN}@" if colon and len(user) < _LONGEST_USER else f"{HIDDEN}@"


def _forms(value: str) -> Iterator[str]:
    """Yield a value as it is and in the encodings in which texts have it."""
    if len(value) < _SHORTEST or _WORD.fullmatch(value):
        return
    with suppress(ValueError):
        float(value)
        return
    encoded = value.encode("utf-8", "surrogateescape")
    yield value
    yield from (quote(encoded, safe=""), quote(encoded), quote_plus(encoded))
    yield from (json.dumps(value)[1:-1], repr(value)[1:-1])
    for in_base64 in (base64.b64encode(encoded), base64.urlsafe_b64encode(encoded)):
        yield from (in_base64.decode(), in_base64.decode().rstrip("="))
