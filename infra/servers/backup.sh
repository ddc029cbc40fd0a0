#!/usr/bin/env bash
# Copy a folder of runs while its servers work: `infra/servers/backup.sh RUNS TO`.
#
# Databases are copied by SQLite itself, everything else by cp. Artifacts appear complete in RUNS or
# not at all, so a run that goes on meanwhile costs no more than its unfinished stage. To restore,
# stop the servers and copy the folder back to the same path, which the records of MLflow name.
# Databases of PostgreSQL are backed up with pg_dump.
set -euo pipefail
(($# == 2)) && [[ -d $1 && -n $2 ]] || {
    echo "make backup TO=<folder> [PLUMBLINE_RUNS=<folder of runs>]" >&2
    exit 2
}
runs=$1 to=$2
umask 077
mkdir -p "$to"
copy='import sqlite3, sys
with sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True) as live:
    live.backup(copy := sqlite3.connect(sys.argv[2]))
sys.exit(copy.execute("pragma integrity_check").fetchone() != ("ok",))'
for path in prefect/prefect.db mlflow/mlflow.db; do
    [[ -f $runs/$path ]] || continue
    mkdir -p "$to/${path%/*}"
    rm -f "$to/$path"
    "${VENV:-.venv}/bin/python" -c "$copy" "$runs/$path" "$to/$path" || {
        echo "$runs/$path is damaged" >&2
        exit 1
    }
done
# Status 1 of tar: a log has grown, or a run has renamed its finished work meanwhile.
{
    tar -C "$runs" --create --exclude='./*/*.db' --exclude='./*/*.db-*' --exclude='.*.tmp' \
        --exclude='./services/*.json' . 2>/dev/null || (($? == 1))
} | tar -C "$to" --extract
echo "backup    $to; to restore: make down, then cp --archive $to/. $runs"
