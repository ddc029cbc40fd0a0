"""Serve a folder as its users do, verify the server as `flows/verify.py` does, and evaluate it.

`vllm serve` serves it, or llama.cpp's server a GGUF file. The engine of `serve.py` gets token ids
inside of one process. This one is what users reach: the HTTP server with its own tokenizer, chat
template, EOS and default sampling settings. Everything that the smoke test needs comes from its
answers, so that reports and metrics keep their names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from tasks.config.sections import Smoke
from tasks.core.contract import Check
from tasks.core.report import Row
from tasks.drift.fingerprint import Fingerprint
from tasks.evaluation.prompts import Question, Setup
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import Responses, Served, length_of
from tasks.serving import http_server
from tasks.serving.http_server import NAME
from tasks.serving.llama_cpp import find_programs, gguf_file, serve_command
from tasks.serving.vllm.job import STAGE, time_limit
from tasks.serving.vllm.server import AT_ONCE, running
from tasks.verify.compare import Aligned, Asked
from tasks.verify.dialects import LlamaCppServer, OpenAiServer
from tasks.verify.reference import Probe, Reference, token_facts
from tasks.verify.run import run_checks
from tasks.verify.server import Client, Generated, Server, parallel
from tasks.witness.plumbline_witness.prints import FINGERPRINT
from tasks.witness.plumbline_witness.probes import CHATS

TEXTS = 16
"""Texts that the server has to split into the same tokens, and conversations it has to render."""
_TEXT_TOKENS = 256
_SLOTS = 4
"""Requests that llama.cpp's server computes at the same time."""
_TINY = 1e-9
"""Mass below which what a list leaves is rounding of its numbers."""
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every response that is evaluated: defaults of the folder must not change it."""


def serve_over_http(question: Question, setup: Setup) -> Served:
    """Serve and verify the model under test, and sample its responses; then those of the base.

    Raises StageProcessError if a server did not start, crashed, or took too long, and ServerError
    if it refuses a request.
    """
    settings, temperature = setup.settings, question.temperature
    reference = reference_of(question, setup.scorer)
    greedy, sampled = list[Responses](), list[Responses]()
    for side in question.sides:
        began = time.perf_counter()
        with _server_of(side.model, question, setup) as server:
            is_first = side is question.served
            if is_first:
                load_s = time.perf_counter() - began
                longest = max(map(len, reference.sequences))
                asked = Asked(server, NAME, None, reference, setup.profile, positions=longest)
                fingerprint = fingerprint_of(reference.trained, asked.aligned(NAME))
                fingerprint.save(setup.out / FINGERPRINT)
                checks = run_checks(asked)
            # The folder's own EOS ids have to end the responses of the model under test.
            stops = [] if is_first else side.stops
            greedy.append(responses(server, side.prompts, settings, 0.0, stops))
            if temperature is not None:
                sampled.append(responses(server, side.prompts, settings, temperature, stops))
    differing = (check.measured.get("differing", 0) for check in checks if check.code == "template")
    verdicts = tuple(map(smoke_check, checks))
    return Served(fingerprint, greedy, sampled, int(next(differing, 0)), load_s, verdicts)


@contextmanager
def _server_of(model: ModelRef, question: Question, setup: Setup) -> Iterator[Server]:
    """Serve a folder with `vllm serve`, or its GGUF file with llama.cpp."""
    settings, file = setup.settings, gguf_file(model.path)
    limit = settings.timeout_s or time_limit([question.served.model.path])
    length = length_of(question, settings)
    if file is None:
        server = running(
            model.path, settings, limit, dtype=question.served.model.dtype,
            max_model_len=length, **setup.logs,
        )  # fmt: skip
    else:
        port = http_server.free_port()
        argv = serve_command(file, find_programs(setup.llama_cpp).server)
        argv += ["--host", http_server.HOST, "--port", str(port), "--alias", NAME]
        argv += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * length)]
        if settings.threads:
            argv += ["--threads", str(settings.threads)]
        server = http_server.running(argv, port, limit, stage=STAGE, **setup.logs)
    with server as url, closing(Client(url, timeout_s=limit)) as client:
        yield OpenAiServer(client, "vllm") if file is None else LlamaCppServer(client)


def reference_of(question: Question, scorer: ReferenceScorer) -> Reference:
    """Return what a server is compared with: the fingerprint of training, and the folder's tokens.

    The tokens are those of transformers. The smoke test compares them with training's own.
    """
    trained, served = Fingerprint.load(question.reference), question.served.model.path
    probes = tuple(Probe(ids, "served", number) for number, ids in enumerate(trained.probes))
    conversations, rendered = question.chats, question.served.prompts
    if conversations is not None:
        texts = [str(chat["messages"][-1]["content"]) for chat in conversations[:TEXTS]]
    else:
        texts = scorer.decode(served, rendered[:TEXTS])
        # Public conversations; some templates refuse a system prompt. Without a template: none.
        has_template = (served / "chat_template.jinja").is_file()
        conversations = [
            {"messages": [{"role": role, "content": text} for role, text in turns]}
            for turns in CHATS if has_template and turns[0][0] != "system"
        ]  # fmt: skip
        rendered = scorer.encode(served, conversations).tokens if conversations else []
    unscored = [
        Probe(tuple(ids), "chat", n, turns=tuple(c["messages"]), tools=tuple(c.get("tools", ())))
        for n, (c, ids) in enumerate(zip(conversations, rendered, strict=True))
    ]
    encoded = scorer.encode_texts(served, texts, limit=1 << 20)
    unscored += [
        Probe(tuple(ids), "text", number, text)
        for number, (text, ids) in enumerate(zip(texts, encoded, strict=True))
        if len(ids) <= _TEXT_TOKENS
    ]
    tokens = token_facts(served)
    tokens["tokenizer"]["eos_token_id"] = list(question.served.stops)
    facts = {"tokens": tokens, "longest_row": max(map(len, trained.probes))}
    return Reference(probes, trained, None, facts, served, tuple(unscored))


def fingerprint_of(reference: Fingerprint, served: Aligned) -> Fingerprint:
    """Return the server's answers as a fingerprint at the ids of the reference.

    Ids that are not in the server's list share what it leaves of the mass, in the proportions of
    the reference: the KL is that of one group (a lower bound). None of them is likelier than the
    last of the server's list.
    """
    listed = ~np.isnan(served.logprobs)
    p = np.exp(reference.logprobs.astype(np.float64))
    q = np.exp(np.where(listed, served.logprobs, -np.inf))
    p_left = np.maximum(1 - np.where(listed, p, 0.0).sum(1), _TINY)
    q_left = np.maximum(1 - q.sum(1) - served.extra_mass, _TINY)
    shares = reference.logprobs + np.log(q_left / p_left)[:, None]
    logprobs = np.where(listed, served.logprobs, np.minimum(shares, served.floor[:, None]))
    logprobs[~served.measured] = np.nan
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=logprobs.astype(np.float32),
        top1=served.top1.astype(np.int32),
        engine="server",
    )


def responses(
    server: Server,
    prompts: Sequence[Sequence[int]],
    settings: Smoke,
    temperature: float,
    stops: Sequence[int],
) -> Responses:
    """Return a response to each prompt."""
    options: dict[str, Any] = {"stop_token_ids": stops, "temperature": temperature, **_NEUTRAL}

    def respond(numbered: tuple[int, Sequence[int]]) -> Generated:
        seed, prompt = numbered
        most = settings.max_new_tokens
        (made,) = server.generate(NAME, list(prompt), most, seed=seed, **options)
        return made

    began = time.perf_counter()
    made = parallel(respond, list(enumerate(prompts)), AT_ONCE)
    seconds = time.perf_counter() - began
    stopped = [response.finish == "stop" for response in made]
    return Responses([list(response.ids or ()) for response in made], stopped, seconds)


def smoke_check(check: Row) -> Check:
    """Return a verdict of verify as one of the smoke test; "unknown" fails nothing, and says so."""
    causes = "; ".join(f"{cause.code}: {cause.text} -> {cause.hint}" for cause in check.causes)
    text = f"not proven: {check.text}" if check.verdict == "unknown" else check.text
    return Check(
        f"server: {check.code}",
        "as trained",
        f"{text}; {causes}" if causes else text,
        ok=check.verdict != "fault",
    )
