"""Files of a folder that somebody else made: what is opened, what is followed, what is copied."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.core.files import UMASK, copy_file, link_problem, open_regular, open_up, stay_private


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "file").write_text("text")
    return tmp_path / "folder"


def test_links_inside_the_folder_may_be_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "sub" / "up").symlink_to("../file")
    (folder / "twice").symlink_to("sub/up")
    for name in ("file", "sub/up", "twice"):
        assert link_problem(folder / name, folder) == ""
    (tmp_path / "latest").symlink_to(folder)
    assert link_problem(tmp_path / "latest" / "file", tmp_path / "latest") == ""


def test_links_that_lead_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder-2").mkdir()  # a name that begins like the folder's
    (tmp_path / "folder-2" / "key").write_text("secret")
    (folder / "key").symlink_to("../folder-2/key")
    (folder / "again").symlink_to("key")
    (folder / "all").symlink_to("../folder-2")
    (folder / "circle").symlink_to("circle")
    assert "../folder-2/key" in link_problem(folder / "key", folder)
    assert "outside" in link_problem(folder / "again", folder)
    assert "outside" in link_problem(folder / "all" / "key", folder)
    assert "a broken link" in link_problem(folder / "circle", folder)


def test_no_waiting_for_what_is_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "pipe")
    for path in (folder / "pipe", folder / "sub", Path("/dev/zero")):
        with pytest.raises(ArtifactError, match="pipe|sub|zero"):
            open_regular(path)
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)  # the path of a socket is limited
        server.bind("socket")
        with pytest.raises(OSError, match="No such device"):
            open_regular(folder / "socket")


def test_a_copy_is_a_file_of_its_own(folder: Path) -> None:
    content = os.urandom(3 << 20)
    (folder / "file").write_bytes(content)
    (folder / "file").chmod(0o755)
    os.link(folder / "file", folder / "copy")
    before = os.umask(0o027)
    try:
        copy_file(folder / "file", folder / "copy")
    finally:
        os.umask(before)
    with (folder / "file").open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    assert (folder / "copy").read_bytes() == content
    assert (folder / "copy").stat().st_mode & 0o777 == 0o640


def test_files_are_the_owners_until_they_are_opened_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UMASK, raising=False)
    before, folder = os.umask(0o022), tmp_path / "out"
    try:
        stay_private()
        stay_private()  # a second call must not take our umask for that of the user
        folder.mkdir()
        (folder / "file").touch()
        modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "file")]
        assert modes == [0o700, 0o600]
        open_up(folder)
        modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "file")]
        assert modes == [0o755, 0o644]
    finally:
        os.umask(before)
        os.environ.pop(UMASK, None)
