"""Read a JSON file of a model on the Hugging Face Hub: from the local cache, or downloaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TIMEOUT_S = 5.0
"""Limit of the one request that finds out whether the Hub answers; nothing is tried again."""


def hub_config(
    hub_id: str, revision: str | None = None, name: str = CONFIG
) -> tuple[dict[str, Any], str]:
    """Return config.json of a model, or another JSON file, and the reason if there is none.

    A file that is not in the cache is downloaded into it, unless `HF_HUB_OFFLINE` is set. A Hub
    that fails is asked only once per process.
    """
    from huggingface_hub import constants

    file = _cached(hub_id, revision, name)
    reason = ""
    if file is None:
        reason = _download(hub_id, revision, name, str(constants.HF_HUB_CACHE))
        file = _cached(hub_id, revision, name)
    if file is None:
        return {}, reason
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"{file}: {error}"
    return (config, "") if isinstance(config, dict) else ({}, f"{file}: not an object")


def _cached(hub_id: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(hub_id, name, revision=revision)
    except (OSError, ValueError):  # an id that no model can have
        return None
    return Path(file) if isinstance(file, str) else None


@cache
def _download(hub_id: str, revision: str | None, name: str, folder: str) -> str:
    """Download a file into the cache. Returns the reason if that fails.

    The metadata is asked for first, because `hf_hub_download` waits 23 s for a Hub that cannot be
    reached.
    """
    from huggingface_hub import errors, get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url

    at = f" at revision {revision}" if revision else ""
    by_hand = f"hf download {hub_id} {name}{f' --revision {revision}' if revision else ''}"
    try:
        url = hf_hub_url(hub_id, name, revision=revision)
        get_hf_file_metadata(url, token=get_token(), timeout=TIMEOUT_S)
        hf_hub_download(hub_id, name, revision=revision, cache_dir=folder)
    except errors.OfflineModeIsEnabled:
        return f"HF_HUB_OFFLINE is set; {by_hand} on a machine with network"
    except errors.GatedRepoError:
        return f"{hub_id} is gated; ask for access on its page, then hf auth login"
    except errors.RepositoryNotFoundError:
        return f"no model {hub_id} for this token; another model.path, or hf auth login"
    except errors.RevisionNotFoundError:
        return f"{hub_id} has no revision {revision}; another model.revision"
    except errors.RemoteEntryNotFoundError:
        return f"{hub_id} has no {name}{at}; another model.path"
    except (errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"the Hub failed ({first[0]}); try again, or {by_hand}"
    return ""
