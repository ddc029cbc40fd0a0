"""Fifteen faults, planted in a real vLLM on the CPU: each is found, and named by its cause.

Eight faults are adapters of one server, or requests that a gateway before it spoils; the others
need a server with another base, other options or another tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.verify import faults
from tests.verify.conftest import SPOILT, Answer
from tests.verify.serving import LoraLeak, Running, gateway, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
Verify = Callable[..., Answer]


def is_found(answer: Answer, cause: str) -> None:
    """Check that a fault was found, and that its likeliest cause is the one that was planted."""
    assert answer.code == 1, answer.out + answer.err
    assert cause in answer.causes, answer.out
    print(answer.out)


@pytest.mark.parametrize(
    ("served", "source", "cause"),
    [
        ("zeros", SPOILT, "base-served"),
        ("half", SPOILT, "adapter-scaled"),
        ("step-before", SPOILT, "other-checkpoint"),
        ("one-layer", SPOILT, "partly-other-weights"),
        ("lora-1", "lora-0", "adapters-swapped"),
        ("qlora", "qlora", "nf4-on-16-bit"),
    ],
)
def test_a_faulty_adapter(
    server: Running, models: Path, verify: Verify, served: str, source: str, cause: str
) -> None:
    words = (f"url={server.url}", f"source={models / source}", f"name={served}")
    is_found(verify(*words), cause)


def test_a_lora_leak(server: Running, models: Path, verify: Verify) -> None:
    with gateway(server.url, LoraLeak("lora-0")) as url:
        answer = verify(f"url={url}", f"source={models / 'lora-0'}", "name=lora-0")
    is_found(answer, "lora-leak")


@dataclass(frozen=True)
class Other:
    """A server of its own: its base, its options, the causes to be named, the profile."""

    causes: Sequence[str]
    base: Callable[[Path, Path], Path] | None = None
    options: Callable[[Path], Sequence[str]] = field(default=lambda folder: ())
    profile: str = "standard"


def wrong_template(folder: Path) -> Sequence[str]:
    """Return the option of a server with another family's chat template."""
    path = folder / "template.jinja"
    path.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return ("--chat-template", str(path))


def own_sampling_and_short_context(folder: Path) -> Sequence[str]:
    """Return the options of a server with a default temperature and less context than a row."""
    return ("--override-generation-config", '{"temperature": 0.3}', "--max-model-len", "40")


def tokenizer_of_another(folder: Path) -> Sequence[str]:
    """Return the option of a server with another tokenizer of the same size."""
    return ("--tokenizer", str(faults.other_tokenizer(folder / "tokenizer")))


OTHERS = {
    "wrong template": Other(["template"], options=wrong_template),
    "sampling and context": Other(
        ["default-temperature", "context-short"], options=own_sampling_and_short_context
    ),
    "missing EOS": Other(["eos-missing"], faults.without_eos),
    "rope theta": Other(["rope"], faults.other_rope),
    # 1e-4 to 3e-4 nats on models of this size: less than `standard` asks for.
    "fp8": Other(["quantised"], faults.rounded_to_fp8, profile="strict"),
    "tokenizer": Other(["tokenizer"], options=tokenizer_of_another),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_faulty_server(name: str, models: Path, verify: Verify, tmp_path: Path) -> None:
    other = OTHERS[name]
    base = other.base(models, tmp_path / "base") if other.base else models / "base"
    modules = {"lora-0": models / "lora-0"}
    log = tmp_path / "server.log"
    with serve(base, modules, log=log, options=other.options(tmp_path)) as running:
        words = (f"url={running.url}", f"source={models / 'lora-0'}", f"profile={other.profile}")
        answer = verify(*words, "name=lora-0")
    for cause in other.causes:
        is_found(answer, cause)
