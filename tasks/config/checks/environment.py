"""`rl.environment`: the class in the user's file, the chat template, the rows of the toy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.finding import Finding
from tasks.data.kinds import kind_for, names_texts
from tasks.rl.environment.observation_tokens import probes, refused, unstable
from tasks.rl.user_code import CALCULATOR, ENVIRONMENT, FunctionReference
from tasks.toy.dataset import CALCULATOR_ROWS
from tasks.weights.tokens.render_template import TemplateError
from tasks.weights.tokens.tokenizer import prompts_of

_PROMPT = [{"role": "user", "content": "question"}]


def environment(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the problems of the environment of an online run.

    Args:
        settings: the resolved configuration.
    """
    name, role = settings["rl"]["environment"], settings["rl"]["observation_role"]
    if name is None:
        return
    try:
        FunctionReference.of(name, ENVIRONMENT).require()
    except ConfigError as error:
        allowed = "a class in an existing file"
        message = error.message.removeprefix(f"{ENVIRONMENT}=")
        yield Finding(ENVIRONMENT, message, allowed, error.hint)
    data = settings["data"]
    if name == CALCULATOR and (data["kind"] != "toy" or data["tasks"] != CALCULATOR):
        allowed = "needs its own rows, with the column total"
        override = "data=toy data.tasks=calculator"
        yield Finding(ENVIRONMENT, CALCULATOR, allowed, override)
    yield from _template(settings["model"]["path"], data["chat_template"], role)


def _template(folder: str | None, own: str | None, role: str) -> Iterator[Finding]:
    """Check the chat template, if it is at hand; the ranks check it too, before the first rollout.

    Args:
        folder: `model.path`.
        own: `data.chat_template`.
        role: of observations.
    """
    path = Path(folder or "").expanduser()
    written = Path(own).expanduser() if own else None
    if (written is None and not (folder and path.is_dir())) or (written and not written.is_file()):
        return
    try:
        template = written.read_text(encoding="utf-8") if written else None
        reason = unstable(prompts_of(path, probes(_PROMPT, role), template))
    except TemplateError as error:
        reason = f"it rejects a conversation with observations of role {role!r}: {error}"
    except (ArtifactError, OSError, UnicodeDecodeError):
        return  # other checks report a file that cannot be read
    if reason:
        allowed = "a template that renders earlier messages always the same"
        yield Finding("data.chat_template", reason, allowed, refused(reason, role).hint)


def toy_tasks(settings: Mapping[str, Any], objective: str) -> Iterator[Finding]:
    """Yield a finding if the calculator has no rows of the kind that the objective needs.

    Args:
        settings: section `data`.
        objective: `train.objective`.
    """
    rows = kind_for(objective, texts=names_texts(settings)).name
    if settings["kind"] != "toy" or settings["tasks"] != CALCULATOR or rows in CALCULATOR_ROWS:
        return
    value = f"{CALCULATOR} with train.objective={objective}"
    allowed = "it has conversations and prompts, for sft and online objectives"
    yield Finding("data.tasks", value, allowed, "data.tasks=letters")
