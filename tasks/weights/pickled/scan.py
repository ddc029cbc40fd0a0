"""Find what loading a file would run: the names in every pickle in it, wherever it lies.

A file is judged by its content, not by its name. Every pickle counts: those one after the other
(torch's format before 1.6), in a zip file whether or not its directory lists them, within byte
strings, packed, behind numpy's header. Nothing is unpickled. What cannot be followed is reported,
so that "no names" means that there are none.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.archive import read_archives
from tasks.weights.pickled.unpickler import (
    DamagedError,
    Foreign,
    Global,
    PickleError,
    TruncatedError,
    UnresolvedError,
    Walker,
)

MAX_BYTES = 128 << 20
"""Most bytes of a pickle, of a zip file that torch did not write, and of what one unpacks to."""
MAX_STEPS = 40_000_000
"""Most instructions of one `Scanner`: about a minute."""
_HEAD, _CHUNK = 64 << 10, 1 << 20
_DATA_STEPS = 20_000
"""Most instructions at the beginning of data that no loader unpickles."""
_FEW_STEPS = 64
"""Instructions by which a pickle is told from other data once `MAX_STEPS` are used up."""
_INERT = 1024
_MAX_MEMBERS, _MAX_STREAMS, _MAX_DEPTH, _MAX_REASONS = 20_000, 1000, 4, 5
_ENCRYPTED, _DEFLATED = 0x41, 8
_KERAS, _LAMBDA_NAME = "config.json", "keras.layers.Lambda"
_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")
_LEGACY_MAGIC, _LEGACY_PICKLES = 0x1950A86A20F9469CFC6C, 5
_LOCAL, _LOCAL_MAGIC, _END_MAGIC = struct.Struct("<4s5H3L2H"), b"PK\x03\x04", b"PK\x05\x06"
_TAIL = 22 + (64 << 10)
"""Bytes in which the end of a zip file's directory lies."""
_CLOSED = {
    b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar", b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}  # fmt: skip
_PACKED: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(memlimit=MAX_BYTES)),
    (b"]\0\0", lambda: lzma.LZMADecompressor(memlimit=MAX_BYTES)),
    *((b"x" + bytes([level]), zlib.decompressobj) for level in (0x01, 0x5E, 0x9C, 0xDA)),
)
_NUMPY, _HDF5 = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n"
_LAMBDA = re.compile(rb'"class_name"\s*:\s*"(?:Lambda"|[^"]{0,99}\\u)')
_FILE_OPERATION = re.compile(rb"\x12(?:\x08Read|\x09Write)File")
"""Field `op` of a TensorFlow node."""


@dataclass
class Scanned:
    """Result of a scan.

    Attributes:
        names: dotted names of the classes and functions that loading the file may import or call.
        unreadable: reasons why the file may run more than that, with the offset.
    """

    names: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)

    def add_reason(self, where: str, reason: object) -> None:
        """Add a reason, unless there are many."""
        text = f"{where}: {reason}" if where else str(reason)
        if len(self.unreadable) < _MAX_REASONS and text not in self.unreadable:
            self.unreadable.append(text)


@dataclass(frozen=True)
class _Data:
    """Bytes to scan."""

    raw: bytes
    where: str  # name of the part within the file; "" for the file itself
    size: int  # number of bytes with those that were not read
    suspect: bool = False  # it should be a pickle, so that damage counts
    inert: bool = False  # data that no loader of tensors unpickles
    depth: int = 0  # number of archives around it


class Scanner:
    """Scan files, with a limit of instructions and unpacked bytes for all of them together."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._unpacked = 4 * MAX_BYTES

    def scan(self, path: Path) -> Scanned:
        """Scan a file. Raises ArtifactError if it cannot be read."""
        scanned = Scanned()
        try:
            with path.open("rb") as file:
                for data in _parts(path, file):
                    self._content(data, scanned)
                scanned.names.update(_graph_code(path, file))
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
        return scanned

    def _content(self, data: _Data, scanned: Scanned, at: int = 0) -> None:
        """Scan the bytes from `at` on: as pickles, and by the format that begins there."""
        if data.inert:
            return self._pickles(data, at, scanned)
        head = data.raw[at : at + 512]
        packed = next((make for magic, make in _PACKED if head.startswith(magic)), None)
        closed = "tar" if head[257:262] == b"ustar" else ""
        closed = next((name for magic, name in _CLOSED.items() if head.startswith(magic)), closed)
        is_zip, is_array = head.startswith(_LOCAL_MAGIC), head.startswith(_NUMPY)
        is_safetensors = head[5:9] == b"\0\0\0{"
        other = packed is not None or closed or is_zip or is_array or is_safetensors
        self._pickles(data, at, scanned, is_other=bool(other))
        if _KERAS in data.where and _LAMBDA.search(data.raw, at):
            scanned.names.add(_LAMBDA_NAME)
        if closed:
            scanned.add_reason(data.where, f"a {closed} file, which is not looked into")
        if is_array:
            start = 12 if head[6:7] > b"\x01" else 10
            size = int.from_bytes(head[8:start], "little")
            self._pickles(data, at + start + size, scanned, is_other=True)
        if packed is not None:
            self._unpack(data, at, packed, scanned)
        if not at and (is_zip or _END_MAGIC in data.raw[-_TAIL:]):
            self._members(data, scanned)

    def _pickles(self, data: _Data, at: int, scanned: Scanned, *, is_other: bool = False) -> None:
        """Walk the pickles that lie one after the other from `at` on.

        Damage counts unless the bytes have another format; what ran before it always does.
        """
        first, legacy, number = at, False, 0
        while at < len(data.raw):
            inert = data.inert or (legacy and number >= _LEGACY_PICKLES)
            encoded: list[bytes] = []
            walker = Walker(data.raw, at, reduce=partial(_placeholder, encoded))
            problem = None
            try:
                walker.walk(max(_FEW_STEPS, min(_DATA_STEPS if inert else MAX_STEPS, self._steps)))
            except PickleError as error:
                problem = error
            self._steps -= walker.steps
            begins = data.suspect or data.raw[at : at + 1] == b"\x80"
            is_pickle = walker.steps > 1 or bool(walker.names)  # its first instruction is one
            expected = begins and is_pickle and at == first and not (inert or is_other)
            if expected or walker.calls or (problem is None and begins):
                scanned.names.update(name.path for name in walker.names)
            if data.depth < _MAX_DEPTH:
                for blob in (*walker.blobs, *encoded):
                    where = f"{data.where} bytes".strip()
                    nested = _Data(blob, where, len(blob), inert=True, depth=data.depth + 1)
                    self._pickles(nested, 0, scanned)
            if problem is not None:
                unknown = isinstance(problem, UnresolvedError) or (
                    isinstance(problem, TruncatedError) and len(data.raw) < problem.end <= data.size
                )
                if expected or (unknown and (walker.names or not inert)):
                    scanned.add_reason(data.where, problem)
                return
            legacy |= number == 0 and walker.top == _LEGACY_MAGIC
            at, number = walker.at, number + 1

    def _unpack(self, data: _Data, at: int, make: Callable[[], Any], scanned: Scanned) -> None:
        """Scan what the bytes from `at` on unpack to, all streams one after the other."""
        unpacked, limit = bytearray(), min(MAX_BYTES, self._unpacked)
        magic, machine, streams = data.raw[at : at + 2], make(), 1
        damaged = too_large = limit <= 0
        while at < len(data.raw) and len(unpacked) < limit and not damaged:
            chunk = data.raw[at : at + _HEAD]
            try:
                unpacked += machine.decompress(chunk, limit - len(unpacked))
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                damaged, too_large = True, "emory" in str(error)  # LZMA's limit of memory
            at += len(chunk)
            if not damaged and machine.eof:
                at -= len(machine.unused_data)
                if data.raw[at : at + 2] != magic or streams >= _MAX_STREAMS:
                    break
                machine, streams = make(), streams + 1
        self._unpacked -= len(unpacked)
        if damaged and not unpacked and not too_large:
            return  # another kind of file
        is_cut = too_large or len(unpacked) >= limit or streams >= _MAX_STREAMS
        if is_cut or data.depth >= _MAX_DEPTH:
            scanned.add_reason(data.where, f"packed too often, or unpacks to {limit} bytes or more")
        where = f"{data.where} unpacked".strip()
        size = 1 << 62 if is_cut else len(unpacked)
        inner = _Data(bytes(unpacked), where, size, data.suspect, depth=data.depth + 1)
        if data.depth < _MAX_DEPTH:
            self._content(inner, scanned)

    def _members(self, data: _Data, scanned: Scanned) -> None:
        """Scan whatever follows a local header of a zip file; its directory is not believed."""
        if data.size > len(data.raw):
            reason = f"a zip file that torch did not write, of more than {MAX_BYTES} bytes"
            scanned.add_reason(data.where, reason)
        at, count = data.raw.find(_LOCAL_MAGIC), 0
        while 0 <= at <= len(data.raw) - _LOCAL.size:
            local = _LOCAL.unpack_from(data.raw, at)
            flags, method, name_size, extra_size = local[2], local[3], local[9], local[10]
            start = at + _LOCAL.size + name_size
            name = data.raw[at + _LOCAL.size : start].decode("utf-8", "replace")[:200]
            member = replace(data, where=name, suspect=name.lower().endswith(_SUFFIXES))
            start += extra_size
            if flags & _ENCRYPTED:
                scanned.add_reason(name, "encrypted")
            if method == _DEFLATED:
                self._unpack(member, start, lambda: zlib.decompressobj(-15), scanned)
            elif method:
                scanned.add_reason(name, f"packed by method {method}, which is not unpacked")
            elif start < len(data.raw):
                self._content(member, scanned, start)
            count += 1
            if count >= _MAX_MEMBERS:
                scanned.add_reason(data.where, f"a zip file of more than {_MAX_MEMBERS} files")
                return
            at = data.raw.find(_LOCAL_MAGIC, at + 4)


def _parts(path: Path, file: BinaryIO) -> Iterator[_Data]:
    """Yield what a loader may unpickle: the records of torch's zip files, or the file itself."""
    size = file.seek(0, io.SEEK_END)
    head, tail = _read(file, 0, _HEAD), _read(file, max(0, size - _TAIL), _TAIL)
    if _END_MAGIC in tail:
        try:
            archives = read_archives(path)
        except ArtifactError:
            archives = []
        for archive in archives:
            for name, record in archive.records.items():
                inert = name.startswith("data/")
                raw = _read(file, record.start, min(record.nbytes, _INERT if inert else MAX_BYTES))
                suspect = name.lower().endswith(_SUFFIXES)
                yield _Data(raw, name, record.nbytes, suspect, inert, depth=1)
        if archives:
            return
    suspect = path.name.lower().endswith(_SUFFIXES)
    is_zip = head.startswith(_LOCAL_MAGIC) or _END_MAGIC in tail
    raw = _read(file, 0, min(size, MAX_BYTES)) if is_zip or _may_go_on(head) else head
    yield _Data(raw, "", size, suspect)


def _graph_code(path: Path, file: BinaryIO) -> Iterator[str]:
    """Yield code in models of Keras (HDF5) and TensorFlow (`.pb`), which hold no pickles."""
    if path.suffix != ".pb" and _read(file, 0, len(_HDF5)) != _HDF5:
        return
    file.seek(0)
    end = b""
    while chunk := file.read(_CHUNK):
        if _LAMBDA.search(end + chunk):
            yield _LAMBDA_NAME
        if _FILE_OPERATION.search(end + chunk):
            yield "tensorflow.io.read_file or write_file"
        end = chunk[-200:]


def _may_go_on(head: bytes) -> bool:
    """Return True if more than the first bytes of a file has to be read to judge it."""
    if head.startswith((_NUMPY, *(magic for magic, _ in _PACKED))):
        return True
    try:
        Walker(head).walk(_DATA_STEPS)
    except DamagedError as error:
        return isinstance(error, TruncatedError)
    except PickleError:
        return True
    return True


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _placeholder(encoded: list[bytes], target: Global, args: tuple[Any, ...]) -> Foreign:
    """Return a placeholder of a call; collect bytes, which protocol 2 writes as encoded text."""
    if target.path == "_codecs.encode" and args and isinstance(args[0], str):
        encoded.append(args[0].encode("latin-1", "ignore"))
    return Foreign(target.path, args)


# Names that a pickle of tensors or of a trainer may use: exact ones, never prefixes. `TENSORS` is
# what `torch.load(weights_only=True)` of the pinned torch allows (a test compares them), and what
# trainers put beside tensors: random states of numpy, DeepSpeed's and FSDP's descriptions.
# `TRAINERS` are classes of settings, which load only with weights_only=False.


def _all(modules: str, names: str) -> Iterable[str]:
    return (f"{module}.{name}" for module in modules.split() for name in names.split())


_KINDS = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_DENSE = " ".join(f"{kind}Tensor" for kind in _KINDS.split())
_SPARSE = _DENSE.replace("BoolTensor ", "")
_STORAGES = " ".join(f"{kind}Storage" for kind in f"{_KINDS} ComplexDouble ComplexFloat".split())

TORCH = frozenset(
    (
        *_all("_codecs", "encode"),
        *_all("builtins", "bytearray complex set"),
        *_all("collections", "Counter OrderedDict"),
        *_all("torch torch.cuda", f"{_DENSE} {_STORAGES}"),
        *_all("torch.sparse torch.cuda.sparse", _SPARSE),
        *_all("torch", "QInt32Storage QInt8Storage QUInt2x4Storage QUInt4x2Storage QUInt8Storage"),
        *_all("torch", "Size Tensor device bfloat16 bool complex32 complex64 complex128"),
        *_all("torch", "float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2"),
        *_all("torch", "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 qint32 quint8"),
        *_all("torch", "quint2x4 quint4x2 bits8 bits16 bits1x8 bits2x4 bits4x2"),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8)),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (16, 32, 64)),
        *_all("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine"),
        *_all("torch", "per_channel_symmetric per_channel_affine_float_qparams"),
        *_all("torch.nn.parameter", "Parameter"),
        *_all("torch.serialization", "_get_layout"),
        *_all("torch.storage", "TypedStorage UntypedStorage"),
        *_all("torch._tensor", "_rebuild_from_type_v2"),
        *_all("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor"),
        *_all("torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3"),
        *_all("torch._utils", "_rebuild_sparse_tensor _rebuild_meta_tensor_no_storage"),
        *_all("torch._utils", "_rebuild_nested_tensor _rebuild_wrapper_subclass"),
        *_all("torch._utils", "_rebuild_device_tensor_from_numpy"),
        *_all("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
    )
)
"""The list of torch/_weights_only_unpickler.py."""

_DISTRIBUTED = "torch.distributed"
TENSORS = TORCH | frozenset(
    (
        *_all("builtins", "bool bytes dict float frozenset int list object range slice str tuple"),
        *_all("collections", "defaultdict deque"),
        *_all("argparse", "Namespace"),
        *_all("numpy", "dtype ndarray"),
        *_all("numpy.core.multiarray numpy._core.multiarray", "_reconstruct scalar"),
        *_all("numpy.core.numeric numpy._core.numeric", "_frombuffer"),
        *_all("numpy.dtypes", "Float64DType Int64DType UInt32DType"),
        *_all(f"{_DISTRIBUTED}.checkpoint.metadata", "BytesStorageMetadata ChunkStorageMetadata"),
        *_all(f"{_DISTRIBUTED}.checkpoint.metadata", "Metadata MetadataIndex StorageMeta"),
        *_all(f"{_DISTRIBUTED}.checkpoint.metadata", "TensorProperties TensorStorageMetadata"),
        *_all(f"{_DISTRIBUTED}.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        *_all(f"{_DISTRIBUTED}.checkpoint.filesystem", "_StorageInfo _StoragePrefix"),
        *_all(f"{_DISTRIBUTED}._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        *_all(f"{_DISTRIBUTED}._shard.sharded_tensor.metadata", "TensorProperties"),
        *_all(f"{_DISTRIBUTED}.device_mesh", "DeviceMesh"),
        *_all(f"{_DISTRIBUTED}.tensor {_DISTRIBUTED}._tensor.api", "DTensor"),
        *_all(f"{_DISTRIBUTED}.tensor._dtensor_spec", "DTensorSpec TensorMeta"),
        *_all(f"{_DISTRIBUTED}._tensor.placement_types", "DTensorSpec TensorMeta"),
        *_all(
            f"{_DISTRIBUTED}.tensor.placement_types {_DISTRIBUTED}._tensor.placement_types",
            "Partial Replicate Shard _Partial _StridedShard",
        ),
        *_all("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        *_all("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler LossScaler LossScalerBase"),
        *_all("deepspeed.utils.tensor_fragment", "fragment_address"),
        *_all("deepspeed.checkpoint.utils deepspeed.runtime.utils", "PartitionedTensor"),
    )
)

_TRL = (
    "bco.BCO cpo.CPO dpo.DPO gkd.GKD grpo.GRPO iterative_sft.IterativeSFT kto.KTO "
    "nash_md.NashMD online_dpo.OnlineDPO orpo.ORPO ppo.PPO ppov2.PPOv2 prm.PRM reward.Reward "
    "rloo.RLOO sft.SFT xpo.XPO"
)
TRAINERS = frozenset(
    (
        *_all("transformers.training_args", "OptimizerNames ParallelMode TrainingArguments"),
        *_all("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
        *_all("transformers.trainer_pt_utils", "AcceleratorConfig"),
        *_all("transformers.trainer_utils", "EvaluationStrategy FSDPOption HubStrategy"),
        *_all("transformers.trainer_utils", "IntervalStrategy SaveStrategy SchedulerType"),
        *_all("transformers.debug_utils", "DebugOption"),
        *_all("transformers.generation.configuration_utils", "GenerationConfig"),
        *_all(
            "transformers.deepspeed transformers.integrations.deepspeed",
            "HfDeepSpeedConfig HfTrainerDeepSpeedConfig",
        ),
        *_all("accelerate.state", "AcceleratorState PartialState"),
        *_all("accelerate.utils.dataclasses", "DeepSpeedPlugin DistributedType DynamoBackend"),
        *_all("accelerate.utils.dataclasses", "FullyShardedDataParallelPlugin PrecisionType"),
        *_all("accelerate.utils.deepspeed", "HfDeepSpeedConfig"),
        *_all("torch.distributed.fsdp.api", "BackwardPrefetch MixedPrecision ShardingStrategy"),
        *_all("pathlib", "PosixPath PurePosixPath PureWindowsPath WindowsPath"),
        *_all("datetime", "timedelta"),
        *_all("llamafactory.hparams.training_args", "TrainingArguments"),
        *_all("llamafactory.hparams.training_args", "RayArguments"),
        *_all("llmtuner.hparams.training_args", "TrainingArguments"),
        *_all("axolotl.core.training_args", "AxolotlTrainingArguments"),
        *_all("unsloth.trainer", "UnslothTrainingArguments"),
        *_all("swift.trainers.arguments", "Seq2SeqTrainingArguments TrainingArguments"),
        *(
            f"trl.trainer.{module}_config.{name}Config"
            for module, name in (pair.split(".") for pair in _TRL.split())
        ),
        *_all("trl.trainer.dpo_config", "FDivergenceConstants FDivergenceType"),
        *_all("megatron.core.enums", "ModelType"),
        *_all("megatron.core.transformer.enums", "AttnBackend"),
    )
)
"""Settings and their enumerations, as `training_args.bin` holds them."""
