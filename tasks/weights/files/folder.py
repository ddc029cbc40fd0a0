"""The folder of a Hugging Face model: its files, and the only way to copy those beside the weights.

A folder from elsewhere can hold anything under any name. Only files that transformers or vLLM read
for a tokenizer or a processor are copied, and only if `tasks/core/files.py` lets them be followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tasks.core.errors import ArtifactError, first_and_more
from tasks.core.files import copy_file, link_problem, link_refused
from tasks.weights.files.documents import (
    MANIFEST,
    artifact_name,
    optional_json,
    read_json,
    read_manifest,
)
from tasks.weights.files.reader import OTHER_WEIGHTS, index_of, read_header, survey, weight_files
from tasks.weights.files.tensors import Tensors

CONFIG, SINGLE = "config.json", "model.safetensors"
CHAT_TEMPLATE = "chat_template.jinja"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""Files of which a tokenizer needs one."""
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v[0-9]*",
    "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model",
    "ice_text.model", "bpe.model", "tiktoken.model", "*.tiktoken", "tekken.json",
    CHAT_TEMPLATE, "chat_template.json",
)  # fmt: skip
"""Names of a tokenizer's files, as patterns."""
PROCESSORS = (
    "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "audio_processor_config.json",
)  # fmt: skip
"""Names of the processors' files of a multimodal model."""
CODE = ("*.py", "*.txt", "*.model", "*.tiktoken", "*.bpe")
"""Names of a model's own code and of the vocabularies that it reads."""


def side_files(folder: Path, patterns: Sequence[str] = TOKENIZER) -> list[Path]:
    """Return the files of a folder that may be copied beside weights, sorted.

    Raises ArtifactError if one is not a file, or a link that leads elsewhere.
    """
    names = sorted(entry.name for entry in os.scandir(folder)) if folder.is_dir() else []
    paths = [folder / name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    for path in paths:
        _require(path, folder)
    return paths


def copy_side_file(source: Path, target: Path, root: Path | None = None) -> None:
    """Copy a side file. Raises ArtifactError if it is not a file of `root`, else of its folder."""
    _require(source, root or source.parent)
    copy_file(source, target)


def _require(path: Path, folder: Path) -> None:
    problem = link_problem(path, folder)
    if problem:
        raise link_refused(path, problem)
    if not path.is_file():
        raise ArtifactError(
            f"{path}: a folder, a pipe or a device, not a file",
            hint="replace it with a regular file, or remove it",
        )


def entry_problem(path: Path, root: Path) -> str:
    """Return the reason why an entry of a folder must not be read; "" if it may be.

    The weights of a `base` artifact are links to the user's files. They may lead elsewhere, because
    their bytes are compared with the manifest before they are used: whoever made the manifest knew
    the bytes.
    """
    problem = link_problem(path, root)
    is_weights = path.suffix == ".safetensors" and path.is_file()
    return "" if problem and is_weights and artifact_name(path.parent)[0] == "base" else problem


def foreign_entries(folder: Path) -> list[str]:
    """Return one line for each link that leads elsewhere, pipe, socket and device in a folder."""
    findings = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") and not path.exists():
            continue  # `.#x` of Emacs: a broken link that no loader reads, and nothing copies
        problem = entry_problem(path, folder)
        if not problem and not (path.is_file() or path.is_dir()):
            problem = "a pipe, a socket or a device"
        if problem:
            findings.append(f"{path.name}: {problem}")
    return findings


def require_own_files(folder: Path) -> None:
    """Refuse a folder with `foreign_entries`. Raises ArtifactError with all of them."""
    findings = foreign_entries(folder)
    if findings:
        raise ArtifactError(
            f"{folder}/{first_and_more(findings)}",
            details=findings,
            hint=f"remove them, or copy what they lead to: cp -rL {shlex.quote(str(folder))} "
            "<a new folder>",
        )


def model_files(folder: Path) -> tuple[dict[str, Path], Tensors]:
    """Return the files of a model's folder by name, and its tensors; only headers are read.

    Raises ArtifactError with every problem, so a broken download needs one look.
    """
    files: dict[str, Path] = {}
    problems: list[str] = []
    tensors: Tensors = {}
    beside = (CONFIG, "generation_config.json", index_of(SINGLE), *TOKENIZER, *PROCESSORS)
    try:
        files = {path.name: path for path in side_files(folder, beside)}
        if CONFIG in files and "model_type" not in read_json(folder / CONFIG):
            problems.append(f"{CONFIG} has no model_type")
    except ArtifactError as error:
        problems.append(error.message.removeprefix(f"{folder}/"))
    if not (folder / CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        kind = ": this is an adapter; name the base model it belongs to" if adapter else ""
        problems.append(f"no {CONFIG}{kind}")
    if not any((folder / name).is_file() for name in VOCABULARIES):
        problems.append(f"no tokenizer: none of {', '.join(VOCABULARIES)}")
    pickles = weight_files(folder, "*.bin", "*.pt", "*.pth", "*.ckpt")
    if any((folder / name).is_file() for name in (SINGLE, index_of(SINGLE))):
        others = [path.name for path in weight_files(folder, *OTHER_WEIGHTS)]
        tensors, wrong = survey(folder, SINGLE, lambda path: read_header(path).tensors, others)
        problems += wrong
    elif pickles and not weight_files(folder, "*.safetensors"):
        problems.append(
            f"weights only as pickles ({pickles[0].name}), which can run code when loaded; "
            "save them as safetensors: save_pretrained of transformers 5 does"
        )
    elif strays := weight_files(folder, "*.safetensors"):
        problems.append(f"{strays[0].name} is not {SINGLE}, and there is no {index_of(SINGLE)}")
    else:
        problems.append(f"no weights: neither {SINGLE} nor {index_of(SINGLE)}")
    if problems:
        raise ArtifactError(
            f"{folder} cannot be used as a base: {first_and_more(problems)}",
            details=problems,
            hint="repair the folder or download it again; model.path=<another folder>",
        )
    paths = {extent.path for tensor in tensors.values() for extent in tensor.extents}
    return files | {path.name: path for path in sorted(paths)}, tensors


# A wrong base of the same architecture (the instruct model for the plain one) has the same names
# and shapes. So it is identified by what training recorded.

_SAMPLES, _SAMPLE = 16, 4096
_HUB = re.compile(r"models--(.+)")
_PACKED = re.compile(r"(-unsloth)?(-bnb)?-4bit$")
"""Name suffixes of 4-bit copies of the same model."""


def base_mismatch(
    base: Path, *, digest: str = "", name: str = "", store: Path | None = None
) -> str:
    """Return why `base` is not the model that training recorded; "" if it may be.

    The most reliable record decides: `digest` of the base artifact, which is looked up in `store`,
    the root folder of our artifacts, or else `name` of the base or its folder, as PEFT recorded it.
    """
    manifest = read_manifest(base)
    if digest and manifest:
        is_same, own = manifest["digest"] == digest, manifest["digest"][:12]
        return "" if is_same else f"trained on the base {digest[:12]}, {base} is {own}"
    original = published(digest, store, "base") if digest and store is not None else None
    local = Path(name)
    if original is None and "\0" not in name and local.is_absolute():
        original = local if (local / CONFIG).is_file() else None
    if original is not None:
        if original.resolve() == base.resolve() or sample(original) == sample(base):
            return ""
        return f"trained on {original}; the weights in {base} are others"
    called = next((own for own in names_of(base) if name and _contradicts(name, own)), "")
    return f"trained on {name}; {base} says it is {called}" if called else ""


def published(digest: str, store: Path, kind: str) -> Path | None:
    """Return the folder of the artifact with this kind and digest; None if it is not stored."""
    for path in sorted((store / kind).glob("*")):
        if optional_json(path / MANIFEST).get("digest") == digest:  # one may be half written
            return path
    return None


def names_of(base: Path) -> Iterator[str]:
    """Yield the names of a model: from config.json, from the Hub cache, from its folder."""
    name = optional_json(base / CONFIG).get("_name_or_path")
    if isinstance(name, str) and name and not name.startswith(("/", ".")):
        yield name
    for part in base.resolve().parts:
        if match := _HUB.fullmatch(part):
            yield match[1].replace("--", "/")
    yield base.name


def _contradicts(recorded: str, called: str) -> bool:
    """Return True if two Hub names differ, or if one name extends the other with a suffix."""
    first, second = (_PACKED.sub("", text.rstrip("/").lower()) for text in (recorded, called))
    if "/" in first and "/" in second:
        return first != second
    first, second = first.rpartition("/")[2], second.rpartition("/")[2]
    return first != second and (first.startswith(f"{second}-") or second.startswith(f"{first}-"))


def sample(folder: Path) -> str:
    """Return a hash of all header entries and of samples of 4 KiB from every tensor.

    Two checkpoints of one architecture differ nearly everywhere. A change between the samples is
    not noticed.
    """
    from tasks.weights.quantized.packed import open_model

    digest = hashlib.sha256()
    source = open_model(folder)
    for name, info in sorted(source.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        for extent in info.extents:
            with extent.path.open("rb") as file:
                step = max(1, extent.nbytes // _SAMPLES)
                for at in range(0, extent.nbytes, step):
                    file.seek(extent.start + at)
                    digest.update(file.read(min(_SAMPLE, extent.nbytes - at)))
    return digest.hexdigest()
