#!/usr/bin/env bash
# Steps of infra/action/action.yml: `gate.sh setup|audit|verify`.
#
# Settings come in GATE_... variables, never as text of a script: what a workflow passes may be the
# title of somebody's pull request. A step ends with the exit status of its command, so a fault fails
# the job. The report is in the log and in the summary of the job.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
    printf 'gate: %s\n' "$1" >&2
    exit 2
}

setup() {
    local python=${GATE_PYTHON:-}
    if [[ -z $python ]]; then
        python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
            fail "$(python3 -V) is too old or too new: use actions/setup-python with 3.11 to 3.14"
        python3 -m venv "$RUNNER_TEMP/plumbline"
        python=$RUNNER_TEMP/plumbline/bin/python
        "$python" -m pip install --quiet --disable-pip-version-check --require-hashes \
            -r "$project/requirements/gate.lock"
    fi
    printf 'PLUMBLINE_PYTHON=%s\n' "$python" >>"$GITHUB_ENV"
}

# Run a command of flows/, and show its output: `report TITLE PROGRAM SETTING...`.
report() {
    local title=$1 program=$2 status=0 text
    shift 2
    text=$("$PLUMBLINE_PYTHON" "$project/flows/$program.py" "$@" 2>&1) || status=$?
    printf '%s\n' "$text"
    printf '### %s\n\n```\n%s\n```\n' "$title" "${text//\`\`\`/}" >>"$GITHUB_STEP_SUMMARY"
    return "$status"
}

audit() {
    report "Audit of $GATE_FOLDER" audit "source=$GATE_FOLDER"
}

verify() {
    local status=0
    local -a settings
    mkdir -p "$GATE_OUT"
    settings=("url=$GATE_URL" "source=$GATE_SOURCE"
        "profile=$GATE_PROFILE" "out=$GATE_OUT/verify.json")
    [[ -z $GATE_MODEL ]] || settings+=("name=$GATE_MODEL")
    [[ -z $GATE_BASE ]] || settings+=("base=$GATE_BASE")
    [[ -n $PLUMBLINE_API_KEY ]] || unset PLUMBLINE_API_KEY
    rm -f "$GATE_OUT/verify.json" # of an earlier job
    report "Server at $GATE_URL" verify "${settings[@]}" || status=$?
    outputs >>"$GITHUB_OUTPUT"
    return "$status"
}

# Print the outputs of the step; the report may be missing.
outputs() {
    "$PLUMBLINE_PYTHON" - "$GATE_OUT/verify.json" <<'PYTHON'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
report = json.loads(path.read_text()) if path.is_file() else {}
print(f"verdict={report.get('verdict', 'unverified')}")
print(f"causes={' '.join(report.get('causes', []))}")
PYTHON
}

case ${1:-} in
    setup | audit | verify) "$1" ;;
    *) fail "one of setup, audit, verify" ;;
esac
