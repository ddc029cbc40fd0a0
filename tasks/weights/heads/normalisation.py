"""Mean and std of rewards: from config.json, where OpenRLHF writes them, or from buffers.

    normalised reward = (score - mean) / std

OpenRLHF's own loader leaves them uninitialised under transformers 5; so they are kept as numbers in
config.json, under the keys it reads (`mean`, `std`), and vLLM takes them as
`PoolerConfig(logit_mean=mean, logit_sigma=std)`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.contract import describe
from tasks.core.errors import ArtifactError
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.source import Source
from tasks.weights.heads.folder import HeadFolder

BUFFERS = ("mean", "std")
_SHOWN = 40


@dataclass(frozen=True)
class Normalisation:
    """How rewards are normalised.

    Attributes:
        mean: subtracted from a score. std: what the rest is divided by.
        buffers: "<input>:<key>" of tensors that hold them.
    """

    mean: float | None = None
    std: float | None = None
    buffers: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Whether there is any."""
        return self.mean is not None and self.std is not None

    def with_bias(self, bias: float) -> Normalisation:
        """The same rewards from a head without `bias`, which is moved into the mean.

        `(w h + bias - mean) / std = (w h - (mean - bias)) / std`; bit for bit where mean is 0.
        """
        if bias == 0.0:
            return self
        return Normalisation((self.mean or 0.0) - bias, self.std or 1.0, self.buffers)


def read_normalisation(folder: HeadFolder) -> tuple[Normalisation, list[str]]:
    """What the folder says, and what is wrong with it. Raises ArtifactError."""
    findings: list[str] = []
    source = folder.sources[folder.weights]
    said = _from_config(folder.config, findings)
    keys = [key for key in BUFFERS if key in source.tensors]
    held = {key: _from_buffer(source, key, findings) for key in keys}
    for key, value in held.items():
        if value is not None and key in said and _as_f32(said[key]) != _as_f32(value):
            findings.append(f"{key}: {value} in the weights, {said[key]} in config.json")
    both = {**{key: value for key, value in held.items() if value is not None}, **said}
    findings += _pair_findings(both)
    buffers = tuple(f"{folder.weights}:{key}" for key in keys)
    return Normalisation(both.get("mean"), both.get("std"), buffers), findings


def normalisation_from(config: Mapping[str, Any]) -> tuple[Normalisation, list[str]]:
    """What config.json alone says, and what is wrong with it."""
    findings: list[str] = []
    said = _from_config(config, findings)
    return Normalisation(said.get("mean"), said.get("std")), findings + _pair_findings(said)


def _pair_findings(said: Mapping[str, float]) -> list[str]:
    found = []
    if len(said) == 1:
        found.append(f"{next(iter(said))} is there, the other of mean and std is not")
    if said.get("std", 1.0) <= 0:
        found.append(f"std is {said['std']}: rewards cannot be divided by it")
    return found


def read_scalar(source: Source, key: str) -> float:
    """A tensor of one element. Raises ArtifactError when it is not one of fp32, fp16 or bf16."""
    info = source.tensors[key]
    size = math.prod(info.shape)
    formats = {"F32": "<f", "F16": "<e", "BF16": "<f", "F64": "<d"}
    if size != 1 or info.dtype not in formats:
        raise ArtifactError(f"{key}: {describe(info.shape, info.dtype)} is not one number")
    with Reader(source.extents(key)) as reader:
        raw = bytearray(reader.nbytes)
        reader.into(raw, 0)
    if info.dtype == "BF16":
        raw = bytearray(2) + raw
    return float(struct.unpack(formats[info.dtype], raw)[0])


def _as_f32(value: float) -> float:
    """As OpenRLHF's buffers hold it; what fp32 cannot hold is infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except (OverflowError, struct.error):  # of floats, of integers
        return math.inf


def _from_config(config: Mapping[str, Any], findings: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in BUFFERS:
        value = config.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(_as_f32(value)):
            findings.append(f"config.json: {key}={str(value)[:_SHOWN]} is not a number in fp32")
        else:
            found[key] = float(value)
    return found


def _from_buffer(source: Source, key: str, findings: list[str]) -> float | None:
    try:
        value = read_scalar(source, key)
    except ArtifactError as error:
        findings.append(error.message)
        return None
    if not math.isfinite(value):
        findings.append(f"{key}: {value} in the weights")
        return None
    return value
