"""Load a registered model with MLflow, and answer chat requests.

    model = mlflow.pyfunc.load_model("models:/plumbline@candidate")
    model.predict({"messages": [{"role": "user", "content": "Hello"}]})

MLflow has the path and the digest of the served folder and the name of this module: no weights, no
pickle, no code. The folder is compared with its manifest, byte by byte, before transformers reads
it. Its own code never runs. A reward model returns a score in place of a response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.pipeline.artifact import require_published
from tasks.serving.prompts import load_tokenizer, render_one, stop_ids, whole_ids
from tasks.weights.model_class import language_class, read_config

MAX_TOKENS = 512
"""Longest response in tokens if a request does not say."""


def _load_pyfunc(data_path: str) -> RegisteredModel:
    """Load the folder that `served.json` names; called by MLflow.

    Raises ArtifactError if the folder does not exist here, or is not what was registered.
    """
    place = json.loads((Path(data_path) / "served.json").read_text())
    return RegisteredModel(require_published(Path(place["path"]), place["digest"]).path)


class RegisteredModel:
    """A verified folder, loaded by transformers, on the GPUs if there are any."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        self.folder, config = folder, read_config(folder)
        self.tokenizer = load_tokenizer(folder)
        self.stops = stop_ids(folder, self.tokenizer.eos_token_id)
        name = (config.architectures or [""])[0]
        self.is_reward = name.endswith("ForSequenceClassification")
        auto = AutoModelForSequenceClassification if self.is_reward else language_class(config)
        self.model = auto.from_pretrained(
            folder, dtype="auto", device_map="auto" if torch.cuda.is_available() else None,
            local_files_only=True, trust_remote_code=False,
        )  # fmt: skip

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Answer chat requests: one as a dictionary, several as a list of them.

        MLflow passes several as a table with one a row, and `params`, which are not used.
        """
        rows = model_input.to_dict("records") if hasattr(model_input, "to_dict") else [model_input]
        answer = self.score if self.is_reward else self.answer
        answers = [answer({k: v for k, v in row.items() if _is_given(v)}) for row in rows]
        return answers[0] if len(answers) == 1 else answers

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the score of a conversation whose last message is the assistant's."""
        import torch

        ids = whole_ids(self.tokenizer, request, set(self.stops))
        with torch.inference_mode():
            score = self.model(torch.tensor([ids], device=self.model.device)).logits[0, 0]
        return {"object": "score", "model": str(self.folder), "score": float(score)}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion, as OpenAI's API has it.

        Samples if the request has a temperature, else as generation_config.json says.
        """
        import torch

        options: dict[str, Any] = {"max_new_tokens": int(request.get("max_tokens", MAX_TOKENS))}
        options |= {key: request[key] for key in ("temperature", "top_p") if key in request}
        if "temperature" in request:
            options["do_sample"] = request["temperature"] > 0
        if not options.get("do_sample", True):
            options |= {"temperature": None, "top_p": None, "top_k": None}
        stops = list(request.get("stop", ()))
        if stops:
            options |= {"stop_strings": stops, "tokenizer": self.tokenizer}
        prompt = torch.tensor([render_one(self.tokenizer, request)], device=self.model.device)
        with torch.inference_mode():
            whole = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), eos_token_id=self.stops,
                pad_token_id=self.stops[0], **options,
            )  # fmt: skip
        tokens = whole[0, prompt.shape[1] :].tolist()
        content = self.tokenizer.decode(tokens, skip_special_tokens=True)
        cut = min((content.find(stop) for stop in stops if stop in content), default=None)
        ended = cut is not None or any(token in self.stops for token in tokens)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content[:cut]},
            "finish_reason": "stop" if ended else "length",
        }
        return {"object": "chat.completion", "model": str(self.folder), "choices": [choice]}


def _is_given(value: Any) -> bool:
    """Return True unless it is what a table has for a missing field: None or NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
