"""Names that a pickle of tensors or of a trainer may use: exact ones, never prefixes.

`TENSORS` is what `torch.load(weights_only=True)` of the pinned torch allows (a test compares them),
and what trainers put beside tensors: random states of numpy, DeepSpeed's and FSDP's descriptions.
`TRAINERS` are classes of settings, which load only with weights_only=False.
"""

from __future__ import annotations

from collections.abc import Iterable


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
