"""Secrets in texts."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tasks.core import redaction
from tasks.core.redaction import (
    hide_environment,
    hide_in_url,
    hide_interpolated,
    redact,
    redact_error,
    redacted,
)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the hidden values of other tests, and those of this one."""
    monkeypatch.setattr(redaction, "_shown", {})
    monkeypatch.setattr(redaction, "_values", None)
    monkeypatch.delenv(redaction.VARIABLES, raising=False)
    yield
    os.environ.pop(redaction.VARIABLES, None)


URLS = [
    ("postgresql://me:secret@db:5432/x", "postgresql://me:***@db:5432/x"),
    ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ("https://secret@host/a", "https://***@host/a"),
    ("http://me:se@cret@host:1", "http://me:***@host:1"),
    ("http://:secret@host:1", "http://:***@host:1"),
    ("https://h/a?user=me&password=secret&x=1", "https://h/a?user=me&password=***&x=1"),
    ("to http://a:secret@h failed; http://b:secret@i", "to http://a:***@h failed; http://b:***@i"),
    ("https://ghp_0123456789abcdefghij:x-oauth-basic@h/a", "https://***@h/a"),
    ("https://h/a?access_token=secret&api-key=secret#x",
     "https://h/a?access_token=***&api-key=***#x"),
    ("https://h/a?code=secret;X-Amz-Signature=secret", "https://h/a?code=***;X-Amz-Signature=***"),
    ("https://h/a?keyword=shown&monkey=shown", "https://h/a?keyword=shown&monkey=shown"),
    ("{'Authorization': 'Bearer secret'}", "{'Authorization': 'Bearer ***'}"),
    ("tag=hf_0123456789abcdefghij", "tag=***"),
    ("tag=hf_model", "tag=hf_model"),
    ("hf://datasets/a/b@main", "hf://datasets/a/b@main"),
    ("models:/plumbline@candidate", "models:/plumbline@candidate"),
]  # fmt: skip


def test_urls_lose_their_passwords() -> None:
    assert [redact(text) for text, _ in URLS] == [hidden for _, hidden in URLS]


@pytest.mark.usefixtures("nothing_known")
def test_which_variables_are_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = {
        "HF_TOKEN": "Hf+123456789",
        "AWS_SECRET_ACCESS_KEY": "longer-than-the-other",
        "PGPASSWORD": "correct-horse",
        "DB_PWD": "Pwd456789",
        "A_AUTH_STRING": "admin:Auth456789",
        "TOKENIZERS_PARALLELISM": "falsefalse1",
        "PREFECT_API_KEY": "short",
        "POSTGRES_PASSWORD": "plumbline",
        "PIN_SECRET": "1234567890",
        "SSL_KEY": str(tmp_path),
        "SOMEWHERE": "/home/somebody",
        "DATABASE": "postgresql://me:Url456789@db/x",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hide_environment()
    text = redact(" ".join([*variables.values(), "Auth456789", "Url456789"]))
    shown = (
        f"falsefalse1 short plumbline 1234567890 {tmp_path} /home/somebody postgresql://me:***@db/x"
    )
    assert text == f"{'*** ' * 5}{shown} *** ***"


@pytest.mark.usefixtures("nothing_known")
def test_encoded_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'a/b c+"d'
    monkeypatch.setenv("MY_TOKEN", secret)
    in_base64 = base64.b64encode(secret.encode()).decode()
    for form in (secret, quote(secret, safe=""), in_base64, in_base64.rstrip("="), 'a/b c+\\"d'):
        assert redact(f"<{form}>") == "<***>"


@pytest.mark.usefixtures("nothing_known")
def test_interpolated_variables_keep_their_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {"A": "Some-Value-1", "B": "12345678", "C": "two-words", "D": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    hide_interpolated("x=${oc.env:A} ${oc.env:B,1} ${oc.env: 'C'} ${oc.env:D} ${oc.env:absent,2}")
    assert redact(" ".join(values.values())) == f"${{oc.env:A}} 12345678 two-words {tmp_path}"
    code = "from tasks.core.redaction import redact; print(redact('Some-Value-1'))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert done.stdout == "${oc.env:A}\n"  # child processes know it, too


@pytest.mark.usefixtures("nothing_known")
def test_a_password_of_a_setting_is_hidden_elsewhere() -> None:
    hide_in_url("http://me:Pass%2Fw0rd@h/a?token=T0ken+value&sig=word")
    login = base64.b64encode(b"me:Pass/w0rd").decode()
    assert redact(f"Pass/w0rd Pass%2Fw0rd {login} T0ken value, a word") == (
        "*** *** *** ***, a word"
    )


def test_values_and_errors() -> None:
    assert redacted({"a": ["http://b:c@d", 1, None]}) == {"a": ["http://b:***@d", 1, None]}
    error = ValueError("http://b:c@d", 2)
    error.__cause__ = KeyError("http://e:f@g")
    redact_error(error)
    assert (error.args, error.__cause__.args) == (("http://b:***@d", 2), ("http://e:***@g",))
