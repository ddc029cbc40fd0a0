"""Key pairs that sign models, as `openssl` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def make_pair(
    folder: Path, name: str = "key", *, private: Any = None, password: str | None = None
) -> tuple[Path, Path]:
    """Write NAME.pem, readable by its owner alone, and NAME.pub. Returns both paths.

    Args:
        folder: the folder; made if it is not there.
        name: name of the files.
        private: the key; None makes one on P-256.
        password: encrypts the private key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = private or ec.generate_private_key(ec.SECP256R1())
    hidden = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    secret.touch(mode=0o600)
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return secret, public
