"""Read the mean and std of rewards, from config.json (OpenRLHF) or from buffers in the weights.

    normalised reward = (score - mean) / std

OpenRLHF's loader leaves its buffers uninitialised under transformers 5. So both numbers are written
to config.json, under the keys that OpenRLHF reads (`mean`, `std`); vLLM accepts them as
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
    """Normalisation of rewards: (score - mean) / std.

    Attributes:
        mean: mean of the scores; None for no normalisation.
        std: standard deviation of the scores; None for no normalisation.
        buffers: "<input>:<key>" of the tensors that store them.
    """

    mean: float | None = None
    std: float | None = None
    buffers: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Return True if rewards are normalised."""
        return self.mean is not None and self.std is not None

    def with_bias(self, bias: float) -> Normalisation:
        """Return the normalisation for the same head without its bias.

        The bias moves into the mean: `(w h + bias - mean) / std = (w h - (mean - bias)) / std`.
        Rewards are bit-identical if the mean is 0.
        """
        if bias == 0.0:
            return self
        return Normalisation((self.mean or 0.0) - bias, self.std or 1.0, self.buffers)


def read_normalisation(folder: HeadFolder) -> tuple[Normalisation, list[str]]:
    """Return the normalisation of a folder, and its findings. Raises ArtifactError."""
    findings: list[str] = []
    source = folder.sources[folder.weights]
    configured = _from_config(folder.config, findings)
    keys = [key for key in BUFFERS if key in source.tensors]
    buffers_read = {key: _from_buffer(source, key, findings) for key in keys}
    for key, value in buffers_read.items():
        if value is not None and key in configured and _as_f32(configured[key]) != _as_f32(value):
            findings.append(f"{key}: {value} in the weights, {configured[key]} in config.json")
    both = {
        **{key: value for key, value in buffers_read.items() if value is not None},
        **configured,
    }
    findings += _pair_findings(both)
    buffers = tuple(f"{folder.weights}:{key}" for key in keys)
    return Normalisation(both.get("mean"), both.get("std"), buffers), findings


def normalisation_from(config: Mapping[str, Any]) -> tuple[Normalisation, list[str]]:
    """Return the normalisation in config.json, and its findings."""
    findings: list[str] = []
    configured = _from_config(config, findings)
    return Normalisation(configured.get("mean"), configured.get("std")), findings + _pair_findings(
        configured
    )


def _pair_findings(values: Mapping[str, float]) -> list[str]:
    findings = []
    if len(values) == 1:
        findings.append(f"{next(iter(values))} is there, the other of mean and std is not")
    if values.get("std", 1.0) <= 0:
        findings.append(f"std is {values['std']}: rewards cannot be divided by it")
    return findings


def read_scalar(source: Source, key: str) -> float:
    """Read a float tensor of one element. Raises ArtifactError for any other tensor."""
    info = source.tensors[key]
    size = math.prod(info.shape)
    formats = {"F32": "<f", "F16": "<e", "BF16": "<f", "F64": "<d"}
    if size != 1 or info.dtype not in formats:
        raise ArtifactError(f"{key}: {describe(info.shape, info.dtype)} is not one number")
    with Reader(source.extents(key)) as reader:
        raw = reader.read().tobytes()
    widen = bytes(2) if info.dtype == "BF16" else b""
    return float(struct.unpack(formats[info.dtype], widen + raw)[0])


def _as_f32(value: float) -> float:
    """Round a number to fp32, as OpenRLHF's buffers store it; infinity if it is too large."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except (OverflowError, struct.error):  # the first for floats, the second for integers
        return math.inf


def _from_config(config: Mapping[str, Any], findings: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for key in BUFFERS:
        value = config.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(_as_f32(value)):
            findings.append(f"config.json: {key}={str(value)[:_SHOWN]} is not a number in fp32")
        else:
            values[key] = float(value)
    return values


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
