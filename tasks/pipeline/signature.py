"""Signatures of served models: OpenSSF Model Signing with a key pair, without any network.

    sign(folder, Path("key.pem"))            writes model.sig
    faults(folder, Path("key.pub"))          every difference from what was signed

`model.sig` is a Sigstore bundle that lists the SHA-256 of every other file of the folder. The
package `model-signing` (`make setup-sign`) writes and checks it, and so does its own command
`model_signing verify key`.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.disk import flush
from tasks.core.errors import ArtifactError, first_and_more
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


@dataclass(frozen=True)
class Fault:
    """One way in which a folder differs from what was signed.

    Attributes:
        code: code of the finding.
        file: the file, relative to the folder.
        found: its state.
        expected: what was signed, or what a signature looks like.
    """

    code: str
    file: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.code}: {self.file}: {self.found}"


def key_file(value: str | None) -> Path | None:
    """Return the file of a key from its setting; None for null."""
    return None if value is None else Path(value).expanduser().absolute()


def is_signed(folder: Path) -> bool:
    """Return True if the folder has a signature, whatever it is worth."""
    return os.path.lexists(folder / SIGNATURE)


def sign(folder: Path, private_key: Path) -> bool:
    """Sign every file of a folder. A folder that this key has signed already is left as it is.

    Args:
        folder: the served model; gets `model.sig` by one rename.
        private_key: PEM file of a key on P-256, P-384 or P-521; its password is in `PASSWORD`.

    Returns:
        True if a signature was written.

    Raises:
        ArtifactError: the folder has a signature that does not hold, or `model.sig` cannot be
            written.
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
    """Check that a folder is, byte for byte, what the owner of a key signed.

    Raises:
        ArtifactError: it is not; the details name the code and the file of every difference.
    """
    problems = [str(fault) for fault in faults(folder, public_key)]
    if problems:
        raise ArtifactError(
            f"{folder} is not what was signed: {first_and_more(problems)}",
            details=problems,
            hint=_SIGN_HERE
            if not is_signed(folder)
            else f"restore it from its origin; if its files are right, rm {folder / SIGNATURE} and "
            "sign it again",
        )


def require_published(folder: Path, digest: str | None, public_key: Path | None = None) -> Artifact:
    """Read every byte of a served folder, and compare it with what was published.

    Args:
        digest: digest that was registered; None for that of its own manifest.
        public_key: key that has to have signed it; None for any or none.

    Raises:
        ArtifactError: the folder is gone, or not what was published, registered and signed.
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


def faults(folder: Path, public_key: Path) -> list[Fault]:
    """Compare a folder with its signature; every byte is read.

    Returns:
        The differences, sorted by file; empty if there are none.
    """
    if not is_signed(folder):
        return [Fault("SIGNATURE_MISSING", SIGNATURE, "no such file", "a signature by this key")]
    entries = list(folder.rglob("*"))
    links = [path.relative_to(folder).as_posix() for path in entries if path.is_symlink()]
    if links:
        expected = "the files that were signed"
        return [Fault("SIGNED_ADDED", name, "a link", expected) for name in sorted(links)]
    try:
        return _compare(folder, public_key)
    except (ArtifactError, *_CANNOT_READ) as error:
        reason = error.message if isinstance(error, ArtifactError) else f"{type(error).__name__}"
        return [
            Fault("SIGNATURE_UNREADABLE", SIGNATURE, reason, "a signature of OpenSSF Model Signing")
        ]


def _compare(folder: Path, public_key: Path) -> list[Fault]:
    from cryptography.exceptions import InvalidSignature
    from model_signing import hashing, verifying

    bundle = read_json(folder / SIGNATURE)  # bounded, before the package reads it
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        with redirect_stdout(sys.stderr):  # the package prints its warnings
            config.verify(folder, folder / SIGNATURE)
        is_same = True
    except InvalidSignature:
        return [_by_another("the signature does not belong to its content")]
    except ValueError as error:
        if str(error).startswith("Key mismatch"):
            return [_by_another("signed by another key")]
        if not str(error).startswith("Signature mismatch"):
            raise
        is_same = False
    # The signature holds, so its statement can be trusted: name the files that differ.
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    signed = {each["name"]: each for each in statement["predicate"]["resources"]}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    present.discard(SIGNATURE)
    digests: dict[str, str] = {}
    if not is_same:
        (function,) = {each["algorithm"] for each in signed.values()}
        hasher = hashing.Config().use_file_serialization(hashing_algorithm=function)
        files = [folder / name for name in present & signed.keys()]
        listed = hasher.hash(folder, files_to_hash=files).resource_descriptors()
        digests = {each.identifier: each.digest.digest_hex for each in listed}
    return sorted(_differences(signed, present, digests), key=lambda fault: fault.file)


def _differences(
    signed: Mapping[str, Any], present: set[str], digests: Mapping[str, str]
) -> Iterator[Fault]:
    """Yield a fault for each file; `digests` has those to compare, by name."""
    for name in present - signed.keys():  # also those that the package ignores, such as .git
        yield Fault("SIGNED_ADDED", name, "not in the signature", "the files that were signed")
    for name, entry in signed.items():
        expected = f"{entry['algorithm']} {entry['digest']}"
        if name not in present:
            yield Fault("SIGNED_REMOVED", name, "missing", expected)
        elif digests.get(name, entry["digest"]) != entry["digest"]:
            yield Fault("SIGNED_CHANGED", name, "other bytes than those that were signed", expected)


def _by_another(reason: str) -> Fault:
    return Fault("SIGNED_BY_ANOTHER", SIGNATURE, reason, "a signature by this key")


def password_bytes() -> bytes | None:
    """Return the password of the private key; None if none is set."""
    return os.environ[PASSWORD].encode() if os.environ.get(PASSWORD) else None


def public_part(private_key: Path) -> bytes:
    """Return the public key of a private one, as PEM.

    Raises:
        ValueError, TypeError, OSError: the file is no private key, or the password is wrong.
    """
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(private_key.read_bytes(), password_bytes())
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
