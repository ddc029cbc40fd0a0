"""Chat templates"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

TEMPLATE_MISSING = Entry(
    "TEMPLATE_MISSING",
    Severity.WARNING,
    "No chat template",
    "vLLM's chat endpoint and apply_chat_template refuse: 'default chat template is no longer "
    "allowed'; a template given by hand may not be the one of training",
    "save the template of the training run as chat_template.jinja",
    ("LLaMA-Factory #10396", "OpenRLHF #1069"),
)
TEMPLATES_DIFFER = Entry(
    "TEMPLATES_DIFFER",
    Severity.ERROR,
    "Different chat templates in one folder",
    "transformers, processors and vLLM read different files of them: the same chat becomes "
    "different tokens",
    "keep the template of training, in chat_template.jinja alone",
    ("LLaMA-Factory #5489", "OpenRLHF #1069"),
)
TEMPLATE_BROKEN = Entry(
    "TEMPLATE_BROKEN",
    Severity.ERROR,
    "A chat template that does not parse",
    "every chat request fails with a TemplateSyntaxError",
    "save the template of the training run again",
)
TEMPLATE_UNKNOWN_TOKENS = Entry(
    "TEMPLATE_UNKNOWN_TOKENS",
    Severity.WARNING,
    "Markers in the template that are no tokens",
    "the tokenizer cuts them into pieces: the model sees a text that it was not trained on, and "
    "no end-of-turn token ever comes",
    "serve the tokenizer of the training run, or add the tokens and resize the embedding",
    ("OpenRLHF #645", "OpenRLHF PR #648", "OpenRLHF #1069"),
)
TEMPLATE_NOT_OF_BASE = Entry(
    "TEMPLATE_NOT_OF_BASE",
    Severity.INFO,
    "Another chat template than the base has",
    "meant where training had a template of its own; otherwise the reason why an API that uses the "
    "base's template answers better than the merged model",
    "compare it with the template of the training run",
    ("LLaMA-Factory #10596", "OpenRLHF #1069"),
)
