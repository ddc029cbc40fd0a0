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
    from huggingface_hub import constants, try_to_load_from_cache

    folder, reason = str(constants.HF_HUB_CACHE), ""
    try:
        file = try_to_load_from_cache(hub_id, name, folder, revision)
        if not isinstance(file, str):
            file, reason = _download(hub_id, revision, name, folder)
        config = json.loads(Path(file).read_text("utf-8")) if file else {}
    except (OSError, ValueError) as error:  # also an id that no model can have
        return {}, str(error)
    return (config, reason) if isinstance(config, dict) else ({}, f"{file}: not an object")


@cache
def _download(hub_id: str, revision: str | None, name: str, folder: str) -> tuple[str, str]:
    """Download a file into the cache. Returns its path, or the reason if that fails.

    The metadata is asked for first, because `hf_hub_download` waits 23 s for a Hub that cannot be
    reached.
    """
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url

    try:
        url = hf_hub_url(hub_id, name, revision=revision)
        get_hf_file_metadata(url, token=get_token(), timeout=TIMEOUT_S)
        return hf_hub_download(hub_id, name, revision=revision, cache_dir=folder), ""
    except hub_errors() as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        by_hand = f"hf download {hub_id} {name}" + (f" --revision {revision}" if revision else "")
        return "", f"{first} (another model.path or model.revision; hf auth login; or {by_hand})"


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the classes of huggingface_hub's errors: its own, and those of its HTTP library."""
    import huggingface_hub.utils

    client: Any = huggingface_hub.utils  # httpx under version 1, httpx2 under version 2
    return client.httpx.HTTPError, client.httpx.InvalidURL, OSError, ValueError
