"""Problems that would show after training: quantised models, the gate, servers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.context import Context, installed
from tasks.config.checks.online import function
from tasks.core.finding import Finding
from tasks.core.redaction import HIDDEN, redact
from tasks.drift.fingerprint import EXPERTS
from tasks.lm_eval import is_file, task_name
from tasks.quantize import CONVERTED
from tasks.release.gate import EXAMPLES, LM_EVAL, NUMBERS, names_for, parse, run_kinds
from tasks.rl.user_code import EVAL
from tasks.serving.llama_cpp import CONVERTER, QUANTIZER, SERVER, find_programs
from tasks.weights.quantized.packed import CONV1D
from tasks.weights.quantized.quantize import GGUF

GGUF_READ = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "falcon", "stablelm",
    "starcoder2", "nemotron",
)  # fmt: skip
"""Model types whose GGUF files transformers reads, so that they can be compared."""
_INSECURE = ("MLFLOW_TRACKING_INSECURE_TLS", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY")
LIMIT_S = 5.0


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems that would show after training."""
    settings = context.settings
    is_reward = context.objective == "reward"
    yield from quantizing(settings["convert"], context.known.config, is_reward=is_reward)
    yield from function(settings["eval"]["function"], EVAL)
    if not is_reward:
        yield from lm_eval_tasks(settings["eval"]["lm_eval"])
    yield from conditions(settings)
    yield from reachable(settings["tracking"]["uri"])
    yield from prefect_reachable()
    yield from public(settings["tracking"])


def quantizing(
    convert: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    is_reward: bool = False,
    engine: str = "vllm",
) -> Iterator[Finding]:
    """Yield every reason why a model cannot be quantised (`convert.quantize`).

    `config` is the model's config.json, empty if unknown; `engine` is `smoke.engine`.
    """
    scheme, text = convert["quantize"], config.get("text_config") or config
    if scheme == "none":
        return
    family, missing, readable, override = text.get("model_type"), [], True, "convert.quantize=none"
    if scheme.startswith(GGUF):
        programs = find_programs(convert["llama_cpp"])
        needed = {CONVERTER: programs.converter, SERVER: programs.server}
        if scheme.removeprefix(GGUF) not in CONVERTED:
            needed[QUANTIZER] = programs.quantizer
        missing = [name for name, path in needed.items() if path is None]
        readable = not family or family in GGUF_READ
    experts = any(text.get(key) for key in EXPERTS)
    for wrong, allowed, instead in (
        (is_reward, "a reward model is served in 16 bits", override),
        (experts, "experts are not quantised, only plain linear layers", override),
        (family in CONV1D, f"{family} has convolutions as layers", override),
        (engine == "none", "a quantised model is measured first", "smoke.engine=vllm"),
        (missing, f"needs llama.cpp: {', '.join(missing)}", "convert.llama_cpp=<its folder>"),
        (not readable, f"transformers reads GGUF of {', '.join(GGUF_READ)}", override),
    ):
        if wrong:
            yield Finding("convert.quantize", scheme, allowed, instead)


def conditions(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each condition of the gate that this run cannot judge."""
    names, stated = names_for(run_kinds(settings)), settings["gate"]["conditions"] or {}
    tasks = []
    for task in settings["eval"]["lm_eval"]:
        with suppress(OSError, ValueError):  # `lm_eval_tasks` reports a file that cannot be read
            tasks.append(task_name(task))
    for name, text in stated.items():
        key, harness = f"gate.conditions.{name}", name.startswith(LM_EVAL)
        if harness and not any(name.startswith(f"{LM_EVAL}{task}.") for task in tasks):
            override = " or ".join(f"{LM_EVAL}{task}.acc" for task in tasks)
            allowed = f"{LM_EVAL}<task>.<metric> of a task in eval.lm_eval"
            yield Finding(key, "no such task", allowed, override or "eval.lm_eval=[<task>]")
        elif not harness and name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names
            yield Finding(key, "not measured", "a number of this run", " or ".join(near))
        else:
            try:
                to = parse(name, text).to
            except ValueError as error:
                yield Finding(key, str(error), "a comparison with a limit", f"such as {EXAMPLES}")
                continue
            if to == "base" and not (harness or (name in NUMBERS and NUMBERS[name].base)):
                allowed = "the model before training has no such number"
                yield Finding(key, str(text), allowed, "a number, or champion, as the limit")


def lm_eval_tasks(tasks: list[str]) -> Iterator[Finding]:
    """Yield a finding for each task of `eval.lm_eval` that cannot be run."""
    if tasks and installed("lm-eval") == "0":
        value = f"[{', '.join(tasks)}]"
        yield Finding("eval.lm_eval", value, "lm-eval is not installed", "make setup-lm-eval")
    for task in filter(is_file, tasks):
        try:
            task_name(task)
        except (OSError, ValueError) as error:
            override = "eval.lm_eval=[<file>.yaml]"
            yield Finding("eval.lm_eval", f"{task}: {error}", "a task in YAML", override)


def reachable(uri: str | None) -> Iterator[Finding]:
    """Yield a finding if the server of `tracking.uri` does not answer; SQLite needs none."""
    if uri is None or urlsplit(uri).scheme not in ("http", "https"):
        return
    login = (os.environ.get(f"MLFLOW_TRACKING_{name}") or "" for name in ("USERNAME", "PASSWORD"))
    page = "api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if reason := _why_silent(f"{uri.rstrip('/')}/{page}", ":".join(login), token):
        allowed = f"{reason}; metrics of this run would have no place to go"
        override = "tracking.uri=sqlite:////<path>/mlflow.db, or make up"
        yield Finding("tracking.uri", redact(uri), allowed, override)


def prefect_reachable() -> Iterator[Finding]:
    """Yield a finding if the Prefect server of `PREFECT_API_URL` does not answer."""
    if not (url := os.environ.get("PREFECT_API_URL")):
        return
    login, token = (os.environ.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "KEY"))
    if reason := _why_silent(f"{url.rstrip('/')}/admin/version", login or "", token):
        allowed = f"{reason}; this run would not be recorded there"
        override = "unset PREFECT_API_URL (a server of its own), or PREFECT_API_AUTH_STRING"
        yield Finding("PREFECT_API_URL", redact(url), allowed, override)


@cache  # the steps of a run and its plan ask once
def _why_silent(url: str, login: str, token: str | None) -> str:
    """Return why no server answers at a URL; empty if one does. `login`: `<user>:<password>`."""
    import httpx

    user, _, word = login.partition(":")
    headers = {"Authorization": f"Bearer {token}"} if token and not (user and word) else {}
    auth = (user, word) if user and word else None
    insecure = any((os.environ.get(name) or "").lower() in ("true", "1") for name in _INSECURE)
    try:
        answer = httpx.get(url, timeout=LIMIT_S, auth=auth, headers=headers, verify=not insecure)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"no answer within {LIMIT_S:g} s ({error or type(error).__name__})"
    if answer.status_code in (401, 403):
        return "it refuses the login"
    return f"it answers with status {answer.status_code}" if answer.status_code >= 500 else ""


def public(tracking: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each name that MLflow's pages show and that contains a secret."""
    for key in sorted({"experiment", "model_name"} & tracking.keys()):
        if HIDDEN in (shown := redact(tracking[key])):
            allowed = "a name without a token or a password, because every page shows it"
            yield Finding(f"tracking.{key}", shown, allowed, f"tracking.{key}=plumbline")
