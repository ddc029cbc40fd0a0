"""Model cards: `README.md` of a served folder, in the format of the Hugging Face Hub.

    write_card(folder, text)                       a published folder, or one that is being made
    beside(text, Path("ckpt/README.md"))           a card that the folder of the user already has

The manifest lists the card under `card`, not among its files: the digest names the model, and the
card says how it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3

from tasks.core.disk import flush
from tasks.core.terminal import plain
from tasks.pipeline.artifact import CARD, MANIFEST, read_manifest

_FENCE = "---\n"
_HEADING = "# Delivered by Plumbline"
_ADAPTER_TAGS = ("lora", "qlora", "adapter", "peft")


def write_card(folder: Path, text: str) -> bool:
    """Write the card of a served folder, and list it in the manifest. Return if that changed it."""
    document = read_manifest(folder)
    data = text.encode()
    entry = {"size": len(data), "blake3": str(blake3(data).hexdigest())}
    if document.get("card") == entry:
        return False
    listed = json.dumps({**document, "card": entry}, indent=1, sort_keys=True) + "\n"
    for name, content in ((CARD, data), (MANIFEST, listed.encode())):
        partial = folder / f".{name}.tmp"
        partial.write_bytes(content)
        flush(partial)
        partial.rename(folder / name)
    flush(folder)
    return True


def card(header: Mapping[str, Any], title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a card with a YAML header and sections of lines; empty ones are left out."""
    lines = [f"# {title}", ""]
    for heading, content in sections.items():
        if content:
            lines += [f"## {heading}", "", *content, ""]
    return plain(f"{_front(header)}\n" + "\n".join(lines))


def _front(header: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in header.items() if value}
    return f"{_FENCE}{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}{_FENCE}"


def beside(text: str, existing: Path) -> str:
    """Return a card, after the card that the user's folder already has; that one keeps its header.

    The header of an adapter's card becomes that of a model: its library, its tags and the path of
    its base are left out.
    """
    if not existing.is_file():
        return text
    theirs = _as_model(plain(existing.read_text(errors="replace")).rstrip())
    if f"\n{_HEADING}" in theirs:  # delivered before: that section describes another folder
        theirs = theirs.partition(f"\n{_HEADING}")[0].rstrip()
    body = text.split(_FENCE, 2)[2].strip().partition("\n")[2].strip()
    return f"{theirs}\n\n{_HEADING}\n\n{body}\n"


def _as_model(text: str) -> str:
    """Return the card of an adapter with the header of the model that it was merged into."""
    header = _header(text)
    if header.get("library_name") != "peft":
        return text
    tags = [str(tag) for tag in header.pop("tags", None) or []]
    base = header.pop("base_model", None)  # a list in cards of merged models
    header |= {
        "library_name": "transformers",
        "base_model": hub_id(base) if isinstance(base, str) else "",
        "tags": [t for t in tags if t not in _ADAPTER_TAGS and t.split(":")[0] != "base_model"],
    }
    return _front(header) + text.split(_FENCE, 2)[2]


def _header(text: str) -> dict[str, Any]:
    """Return the YAML header of a card; empty if there is none, or it cannot be read."""
    parts = text.split(_FENCE, 2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else {}
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}


def license_of(folder: str | None) -> str:
    """Return the license that the card of a local base states; empty if there is none."""
    path = Path(folder or "").expanduser() / CARD
    if not folder or not path.is_file():
        return ""
    stated = _header(path.read_text(errors="replace")).get("license")
    return stated if isinstance(stated, str) else ""


def hub_id(name: str | None) -> str:
    """Return a name if it is a Hub id such as `Qwen/Qwen3-8B`, else an empty text."""
    if not name or name[0] in "./~" or name.count("/") != 1 or Path(name).exists():
        return ""
    return name
