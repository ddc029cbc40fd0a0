"""Every reported failure has a finding and a case that yields it, or a reason why it cannot."""

from __future__ import annotations

from tasks.audit.catalogue import CATALOGUE
from tasks.audit.catalogue.unseen import UNSEEN
from tests.audit.corpus.broken_adapters import BROKEN_ADAPTERS
from tests.audit.corpus.broken_files import BROKEN_FILES
from tests.audit.corpus.broken_merges import BROKEN_MERGES
from tests.audit.corpus.broken_words import BROKEN_WORDS
from tests.audit.reported import REPORTED

CASES = {**BROKEN_FILES, **BROKEN_WORDS, **BROKEN_ADAPTERS, **BROKEN_MERGES}
CLAIMED = {issue for entry in CATALOGUE.values() for issue in entry.issues}
EXPLAINED = {issue for failure in UNSEEN for issue in failure.issues}
SHOWN = {issue for case in CASES.values() for issue in case.issues}
ELSEWHERE = {
    # Covered by other tests, on checkpoints that DeepSpeed and verl write.
    "tests/weights/deepspeed/test_audit.py": {
        "LLaMA-Factory #2161",
        "LLaMA-Factory #2604",
        "OpenRLHF #1067",
        "OpenRLHF PR #1208",
    },
    "tests/audit/test_base.py": {
        "Automodel PR #3582",
        "aprender #3971",
        "huggingface_hub #3643",
        "semble #222",
        "unsloth #4919",
        "unsloth-zoo PR #803",
    },
    "tests/audit/test_files.py": {
        "SceneWorks #1333",
        "unsloth #8566",
        "verl #1679",
        "verl #2262",
        "verl #7193",
    },
    "tests/audit/test_merge_proof.py": {"mlx-lm #661", "ms-swift #8186"},
    "tests/audit/test_token_ids.py": {
        "TensorRT-LLM PR #13924",
        "open-instruct #1896",
        "transformers #45488",
        "transformers #48206",
        "vLLM PR #48482",
    },
    "tests/delivery/test_packed.py": {"LLaMA-Factory #10328", "ms-swift #7907"},
    "tests/audit/test_witness.py": {"ms-swift #9168", "trl #6361"},
    "tests/delivery/dialects/test_unsloth.py": {"unsloth #1122", "unsloth #1521"},
}


def test_every_report_is_covered() -> None:
    assert not REPORTED - CLAIMED - EXPLAINED


def test_every_claimed_report_has_a_case() -> None:
    shown = SHOWN.union(*ELSEWHERE.values())
    assert not {issue for issue in CLAIMED - shown if issue not in EXPLAINED}


def test_no_stale_exceptions() -> None:
    for issues in ELSEWHERE.values():
        assert issues <= CLAIMED
        assert not issues & SHOWN


def test_reports_of_a_case_belong_to_its_code() -> None:
    for name, case in CASES.items():
        assert set(case.issues) <= set(CATALOGUE[case.code].issues), name


def test_unseen_failures_have_a_reason() -> None:
    for failure in UNSEEN:
        assert failure.issues
        assert failure.what
        assert failure.reason
