"""The opened and recognised folder that every check reads.

source = open_source(Path("ckpt"), base=None)
source.kind is Kind.ADAPTER
source.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape
source.config("tokenizer_config.json").get("eos_token")

It is untrusted: it is listed once, its documents and headers are read on demand and within limits.
Nothing is written, and nothing is run in this process. Links to folders, and links that lead out of
the folder and its hub cache, are not followed; pipes and devices are not opened.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tasks.core.errors import ArtifactError
from tasks.core.terminal import command
from tasks.weights.files.documents import MANIFEST, own_manifest, read_json, read_text
from tasks.weights.files.folder import entry_problem
from tasks.weights.files.reader import Weights, index_of, is_index, read_header
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.heads import OPENRLHF, SIDE_FILES, architectures
from tasks.weights.pickled.torch_file import nested_in, read_torch_file
from tasks.weights.shards import PARTITIONS

MAX_ENTRIES = 50_000
"""Most files and folders that are listed."""
MAX_DEPTH = 6
MAX_TEXT_BYTES = 4 << 20
_T = TypeVar("_T")


class Folder:
    """An untrusted folder; a missing or unusable file reads as an empty document."""

    def __init__(self, root: Path) -> None:
        """List the folder. Raises ArtifactError if it does not exist or cannot be read."""
        self.root = root
        self.files: dict[str, int] = {}  # size in bytes of every regular file, by relative path
        self.folders: list[str] = []  # relative paths
        # reason by path: broken links, links to folders, folders nested too deep
        self.odd: dict[str, str] = {}
        # reason by path: links that lead out, pipes, sockets, devices, endless listings
        self.unsafe: dict[str, str] = {}
        self.wrong: dict[str, str] = {}  # reason by name; filled when files are read
        self._read: dict[str, Any] = {}
        self._list()

    def here(self) -> Iterator[str]:
        """Yield the names of files directly in the folder."""
        return (name for name in self.files if "/" not in name)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object."""
        return self._once(name, read_json, {})

    def text(self, name: str) -> str:
        """Return the content of a text file."""
        return self._once(name, lambda path: read_text(path, MAX_TEXT_BYTES), "")

    def _once(self, name: str, read: Callable[[Path], _T], empty: _T) -> _T:
        if name not in self._read:
            self._read[name] = empty
            if name in self.files:
                try:
                    self._read[name] = read(self.root / name)
                except ArtifactError as error:
                    self.wrong[name] = error.message.removeprefix(f"{self.root / name}: ")
        result: _T = self._read[name]
        return result

    def _list(self) -> None:
        """List breadth first, within `MAX_ENTRIES` and `MAX_DEPTH`."""
        count, queue = 0, deque([""])
        while queue:
            at = queue.popleft()
            try:
                with os.scandir(self.root / at) as entries:
                    some = sorted(islice(entries, MAX_ENTRIES + 1), key=lambda entry: entry.name)
            except OSError as error:
                if not at:
                    text = f"{self.root}: cannot be read: {error.strerror}"
                    raise ArtifactError(text) from error
                self.odd[at.rstrip("/")] = f"cannot be read: {error.strerror}"
                continue
            for entry in some:
                count += 1
                if count > MAX_ENTRIES:
                    self.unsafe[""] = f"more than {MAX_ENTRIES} files; the rest not listed"
                    return
                if self._add(entry, f"{at}{entry.name}"):
                    queue.append(f"{at}{entry.name}/")

    def _add(self, entry: os.DirEntry[str], name: str) -> bool:
        """Add an entry. Returns True for a folder to list."""
        try:
            info = entry.stat()  # follows links to files, of which hub caches consist
        except OSError as error:
            self.odd[name] = f"a broken link: {error.strerror}"
            return False
        if entry.is_symlink() and (problem := entry_problem(self.root / name, self.root)):
            self.unsafe[name] = problem
        elif stat.S_ISREG(info.st_mode):
            self.files[name] = info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            self.unsafe[name] = "a pipe, a socket or a device"
        elif entry.is_symlink():
            self.odd[name] = "a link to a folder, which is not followed"
        elif name.count("/") + 1 >= MAX_DEPTH:
            self.odd[name] = "nested too deep"
        else:
            self.folders.append(name)
            return True
        return False


def open_weights(folder: Folder, single: str) -> Weights:
    """Open the files of a checkpoint: those of its index, else `single`, else its shards."""
    weights = Weights(single, index=_index(folder, index_of(single)))
    names = sorted(set(weights.index.values())) if weights.index else _unlisted(folder, single)

    def read(path: Path) -> Tensors:
        is_safe = path.suffix == ".safetensors"
        return read_header(path).tensors if is_safe else _pickle(path, weights)

    weights.open(folder.root, names, read, folder.files.__contains__)
    return weights


def _index(folder: Folder, name: str) -> Mapping[str, str] | None:
    table = folder.json(name).get("weight_map")
    if name not in folder.files or name in folder.wrong:
        return None
    if is_index(table):
        return table
    folder.wrong[name] = "its weight_map is not a table of file names"
    return None


def _unlisted(folder: Folder, single: str) -> list[str]:
    """Return the files of a checkpoint without an index: the single file, else its shards."""
    if single in folder.files:
        return [single]
    stem, _, suffix = single.rpartition(".")
    pattern = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}")
    return [name for name in folder.here() if pattern.fullmatch(name)]


def _pickle(path: Path, into: Weights) -> Tensors:
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: contains a {type(content).__name__}, not a state dict")
    if key := nested_in(content):
        raise ArtifactError(f"{path}: a trainer's checkpoint: save what is under the key {key!r}")
    into.others += [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}


CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MODELS = ("model.safetensors", "pytorch_model.bin")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
READ_BYTES = 2 << 30
"""Most bytes of weights that are read unless `values` says otherwise."""


class Kind(StrEnum):
    """Kinds of folders. `FOREIGN` is a known format that only the tool that wrote it reads."""

    ADAPTER = "adapter"
    MODEL = "model"
    REWARD = "reward-model"
    VALUE = "value-head-model"
    DEEPSPEED = "deepspeed"
    SHARDS = "shards"
    DISTRIBUTED = "distributed"
    FOREIGN = "foreign"
    MIXTURE = "mixture"
    NOTHING = "nothing"


@dataclass
class Source:
    """A recognised folder, and the base to compare it with."""

    folder: Folder
    kind: Kind
    what: str  # description for people, without the folder's name
    weights: Weights  # its tensors; empty for kinds that are not read by headers
    manifest: Mapping[str, Any]  # the manifest of a Plumbline artifact; empty for other folders
    beside: tuple[str, ...] = ()  # descriptions of trainer checkpoints in the same folder
    base: Source | None = None  # the base model, opened in the same way
    # True to read tensor data, False for headers only; None reads up to `READ_BYTES`
    values: bool | None = None
    # folder of the adapter that was merged into the base, if it is known
    adapter: Path | None = None
    # true to plan the merge of an adapter, too, if nothing else is wrong with it
    planned: bool = False
    alone: bool = False  # a delivery makes checks that plan or start a process itself
    # worst severity of each code that was reported so far
    codes: dict[str, Any] = field(default_factory=dict)
    explained: set[str] = field(default_factory=set)  # names of the tensors in these findings
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, make: Callable[[Source], _T]) -> _T:
        """Return `make(source)`, which is computed once and shared by the checks."""
        if make not in self._made:
            self._made[make] = make(self)
        result: _T = self._made[make]
        return result

    @property
    def root(self) -> Path:
        """Path of the folder."""
        return self.folder.root

    def line(self) -> str:
        """Return one line: the folder, its description, and the files that are not used."""
        rest = f"; left alone: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.root}: {self.what}{rest}"

    @property
    def is_adapter(self) -> bool:
        """True if it is a PEFT adapter."""
        return self.kind is Kind.ADAPTER

    @property
    def is_model(self) -> bool:
        """True if it is a full model, with or without a reward or value head."""
        return self.kind in (Kind.MODEL, Kind.REWARD, Kind.VALUE)

    @property
    def is_read(self) -> bool:
        """True if the data of its tensors is read."""
        small = self.weights.nbytes <= READ_BYTES
        return bool(self.tensors) and (small if self.values is None else self.values)

    @property
    def has_base(self) -> bool:
        """True if there is a full model to compare it with."""
        return self.base is not None and self.base.is_model

    @property
    def known_base(self) -> Source:
        """The base, for checks that need one. Raises LookupError."""
        if self.base is None:
            raise LookupError("no base")
        return self.base

    @property
    def tensors(self) -> Tensors:
        """Headers of its tensors."""
        return self.weights.tensors

    def config(self, name: str = CONFIG) -> Mapping[str, Any]:
        """Return a JSON document of the folder; empty if there is no usable one."""
        return self.folder.json(name)


def open_source(
    root: Path,
    base: Path | None = None,
    *,
    values: bool | None = None,
    adapter: Path | None = None,
) -> Source:
    """Open a folder and its base: the one in `base`, else the one that an adapter names.

    Raises:
        ArtifactError: the folder or the base does not exist or cannot be listed.
    """
    source = recognise(root.absolute())  # a child process in another folder reads it, too
    base = base or (named_base(source.config(ADAPTER_CONFIG)) if source.is_adapter else None)
    if base is not None:
        source.base = recognise(base.absolute())
        source.base.values = values
    source.values, source.adapter = values, adapter
    return source


def recognise(root: Path) -> Source:
    """Recognise a folder by file names, then configuration and headers. Raises ArtifactError."""
    folder = Folder(root)
    manifest = own_manifest(folder.json(MANIFEST))
    states = tuple(
        what
        for what, pattern in _STATES.items()
        if any(re.fullmatch(pattern, name) for name in folder.files)
    )
    adapter, model = _open_first(folder, ADAPTERS), _open_first(folder, MODELS)
    # Shards have an adapter_config.json beside them, which gathering uses.
    parts, weights = PARTITIONS in folder.files, Weights("")
    # TRL saves the head of a PEFT model like a full model.
    is_head = model is not None and model.tensors and all("v_head." in key for key in model.tensors)
    if adapter is not None and model is not None and not is_head:
        kind, weights = Kind.MIXTURE, model
        what = f"a mixture: a PEFT adapter ({_stored(adapter)}) and a full model ({_stored(model)})"
    elif adapter is not None or (ADAPTER_CONFIG in folder.files and not (states or parts)):
        weights = adapter or Weights(ADAPTERS[0])
        kind, what = Kind.ADAPTER, _adapter(folder, weights)
    elif model is not None:
        weights = model
        kind, what = _model(folder, model)
    elif parts:
        kind, what = Kind.SHARDS, "Plumbline's shards"
    elif states:
        kinds = {"DeepSpeed": Kind.DEEPSPEED, "torch distributed": Kind.DISTRIBUTED}
        what, *rest = states
        kind = next((kind for part, kind in kinds.items() if part in what), Kind.FOREIGN)
        states = tuple(rest)
    else:
        kind = Kind.NOTHING
        what = "a configuration without weights" if CONFIG in folder.files else "nothing known"
        if manifest:
            what = f"a Plumbline artifact of kind {manifest.get('kind')}"
    if manifest and weights.files:
        what = f"Plumbline artifact of kind {manifest.get('kind')}: {what}"
    return Source(folder, kind, what, weights, manifest, states)


_STATES = {
    # description: pattern of one of its files
    # A trainer's output folder, which holds several, is none itself.
    "a DeepSpeed checkpoint": r"([^/]+/)?(zero/[^/]+/fp32|mp_rank_\d+_model_states"
    r"|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states)\.pt",
    "verl's FSDP shards": r"(.*/)?(actor/|critic/)?model_world_size_\d+_rank_\d+\.pt",
    # Today's Megatron writes *.distcp with names and layouts of its own, and common.pt.
    "a Megatron checkpoint": r"(.*/)?(mp_rank_\d+(_\d+)?/model_optim_rng|common)\.pt",
    "a torch distributed (FSDP) checkpoint": r"(.*/)?__\d+_\d+\.distcp",
    "a GGUF model": r"[^/]+\.gguf",
    "an MLX adapter": r"(\d+_)?adapters\.(safetensors|npz)",
    "a raw torch state dict": r"(.*/)?(consolidated|model|pytorch_model)[^/]*\.(pt|pth)"
    r"|(hf_model|lit_model|adapter)_[^/]*\.(pt|pth)|lit_model\.pth(\.lora)?|pytorch_model_fsdp\.bin",
}


def _open_first(folder: Folder, names: tuple[str, ...]) -> Weights | None:
    """Open the first of several names that has files: safetensors come before pickles."""
    for name in names:
        weights = open_weights(folder, name)
        if weights.files or weights.index is not None or index_of(name) in folder.files:
            return weights
    return None


def _stored(weights: Weights) -> str:
    """Return a short description of the weight files."""
    if len(weights.files) == 1:
        return weights.files[0]
    return f"{len(weights.files)} files of {weights.single.replace('.', '-*.', 1)}"


def _adapter(folder: Folder, weights: Weights) -> str:
    config = folder.json(ADAPTER_CONFIG)
    rank = f" of rank {config['r']}" if type(config.get("r")) is int else ""
    stored = _stored(weights) if weights.files else "no weights"
    return f"a PEFT {'DoRA ' if config.get('use_dora') else ''}adapter{rank} ({stored})"


def _model(folder: Folder, weights: Weights) -> tuple[Kind, str]:
    config, stored = folder.json(CONFIG), _stored(weights)
    names = architectures(config)
    side = next((name for name in SIDE_FILES if name in folder.files), "")
    if side:
        return Kind.VALUE, f"a model with LLaMA-Factory's value head ({stored}, {side})"
    if any("v_head." in key for key in weights.tensors):
        return Kind.VALUE, f"a model with TRL's value head ({stored})"
    if {*OPENRLHF} & set(names) or "value_head_prefix" in config:
        role = "critic" if "CriticModel" in names else "reward model"
        return Kind.REWARD, f"an OpenRLHF {role} ({stored})"
    if any(name.endswith("ForSequenceClassification") for name in names):
        return Kind.REWARD, f"a {names[0]} ({stored})"
    return Kind.MODEL, f"a full {names[0] if names else 'model'} ({stored})"


def named_base(settings: Mapping[str, Any]) -> Path | None:
    """Return the local folder that an adapter names as its base, or its snapshot in the hub cache.

    A relative path is not followed: it depends on where training ran.
    """
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    revision = revision if isinstance(revision, str) and revision else "main"
    if not isinstance(name, str) or "\0" in name:
        return None
    if name.startswith("/"):
        return Path(name) if Path(name).is_dir() else None
    known = re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}@[\w./-]{1,200}", f"{name}@{revision}")
    if not known or ".." in revision.split("/") or revision.startswith("/"):
        return None
    from huggingface_hub import constants  # the functions of the library take longer than an audit

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = cache / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = cache / "snapshots" / commit
    return snapshot if (snapshot / CONFIG).is_file() else None


def setting(file: str, **values: object) -> str:
    """Return an edit of a JSON file as text."""
    edits = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in values.items())
    return f"in {file}: {edits}"


def deliver(root: object, base: object = None) -> str:
    """Return the command that delivers a folder."""
    return command("deliver", source=root, base=base, out=f"{root}-delivered")


def commands(
    root: object, base: object = None, adapter: object = None, *, needs_base: bool = True
) -> dict[str, str]:
    """Return commands by the name that stands for them in the fix of a check."""
    known, adapter = base or "<base>", adapter or "<adapter>"
    merged = f"{root}-merged"
    return {
        "repair": command("audit", source=root, base=base, fix=True, out_dir=f"{root}-repaired"),
        "deliver": deliver(root, known if needs_base else None),
        "merge": command("deliver", source=root, base=known, out=merged),
        "again": command("deliver", source=adapter, base=known, out=merged),
        "prove": command("audit", source=root, base=known, adapter=adapter, values=True),
        "with_base": command("audit", source=root, base=known),
    }
