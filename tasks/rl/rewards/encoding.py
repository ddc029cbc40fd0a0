"""Token ids that a reward model reads for a response.

If the reward model has the policy's vocabulary and chat template, it reads the policy's token ids
of prompt and response unchanged. Otherwise its own template renders the conversation again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from tasks.core.errors import ArtifactError, RewardError
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.folder import RewardFolder
from tasks.rl.rewards.sources import describe, error_details
from tasks.serving.prompts import chat, load_tokenizer, stop_ids, whole_ids


@dataclass(frozen=True)
class Encoding:
    """Turns responses into token ids for a reward model.

    Attributes:
        label: name of the source in errors.
        limit: maximum number of tokens; None: no limit.
        tokenizer: the reward model's; None if the policy's token ids are used unchanged.
        stops: token ids that end a response in the reward model's template.
    """

    label: str
    limit: int | None
    tokenizer: Any = None
    stops: frozenset[int] = frozenset()

    @classmethod
    def between(cls, policy: Any, folder: RewardFolder, *, label: str, log: Log) -> Encoding:
        """Compare the policy's tokenizer with the reward model's; log which ids are used.

        Args:
            policy: the policy's tokenizer.
            folder: the reward model.
            label: name of the source in errors.
            log: gets the result.

        Raises:
            ArtifactError: they differ, and the reward model has no chat template.
        """
        tokenizer = load_tokenizer(folder.path)
        difference = _difference(policy, tokenizer)
        if difference is None:
            log.info("%s: has the policy's tokenizer; scores its token ids as they are", label)
            return cls(label, folder.context)
        if not tokenizer.chat_template:
            raise ArtifactError(
                f"{label}: {difference}, and it has no chat template to render conversations with",
                hint="a reward model with a chat_template.jinja",
            )
        log.warning("%s: %s; its own template renders the responses again", label, difference)
        stops = frozenset(stop_ids(folder.path, tokenizer.eos_token_id))
        return cls(label, folder.context, tokenizer, stops)

    def texts(self, responses: Sequence[Response]) -> list[list[int]]:
        """Return the token ids of each response's whole conversation.

        A response that was cut off has no end token.

        Raises:
            RewardError: a text is longer than the limit, or the template rejects it.
        """
        texts = [self._text(response) for response in responses]
        for response, ids in zip(responses, texts, strict=True):
            if self.limit is not None and len(ids) > self.limit:
                raise RewardError(
                    f"{self.label}: {len(ids)} tokens for {describe(response)}, more than its "
                    f"limit of {self.limit}",
                    details=error_details(response),
                    hint="rollout.max_new_tokens=<less>, or a reward model with a longer context",
                )
        return texts

    def _text(self, response: Response) -> list[int]:
        if self.tokenizer is None:
            ids: list[int] = response.ids.tolist()
            return ids
        messages = [*response.prompt.messages, *response.messages]
        try:
            ids = whole_ids(self.tokenizer, chat(messages, response.prompt.row), self.stops)
        except TemplateError as error:
            raise RewardError(
                f"{self.label}: its chat template rejects {describe(response)}: {error}",
                details=error_details(response),
            ) from error
        cut_off = not response.generated.ended and ids[-1] in self.stops
        return ids[:-1] if cut_off else ids


def _difference(policy: Any, own: Any) -> str | None:
    """Return how the reward model's tokenizer differs from the policy's, or None."""
    if policy.get_vocab() != own.get_vocab():
        return f"its vocabulary ({len(own)} tokens) is not the policy's ({len(policy)})"
    if policy.chat_template != own.chat_template:
        return "its chat template is not the policy's"
    return None
