"""Keys that cannot sign, or check a signature, are refused before anything starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from flows.chain.steps import chain_steps
from flows.cli.config import compose_config
from flows.cli.plan import check
from tasks.config.checks import signing
from tasks.core.errors import ConfigError
from tasks.pipeline.signature import PASSWORD
from tests.conftest import PROJECT
from tests.keys import make_pair


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with keys of all kinds, as the working directory."""
    monkeypatch.delenv(PASSWORD, raising=False)
    monkeypatch.chdir(tmp_path)
    make_pair(tmp_path)
    make_pair(tmp_path, "other")
    make_pair(tmp_path, "hidden", password="right")
    make_pair(tmp_path, "koblitz", private=ec.generate_private_key(ec.SECP256K1()))
    make_pair(tmp_path, "edwards", private=ed25519.Ed25519PrivateKey.generate())
    make_pair(tmp_path, "rsa", private=rsa.generate_private_key(65537, 2048))
    make_pair(tmp_path, "open")[0].chmod(0o644)
    make_pair(tmp_path, "group")[0].chmod(0o640)
    Path("text.pem").touch(mode=0o600)
    Path("large.pem").touch(mode=0o600)
    Path("large.pem").write_bytes(b"-" * 100_000)
    return tmp_path


def findings(private: str | None, public: str | None = None) -> list[Any]:
    return signing.signing({"sign": private, "verify": public})


NEEDS = "a key on P-256, P-384 or P-521 is needed, this is "
PRIVATE = {
    "absent.pem": ("no such file", "openssl ecparam"),
    ".": ("not a file", "openssl ecparam"),
    "open.pem": ("has mode 0644", "chmod 600 open.pem"),
    "group.pem": ("has mode 0640", "chmod 600 group.pem"),
    "key.pub": ("has mode 0644", "chmod 600"),
    "text.pem": ("no private key in PEM", "openssl ecparam"),
    "large.pem": ("too large for a key", "openssl ecparam"),
    "koblitz.pem": (f"{NEEDS}secp256k1", "openssl ecparam"),
    "edwards.pem": (f"{NEEDS}Ed25519", "openssl ecparam"),
    "rsa.pem": (f"{NEEDS}RSA", "openssl ecparam"),
    "hidden.pem": ("the key has a password", f"export {PASSWORD}="),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_key_that_cannot_sign(name: str) -> None:
    (finding,) = findings(name)
    problem, advice = PRIVATE[name]
    assert finding.what == "register.sign"
    assert problem in str(finding)
    assert advice in finding.override


PUBLIC = {
    "absent.pub": ("no such file", "openssl ec -in key.pem -pubout"),
    "key.pem": ("a private key", "openssl ec -in key.pem -pubout -out key.pub"),
    "text.pem": ("no public key in PEM", "-pubout"),
    "koblitz.pub": (f"{NEEDS}secp256k1", "openssl ecparam"),
    "rsa.pub": (f"{NEEDS}RSA", "openssl ecparam"),
    "other.pub": ("not the public key of register.sign=key.pem", "openssl ec -in key.pem -pubout"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_key_that_cannot_check(name: str) -> None:
    (finding,) = findings("key.pem", name)
    problem, advice = PUBLIC[name]
    assert finding.what == "register.verify"
    assert problem in str(finding)
    assert advice in finding.override


def test_keys_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(None) == []
    assert findings("key.pem") == findings(None, "key.pub") == findings("key.pem", "key.pub") == []
    monkeypatch.setenv(PASSWORD, "right")
    assert findings("hidden.pem", "hidden.pub") == []
    (finding,) = findings("key.pem")
    assert f"unset {PASSWORD}" in finding.override
    monkeypatch.setenv(PASSWORD, "wrong")
    (finding,) = findings("hidden.pem")
    assert finding.allowed == "the password is wrong"
    assert "wrong" not in finding.override


def test_without_the_package_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec("model_signing")
    monkeypatch.setattr(signing, "find_spec", lambda name: None)
    (finding,) = findings("key.pem")
    assert finding.override == "make setup-sign"


def test_it_is_one_of_all_problems_of_a_run() -> None:
    overrides = ["+exp=sft_qlora", "register.sign=open.pem", "zero=zero3"]
    with pytest.raises(ConfigError) as refused:
        check(chain_steps(compose_config(overrides), overrides))
    text = refused.value.report()
    assert "register.sign: open.pem has mode 0644" in text
    assert "QLoRA with ZeRO-3" in text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_documented_commands_make_keys_that_fit(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "delivery.md").read_text()
    for command in (signing.MAKE, signing.EXPORT):
        assert command in page
    folder = tmp_path / "new"
    folder.mkdir()
    for command in (signing.MAKE, signing.EXPORT):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    assert findings(str(folder / "key.pem"), str(folder / "key.pub")) == []
