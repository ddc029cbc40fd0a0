"""Errors for input that cannot be trained on, and the test of each.

data whose template yields no trainable token
    tests/training/tokens/test_bad_input.py::test_a_template_that_leaves_no_trainable_token
all samples longer than `train.max_len`
    tests/training/tokens/test_bad_input.py::test_all_samples_are_longer_than_the_context
label columns missing or of the wrong type
    tests/config/test_preflight_data.py::test_rows_that_do_not_fit
batch arithmetic that does not work out
    tests/config/test_preflight.py::test_batches_divide_or_the_offered_sizes_do
an objective that the model kind cannot have
    tests/config/test_preflight_model.py::test_an_objective_that_this_kind_of_model_cannot_have
a family that cannot be packed
    tests/config/test_preflight_model.py::test_a_family_with_recurrent_layers_is_refused
gradients that are not finite: step, rank and tensor named
    tests/training/test_interrupted.py::test_nan_in_a_sample_is_reported_with_rank_and_tensor
out of memory: what to change
    tests/training/test_interrupted.py::test_a_rank_without_memory_names_settings_to_change
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.core.errors import DataError
from tasks.training.tokens.example_spec import CONVERSATIONS, PAIRS
from tests.training.datasets import answer, job_for, load, pair, user, write

PROJECT = Path(__file__).resolve().parents[3]
NAMED = re.findall(r"^    (tests/\S+\.py)::(\w+)$", __doc__ or "", re.M)
SILENT = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Forgets what the assistant says."""


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_kind_of_bad_input_has_its_test(path: str, name: str) -> None:
    assert re.search(rf"^ *def {name}\(", (PROJECT / path).read_text(), re.M)


@pytest.mark.parametrize("roles", [CONVERSATIONS, PAIRS], ids=["sft", "pairs"])
def test_a_template_that_leaves_no_trainable_token(
    base: Path, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    chats = [{"id": f"s{i}", "messages": [user("q"), answer("yes")]} for i in range(3)]
    pairs = [pair(f"s{i}", "q", "good", "bad") for i in range(3)]
    write(tmp_path, pairs if roles == PAIRS else chats)
    (tmp_path / "chat_template.jinja").write_text(SILENT)
    with pytest.raises(DataError, match="3 samples cannot be used, first s0: no train") as caught:
        load(job_for(tmp_path, base), roles)
    why = "no trainable token: the chat template leaves nothing of the answer"
    assert caught.value.details == tuple(f"s{i}: {why}" for i in range(3))
    assert "data.chat_template=" in caught.value.hint
    assert not list((tmp_path / "tokens").iterdir())


@pytest.mark.parametrize("rule", ["truncate", "refuse"])
def test_all_samples_are_longer_than_the_context(base: Path, tmp_path: Path, rule: str) -> None:
    """Prompts alone fill `train.max_len`, so truncation leaves no answer."""
    write(tmp_path, [pair(f"s{i}", "q" * 80, "good", "bad") for i in range(3)])
    with pytest.raises(DataError) as caught:
        load(job_for(tmp_path, base, batch={"on_overlong": rule}), PAIRS)
    what = {"truncate": "3 samples cannot be used, first s0: prompt of",
            "refuse": "none of 3 samples is left: 3 too long"}  # fmt: skip
    assert what[rule] in caught.value.message
    assert len(caught.value.details) == 3
    assert "train.max_len=" in caught.value.hint
