"""Push a served folder to a repository of the Hugging Face Hub, and compare what arrived.

    owner_problem("me/qwen-sft")              why nothing can be pushed there; empty if it can
    push(artifact, "me/qwen-sft")             {"repo": ..., "url": ..., "commit": ...}

The token is that of `HF_TOKEN`, or of `hf auth login`. One commit makes the repository equal to the
folder: files that an earlier push left are removed by it, and remain in the history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tasks.core.errors import TrackingError
from tasks.core.redaction import redact
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.signature import require_published

KEPT = ".gitattributes"
"""File of the Hub's own, in every repository."""
LOGIN = "export HF_TOKEN=<a token that may write>, or hf auth login"


def owner_problem(repo: str) -> str:
    """Ask the Hub who owns the token. Returns why it cannot write to `repo`; empty if it can."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        user = HfApi().whoami()
    except HfHubHTTPError as error:
        status = error.response.status_code
        refused = status in (401, 403)
        return f"{constants.ENDPOINT} {'refuses the token' if refused else 'answers'} ({status})"
    except (HTTPError, OSError) as error:
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    role = user.get("auth", {}).get("accessToken", {}).get("role", "")
    if role == "read":
        return "the token may only read"
    owners = [user["name"], *(each["name"] for each in user.get("orgs", ()))]
    owner = repo.partition("/")[0]
    return "" if owner in owners else f"the token belongs to {', '.join(owners)}, not to {owner}"


def push(served: Artifact, repo: str) -> dict[str, str]:
    """Push a served folder, after every byte was compared with its manifest.

    A repository that does not exist is made, for its owner's eyes only.

    Raises:
        ArtifactError: the folder is not what was published.
        TrackingError: the Hub does not answer, or what arrived differs from the folder.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    require_published(served.path, served.digest)
    api = HfApi()
    try:
        page = api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=served.path,
            commit_message=f"Plumbline, digest {served.digest[:12]}",
            delete_patterns="*",
        )
        arrived = api.list_repo_tree(repo, recursive=True, revision=commit.oid)
        differing = list(differences(served.path, arrived))
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = redact(f"{type(error).__name__}: {error}".strip().splitlines()[0])
        raise _not_pushed(f"push={repo}: {reason}") from None
    if differing:
        raise _not_pushed(f"push={repo}: commit {commit.oid[:12]} is not the folder", differing)
    return {"repo": repo, "url": str(page), "commit": commit.oid}


def differences(folder: Path, arrived: Iterable[Any]) -> Iterator[str]:
    """Yield a line for each file in which the Hub's copy differs from a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    local = {path.relative_to(folder).as_posix(): path for path in paths}
    remote = {each.path: each for each in arrived if hasattr(each, "blob_id")}
    for name in sorted((local.keys() | remote.keys()) - {KEPT}):
        if name not in remote:
            yield f"{name}: not in the repository"
        elif name not in local:
            yield f"{name}: in the repository alone"
        elif not _is_copy(local[name], remote[name]):
            yield f"{name}: other bytes than those of the folder"


def _is_copy(file: Path, copy: Any) -> bool:
    size = file.stat().st_size
    if copy.lfs is not None:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return bool((size, digest) == (copy.size, copy.lfs.sha256))
    blob = b"blob %d\0" % size + file.read_bytes()  # git's name of a small file
    return bool((size, hashlib.sha1(blob).hexdigest()) == (copy.size, copy.blob_id))


def _not_pushed(message: str, details: Iterable[str] = ()) -> TrackingError:
    hint = "type the same command again: only the push is repeated"
    return TrackingError(message, details=list(details), hint=hint)
