"""Ten secrets, planted where a user might put one, are in no file and no line of output."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from flows.servers import mlflow_page
from tests.commands import command, environment, summary_of
from tests.tracking.mlflow_process import MlflowProcess

SECRETS = {
    "typed in tracking.uri": "Tq7/track+ing==w0rd",
    "typed in reward.url": "Rw3&login?w0rd#9",
    "query of reward.url in a file of settings": "Qf5=file&token+42",
    "variable in reward.url": "Pv8-path-of-judge-31",
    "variable in tag": "Tg2 tag of release 77",
    "variable HF_TOKEN": "hf_QzX81bTrWq55LmNcYdKs",
    "variable JUDGE_API_KEY, raised by a function": "jk/55+Raised-by-judge",
    "PLUMBLINE_REWARD_TOKEN": "bearer-Yt6.to.judge~12",
    "PREFECT_API_AUTH_STRING": "admin:pf-Lo9gin-w0rd",
    ".env": "pnu_dotEnv7Key8Value9",
}
TYPED_HUB_ID = "hf_TypedIntoTheHubId4711"

JUDGE = """
import os

def score(completions, **_):
    print("judge, key", os.environ["JUDGE_API_KEY"], flush=True)
    if os.path.exists(os.environ["BROKEN"]):
        raise RuntimeError("refused: Authorization: " + os.environ["JUDGE_API_KEY"])
    return [float(len(c[0]["content"])) for c in completions]
"""
SETTINGS = """# @package _global_
defaults:
  - /exp/grpo@_global_
  - _self_
reward:
  url: ${oc.env:JUDGE_ORIGIN}/${oc.env:JUDGE_PATH}?model=a&token=FILE_TOKEN
"""
SMALL = (
    "rollout.kv_cache_gib=0.25", "smoke=transformers", "rl.iterations=1", "rl.rollout_batch_size=4",
    "rl.num_generations=2", "rl.eval_prompts=4", "train.global_batch_size=8",
    "train.micro_batch_size=4", "smoke.eval_samples=4", "rollout.max_new_tokens=8",
)  # fmt: skip


def forms(secret: str) -> set[bytes]:
    """Return a secret as files may have it: plain, URL-encoded, in JSON, and within base64."""
    texts = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}
    encoded = {text.encode() for text in texts} | {json.dumps(secret)[1:-1].encode()}
    for offset in range(3):  # what comes before it shifts the characters of base64
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded.add(encode(b"x" * offset + secret.encode())[4 if offset else 0 : -4])
    return encoded


@dataclass
class Place:
    """Folders and variables of a user with many secrets, and what the commands have printed."""

    folder: Path
    env: dict[str, str]
    output: str = ""
    paths: list[str] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run(self, *overrides: str, timeout: float = 1200) -> int:
        argv = command("rlhf", *overrides, f"paths.runs={self.runs}")
        done = subprocess.run(
            argv, cwd=self.folder / "home", env=self.env, timeout=timeout, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.output += done.stdout
        return done.returncode

    def require_clean(self) -> None:
        """Search all output, and all files but those that the user wrote."""
        written = (self.runs, self.folder / "server")
        files = [path for root in written for path in root.rglob("*") if path.is_file()]
        contents = {str(path): str(path).encode() + path.read_bytes() for path in files}
        contents["output"] = self.output.encode()
        leaks = [
            f"{where}: {name}"
            for name, secret in {**SECRETS, "typed Hub id": TYPED_HUB_ID}.items()
            for form in forms(secret)
            for where, content in contents.items()
            if form in content
        ]
        assert sorted(set(leaks)) == []

    def require_private(self) -> None:
        """Check that other users can read nothing that was written."""
        paths = [self.runs, *self.runs.rglob("*")]
        open_ = [p for p in paths if not p.is_symlink() and p.stat().st_mode & 0o077]
        assert open_ == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    for name in ("home", "server", "conf/exp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "home" / ".env").write_text(f"PREFECT_API_KEY={SECRETS['.env']}\n")
    in_file = SETTINGS.replace(
        "FILE_TOKEN", quote(SECRETS["query of reward.url in a file of settings"], safe="")
    )
    (tmp_path / "conf" / "exp" / "mine.yaml").write_text(in_file)
    login = quote(SECRETS["typed in reward.url"], safe="")
    place = Place(
        tmp_path,
        environment(
            JUDGE_PATH=SECRETS["variable in reward.url"],
            RELEASE=SECRETS["variable in tag"],
            HF_TOKEN=SECRETS["variable HF_TOKEN"],
            JUDGE_API_KEY=SECRETS["variable JUDGE_API_KEY, raised by a function"],
            PLUMBLINE_REWARD_TOKEN=SECRETS["PLUMBLINE_REWARD_TOKEN"],
            PREFECT_API_AUTH_STRING=SECRETS["PREFECT_API_AUTH_STRING"],
            BROKEN=str(tmp_path / "broken"),
        ),
    )

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            place.paths.append(f"{self.path} {self.headers['Authorization']}")
            answer = json.dumps({"rewards": [float(len(c)) for c in body["completions"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        port = server.server_address[1]
        place.env["JUDGE_ORIGIN"] = f"http://someone:{login}@127.0.0.1:{port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield place
        server.shutdown()
        thread.join()


def test_a_refused_run_shows_none(place: Place) -> None:
    login = quote(SECRETS["typed in tracking.uri"], safe="")
    common = (
        f"--config-dir={place.folder}/conf", "+exp=mine", "tag=${oc.env:RELEASE}",
        f"tracking.uri=http://me:{login}@127.0.0.1:9", "train.global_batch_size=33",
        "tracking.experiment=${oc.env:HF_TOKEN}",
    )  # fmt: skip
    for more in (
        ["train.lr=${oc.env:JUDGE_API_KEY}"], ["model=hf", f"model.path={TYPED_HUB_ID}/x/y"],
    ):  # fmt: skip
        assert place.run(*common, *more) == 2, place.output
    for name in ("train.lr", "tracking.experiment", "tracking.uri"):
        assert name in place.output
    assert not place.runs.exists()
    place.run(f"--config-dir={place.folder}/conf", "+exp=mine", "--cfg", "job")
    place.require_clean()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_secret_is_on_record(place: Place) -> None:
    server = MlflowProcess(place.folder / "server")
    server.start()
    login = quote(SECRETS["typed in tracking.uri"], safe="")
    uri = server.uri.replace("//", f"//me:{login}@")
    common = [
        f"--config-dir={place.folder}/conf", "+exp=mine", "tag=${oc.env:RELEASE}", *SMALL,
        f"reward.function={place.folder}/judge.py:score",
    ]  # fmt: skip
    try:
        (place.folder / "broken").touch()
        assert place.run(*common) == 1, place.output  # with SQLite
        assert "refused: Authorization: ***" in place.output
        (place.folder / "broken").unlink()
        assert place.run(*common, f"tracking.uri={uri}") == 0, place.output
        assert place.run(*common, f"tracking.uri={uri}", "--multirun", "plan=true,false") == 0
    finally:
        server.kill()
    sent = "\n".join(place.paths)
    for name in ("variable in reward.url", "query of reward.url in a file of settings"):
        assert quote(SECRETS[name], safe="") in sent
    place.require_clean()
    place.require_private()
    recorded = (place.runs / "latest" / "config.yaml").read_text()
    assert "tag: ${oc.env:RELEASE}" in recorded
    assert "url: ${oc.env:JUDGE_ORIGIN}/${oc.env:JUDGE_PATH}?model=a&token=***" in recorded
    stages = {stage["name"]: stage for stage in summary_of(place.runs)["stages"]}

    key = stages["train"]["artifact"]
    place.env["JUDGE_ORIGIN"] = place.env["JUDGE_ORIGIN"].replace("someone:", "someone:rotated")
    assert place.run(*common) == 0, place.output
    again = {stage["name"]: stage for stage in summary_of(place.runs)["stages"]}
    assert (again["train"]["reused"], again["train"]["artifact"]) == (True, key)
    assert os.listdir(place.folder / "home") == [".env"]


def test_the_link_to_a_users_mlflow_server_has_no_password(tmp_path: Path) -> None:
    page = "#/experiments/1/runs/2"
    uri = "https://me:s3cret@tracking.example:8443/mlflow/"
    assert mlflow_page(tmp_path, uri, page) == f"https://tracking.example:8443/mlflow/{page}"
