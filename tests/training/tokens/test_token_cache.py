"""Splits are tokenised once, and again if anything changes or is damaged."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.training.tokens.example_spec import CONVERSATIONS
from tasks.training.tokens.examples import Examples, damage, open_examples
from tests.training.datasets import (
    answer,
    data_events,
    job_for,
    load,
    user,
    write,
)

ROWS = [{"id": f"s{i}", "messages": [user(f"q{i}"), answer("x" * (i % 7 + 1))]}
        for i in range(300)]  # fmt: skip


class TestCache:
    def test_an_entry_is_made_once_and_again_after_changes(self, base, tmp_path, capfd) -> None:
        write(tmp_path, ROWS)
        job = job_for(tmp_path, base)
        first = load(job, CONVERSATIONS)
        second = load(job, CONVERSATIONS)
        assert np.array_equal(first.ids, second.ids)
        changed = [
            job_for(tmp_path, base, max_len=63),
            job_for(tmp_path, base, mask="every_token"),
            job_for(tmp_path, base, batch={"on_overlong": "refuse"}),
        ]
        for other in changed:
            load(other, CONVERSATIONS)
        load(job_for(tmp_path, base, seed=5, probes=1), CONVERSATIONS)  # they play no part
        write(tmp_path, ROWS[:-1])
        load(job, CONVERSATIONS)
        (tmp_path / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        load(job, CONVERSATIONS)
        events = data_events(capfd)
        assert [e["cached"] for e in events] == [False, True, *[False] * 3, True, False, False]
        assert events[0]["kept"] == events[1]["kept"] == 300
        assert len(list((tmp_path / "tokens").iterdir())) == 6

    @pytest.mark.parametrize("how", ["flipped", "cut", "missing", "undescribed"])
    def test_a_damaged_entry_is_noticed_and_made_again(
        self, base, tmp_path, capfd, caplog, how
    ) -> None:
        write(tmp_path, ROWS)
        job = job_for(tmp_path, base)
        good = np.array(load(job, CONVERSATIONS).ids)
        (entry,) = (tmp_path / "tokens").iterdir()
        ids = entry / "ids.i32"
        if how == "flipped":
            content = bytearray(ids.read_bytes())
            content[100] ^= 1
            ids.write_bytes(content)
        elif how == "cut":
            os.truncate(ids, ids.stat().st_size - 4)
        elif how == "missing":
            (entry / "bears.u8").unlink()
        else:
            (entry / "examples.json").write_text("{")
        assert damage(entry)
        with caplog.at_level(logging.WARNING):
            assert np.array_equal(load(job, CONVERSATIONS).ids, good)
        assert "are damaged and made again" in caplog.text
        assert [e["cached"] for e in data_events(capfd)] == [False, False]
        assert [p.name for p in (tmp_path / "tokens").iterdir()] == [entry.name]
        assert not damage(entry)

    def test_two_concurrent_runs_share_the_first_entry(self, base, tmp_path, monkeypatch) -> None:
        write(tmp_path, ROWS)
        job = job_for(tmp_path, base)
        from tasks.training.tokens.token_cache import TokenCache

        stage = TokenCache.stage
        others: list[Examples] = []

        def meanwhile(cache: TokenCache) -> Path:
            """Let another run publish the entry between this run's check and its rename."""
            monkeypatch.setattr(TokenCache, "stage", stage)
            others.append(load(job, CONVERSATIONS))
            return stage(cache)

        monkeypatch.setattr(TokenCache, "stage", meanwhile)
        mine = load(job, CONVERSATIONS)
        assert np.array_equal(mine.ids, others[0].ids)
        assert len(list((tmp_path / "tokens").iterdir())) == 1

    @pytest.mark.slow
    def test_two_ranks_write_the_bytes_of_one(self, base, tmp_path) -> None:
        """Real ranks: all of them stop at bad data, and the bytes do not depend on their number."""
        write(tmp_path, ROWS)
        write(tmp_path, [*ROWS[:299], {"id": "bad", "messages": []}], "heldout")
        job = job_for(tmp_path, base)
        (tmp_path / "ck").mkdir()
        job.write(tmp_path / "job.json")
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "2", str(Path(__file__).with_name("tokenise.py")),
                   str(tmp_path / "job.json")]  # fmt: skip
        done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False,
                              cwd=Path(__file__).parents[3])  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
        wrong = "heldout.jsonl: 1 samples cannot be used, first bad: the last message is not"
        assert [one["error"].partition(" the assistant")[0] for one in said] == [wrong] * 2
        (entry,) = (p for p in (tmp_path / "tokens").iterdir() if not p.name.startswith("."))
        alone = replace(job, tokens=tmp_path / "alone")
        load(alone, CONVERSATIONS)
        for name in sorted(p.name for p in entry.iterdir()):
            assert (entry / name).read_bytes() == (
                tmp_path / "alone" / entry.name / name
            ).read_bytes()
        assert len(open_examples(entry)) == 300
