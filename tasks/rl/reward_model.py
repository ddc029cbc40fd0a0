"""`reward.model`: a reward model scores responses at their last token, in this process.

    reward = (score - mean) / std

with the model's own mean and std over held-out responses (`reward.normalize`). If the reward model
has the policy's vocabulary and chat template, it reads the policy's token ids of prompt and
response unchanged. Otherwise its own template renders the conversation again.

The folder's facts are read without torch, for the preflight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, RewardError
from tasks.core.files import file_stats
from tasks.core.terminal import command
from tasks.process.output import Log
from tasks.rl.responses import Response
from tasks.rl.rewards import describe, error_details, validate_rewards
from tasks.serving.prompts import chat, load_tokenizer, stop_ids, whole_ids
from tasks.weights.files.documents import read_json
from tasks.weights.files.folder import require_own_files
from tasks.weights.heads import Normalisation, architectures, normalisation_from

if TYPE_CHECKING:
    import torch

ROW_TOKENS = 8192
"""Maximum tokens of a packed row; a longer text gets a row of its own."""
_CLASS = "ForSequenceClassification"


@dataclass(frozen=True)
class RewardFolder:
    """Facts about a reward model from its folder."""

    dtype: str  # torch name of its parameters' dtype
    normalisation: Normalisation  # mean and std of its rewards
    context: int | None  # maximum number of tokens; None if config.json does not say

    @classmethod
    def read(cls, path: Path, *, normalize: bool) -> RewardFolder:
        """Read config.json; `normalize` requires mean and std.

        Raises an ArtifactError unless it is a reward model with one label.
        """
        label = f"reward.model={path}"
        hint = (
            "reward.model=<the artifact of kind `served` of a chain with train=reward>; "
            f"{command('deliver')} source=<it> out=<folder> converts a model to that class"
        )
        if path.is_dir():
            require_own_files(path)
        if not (path / "config.json").is_file():
            raise ArtifactError(f"{label} is not a model folder: no config.json", hint=hint)
        config = read_json(path / "config.json")
        name = next(iter(architectures(config)), "no class")
        # transformers assumes two labels where config.json does not say.
        labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
        if not name.endswith(_CLASS) or labels != 1:
            raise ArtifactError(
                f"{label} is not a *{_CLASS} with one label: {name} with {labels}", hint=hint
            )
        normalisation = normalisation_from(config, label)
        if normalize and not normalisation.is_there:
            raise ArtifactError(
                f"{label}: no mean and std of its rewards in config.json",
                hint="reward.normalize=false uses its scores unchanged",
            )
        text = config.get("text_config") or config  # nested in multimodal models
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return cls(dtype, normalisation, text.get("max_position_embeddings"))


def model_digest(folder: Path) -> str:
    """Return the digest of a reward model's manifest, else of sizes, times, inodes of its files."""
    manifest = folder.expanduser() / "manifest.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = sorted(path for path in folder.expanduser().glob("*") if path.is_file())
    text = "\n".join(f"{path.name} {file_stats(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


class RewardModel:
    """A reward model as a reward source; scores packed rows without gradients.

    `tokenizer` is the policy's.
    """

    def __init__(
        self, path: Path, tokenizer: Any, device: torch.device, *, normalize: bool, log: Log
    ) -> None:
        from tasks.serving.reference.load import from_folder
        from tasks.serving.reference.rewards import CLASSIFIER
        from tasks.training.model.packed_model import accept_packed_rows

        folder = RewardFolder.read(path, normalize=normalize)
        self.label, self._limit = f"reward.model={path}", folder.context
        self._normalisation = folder.normalisation if normalize else Normalisation()
        own = load_tokenizer(path)
        self._tokenizer = self._stops = None
        same = tokenizer.get_vocab() == own.get_vocab()
        if same and tokenizer.chat_template == own.chat_template:
            log.info("%s: has the policy's tokenizer; scores its token ids as they are", self.label)
        elif not own.chat_template:
            raise ArtifactError(
                f"{self.label}: its vocabulary or chat template is not the policy's, and it has no "
                "chat template to render conversations with",
                hint="a reward model with a chat_template.jinja",
            )
        else:
            log.warning(
                "%s: its vocabulary or chat template is not the policy's; its own template renders "
                "the responses again",
                self.label,
            )
            self._tokenizer, self._stops = own, frozenset(stop_ids(path, own.eos_token_id))
        self._device = device
        model = from_folder(
            CLASSIFIER,
            path,
            dtype=folder.dtype,
            attn_implementation="sdpa",
            device_map=None if device.type == "cpu" else {"": str(device)},
            num_labels=1,
        )
        accept_packed_rows(model)
        self._model: Any = model.to(device).eval().requires_grad_(False)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the reward of each response: the head's output at its last token."""
        import torch

        from tasks.serving.reference.rewards import normalised
        from tasks.training.tokens.examples import Examples
        from tasks.training.tokens.rows import filled, pack

        texts = list(map(self.ids, responses))
        examples = Examples.of_texts(texts)
        scores = torch.empty(len(texts), dtype=torch.float64)
        with torch.no_grad():
            for chosen in filled([len(text) for text in texts], ROW_TOKENS):
                row = pack(examples, chosen).to(self._device)
                scores[chosen] = self._model(row=row).double().cpu()
        valid = validate_rewards(scores.tolist(), responses, self.label)
        return normalised(valid, self._normalisation)

    def ids(self, response: Response) -> list[int]:
        """Return the token ids of a conversation; without an end token if it was cut off."""
        ids: list[int] = response.ids.tolist()
        if self._tokenizer is not None:
            ids = self._rendered(response)
        if self._limit is not None and len(ids) > self._limit:
            raise RewardError(
                f"{self.label}: {len(ids)} tokens for {describe(response.prompt)}, more than "
                f"its limit of {self._limit}",
                details=error_details(response.prompt, response.text),
                hint="rollout.max_new_tokens=<less>, or a reward model with a longer context",
            )
        return ids

    def _rendered(self, response: Response) -> list[int]:
        from jinja2 import TemplateError

        assert self._stops is not None
        messages = [*response.prompt.messages, *response.messages]
        try:
            ids = whole_ids(self._tokenizer, chat(messages, response.prompt.row), self._stops)
        except TemplateError as error:
            raise RewardError(
                f"{self.label}: its chat template rejects {describe(response.prompt)}: {error}",
                details=error_details(response.prompt, response.text),
            ) from error
        cut_off = not response.generated.ended and ids[-1] in self._stops
        return ids[:-1] if cut_off else ids
