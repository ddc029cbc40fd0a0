"""Check the keys that sign a served model, and those that its signature is checked with."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.core.finding import Finding
from tasks.pipeline.signature import PASSWORD, password_bytes, public_part

CURVES = ("secp256r1", "secp384r1", "secp521r1")
MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
EXPORT = "openssl ec -in key.pem -pubout -out key.pub"
_LARGEST = 1 << 16
"""Bytes; a PEM file of any such key has less than 1,000."""


def signing(register: Mapping[str, Any]) -> list[Finding]:
    """Return the problems of `register.sign` and `register.verify`.

    Args:
        register: the section; `verify` may be absent.
    """
    private, public = register["sign"], register.get("verify")
    problems = private_key("register.sign", private) if private else []
    problems += public_key("register.verify", public) if public else []
    if private and public and not problems and not _is_pair(_path(private), _path(public)):
        problems.append(
            Finding(
                "register.verify",
                public,
                f"not the public key of register.sign={private}",
                f"openssl ec -in {private} -pubout -out {public}",
            )
        )
    return problems


def private_key(key: str, value: str) -> list[Finding]:
    """Return why a file cannot sign.

    Args:
        key: the setting.
        value: the file.
    """
    path = _path(value)
    if problems := _unusable(key, value, MAKE):
        return problems
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        allowed = "a private key is readable by its owner alone"
        return [Finding(key, f"{value} has mode {mode:04o}", allowed, f"chmod 600 {value}")]
    problem, advice = _private_problem(path)
    return [Finding(key, value, problem, advice)] if problem else []


def public_key(key: str, value: str) -> list[Finding]:
    """Return why signatures cannot be checked with a file; arguments as of `private_key`."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if problems := _unusable(key, value, EXPORT):
        return problems
    content = _path(value).read_bytes()
    if b"PRIVATE KEY" in content:
        advice = f"openssl ec -in {value} -pubout -out key.pub, then {key}=key.pub"
        return [Finding(key, value, "a private key, which belongs to the signer alone", advice)]
    problem, advice = _kind_problem(lambda: load_pem_public_key(content), "public key", EXPORT)
    return [Finding(key, value, problem, advice)] if problem else []


def _unusable(key: str, value: str, advice: str) -> list[Finding]:
    """Return why a key file cannot be read, or why signatures cannot be made here at all."""
    path = _path(value)
    if not path.is_file():
        state = "not a file" if path.exists() else "no such file"
        return [Finding(key, f"{value}: {state}", "a key in a PEM file", advice)]
    if path.stat().st_size > _LARGEST:
        return [Finding(key, value, "too large for a key", advice)]
    if not all(map(find_spec, ("model_signing", "OpenSSL"))):
        allowed = "signatures need the package model-signing, which is not installed"
        return [Finding(key, value, allowed, "make setup-sign")]
    return []


def _private_problem(path: Path) -> tuple[str, str]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = path.read_bytes()
    if b"PRIVATE KEY" not in content:
        return "no private key in PEM", MAKE
    encrypted = b"ENCRYPTED" in content
    if encrypted and not password_bytes():
        return "the key has a password", f"export {PASSWORD}=<the password>"
    if password_bytes() and not encrypted:
        return f"{PASSWORD} is set, and the key has no password", f"unset {PASSWORD}"
    problem, advice = _kind_problem(
        lambda: load_pem_private_key(content, password_bytes()), "private key", MAKE
    )
    if encrypted and problem.startswith("no private key"):
        return "the password is wrong", f"export {PASSWORD}=<the password>"
    return problem, advice


def _kind_problem(load: Callable[[], Any], what: str, advice: str) -> tuple[str, str]:
    """Return why a key is of no use, and what to type; two empty texts if it can be used."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return f"no {what} in PEM", advice
    curve = getattr(getattr(key, "curve", None), "name", "")
    if curve not in CURVES:
        kind = curve or type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey")
        return f"a key on P-256, P-384 or P-521 is needed, this is {kind.strip('_')}", MAKE
    return "", ""


def _is_pair(private: Path, public: Path) -> bool:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    derived = load_pem_public_key(public_part(private))
    return bool(derived == load_pem_public_key(public.read_bytes()))


def _path(value: str) -> Path:
    return Path(value).expanduser()
