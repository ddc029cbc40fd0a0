"""Run the stages of one model: the inputs of each stage, and the settings that decide its result.

This module, `train` and `smoke` turn the configuration into plain arguments of stage functions;
nothing else does. Arguments passed as `config` are part of a stage's key, those passed as `context`
are not.
"""

from __future__ import annotations

from typing import Any

from flows.chain.context import ChainRun, Delivered
from flows.chain.smoke import smoke_stage
from flows.chain.stages import BASE, CONVERT, DATA, GATHER_ADAPTER, GATHER_WEIGHTS, MERGE
from flows.chain.train import train_stage
from flows.orchestration.progress import progress
from tasks.convert import convert
from tasks.data.kinds import PROMPTS
from tasks.gather import gather
from tasks.merge import merge
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Stage
from tasks.prepare import prepare_base, prepare_data, source_identity
from tasks.rl.rewards.exact import EXACT_MATCH


class Chain(ChainRun):
    """Run the stages of one model in their order."""

    def deliver(self) -> Delivered:
        """Run all stages from prepare_data to smoke_eval."""
        data = self._prepare_data()  # first: mistakes in the user's data are cheap to find
        base = self._prepare_base()
        trained = train_stage(self, base, data)
        gathered = self._gather(trained, base)
        adapter, weights = None, gathered
        if self.settings["peft"]["kind"] != "none":
            adapter, weights = gathered, self._merge(gathered, base, trained)
        served = self._convert(weights, trained)
        before = self.earlier.served if self.earlier else base
        smoke_stage(self, served=served, base=before, data=data, trained=trained)
        return Delivered(served, base, adapter, self.settings["peft"])

    def _prepare_base(self) -> Artifact:
        if self.earlier is not None:
            return self.earlier.base if self.continued else self.earlier.served
        model = dict(self.settings["model"])
        # Options for loading a model do not change its files.
        config = {k: v for k, v in model.items() if k not in _LOADING}
        return self._run(
            BASE,
            prepare_base,
            config={**config, "source": source_identity(**model)},
            context={"log_path": self.log_path("prepare_base")},
            observe=progress,
        )

    def _prepare_data(self) -> Artifact:
        data = {k: v for k, v in self.settings["data"].items() if k != "max_truncated"}
        config = {**data, "rows": self.rows.name, "source": source_identity(**data)}
        if self.rows is PROMPTS and self.settings["reward"]["function"] == EXACT_MATCH:
            config["answered"] = True  # a missing answer is reported here, not by a rank
        return self._run(DATA, prepare_data, config=config)

    def _gather(self, trained: Artifact, base: Artifact) -> Artifact:
        full = self.settings["peft"]["kind"] == "none"
        return self._run(
            GATHER_WEIGHTS if full else GATHER_ADAPTER,
            gather,
            inputs={"trained": trained, "base": base},
            context=self._measuring,
        )

    def _merge(self, adapter: Artifact, base: Artifact, trained: Artifact) -> Artifact:
        """Merge into the dtype and files that convert has to write, so that convert only links."""
        convert_to = self.settings["convert"]
        return self._run(
            MERGE,
            merge,
            inputs={"adapter": adapter, "base": base, "trained": trained},
            config={
                "base_mode": self.settings["merge"]["base"],
                "output": {key: convert_to[key] for key in ("dtype", "max_shard_size")},
                "profile": self.profile,
            },
            context=self._measuring,
        )

    def _convert(self, weights: Artifact, trained: Artifact) -> Artifact:
        return self._run(
            CONVERT,
            convert,
            inputs={"weights": weights, "trained": trained},
            config={**self.settings["convert"], "profile": self.profile},
            context=self._measuring,
        )

    @property
    def _measuring(self) -> dict[str, Any]:
        return {"score": self.scorer.measure, "perform": self.scorer.perform}

    def _run(self, stage: Stage, function: Any, **arguments: Any) -> Artifact:
        arguments = {"inputs": {}, "config": {}, **arguments}
        return self.mechanism.run(stage, function, **arguments).artifact


_LOADING = ("dtype", "attn_implementation", "trust_remote_code")
