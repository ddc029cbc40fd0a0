"""Find the files of a DeepSpeed checkpoint: the folder of one step, and its files by rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError, Coded, first_and_more
from tasks.weights.files.reader import weight_files

_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+(?:_\d+)?)_model_states\.pt"
)
_OPTIM = re.compile(
    r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+(?:_\d+)?)_optim_states\.pt"
)
_LATEST = ("latest", "latest_universal")


@dataclass(frozen=True)
class Layout:
    """Files of one step."""

    root: Path
    model: Mapping[int, Path]  # `*model_states.pt` by rank; only rank 0 below ZeRO-3
    optim: Mapping[int, Path]  # `*optim_states.pt` by rank
    zero: Path | None  # folder of a universal checkpoint's parameters
    partitioned: bool  # one model file per rank, as ZeRO-3 writes


def find_layout(folder: Path) -> Layout:
    """Find the step in `folder` (the folder passed to `save_checkpoint`, or that of a step).

    Raises:
        ArtifactError: there is no step, or several and `latest` names none; files of tensor,
            pipeline or expert parallel training; two files of one rank.
    """
    root = _step(folder)
    findings: list[str] = []
    model: dict[int, Path] = {}
    optim: dict[int, Path] = {}
    split = set()
    for path in weight_files(root, "*.pt"):
        kind, match = (model, _MODEL.fullmatch(path.name)) if "model_s" in path.name else (
            optim, _OPTIM.fullmatch(path.name)
        )  # fmt: skip
        if match is None:
            findings += _foreign(path.name)
            continue
        rank = int(match["rank"] or 0)
        if int(match["mp"].split("_")[0]) or "_" in match["mp"]:
            findings.append(
                Coded(f"{path.name}: tensor or pipeline parallel training", "ZERO_PARALLEL")
            )
        elif rank in kind:
            text = f"{path.name}: rank {rank} has another file, {kind[rank].name}"
            findings.append(Coded(text, "ZERO_WORLD_DISAGREES"))
        else:
            kind[rank] = path
        if kind is model:
            split.add(match["rank"] is not None)
    if not model and not findings:
        findings.append("no *_model_states.pt")
    if len(split) > 1:
        text = "model states both of ZeRO-3 and of lower stages: two checkpoints in one"
        findings.append(Coded(text, "ZERO_WORLD_DISAGREES"))
    if findings:
        raise ArtifactError(
            f"{root}: not a readable checkpoint: {first_and_more(findings)}",
            details=findings,
            hint="convert tensor, pipeline and expert parallel checkpoints with their trainer"
            if any(getattr(finding, "code", "") == "ZERO_PARALLEL" for finding in findings)
            else "keep only one checkpoint's files in the folder: one model states file per rank",
        )
    zero = root / "zero"
    return Layout(root, model, optim, zero if zero.is_dir() else None, split == {True})


def _foreign(name: str) -> list[str]:
    if "expert" in name or name.startswith("expp_rank"):
        return [Coded(f"{name}: experts of expert parallel training", "ZERO_PARALLEL")]
    if name.startswith("layer_"):
        return [Coded(f"{name}: a layer of pipeline parallel training", "ZERO_PARALLEL")]
    if name.endswith(("_model_states.pt", "optim_states.pt")):
        return [f"{name}: its name does not tell the rank"]
    return []


def _step(folder: Path) -> Path:
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder")
    if weight_files(folder, "*_model_states.pt"):
        return folder
    steps = sorted({path.parent.name for path in weight_files(folder, "*/*_model_states.pt")})
    for name in _LATEST:
        if not (folder / name).is_file():
            continue
        tag = (folder / name).read_text(errors="replace")[:256].strip()
        if not tag or Path(tag).name != tag or tag in (".", ".."):
            raise ArtifactError(
                f"{folder}: {name} names {tag!r}, which is not a plain folder name",
                code="ZERO_LATEST_DANGLING",
            )
        if tag not in steps:
            raise ArtifactError(
                f"{folder}: {name} names {tag}, which has no *_model_states.pt",
                details=[f"{step}: has them" for step in steps],
                hint="name the step's folder itself",
                code="ZERO_LATEST_DANGLING",
            )
        return folder / tag
    if len(steps) != 1:
        raise ArtifactError(
            f"{folder}: no DeepSpeed checkpoint: "
            + (f"{len(steps)} steps and no file `latest`" if steps else "no *_model_states.pt"),
            details=steps,
            hint="name the step's folder itself" if steps else "",
            code="ZERO_LATEST_DANGLING" if steps else "",
        )
    return folder / steps[0]
