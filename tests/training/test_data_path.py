"""From a dataset artifact to tokenised examples: kinds of rows, the truncation rule, the cache."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import ConfigError, DataError
from tasks.training.data import load_split
from tasks.training.drafts import CONVERSATIONS, LABELLED, PAIRS, Drafts
from tasks.training.examples import Example, Examples, Tokens, damage, open_examples
from tasks.training.fitting import Rule, Tally
from tasks.training.job import Batch, Settings, TrainJob
from tasks.training.model import load_tokenizer
from tasks.training.rows import RowFile

Row = dict[str, Any]


class Alone:
    """The ranks of a run that has one."""

    rank, world_size, first = 0, 1, True

    def all_objects(self, value: Any) -> list[Any]:
        """What all ranks say."""
        return [value]

    def barrier(self) -> None:
        """There is nobody to wait for."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(name: str, question: str, chosen: str, rejected: str, **more: Any) -> Row:
    return {"id": name, "prompt": [user(question)], "chosen": [answer(chosen)],
            "rejected": [answer(rejected)], **more}  # fmt: skip


def write(folder: Path, rows: list[Row], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_for(folder: Path, base: Path, **changes: Any) -> TrainJob:
    batch = Batch(max_len=changes.pop("max_len", 64), **changes.pop("batch", {}))
    settings = Settings(batch=batch, **changes)
    return TrainJob(settings, base, "", folder, folder / "out", folder / "ck",
                    tokens=folder / "tokens")  # fmt: skip


def load(job: TrainJob, roles: tuple[str, ...]) -> Examples:
    ranks: Any = Alone()
    return load_split(job, "train", roles=roles, tokenizer=load_tokenizer(job), ranks=ranks)


def texts(examples: Examples, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """Of every sequence: what bears no loss and what does."""
    found = []
    for example in range(len(examples)):
        sides = []
        for role in range(len(examples.roles)):
            ids, bears = examples.sequence(example, role)
            sides.append((tokenizer.decode(ids[bears == 0]), tokenizer.decode(ids[bears == 1])))
        found.append(sides)
    return found


def data_events(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = [line for line in capfd.readouterr().out.splitlines() if '"event": "data"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


class TestRows:
    def test_pairs(self, base: Path, tmp_path: Path, tokenizer) -> None:
        rows = [pair("a", "q", "good", "bad", margin=0.5), pair("b", "z", "x", "y", margin=2)]
        write(tmp_path, rows)
        found = load(job_for(tmp_path, base), PAIRS)
        start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
        assert texts(found, tokenizer) == [
            [(start("q"), "good<|im_end|>"), (start("q"), "bad<|im_end|>")],
            [(start("z"), "x<|im_end|>"), (start("z"), "y<|im_end|>")],
        ]
        assert found.values["margin"].tolist() == [0.5, 2.0]
        assert list(found.names) == ["a", "b"]
        assert found.supervised.tolist() == [[5, 4], [2, 2]]

    def test_labelled_answers_and_their_mismatches(self, base: Path, tmp_path, tokenizer) -> None:
        rows = [
            {"id": str(i), "messages": [user(q), answer(a)], "desirable": i % 2 == 0}
            for i, (q, a) in enumerate([("q1", "a"), ("q1", "b"), ("q2", "a"), ("q3", "c")] * 3)
        ]
        write(tmp_path, rows)
        found = load(job_for(tmp_path, base), LABELLED)
        assert found.values["desirable"].tolist() == [1.0, 0.0] * 6
        given = {(r["messages"][0]["content"], r["messages"][1]["content"]) for r in rows}
        for (prompt, own), (same, other) in texts(found, tokenizer):
            assert prompt == same
            assert own != other
            question = prompt.removeprefix("<|im_start|>user\n").partition("<")[0]
            foreign = {a for q, a in given if q != question}
            assert other.removesuffix("<|im_end|>") in foreign
        again = load(job_for(tmp_path, base, seed=1), LABELLED)
        assert texts(found, tokenizer) != texts(again, tokenizer)

    def test_labelled_answers_that_all_agree_are_refused(self, base: Path, tmp_path: Path) -> None:
        rows = [{"id": str(i), "messages": [user(f"q{i}"), answer("a")], "desirable": True}
                for i in range(3)]  # fmt: skip
        write(tmp_path, rows)
        with pytest.raises(DataError, match=r"3 samples cannot be used, first 0: none of 2 other"):
            load(job_for(tmp_path, base), LABELLED)

    @pytest.mark.parametrize(
        ("row", "roles", "words"),
        [
            (pair("a", "q", "x", "y"), CONVERSATIONS, "holds pairs, .* needs conversations"),
            ({"id": "a", "messages": []}, PAIRS, "holds conversations, .* needs pairs"),
            ({"id": "a", "messages": [], "desirable": 1}, PAIRS, "holds labelled"),
        ],
    )
    def test_rows_of_another_kind_are_refused(self, tmp_path: Path, row, roles, words) -> None:
        path = write(tmp_path, [row])
        with pytest.raises(ConfigError, match=words):
            Drafts(path, roles=roles, mask="last_answer", seed=0)

    def test_masks(self, base: Path, tmp_path: Path, tokenizer) -> None:
        said = [user("a"), answer("b"), user("c"), answer("d")]
        write(tmp_path, [{"id": "x", "messages": said}])
        wanted = {"last_answer": 2, "every_answer": 4}
        for mask, count in wanted.items():
            found = load(job_for(tmp_path, base, mask=mask, max_len=200), CONVERSATIONS)
            assert found.supervised.tolist() == [[count]], mask
        whole = load(job_for(tmp_path, base, mask="every_token", max_len=200), CONVERSATIONS)
        assert whole.supervised.tolist() == (whole.lengths - 1).tolist()

    def test_every_bad_row_is_named_in_one_error(self, base: Path, tmp_path: Path) -> None:
        rows = [pair(f"s{i}", "q", "x" * (1 + i), "y") for i in range(30)]
        for number in (3, 7):
            rows[number]["chosen"] = []
        rows[9] = {"id": "s9", "prompt": "q"}
        write(tmp_path, rows)
        with pytest.raises(DataError, match=r"3 samples cannot be used, first s3:") as caught:
            load(job_for(tmp_path, base), PAIRS)
        assert [line.partition(":")[0] for line in caught.value.details] == ["s3", "s7", "s9"]
        assert not list((tmp_path / "tokens").iterdir())

    def test_a_broken_line_is_named(self, base: Path, tmp_path: Path) -> None:
        path = write(tmp_path, [{"id": "a", "messages": [user("q"), answer("a")]}])
        path.write_text(path.read_text() + "{oops\n")
        with pytest.raises(DataError, match=r"train.jsonl:2: not JSON"):
            load(job_for(tmp_path, base), CONVERSATIONS)
        path.write_text("")
        with pytest.raises(DataError, match="no samples"):
            load(job_for(tmp_path, base), CONVERSATIONS)
        path.unlink()
        with pytest.raises(DataError, match="cannot be read: No such file"):
            load(job_for(tmp_path, base), CONVERSATIONS)

    def test_rows_of_which_only_some_have_a_margin_are_refused(self, base, tmp_path) -> None:
        write(tmp_path, [pair("a", "q", "x", "y", margin=1), pair("b", "q", "x", "z")])
        with pytest.raises(DataError, match=r"b: values \[\], not \('margin',\)"):
            load(job_for(tmp_path, base), PAIRS)

    def test_a_disk_that_takes_nothing_is_said(self, base: Path, tmp_path: Path) -> None:
        """The limit on file sizes stands for a full disk: the same error at the same place."""
        write(tmp_path, [pair(str(i), "q", "x" * 40, "y") for i in range(200)])
        job = job_for(tmp_path, base)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            with pytest.raises(DataError, match="tokenised data cannot be written: File too large"):
                load(job, PAIRS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert not list((tmp_path / "tokens").iterdir())

    def test_a_tokenizer_without_a_template_is_refused(self, base: Path, tmp_path: Path) -> None:
        write(tmp_path, [pair("a", "q", "x", "y")])
        job = job_for(tmp_path, base)
        tokenizer: Any = load_tokenizer(job)
        ranks: Any = Alone()
        tokenizer.chat_template = None
        with pytest.raises(DataError, match="has no chat template") as caught:
            load_split(job, "train", roles=PAIRS, tokenizer=tokenizer, ranks=ranks)
        assert "data.chat_template=" in caught.value.hint

    def test_the_datas_own_chat_template_is_the_one_trained_with(self, base, tmp_path) -> None:
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        job = job_for(tmp_path, base)
        bases_own = load_tokenizer(job).chat_template
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(job)
        assert bases_own != tokenizer.chat_template == template
        tokenizer.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "chat_template.jinja").read_text() == template


@given(lines=st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=3)),
       ended=st.booleans())  # fmt: skip
def test_rows_are_found_by_number(lines, ended, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    rows = [{"id": str(i), **line} for i, line in enumerate(lines)]
    text = "\n".join(json.dumps(row) for row in rows)
    path.write_text(text + "\n" if ended and rows else text)
    file = RowFile(path)
    assert [file[i] for i in reversed(range(len(file)))] == rows[::-1]
    file.close()


def sample(name: str, *lengths: int, prompt: int = 5, start: int = 0) -> Example:
    """Sequences with a common prompt; answers count up from different numbers."""
    made = []
    for role, length in enumerate(lengths):
        tail = [start + 1000 * role + i for i in range(length - prompt)]
        bears = [i >= prompt for i in range(length)]
        made.append(Tokens([*range(prompt), *tail], bears))
    return Example(name, tuple(made))


class TestTruncation:
    def run(self, rule: Rule, *examples: Example) -> tuple[list[list[int]], Tally]:
        tally = Tally()
        kept = [one for one in (rule.apply(e, tally) for e in examples) if one is not None]
        return [[len(s.ids) for s in one.sequences] for one in kept], tally

    def test_answers_are_cut_at_the_end_and_their_ends_counted(self) -> None:
        found, tally = self.run(Rule(10, "truncate"), sample("long", 12), sample("fits", 10))
        assert found == [[10], [10]]
        assert (tally.read, tally.kept, tally.truncated, tally.ends_cut) == (2, 2, 1, 1)
        assert not tally.left_out

    def test_pairs_are_cut_each_for_itself_and_their_prompt_never(self) -> None:
        rule = Rule(10, "truncate")
        found, tally = self.run(rule, sample("p", 12, 9), sample("q", 14, 12))
        assert found == [[10, 9], [10, 10]]
        assert (tally.kept, tally.truncated, tally.ends_cut) == (2, 2, 3)

    def test_pairs_that_become_equal_are_left_out_and_counted(self) -> None:
        one = sample("p", 12, 12)
        same = one.sequences[0]
        late = Tokens([*same.ids[:-1], 99], same.bears)
        found, tally = self.run(Rule(11, "truncate"), Example("p", (same, late)), sample("q", 6, 6))
        assert found == [[6, 6]]
        assert (tally.read, tally.kept, tally.equal, tally.truncated) == (2, 1, 1, 0)
        assert tally.left_out == ["p: both answers are the same tokens after truncation to 11"]
        found, tally = self.run(Rule(12, "truncate"), Example("p", (same, late)))
        assert (found, tally.equal) == ([[12, 12]], 0)
        _, tally = self.run(Rule(11, "truncate"), Example("p", (same, late)))
        with pytest.raises(DataError, match=r"no sample is left of 1: 0 too long, 1 pairs"):
            tally.raise_if_unusable("s")

    def test_prompts_that_fill_the_context(self) -> None:
        long = sample("p", 12, prompt=10)
        _, tally = self.run(Rule(10, "truncate"), sample("x", 12), long)
        with pytest.raises(DataError, match="first p: prompt of 10 tokens leaves no room") as bad:
            tally.raise_if_unusable("s")
        assert "train.on_overlong=refuse" in bad.value.hint
        found, tally = self.run(Rule(10, "refuse"), sample("x", 12), long, sample("y", 9))
        assert (found, tally.refused) == ([[9]], 2)
        assert [line.partition(":")[0] for line in tally.left_out] == ["x", "p"]
        _, tally = self.run(Rule(10, "refuse"), long)
        with pytest.raises(DataError, match="no sample is left of 1: 1 too long"):
            tally.raise_if_unusable("s")

    @given(parts=st.lists(st.lists(st.integers(6, 16), max_size=30), min_size=1, max_size=4),
           rule=st.sampled_from(["truncate", "refuse"]))  # fmt: skip
    def test_ranks_together_count_what_one_would(self, parts, rule) -> None:
        def tally(lengths: list[int], at: int) -> Tally:
            found = Tally()
            for number, length in enumerate(lengths, at):
                Rule(10, rule).apply(sample(str(number), length, prompt=length - 5), found)
            return found

        starts = np.cumsum([0, *map(len, parts)])
        apart = sum((tally(p, int(s)) for p, s in zip(parts, starts, strict=False)), Tally())
        assert apart == tally([length for part in parts for length in part], 0)


ROWS = [{"id": f"s{i}", "messages": [user(f"q{i}"), answer("x" * (i % 7 + 1))]}
        for i in range(300)]  # fmt: skip


class TestCache:
    def test_made_once_and_made_again_when_anything_changes(self, base, tmp_path, capfd) -> None:
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

    def test_two_runs_at_the_same_time_share_what_the_faster_one_made(
        self, base, tmp_path, monkeypatch
    ) -> None:
        write(tmp_path, ROWS)
        job = job_for(tmp_path, base)
        from tasks.training.token_cache import TokenCache

        stage = TokenCache.stage
        others: list[Examples] = []

        def meanwhile(cache: TokenCache) -> Path:
            """The other run finishes between this one's look and its rename."""
            monkeypatch.setattr(TokenCache, "stage", stage)
            others.append(load(job, CONVERSATIONS))
            return stage(cache)

        monkeypatch.setattr(TokenCache, "stage", meanwhile)
        mine = load(job, CONVERSATIONS)
        assert np.array_equal(mine.ids, others[0].ids)
        assert len(list((tmp_path / "tokens").iterdir())) == 1

    def test_two_ranks_write_what_one_does(self, base, tmp_path) -> None:
        """Real ranks: every one of them stops at bad data, and the bytes do not depend on them."""
        write(tmp_path, ROWS)
        write(tmp_path, [*ROWS[:299], {"id": "bad", "messages": []}], "heldout")
        job = job_for(tmp_path, base)
        (tmp_path / "ck").mkdir()
        job.write(tmp_path / "job.json")
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "2", str(Path(__file__).with_name("tokenise.py")),
                   str(tmp_path / "job.json")]  # fmt: skip
        done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False,
                              cwd=Path(__file__).parents[2])  # fmt: skip
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
