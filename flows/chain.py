"""The chain of one model: which stage reads what, and which settings decide its result.

This is the only place that turns configuration into the plain arguments of stage functions. What
is passed as `config` is part of a stage's key, what is passed as `context` is not.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain_stages import (
    BASE,
    CONVERT,
    DATA,
    GATHER_ADAPTER,
    GATHER_WEIGHTS,
    MERGE,
    REINFORCE,
    ROLLOUT_BASE,
    SMOKE,
    TRAIN,
)
from flows.progress import progress
from tasks.artifact import Artifact
from tasks.convert import convert
from tasks.data.kinds import PROMPTS, TEXTS, Kind, kind_for, names_texts
from tasks.fingerprint import PROFILES
from tasks.gather import gather
from tasks.merge import merge
from tasks.nodes import Leader
from tasks.prepare import prepare_base, prepare_data, source_identity
from tasks.rl.rewards.exact import EXACT_MATCH
from tasks.rl.rewards.identity import model_digest, sources_digest
from tasks.rollout_base import rollout_base
from tasks.scoring import ReferenceScorer
from tasks.smoke_eval import SmokeSettings, smoke_eval
from tasks.smoke_rewards import smoke_rewards
from tasks.smoke_texts import smoke_texts
from tasks.stage import Mechanism, Stage, StageResult, plain
from tasks.tracking import StageRun
from tasks.train import train
from tasks.training.job import Settings


@dataclass(frozen=True)
class Chain:
    """One chain's run: settings, the mechanism, and who measures.

    Attributes:
        settings: the resolved configuration as plain nested dictionaries.
        mechanism: runs the stages.
        scorer: the transformers reference.
        leader: of the other nodes, where there are any.
        base: the model that came before it in a chain of chains; None: that of the settings.
        reward: the reward model that came before it, likewise.
    """

    settings: Mapping[str, Any]
    mechanism: Mechanism
    scorer: ReferenceScorer
    leader: Leader | None = None
    base: Artifact | None = None
    reward: Artifact | None = None

    def deliver(self) -> StageResult:
        """Run everything from prepare to smoke_eval. Returns the served artifact's result."""
        data = self._prepare_data()  # first: its mistakes are the user's, and cost nothing to find
        base = self._prepare_base()
        trained = self._train(base, data)
        weights = self._gather(trained, base)
        if self.settings["peft"]["kind"] != "none":
            weights = self._merge(weights, base, trained)
        served = self._convert(weights, trained)
        self._smoke_eval(served, base=base, data=data, trained=trained)
        return served

    def _prepare_base(self) -> Artifact:
        if self.base is not None:
            return self.base
        model = dict(self.settings["model"])
        # How a model is loaded later on does not change what it is.
        config = {k: v for k, v in model.items() if k not in _LOADING}
        return self._run(
            BASE,
            prepare_base,
            config={**config, "source": source_identity(**model)},
            context={"log_path": self._log("prepare_base")},
            observe=progress,
        )

    def _prepare_data(self) -> Artifact:
        data = dict(self.settings["data"])
        config = {**data, "rows": self._rows.name, "source": source_identity(**data)}
        if self._rows is PROMPTS and self.settings["reward"]["function"] == EXACT_MATCH:
            config["answered"] = True  # found before a base is made, not by a rank
        return self._run(DATA, prepare_data, config=config)

    def _train(self, base: Artifact, data: Artifact) -> Artifact:
        settings = resolved(self.settings)
        inputs, config = {"base": base, "data": data}, {"settings": settings}
        stage = TRAIN
        if settings.online:
            stage, inputs = REINFORCE, {**inputs, **self._online_inputs(base, settings)}
        # One folder for one result: what broke off is found again by the next attempt at it.
        key = stage.key(plain(config), inputs)
        checkpoints = self.mechanism.store.parent / "checkpoints" / key
        trained = self._run(
            stage,
            train,
            inputs=inputs,
            config=config,
            context={
                "base_digest": base.digest,
                "checkpoints": checkpoints,
                "resume": self.settings["train"]["resume"],
                "tokens": self.mechanism.store.parent / "cache" / "tokens",
                "log_path": self._log("train"),
                "leader": self.leader,
            },
            observe=self._observe_training,
        )
        if not self.settings["train"]["keep_ckpts"]:
            # They are for a run that broke off; what it led to is published now.
            shutil.rmtree(checkpoints, ignore_errors=True)
        return trained

    def _online_inputs(self, base: Artifact, settings: Settings) -> dict[str, Artifact]:
        """What learning from own replies reads beside base and data."""
        found = {} if self.reward is None else {"reward": self.reward}
        quantization = settings.peft.quantization()
        if quantization is not None and settings.online["rollout"]["engine"] == "vllm":
            found["rollout"] = self._run(
                ROLLOUT_BASE,
                rollout_base,
                inputs={"base": base},
                config={"quantization": quantization, "dtype": settings.dtype},
                context={"perform": self.scorer.perform},
            )
        return found

    @contextlib.contextmanager
    def _observe_training(self, run: StageRun, log: Any) -> Iterator[Callable[[Any], None]]:
        """Progress; and the scorer's imports happen while the ranks are still at work."""
        with progress(run, log) as shown:

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "plan":
                    self.scorer.warm()
                shown(event)

            yield on_event

    def _gather(self, trained: Artifact, base: Artifact) -> Artifact:
        full = self.settings["peft"]["kind"] == "none"
        return self._run(
            GATHER_WEIGHTS if full else GATHER_ADAPTER,
            gather,
            inputs={"trained": trained, "base": base},
            context=self._measuring,
        )

    def _merge(self, adapter: Artifact, base: Artifact, trained: Artifact) -> Artifact:
        """In the dtype and files that convert is to make, so that convert only links."""
        convert_to = self.settings["convert"]
        return self._run(
            MERGE,
            merge,
            inputs={"adapter": adapter, "base": base, "trained": trained},
            config={
                "base_mode": self.settings["merge"]["base"],
                "output": {key: convert_to[key] for key in ("dtype", "max_shard_size")},
                "profile": self._profile,
            },
            context=self._measuring,
        )

    def _convert(self, weights: Artifact, trained: Artifact) -> StageResult:
        return self._result(
            CONVERT,
            convert,
            inputs={"weights": weights, "trained": trained},
            config={**self.settings["convert"], "profile": self._profile},
            context=self._measuring,
        )

    def _smoke_eval(self, served: StageResult, **inputs: Artifact) -> None:
        settings = dict(self.settings["smoke"])
        engine = settings.pop("engine")
        drawing: dict[str, float] = {}
        context: dict[str, Any] = {"scorer": self.scorer, "log_path": self._log("smoke_eval")}
        if self.settings["train"]["objective"] == "reward":
            function: Any = smoke_rewards
            del inputs["base"]  # it has no head to compare with
        else:
            function = smoke_texts if self._rows is TEXTS else smoke_eval
            if self._rows is PROMPTS:
                drawing["temperature"] = self.settings["rollout"]["temperature"]
                if (reward := self._reward_model()) is not None:
                    inputs["reward"] = reward
            history = {r.name: r.drift for r in self.mechanism.results if r.drift is not None}
            context["history"] = history
        self._run(
            SMOKE,
            function,
            inputs={"served": served.artifact, **inputs},
            config={
                "engine": engine,
                "settings": SmokeSettings(**settings),
                "profile": self._profile,
                **drawing,
            },
            context=context,
        )

    def _reward_model(self) -> Artifact | None:
        """Who scores the replies: the link before, or a folder of the user's."""
        if self.reward is not None:
            return self.reward
        if (named := self.settings["reward"]["model"]) is None:
            return None
        return Artifact("served", Path(named).expanduser(), model_digest(Path(named)))

    @property
    def _measuring(self) -> dict[str, Any]:
        return {"score": self.scorer.measure, "perform": self.scorer.perform}

    @property
    def _rows(self) -> Kind:
        """What is learnt from, and tested on."""
        texts = names_texts(self.settings["data"])
        return kind_for(self.settings["train"]["objective"], texts=texts)

    @property
    def _profile(self) -> Any:
        return PROFILES[self.settings["gate"]["profile"]]

    def _log(self, stage: str) -> Path:
        return self.mechanism.logs / f"{stage}.log"

    def _run(self, stage: Stage, function: Any, **arguments: Any) -> Artifact:
        return self._result(stage, function, **arguments).artifact

    def _result(self, stage: Stage, function: Any, **arguments: Any) -> StageResult:
        arguments = {"inputs": {}, "config": {}, **arguments}
        return self.mechanism.run(stage, function, **arguments)


def resolved(settings: Mapping[str, Any]) -> Settings:
    """What is trained, of the configuration's sections."""
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    if settings["train"]["objective"] not in PROMPTS.objectives:
        return Settings.from_sections(**sections)
    reward = settings["reward"]
    online = {
        "rl": settings["rl"],
        "rollout": settings["rollout"],
        "reward": {**reward, "digest": sources_digest(reward)},
    }
    return Settings.from_sections(**sections, online=online)


_LOADING = ("dtype", "attn_implementation", "trust_remote_code")
