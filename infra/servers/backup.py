"""Back up a folder of runs while its servers work, and restore it elsewhere.

    make backup TO=FOLDER                          python -m infra.servers.backup backup FOLDER
    make restore FROM=FOLDER PLUMBLINE_RUNS=NEW    python -m infra.servers.backup restore FOLDER

A backup has the databases of Prefect and MLflow, all published artifacts, logs, reports and the
login. Every artifact is compared with its manifest at the end. A later backup into the same folder
copies what is new. What a run that is under way has not published yet is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.servers.services import CLIENT_SETTINGS, services_of
from infra.servers import databases
from tasks.core.errors import ArtifactError, ConfigError, PlumblineError
from tasks.pipeline.artifact import open_artifact, verify

LABEL = "backup.json"
"""Written last: without it a folder is no backup."""
SQLITE = {"prefect": Path("prefect/prefect.db"), "mlflow": Path("mlflow/mlflow.db")}
_OUTBOX = Path("mlflow/outbox")
_SPECIAL = ("artifacts", "prefect", "mlflow", "services")
_AT_ONCE = 500


def backup(runs: Path, to: Path) -> list[str]:
    """Copy a folder of runs.

    Args:
        runs: the folder.
        to: folder of the backup; created if it does not exist, and completed if it does.

    Returns:
        Lines about what was copied.

    Raises:
        ConfigError: there are no runs, or the backup would lie in the folder of runs.
        ArtifactError: an artifact or a database is damaged; the artifact is left out.
        PlumblineError: a copy failed.
    """
    _require_apart(runs, to)
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = to / "runs"
    store.mkdir(exist_ok=True)
    # In this order: what MLflow gets in between is in the copy of the outbox, at least.
    _copy_outbox(runs, store)
    fresh = [*_copy_databases(runs, to, store)]
    copied, damaged = _copy_artifacts(runs, store)
    _copy_rest(runs, store)
    damaged += _damaged(store)
    for path, final in fresh:
        path.replace(final)
    places = sorted({str(runs.absolute()), str(runs.resolve())})
    label = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "runs": places}
    (to / LABEL).write_text(json.dumps(label, indent=1) + "\n")
    _report(damaged, f"they are left out of {to}; a run makes them again")
    return [
        *(f"database  {final.relative_to(to)}" for _, final in fresh),
        f"artifacts {len([*_artifacts(store)])}, of which {copied} are new; all are verified",
        f"restore   make restore FROM={to} PLUMBLINE_RUNS=<new folder>",
    ]


def restore(source: Path, runs: Path) -> list[str]:
    """Write a backup to a new folder of runs, and let MLflow's records point there.

    Args:
        source: folder of the backup.
        runs: the new folder; it does not exist yet, or is empty.

    Returns:
        Lines about what to type next.

    Raises:
        ConfigError: there is no backup, the folder is in use, or the URL of a database is missing.
        ArtifactError: artifacts of the backup are damaged; all others are restored.
        PlumblineError: a copy failed.
    """
    if not (source / LABEL).is_file():
        raise ConfigError(f"{source}: no {LABEL}, so no complete backup", hint="FROM=<folder>")
    label = json.loads((source / LABEL).read_text())
    if runs.exists() and (not runs.is_dir() or any(runs.iterdir())):
        raise ConfigError(f"{runs} is not empty", hint="PLUMBLINE_RUNS=<new folder>")
    dumps = {name: path for name in SQLITE if (path := source / f"{name}.dump").is_file()}
    for server in dumps:
        if not databases.url_of(server):
            hint = f"{databases.VARIABLES[server][0]}=<URL of an empty database>"
            raise ConfigError(f"{source} has a dump of PostgreSQL for {server}", hint=hint)
    runs.parent.mkdir(parents=True, exist_ok=True)
    work = runs.parent / f".{runs.name}.restoring"
    shutil.rmtree(work, ignore_errors=True)
    _cp(["runs/."], work, source)
    damaged = _damaged(work)
    moved = _moved(label["runs"], runs)
    for server, path in dumps.items():
        databases.load(databases.url_of(server), path)
    if url := databases.url_of("mlflow"):
        databases.move_paths(url, moved)
    elif (work / SQLITE["mlflow"]).is_file():
        databases.move_paths(f"sqlite:///{work / SQLITE['mlflow']}", moved)
    databases.move_models(work / "mlflow/artifacts", moved)
    for journal in (work / _OUTBOX).glob("*/journal.jsonl"):
        _move_journal(journal, moved)
    if runs.exists():
        runs.rmdir()
    work.rename(runs)
    _report(damaged, f"everything else is in {runs}; a run makes them again")
    return [
        f"restored  {runs}, as of {label['made']}",
        f"next      make up PLUMBLINE_RUNS={runs} && make deploy PLUMBLINE_RUNS={runs}",
    ]


def _require_apart(runs: Path, to: Path) -> None:
    if not runs.is_dir():
        raise ConfigError(f"{runs}: no such folder", hint="PLUMBLINE_RUNS=<folder of runs>")
    if to.resolve().is_relative_to(runs.resolve()):
        raise ConfigError(f"{to} lies in {runs}", hint="TO=<a folder elsewhere>")
    if to.exists() and any(to.iterdir()) and not (to / "runs").is_dir():
        raise ConfigError(f"{to} has other files in it", hint="TO=<a new folder>")
    for server, place in databases.known(services_of(runs)).items():
        if place and not databases.url_of(server):
            variable = databases.VARIABLES[server][0]
            raise ConfigError(
                f"the records of {server} are in {place}", hint=f"{variable}=<its URL>"
            )


def _copy_outbox(runs: Path, store: Path) -> None:
    """Copy what MLflow has not got yet; a journal is removed once MLflow has all of it."""
    shutil.rmtree(store / _OUTBOX, ignore_errors=True)
    for journal in (runs / _OUTBOX).glob("*"):
        copy = store / _OUTBOX / journal.name
        try:
            for name in ("delivered.json", "journal.jsonl"):  # never more delivered than written
                if (journal / name).is_file():
                    copy.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(journal / name, copy / name)
            if (journal / "files").is_dir():
                shutil.copytree(journal / "files", copy / "files")
        except (FileNotFoundError, shutil.Error):  # removed just now
            pass
        if not (journal / "journal.jsonl").is_file():
            shutil.rmtree(copy, ignore_errors=True)


def _copy_databases(runs: Path, to: Path, store: Path) -> Iterator[tuple[Path, Path]]:
    """Copy both databases. Yields each copy, and the name that it gets at the end."""
    for server, name in SQLITE.items():
        url = databases.url_of(server)
        final = to / f"{server}.dump" if url else store / name
        fresh = final.with_name(f".{final.name}.new")
        final.parent.mkdir(parents=True, exist_ok=True)
        if url:
            databases.dump(url, fresh)
        elif (runs / name).is_file():
            databases.copy_sqlite(runs / name, fresh)
        else:
            continue
        yield fresh, final


def _artifacts(runs: Path) -> Iterator[Path]:
    """Yield the published artifacts of a folder of runs, relative to it."""
    for path in sorted(runs.glob("artifacts/*/*")):  # hidden ones are not published
        if path.is_dir() and "." not in (path.name[0], path.parent.name[0]):
            yield path.relative_to(runs)


def _copy_artifacts(runs: Path, store: Path) -> tuple[int, list[str]]:
    """Copy the artifacts that the backup has not got. Returns their number, and damaged ones."""
    new, damaged = [], []
    for name in _artifacts(runs):
        try:
            digest = open_artifact(runs / name).digest
        except ArtifactError as error:
            damaged.append(f"{name}: {error.message}")
            continue
        with suppress(ArtifactError):
            if open_artifact(store / name).digest == digest:
                continue
        shutil.rmtree(store / name, ignore_errors=True)
        new.append(str(name))
    for start in range(0, len(new), _AT_ONCE):
        _cp(["--parents", *new[start : start + _AT_ONCE]], store, runs)
    return len(new), damaged


def _copy_rest(runs: Path, store: Path) -> None:
    """Copy logs, reports, MLflow's files and the login; not records of processes."""
    names = [p.name for p in runs.iterdir() if p.name not in _SPECIAL and p.name[0] != "."]
    for name in names:
        if (store / name).is_symlink():
            (store / name).unlink()
    home = services_of(Path())
    more = [Path("mlflow/artifacts"), home / CLIENT_SETTINGS, home / databases.RECORD]
    names += [str(path) for path in more if (runs / path).exists()]
    if names:
        _cp(["--parents", "--remove-destination", *names], store, runs)


def _cp(arguments: Sequence[str], to: Path, cwd: Path) -> None:
    """Copy with `cp`: as a reflink if the file system can, with links and times."""
    to.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["cp", "--archive", "--reflink=auto", *arguments, str(to.absolute())],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PlumblineError(
            f"cp to {to} ended with status {done.returncode}",
            details=done.stderr.splitlines()[-5:],
            hint="run it again: files may have changed meanwhile, or the disk is full",
        )


def _damaged(root: Path) -> list[str]:
    """Read every byte of every artifact, and remove damaged ones. Returns a line for each."""
    damaged = []
    for name in _artifacts(root):
        try:
            problems = verify(open_artifact(root / name))
        except ArtifactError as error:
            problems = [error.message]
        if problems:
            damaged.append(f"{name}: {problems[0]}")
            shutil.rmtree(root / name)
    return damaged


def _report(damaged: Sequence[str], hint: str) -> None:
    if damaged:
        raise ArtifactError(f"{len(damaged)} damaged artifacts", details=damaged, hint=hint)


def _moved(before: Sequence[str], runs: Path) -> dict[str, str]:
    """Return the new path and the new URLs of the folder of runs, by the old ones."""
    moved: dict[str, str] = {}
    database, new = SQLITE["mlflow"], runs.resolve()
    for old in before:
        moved[old] = str(new)
        moved[Path(old).as_uri()] = new.as_uri()
        moved[f"sqlite:///{old}/{database}"] = f"sqlite:///{new / database}"
    return moved


def _move_journal(path: Path, moved: dict[str, str]) -> None:
    """Let a journal's header name the new database; offsets of its records move with it."""
    head, newline, rest = path.read_text().partition("\n")
    if not newline:
        return
    header: dict[str, Any] = json.loads(head)
    header["server"] = moved.get(header["server"], header["server"])
    fresh = json.dumps(header)
    path.write_text(f"{fresh}\n{rest}")
    state = path.with_name("delivered.json")
    if state.is_file() and (known := json.loads(state.read_text()))["sent"]:
        known["sent"] += len(fresh.encode()) - len(head.encode())
        state.write_text(json.dumps(known))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.servers.backup")
    parser.add_argument("command", choices=("backup", "restore"))
    parser.add_argument("folder", type=Path, help="folder of the backup")
    words = parser.parse_args(argv)
    runs = Path(os.environ.get("PLUMBLINE_RUNS") or "runs").absolute()
    usage = "make backup TO=<folder>, or make restore FROM=<folder>"
    try:
        if words.folder == Path():
            raise ConfigError("the folder of the backup is missing", hint=usage)
        if words.command == "backup":
            lines = backup(runs, words.folder)
        else:
            lines = restore(words.folder, runs)
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
