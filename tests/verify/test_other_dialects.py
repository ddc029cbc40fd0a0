"""llama.cpp, SGLang, TGI and Ollama, as their documentation says: a small server answers so.

`test_llama_cpp.py` runs the real llama.cpp, `test_real_servers.py` vLLM and `transformers serve`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.core.errors import ConfigError
from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import Abilities, Scores, Server, ServerError, UnsupportedError
from tasks.verify.servers.vocabulary import read_vocabulary
from tests.verify import toy_model as toy
from tests.verify.answering import Answer, answering, refusal

NAMES = ["a", "b", "c", "d", "<user>", "<system>", "<assistant>", "<eos>"]
SEQUENCES = [[1, 2, 3, 0, 2, 1], [7, 1, 2], [3] * 20, [5, 0, 4, 1, 6]]
CHAT = [{"role": "user", "content": "ab"}]
RENDERED = (4, 0, 1, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the toy model's `tokenizer.json`."""
    vocabulary = {name: token for token, name in enumerate(NAMES[:4])}
    added = [{"id": token, "content": NAMES[token]} for token in range(4, 8)]
    document = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<eos>"}))
    return tmp_path


def split(text: str, *, bos: bool = False) -> list[int]:
    """Return the tokens of a text, as the servers split it."""
    ids = [NAMES.index(name) for name in re.findall(r"<\w+>|[abcd]", text)]
    return [toy.EOS, *ids] if bos else ids


def text_of(ids: list[int]) -> str:
    return "".join(NAMES[token] for token in ids)


def llama_cpp() -> dict[str, Answer]:
    def scales(body: Any) -> int:
        chosen = [
            entry["id"] for entry in body.get("lora", [{"id": 0, "scale": 1}]) if entry["scale"]
        ]
        return 1 + chosen[0] if chosen else 0

    def completion(body: Any) -> Any:
        ids, model = body["prompt"], scales(body)
        made = toy.greedy(ids, body["n_predict"], model)
        stop = "eos" if toy.EOS in made else "limit"
        answer = {"content": toy.text(made), "stop_type": stop, "tokens_evaluated": len(ids)}
        answer["tokens"] = made if body.get("return_tokens") else []
        if body.get("stream"):
            return iter([
                *({"content": toy.text([t]), "tokens": [t], "stop": False} for t in made),
                {**answer, "content": "", "tokens": [], "stop": True},
            ])  # fmt: skip
        if body.get("n_probs"):
            tops = toy.tops(ids, body["n_probs"], None, model)
            listed = [{"id": i, "token": "?", "bytes": [], "logprob": v} for i, v in tops.items()]
            answer["completion_probabilities"] = [{"id": made[0], "top_logprobs": listed}]
        return answer

    return {
        "/v1/models": lambda _: {"data": [{"id": "toy.gguf", "owned_by": "llamacpp"}]},
        "/props": lambda _: {
            "default_generation_settings": {"n_ctx": 64},
            "model_path": "/m/toy.gguf",
            "build_info": "b11434-abc",
        },
        "/lora-adapters": lambda _: [
            {"id": 0, "path": "/m/tuned.gguf", "scale": 1.0},
            {"id": 1, "path": "/m/other.gguf", "scale": 0.0},
        ],
        "/completion": completion,
        "/tokenize": lambda body: {"tokens": split(body["content"], bos=body["add_special"])},
        "/detokenize": lambda body: {"content": text_of(body["tokens"])},
        "/apply-template": lambda body: {"prompt": text_of(toy.rendered(body["messages"]))},
    }


def sglang() -> dict[str, Answer]:
    def generate(body: Any) -> Any:
        ids, options = body["input_ids"], body["sampling_params"]
        model = 1 if body.get("lora_path") == "tuned" else 0
        made = toy.greedy(ids, options["max_new_tokens"], model)
        kind = "stop" if toy.EOS in made else "length"
        told: dict[str, Any] = {"finish_reason": {"type": kind}, "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            k = body["top_logprobs_num"]
            tops = [toy.tops(ids[:at], k, None, model) for at in range(1, len(ids) + 1)]
            listed = [[[value, token, None] for token, value in top.items()] for top in tops]
            own = [[float(toy.logprobs(ids[:at], model)[ids[at]]), ids[at], None]
                   for at in range(1, len(ids))]  # fmt: skip
            if body.get("logprob_start_len", -1) == 0:
                told["input_token_logprobs"] = [[None, ids[0], None], *own]
                told["input_top_logprobs"] = [None, *listed[:-1]]
            told["output_top_logprobs"] = listed[-1:]
        answer = {"text": toy.text(made), "output_ids": made, "meta_info": told}
        return [answer] * options["n"] if options.get("n", 1) > 1 else answer

    cards = [{"id": "toy", "root": "toy", "max_model_len": 64, "owned_by": "sglang"}]
    cards.append({"id": "tuned", "root": "/adapters/tuned", "parent": "toy", "owned_by": "sglang"})
    return {
        "/v1/models": lambda _: {"data": cards},
        "/get_model_info": lambda _: {"model_path": "toy", "is_generation": True},
        "/get_server_info": lambda _: {"version": "0.5.9"},
        "/generate": generate,
        "/tokenize": lambda body: {"tokens": split(body["prompt"], bos=body["add_special_tokens"])},
        "/detokenize": lambda body: {"text": text_of(body["tokens"])},
        "/v1/chat/completions": lambda body: {
            "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(toy.rendered(body["messages"]))},
        },
    }


def tgi() -> dict[str, Answer]:
    def tokens(ids: list[int], values: list[float | None]) -> list[dict[str, Any]]:
        return [{"id": i, "text": NAMES[i], "logprob": v} for i, v in zip(ids, values, strict=True)]

    def generate(body: Any) -> Any:
        options = body["parameters"]
        ids = split(body["inputs"])
        if options.get("temperature") == 0:
            return refusal(422, "`temperature` must be strictly positive")
        made = toy.greedy(ids, options["max_new_tokens"])
        details = {
            "finish_reason": "eos_token" if toy.EOS in made else "length",
            "prefill": tokens(ids, [None] * len(ids)),
            "tokens": tokens(made, [-0.1] * len(made)),
        }
        if "top_n_tokens" in options:
            tops = toy.tops(ids, options["top_n_tokens"])
            details["top_tokens"] = [tokens(list(tops), list(tops.values()))]
            details["tokens"] = tokens(made[:1], [tops[made[0]]])
        return {"generated_text": toy.text(made), "details": details}

    def listed(ids: Any) -> Any:
        return [{"id": token, "text": "?", "start": 0, "stop": 0} for token in ids]

    return {
        "/v1/models": lambda _: {"data": [{"id": "toy", "owned_by": "toy"}]},
        "/info": lambda _: {"model_id": "toy", "version": "3.3.6", "max_total_tokens": 64},
        "/generate": generate,
        "/tokenize": lambda body: listed(split(body["inputs"])),
        "/chat_tokenize": lambda body: {
            "templated_text": "?",
            "tokenize_response": listed(toy.rendered(body["messages"])),
        },
    }


def ollama(*, bos: bool = False) -> dict[str, Answer]:
    def generate(body: Any) -> Any:
        if body["model"] != "toy:latest":
            return refusal(404, f"model '{body['model']}' not found")
        ids, options = split(body["prompt"], bos=bos), body["options"]
        made = toy.greedy(ids, options["num_predict"])
        answer = {"response": toy.text(made), "done_reason": "length"}
        answer["prompt_eval_count"] = len(ids)
        if body.get("logprobs"):
            tops = toy.tops(ids, body["top_logprobs"])
            told = [{"token": NAMES[i], "logprob": v, "bytes": list(NAMES[i].encode())}
                    for i, v in tops.items()]  # fmt: skip
            answer["logprobs"] = [{**told[0], "top_logprobs": told}]
        return answer

    def chat(body: Any) -> Any:
        length = len(toy.rendered(body["messages"]))
        return {"message": {"content": "a"}, "done_reason": "stop", "prompt_eval_count": length}

    return {
        "/v1/models": lambda _: {"data": [{"id": "toy:latest", "owned_by": "library"}]},
        "/api/version": lambda _: {"version": "0.13.0"},
        "/api/tags": lambda _: {"models": [{"name": "toy:latest"}]},
        "/api/generate": generate,
        "/api/chat": chat,
    }


def check(scores: list[Scores], *, model: int = 0, most: int = 12) -> None:
    """Compare scores with the model's own numbers."""
    for sequence, scored in zip(SEQUENCES, scores, strict=True):
        measured = [at for at, ids in enumerate(scored.ids) if len(ids)]
        assert len(measured) == min(most, len(sequence) - 1)
        for at in measured:
            expected = toy.logprobs(sequence[: at + 1], model)[scored.ids[at]]
            assert np.allclose(scored.logprobs[at], expected, atol=1e-6)
            assert len(scored.ids[at]) >= 5


def greedy_is_right(server: Server, name: str, *, ids: bool = True) -> None:
    expected = toy.greedy([1, 2], 6)
    (made,) = server.generate(name, [1, 2], 6, temperature=0)
    assert made.text == toy.text(expected)
    assert list(made.ids or expected) == expected
    assert (made.ids is not None) == ids
    assert made.prompt_length == 2


def test_llama_cpp_scores_each_name_with_its_adapters() -> None:
    with answering(llama_cpp()) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("llama.cpp", "b11434-abc")
        assert server.abilities == Abilities(True, 0, 100, True, True)
        names = {entry.name: entry for entry in server.models()}
        assert list(names) == ["toy.gguf", "toy.gguf@base", "tuned", "other"]
        assert (names["tuned"].parent, names["tuned"].max_length) == ("toy.gguf@base", 64)
        for model, name in ((1, "toy.gguf"), (0, "toy.gguf@base"), (1, "tuned"), (2, "other")):
            check(server.score(name, SEQUENCES), model=model)
        greedy_is_right(server, "toy.gguf@base")
        whole, streamed = (
            server.generate("tuned", [1, 2], 6, stream=stream)[0] for stream in (False, True)
        )
        assert whole == streamed
        assert server.tokenize("tuned", "ab<user>") == (7, 0, 1, 4)
        assert server.detokenize("tuned", [0, 1]) == "ab"
        assert server.render("tuned", CHAT) == (7, *RENDERED)  # this one adds BOS
        assert len(server.generate("tuned", [1, 2], 2, 3)) == 3
        with pytest.raises(ServerError, match="serves no model 'tuend'"):
            server.score("tuend", SEQUENCES)


def test_sglang_scores_prompts_and_adapters() -> None:
    with answering(sglang()) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("sglang", "0.5.9")
        check(server.score("toy", SEQUENCES), most=99)
        check(server.score("tuned", SEQUENCES), model=1, most=99)
        assert [body.get("lora_path") for body in requests.bodies("/generate")][-1] == "tuned"
        (entry,) = server.next_tokens("toy", [[1, 2]])
        assert entry[0][0] == toy.logprobs([1, 2]).argmax()
        greedy_is_right(server, "toy")
        assert len(server.generate("toy", [1, 2], 2, 3)) == 3
        assert server.tokenize("toy", "ab") == (7, 0, 1)
        assert server.detokenize("toy", [0, 1]) == "ab"
        assert server.generate("toy", CHAT, 1)[0].prompt_length == len(RENDERED)
        server.generate("tuned", CHAT, 1)
        chats = requests.bodies("/v1/chat/completions")
        assert [body.get("lora_path") for body in chats][-2:] == [None, "tuned"]
        with pytest.raises(UnsupportedError):
            server.render("toy", CHAT)


def test_tgi_scores_texts(folder: Path) -> None:
    with answering(tgi()) as requests:
        server = connect(requests.url, tokenizer=folder)
        assert (server.kind, server.version) == ("tgi", "3.3.6")
        check(server.score("toy", SEQUENCES))
        greedy_is_right(server, "toy")
        assert server.render("toy", CHAT) == RENDERED
        assert server.tokenize("toy", "ab") == (0, 1)


@pytest.mark.parametrize("bos", [False, True])
def test_ollama_scores_texts_that_have_as_many_tokens(folder: Path, bos: bool) -> None:
    with answering(ollama(bos=bos)) as requests:
        server = connect(requests.url, tokenizer=folder)
        assert (server.kind, server.version) == ("ollama", "0.13.0")
        assert server.abilities == Abilities(True, 0, 20, False, False)
        if bos:
            scores = server.score("toy:latest", SEQUENCES)
            assert [any(map(len, s.ids)) for s in scores] == [False, True, False, False]
            return
        check(server.score("toy:latest", SEQUENCES))
        greedy_is_right(server, "toy:latest", ids=False)
        assert server.generate("toy:latest", CHAT, 1)[0].prompt_length == len(RENDERED)
        with pytest.raises(ServerError, match="serves no model 'tiy'") as caught:
            server.score("tiy", SEQUENCES)
        assert "toy:latest" in caught.value.report()


def test_a_kind_that_is_none_or_another_one_is_refused() -> None:
    with answering(ollama()) as requests:
        with pytest.raises(ConfigError, match="kind=x"):
            connect(requests.url, kind="x")
        with pytest.raises(ServerError, match="no server of kind tgi"):
            connect(requests.url, kind="tgi")


def test_vocabularies_join_tokens_to_texts(tmp_path: Path) -> None:
    """Three tokens make the letter ö with a space before it: two of them are half a letter."""
    byte_level = {
        "model": {"vocab": {"\u0120": 0, "\u00c3": 1, "\u00b6": 2, "a": 3}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 4, "content": "<eos>"}],
    }
    pieces = {"model": {"vocab": [["<unk>", 0.0], ["\u2581a", -1.0], ["<0x0A>", -2.0]]}}
    for number, document in enumerate((byte_level, pieces)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "tokenizer.json").write_text(json.dumps(document))
    vocabulary = read_vocabulary(tmp_path / "0")
    assert vocabulary is not None
    assert vocabulary.text([0, 1, 2, 3, 4]) == " öa<eos>"
    assert vocabulary.text([0, 1]) is None
    assert (vocabulary.find(b" "), vocabulary.find(b"x")) == (0, None)
    vocabulary = read_vocabulary(tmp_path / "1")
    assert vocabulary is not None
    assert vocabulary.text([1, 2]) == " a\n"
    for content in ("", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert read_vocabulary(tmp_path) is None
