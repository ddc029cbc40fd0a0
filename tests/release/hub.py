"""A Hub on loopback: as much of the Hub's API as a push and the download of a file need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUv"


@dataclass
class Hub:
    """State and behaviour of the Hub.

    `files` and `commits` are those of its only repository, `created` is what its creation asked
    for, `damage` names a file that is stored with other bytes than were sent, and `asked` has the
    methods and paths of all requests.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    created: dict[str, Any] = field(default_factory=dict)
    role: str = "write"
    damage: str = ""
    gated: bool = False
    asked: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def tree(self) -> list[dict[str, Any]]:
        """Return the list of files, large ones with their SHA-256."""
        return [self._entry(path, content) for path, content in sorted(self.files.items())]

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {
            "type": "file", "path": path, "size": len(content), "oid": git
        }  # fmt: skip
        if path.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry

    def commit(self, lines: list[dict[str, Any]]) -> str:
        """Apply the operations of a commit. Returns its id."""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
        if self.damage:
            self.files[self.damage] = bytes(reversed(self.files[self.damage]))
        return f"{len(self.commits):040d}"


@contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    """Run a Hub whose only repository, `me/model`, does not exist yet."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if self.command == "HEAD" or "/resolve/" in path:
                self.send_file(path)
            elif path.startswith("/upload/"):  # signed addresses need no token
                hub.uploads[path.rpartition("/")[2]] = body
                self.answer({})
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer({"error": "Invalid credentials"}, 401)
            else:
                self.answer(*reply(self.command, path, body))

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def send_file(self, path: str) -> None:
            """Answer like the Hub, which names its errors in a header."""
            repo, _, file = path.strip("/").partition("/resolve/")
            revision, _, name = file.partition("/")
            content = hub.files.get(name, b"")
            if repo != "me/model" or self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, error = 401, "RepoNotFound"
            elif hub.gated:
                status, error = 403, "GatedRepo"
            elif revision not in ("main", "0" * 40):
                status, error = 404, "RevisionNotFound"
            elif name not in hub.files:
                status, error = 404, "EntryNotFound"
            else:
                status, error = 200, ""
            self.send_response(status)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def answer(self, value: Any, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    def reply(method: str, path: str, body: bytes) -> tuple[Any, int]:
        repo = "/api/models/me/model"
        if path == "/api/whoami-v2":
            token = {"displayName": "test", "role": hub.role}
            user = {"type": "user", "name": "me", "orgs": [{"name": "acme"}]}
            return user | {"auth": {"type": "access_token", "accessToken": token}}, 200
        if path == "/api/repos/create":
            status = 409 if hub.created else 200
            hub.created = hub.created or json.loads(body)
            hub.files.setdefault(".gitattributes", b"*.safetensors filter=lfs\n")
            return {"url": f"{hub.url}/me/model"}, status
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        if path == f"{repo}/preupload/main":
            files = json.loads(body)["files"]
            for file in files:
                large = file["path"].endswith(".safetensors")
                file |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            return {"files": files}, 200
        if path == "/me/model.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{hub.url}/upload/{each['oid']}"}}
            return {"transfer": "basic", "objects": objects}, 200
        if path == f"{repo}/commit/main":
            commit = hub.commit([json.loads(line) for line in body.splitlines()])
            page = f"{hub.url}/me/model/commit/{commit}"
            return {"commitOid": commit, "commitUrl": page, "hookOutput": ""}, 200
        if path.startswith(f"{repo}/tree/"):
            return hub.tree(), 200
        if path in (repo, f"{repo}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            facts = {"_id": "0", "id": "me/model", "private": True, "downloads": 0, "likes": 0}
            sha = f"{len(hub.commits):040d}"
            return facts | {"sha": sha, "siblings": siblings, "tags": []}, 200
        return {"error": f"{method} {path}: not part of this Hub"}, 404

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
