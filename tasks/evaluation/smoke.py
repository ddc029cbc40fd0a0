"""The skeleton of a smoke test: serve a model, compare it with the trained one, write the report.

Chat models (`tasks/smoke_eval.py`), raw texts (`smoke_texts`), reward models (`smoke_rewards`) and
deliveries (`tasks/delivery/smoke.py`) share it. Each adds its own prompts and checks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.config.after_training import Smoke
from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import (
    Drift,
    DriftLimit,
    Fingerprint,
    drift,
    within,
)
from tasks.drift.verdict import Moved, limit_in, share_checks
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import computing_dtype_of, context_of
from tasks.evaluation.greedy_ties import Agreement, compare_greedy, engine_noise
from tasks.evaluation.http_verification import serve_over_http
from tasks.evaluation.planned import Explain, located
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import (
    Question,
    Responses,
    Served,
    score_with_vllm,
    serve_with_transformers,
    serve_with_vllm,
)
from tasks.pipeline.report import StageReport
from tasks.pipeline.signature import is_signed, require_signed
from tasks.process.output import Log
from tasks.serving.vllm.job import VllmChild

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
ENGINES = ("vllm", "server", "transformers")


@dataclass(frozen=True)
class Measured:
    """Results of the engine, compared with the trained model.

    Attributes:
        question: the models and their prompts.
        served: fingerprint and responses of the engine.
        drift: distance of its fingerprint from the trained model's.
        agreement: comparison of its first greedy tokens with those of transformers.
        checks: verdicts on loading, drift and greedy tokens.
        notes: what the report says about the cause of a failure.
    """

    question: Question
    served: Served
    drift: Drift
    agreement: Agreement
    checks: tuple[Check, ...]
    notes: Mapping[str, Any]

    def both(self, *, sampled: bool = False) -> tuple[Responses, Responses]:
        """Return the greedy (or sampled) responses of the model before training and of this one."""
        served = self.served
        before = served.sampled_before if sampled else served.before
        after = served.sampled_after if sampled else served.after
        assert before is not None
        assert after is not None
        return before, after

    def texts(
        self, scorer: ReferenceScorer, *, sampled: bool = False
    ) -> tuple[list[str], list[str]]:
        """Return the same responses as texts."""
        before, after = self.both(sampled=sampled)
        assert self.question.base is not None
        old = scorer.decode(self.question.base, before.tokens)
        return old, scorer.decode(self.question.served, after.tokens)


@dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """The common arguments of all smoke tests, and the steps that they share.

    Attributes:
        served: folder to serve.
        trained: folder with the reference, `fingerprint.fp` or `scores.json`: the shards artifact,
            or the reference of a delivery.
        settings: section `smoke` of the configuration.
        profile: limits of the drift.
        scorer: the transformers child.
        log: gets progress and the engine's output.
        log_path: file for the engine's whole output.
        history: drift recorded by earlier stages, by stage, in the order of the chain.
        attn_implementation: attention of the engine "transformers".
        public_key: a signed folder is served only if this key signed it; None for any folder.
        before: the model that the served one has to be, for transformers; None if unknown.
        explain: says where two models part, after a failed drift check.
        llama_cpp: folder of llama.cpp, which serves a GGUF file; None for its programs on PATH.
        vllm: the vLLM child.
        dtype: torch name of the dtype that the engine computes in; None for this machine's.
    """

    served: Path
    trained: Path
    settings: Smoke
    profile: DriftLimit
    scorer: ReferenceScorer
    log: Log
    log_path: Path
    history: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    attn_implementation: str = "sdpa"
    public_key: Path | None = None
    before: ModelRef | None = None
    explain: Explain | None = None
    llama_cpp: str | None = None
    vllm: VllmChild = field(default_factory=VllmChild)
    dtype: str | None = None

    @property
    def engine(self) -> str:
        """Name of the engine that serves the model."""
        return self.settings.engine

    @property
    def model(self) -> ModelRef:
        """The served folder, for transformers."""
        dtype, attention = self.dtype or computing_dtype_of(self.served), self.attn_implementation
        return ModelRef(self.served, dtype=dtype, attn_implementation=attention)

    @property
    def max_len(self) -> int:
        """Longest sequence that the engine accepts, prompt and response together, in tokens."""
        context = context_of(self.served)
        return min(context, self.settings.max_model_len or context)

    def measure(self, question: Question, out: Path) -> Measured:
        """Serve the model, and compare its fingerprint and first greedy tokens.

        Args:
            question: what to serve, and the prompts.
            out: staging directory; gets `fingerprint.fp`.

        Raises:
            StageProcessError: the engine did not start or crashed.
        """
        reference = Fingerprint.load(question.reference)
        served = self._ask_engine(question, out)
        agreement = self._compare_greedy(question, served, reference)
        limit = limit_in(self.profile, reference, question.dtype)
        moved = drift(reference, served.fingerprint, question.dtype)
        appeared_at, in_engine = "", False
        if within(moved, limit):
            appeared_at, in_engine = self.who_moved(question)
        check = smoke_checks.drift_check(moved, limit, appeared_at)
        checks = (
            self.located(check, reference.probes, in_engine=in_engine),
            *share_checks(question.reference, served.fingerprint, limit),
            smoke_checks.greedy_check(agreement, self.settings.greedy_tokens),
            *served.checks,
        )
        notes = {
            "drift_appeared_at": appeared_at or None,
            "greedy_differences": list(agreement.differences[:20]),
        }
        return Measured(question, served, moved, agreement, checks, notes)

    def who_moved(self, question: Question) -> tuple[str, bool]:
        """Name the stage of the chain that changed the model, after a failed drift check.

        Returns:
            The stage as text, and True if it is the engine.
        """
        stage = smoke_checks.first_mover(self.history, self.profile)
        if stage is not None:
            return stage, False
        reference = Fingerprint.load(question.reference)
        model = replace(self.model, float32=reference.arithmetic == "float32")
        with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
            path = Path(folder) / "served.fp"
            seen = self.scorer.fingerprint(model, question.reference, path)
        limit = limit_in(self.profile, reference, seen.arithmetic)
        if within(drift(reference, seen, question.dtype), limit):
            text = "the served folder: transformers sees it moved too, so it changed after convert"
            return text, False
        text = f"transformers finds the folder unmoved, {self.engine} computes something else"
        return f"serve: {text}", True

    def located(
        self, check: Check, probes: Sequence[Sequence[int]], *, in_engine: bool = False
    ) -> Check:
        """Add the module in which the models part to a failed check.

        Args:
            check: verdict on the drift.
            probes: token ids of the texts that were measured.
            in_engine: True to compare the engine with transformers on the same folder.
        """
        before = self.model if in_engine else self.before
        engine = "vllm" if in_engine else "transformers"  # transformers is never blamed itself
        return located(check, before, self.model, probes, self.explain, engine=engine)

    def scores(self, texts: Sequence[Sequence[int]], out: Path) -> list[float]:
        """Return the output of a reward model's head at the last token of each text.

        Args:
            texts: token ids of each text.
            out: staging directory.

        Raises:
            StageProcessError: the engine did not start or crashed.
        """
        if self.engine == "transformers":
            return self.scorer.rewards(self.model, texts, raw=True)
        return score_with_vllm(
            self.model, texts, self.settings,
            child=self.vllm, out=out, log=self.log, log_path=self.log_path,
        )  # fmt: skip

    def report(
        self,
        out: Path,
        checks: Sequence[Check],
        metrics: Mapping[str, float],
        moved: Moved,
        causes: Mapping[str, Any] | None = None,
    ) -> StageReport:
        """Write `report.json` into `out`, and return the report of the stage.

        Args:
            out: staging directory.
            checks: all verdicts but that on the folder.
            metrics: all numbers, by name.
            moved: drift of the engine from the trained model.
            causes: `Measured.notes`; None for a reward model.
        """
        checks = (smoke_checks.no_strays(()), *checks)
        notes = {"engine": self.engine, "settings": asdict(self.settings), **(causes or {})}
        document = {
            "engine": self.engine,
            "checks": [check.as_dict() for check in checks],
            "metrics": metrics,
            "notes": notes,
            **asdict(moved),
        }
        (out / "report.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        return StageReport("report", checks, metrics, notes, moved)

    def _ask_engine(self, question: Question, out: Path) -> Served:
        if self.engine == "transformers":
            return serve_with_transformers(question, self.settings, out=out, scorer=self.scorer)
        if self.engine == "server":
            return serve_over_http(
                question, self.settings, self.profile,
                scorer=self.scorer, out=out, log=self.log, log_path=self.log_path,
                llama_cpp=self.llama_cpp,
            )  # fmt: skip
        return serve_with_vllm(
            question, self.settings,
            child=self.vllm, out=out, log=self.log, log_path=self.log_path,
        )  # fmt: skip

    def _compare_greedy(
        self, question: Question, served: Served, reference: Fingerprint
    ) -> Agreement:
        """Compare greedy tokens with those of transformers, for as many prompts as probes."""
        prompts = question.prompts.tokens[: len(reference.probes)]
        if self.engine == "transformers":  # they are the same tokens
            return Agreement(len(prompts), 0, ())
        expected = self.scorer.greedy(
            self.model,
            prompts,
            max_new_tokens=min(self.settings.greedy_tokens, self.settings.max_new_tokens),
            eos=question.prompts.eos,
        )
        tokens = served.after.tokens[: len(prompts)]
        noise = engine_noise(reference, served.fingerprint)
        return compare_greedy(tokens, expected.tokens, expected.candidates, noise, question.dtype)


def take_fields(kind: type[T], arguments: dict[str, Any]) -> T:
    """Remove the fields of a dataclass from the arguments, and return the object that they make."""
    names = {each.name for each in fields(kind)} & arguments.keys()
    return kind(**{name: arguments.pop(name) for name in names})


def smoke_test(test: Callable[..., StageReport]) -> Callable[..., StageReport]:
    """Make a stage function of `test(common, out, ...)`: it gets the fields of `SmokeTest` as one.

    A folder with stray weight files is not loaded; its report has this one verdict. `trained` may
    be passed as `reference`, its name in a delivery.
    """

    @wraps(test)
    def stage(out: Path, **arguments: Any) -> StageReport:
        if "reference" in arguments:
            arguments["trained"] = arguments.pop("reference")
        engine = arguments.pop("engine")
        arguments["settings"] = replace(arguments["settings"], engine=engine)
        common = take_fields(SmokeTest, arguments)
        if common.engine not in ENGINES:
            raise ConfigError(f"smoke.engine={common.engine} is none of {', '.join(ENGINES)}")
        if common.public_key is not None and is_signed(common.served):
            require_signed(common.served, common.public_key)
        strays = smoke_checks.no_strays(smoke_checks.stray_weights(common.served))
        if not strays.ok:
            return StageReport("report", checks=(strays,))
        return test(common, out, **arguments)

    return stage
