"""Render a chat template in a child process with limits on time and memory.

A template comes with a model and is a program: nested loops run for hours, `'a' * 3000000000` takes
all memory, and jinja2's sandbox stops neither. This file is also the program of the child; it
imports nothing of ours, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

SECONDS, MEMORY = 5, 1 << 30
"""Limits of a rendering: seconds of processor time, and bytes of address space."""
MAX_CHARACTERS = 1 << 20
"""Longest template, and longest text after a response; published templates have about 30 kB."""
_WAIT_S = 60.0
"""Seconds to wait for a child on a busy machine, on which processor time passes slowly."""
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG")  # the others can hold secrets
_ANSWER = "plumbline-answer-text"
_ANY = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that the code of a chat template may raise."""


class TemplateError(ValueError):
    """A template does not render; the message says why."""


class TemplateLimitError(TemplateError):
    """A template takes more time, memory or text than any that serves a model."""


def after_answer(template: str, tokens: Mapping[str, str]) -> str:
    """Return the text that a template writes after an assistant's response.

    Raises TemplateError as `rendered`, or if the template drops the response.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    (text,) = rendered(template, tokens, [messages])
    _, answer, ending = text.rpartition(_ANSWER)
    if not answer:
        raise TemplateError("the chat template drops the assistant's answer")
    return ending.strip()


def rendered(
    template: str,
    tokens: Mapping[str, str],
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Return conversations as a template writes them; with `prompt`, up to the response.

    `tokens` has `bos_token` and `eos_token`. Raises TemplateError, TemplateLimitError.
    """
    if len(template) > MAX_CHARACTERS:
        raise TemplateLimitError(f"{len(template)} characters, at most {MAX_CHARACTERS} are read")
    shown = list(tools) or None
    every = {"tools": shown, "documents": None, "add_generation_prompt": prompt, **tokens}
    contexts = [{"messages": messages, **every} for messages in conversations]
    reply = _reply(json.dumps({"template": template, "contexts": contexts}))
    if "limit" in reply:
        raise TemplateLimitError(reply["limit"])
    if "error" in reply:
        raise TemplateError(reply["error"])
    return list(reply["texts"])


@lru_cache(maxsize=16)
def _reply(job: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=job.encode(), capture_output=True, timeout=_WAIT_S, check=False,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )  # fmt: skip
        reply: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        # No answer in JSON: SIGXCPU, or jinja2 out of memory where it cannot say so
        return {"limit": f"rendering takes more than {SECONDS} s or {MEMORY >> 30} GiB of memory"}
    return reply


def template_environment() -> Any:
    """Return the jinja2 environment that renders chat templates as transformers does.

    It is sandboxed: a template comes with a model and is not trusted.
    """
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Render `{% generation %}`, which marks responses for loss masks, as its contents."""

        tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    return environment


def _render(template: str, contexts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Render a template once with each context; runs in the child."""
    import jinja2

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = template_environment()
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2000-01-01"}
    try:
        compiled = environment.from_string(template)
        texts = [compiled.render(**context) for context in contexts]
    except MemoryError:
        return {"limit": f"rendering takes more than {MEMORY >> 30} GiB of memory"}
    except (jinja2.TemplateError, *_ANY) as error:
        return {"error": f"the chat template does not render: {error}"[:MAX_CHARACTERS]}
    return {"texts": [text[-MAX_CHARACTERS:] for text in texts]}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_render(**json.load(sys.stdin))))
