"""Model cards: `README.md` of a served folder, in the format of the Hugging Face Hub.

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

from tasks.core.files import flush
from tasks.core.terminal import plain
from tasks.pipeline.artifact import CARD, read_manifest
from tasks.weights.files.documents import MANIFEST

_FENCE = "---\n"


def write_card(folder: Path, text: str) -> bool:
    """Write the card of a served folder, and list it in the manifest. Return if that changed it."""
    document = read_manifest(folder)
    data = text.encode()
    entry = {"size": len(data), "blake3": str(blake3(data).hexdigest())}
    if document.get("card") == entry:
        return False
    without = {key: value for key, value in document.items() if key != "card"}
    before, after = (
        (json.dumps(each, indent=1, sort_keys=True) + "\n").encode()
        for each in (without, without | {"card": entry})
    )
    # A card that is not listed is no fault, nor is a partial file: a killed write does no damage.
    for name, content in ((MANIFEST, before), (CARD, data), (MANIFEST, after)):
        partial = folder / f".{name}.tmp"
        partial.write_bytes(content)
        flush(partial)
        partial.rename(folder / name)
    flush(folder)
    return True


def card(header: Mapping[str, Any], title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a card with a YAML header and sections of lines; empty ones are left out."""
    fields = {name: value for name, value in header.items() if value}
    front = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    lines = [f"{_FENCE}{front}{_FENCE}", f"# {title}", ""]
    for heading, content in sections.items():
        if content:
            lines += [f"## {heading}", "", *content, ""]
    return plain("\n".join(lines))


def license_of(folder: str | None) -> str:
    """Return the license that the card of a local base states; empty if there is none."""
    path = Path(folder or "").expanduser() / CARD
    parts = path.read_text(errors="replace").split(_FENCE, 2) if folder and path.is_file() else []
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except yaml.YAMLError:
        header = None
    stated = header.get("license") if isinstance(header, dict) else None
    return stated if isinstance(stated, str) else ""


def hub_id(name: str | None) -> str:
    """Return a name if it is a Hub id such as `Qwen/Qwen3-8B`, else an empty text."""
    if not name or name[0] in "./~" or name.count("/") != 1 or Path(name).exists():
        return ""
    return name
