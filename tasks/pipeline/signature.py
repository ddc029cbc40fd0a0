"""Signatures of served models: OpenSSF Model Signing with a key pair, without any network.

    sign(folder, Path("key.pem"))            writes model.sig
    signature_problem(folder, Path("key.pub"))   the difference from what was signed

`model.sig` is a Sigstore bundle that lists the SHA-256 of every other file of the folder. The
package `model-signing` (`make setup-sign`) writes and checks it, and so does its own command
`model_signing verify key`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tasks.core.disk import flush
from tasks.core.errors import ArtifactError
from tasks.core.terminal import typed
from tasks.pipeline.artifact import MANIFEST, SIGNATURE, Artifact, open_artifact, verify
from tasks.weights.files.documents import read_json

PASSWORD = "PLUMBLINE_SIGN_PASSWORD"
"""Environment variable with the password of the private key."""
_CANNOT_READ = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Exceptions of the package for a bundle that is not one. ValueError includes pydantic's."""
_SIGN_HERE = (
    "register.sign=<private key>; or, where that key is: model_signing sign key FOLDER "
    f"--private_key key.pem --signature FOLDER/{SIGNATURE}"
)


def key_file(value: str | None) -> Path | None:
    """Return the file of a key from its setting; None for null."""
    return None if value is None else Path(value).expanduser().absolute()


def is_signed(folder: Path) -> bool:
    """Return True if the folder has a signature, whatever it is worth."""
    return os.path.lexists(folder / SIGNATURE)


def sign(folder: Path, private_key: Path) -> bool:
    """Sign every file of a folder. A folder that this key has signed already is left as it is.

    The key is on P-256, P-384 or P-521, its password in `PASSWORD`. Returns True if a signature was
    written; raises ArtifactError if the folder has one that does not hold.
    """
    from model_signing import hashing, signing

    partial = folder / f".{SIGNATURE}.{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="plumbline-") as work:
        public_key = Path(work) / "key.pub"
        public_key.write_bytes(public_part(private_key))
        if is_signed(folder):
            require_signed(folder, public_key)
            return False
        hashed = hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
        password: Any = password_bytes()  # declared as text, which `cryptography` refuses
        config = signing.Config().set_hashing_config(hashed)
        config.use_elliptic_key_signer(private_key=private_key, password=password)
        try:
            config.sign(folder, Path(work) / SIGNATURE)
            partial.write_bytes((Path(work) / SIGNATURE).read_bytes())
            flush(partial)
            partial.rename(folder / SIGNATURE)
        except (OSError, ValueError) as error:
            partial.unlink(missing_ok=True)
            raise ArtifactError(f"{folder / SIGNATURE}: cannot be written: {error}") from error
        require_signed(folder, public_key)
    return True


def require_signed(folder: Path, public_key: Path) -> None:
    """Raise ArtifactError, with the files, if a folder is not what the owner of a key signed."""
    if problem := signature_problem(folder, public_key):
        restore = "restore it from its origin; if its files are right, rm {} and sign it again"
        hint = restore.format(folder / SIGNATURE) if is_signed(folder) else _SIGN_HERE
        raise ArtifactError(f"{folder}: SIGNATURE_WRONG: {problem}", hint=hint)


def require_published(folder: Path, digest: str | None, public_key: Path | None = None) -> Artifact:
    """Compare every byte of a served folder with what was published. Raises ArtifactError.

    Args:
        digest: digest that was registered; None for that of its own manifest.
        public_key: key that has to have signed it; None for any or none.
    """
    if not folder.is_dir():
        raise ArtifactError(f"no such folder on this machine: {folder}")
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(
            f"{folder} is no model that Plumbline served: it has no {MANIFEST}",
            hint=f"python flows/deliver.py {typed('source', folder)} out=<a new folder>, which is "
            "proven and can be served; for an adapter also base=<its base>",
        )
    artifact = open_artifact(folder, "served")
    problems = verify(artifact)
    if digest not in (None, artifact.digest):
        problems = [f"its digest is {artifact.digest}, and {digest} was registered", *problems]
    if problems:
        raise ArtifactError(
            f"{folder} is not the model that was {'registered' if digest else 'published'}: "
            f"{problems[0]}",
            details=problems,
            hint="copy the folder again from where it was made, or choose another version",
        )
    if public_key is not None:
        require_signed(folder, public_key)
    return artifact


def signature_problem(folder: Path, public_key: Path) -> str:
    """Compare every byte of a folder with its signature. Returns the difference, or nothing."""
    from cryptography.exceptions import InvalidSignature
    from model_signing import hashing, verifying

    if not is_signed(folder):
        return f"no {SIGNATURE}"
    hashed = hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        read_json(folder / SIGNATURE)  # bounded, before the package reads it
        with redirect_stdout(sys.stderr):  # the package prints its warnings
            config.set_hashing_config(hashed).verify(folder, folder / SIGNATURE)
    except InvalidSignature:
        return f"{SIGNATURE} was altered"
    except (ArtifactError, *_CANNOT_READ) as error:
        return str(error) or f"{SIGNATURE} cannot be read"
    return ""


def password_bytes() -> bytes | None:
    """Return the password of the private key; None if none is set."""
    return os.environ[PASSWORD].encode() if os.environ.get(PASSWORD) else None


def public_part(private_key: Path) -> bytes:
    """Return the public key of a private one, as PEM. Raises ValueError, TypeError or OSError."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(private_key.read_bytes(), password_bytes())
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
