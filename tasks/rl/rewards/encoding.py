"""The token ids by which a reward model reads a reply.

Where it has the policy's vocabulary and chat template they are the policy's own, prompt and reply
as they were fed and sampled, and nothing is tokenised a second time. Otherwise the conversation is
rendered by the reward model's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from tasks.core.errors import ArtifactError, RewardError
from tasks.process.output import Log
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.folder import RewardFolder
from tasks.rl.rewards.sources import about, named
from tasks.serving.prompts import load_tokenizer, stop_ids, whole_ids


@dataclass(frozen=True)
class Encoding:
    """How replies become a reward model's texts.

    Attributes:
        who: the source, for errors.
        limit: longest text, in tokens; None: any.
        tokenizer: the reward model's own; None where the policy's ids are taken as they are.
        stops: ids that end an answer in the reward model's texts.
    """

    who: str
    limit: int | None
    tokenizer: Any = None
    stops: frozenset[int] = frozenset()

    @classmethod
    def between(cls, policy: Any, folder: RewardFolder, *, who: str, log: Log) -> Encoding:
        """Compare the policy's tokenizer with that of the reward model; `log` gets the verdict.

        Raises:
            ArtifactError: they differ, and the reward model has no chat template to render with.
        """
        tokenizer = load_tokenizer(folder.path)
        why = _difference(policy, tokenizer)
        if why is None:
            log.info("%s: has the policy's tokenizer; scores its token ids as they are", who)
            return cls(who, folder.context)
        if not tokenizer.chat_template:
            raise ArtifactError(
                f"{who}: {why}, and it has no chat template to render conversations with",
                hint="a reward model with a chat_template.jinja",
            )
        log.warning("%s: %s; replies are rendered anew by its own template", who, why)
        stops = frozenset(stop_ids(folder.path, tokenizer.eos_token_id))
        return cls(who, folder.context, tokenizer, stops)

    def with_room(self, longest: int | None) -> Encoding:
        """With room for no more than what `longest` tokens of the policy may become."""
        if longest is None:
            return self
        # Another vocabulary may need more tokens for the same text.
        wanted = longest if self.tokenizer is None else 2 * longest
        return replace(self, limit=wanted if self.limit is None else min(wanted, self.limit))

    def texts(self, replies: Sequence[Reply]) -> list[list[int]]:
        """The token ids of each reply's whole conversation.

        A reply that was cut off has no end token, in either way.

        Raises:
            RewardError: a text that is longer than the model's context, or that its template
                refuses.
        """
        found = [self._text(reply) for reply in replies]
        for reply, ids in zip(replies, found, strict=True):
            if self.limit is not None and len(ids) > self.limit:
                raise RewardError(
                    f"{self.who}: {len(ids)} tokens for {named(reply)}; it has room for "
                    f"{self.limit}",
                    details=about(reply),
                    hint="rollout.max_new_tokens=<less>, or a reward model with a longer context",
                )
        return found

    def _text(self, reply: Reply) -> list[int]:
        if self.tokenizer is None:
            return [*reply.prompt.ids.tolist(), *reply.generated.ids.tolist()]
        messages = [*reply.prompt.messages, {"role": "assistant", "content": reply.text}]
        try:
            ids = whole_ids(self.tokenizer, messages, self.stops)
        except TemplateError as error:
            raise RewardError(
                f"{self.who}: its chat template refuses {named(reply)}: {error}",
                details=about(reply),
            ) from error
        cut_off = not reply.generated.ended and ids[-1] in self.stops
        return ids[:-1] if cut_off else ids


def _difference(policy: Any, other: Any) -> str | None:
    """Why the ids of one tokenizer mean something else to the other; None where they do not."""
    if policy.get_vocab() != other.get_vocab():
        return f"its vocabulary ({len(other)} tokens) is not the policy's ({len(policy)})"
    if policy.chat_template != other.chat_template:
        return "its chat template is not the policy's"
    return None
