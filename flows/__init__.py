"""Commands that a user runs, one file each: `python flows/audit.py DIR`, or `plumbline audit DIR`.

rlhf, deliver    the Prefect flows that make models, read by Hydra: `chain/` and `delivery/`
audit, verify, bisect, compare, promote, serve, status, prune
                 commands without Hydra, Prefect and torch: settings in `tasks/config/tools.py`
recorded         audits and verifications as Prefect flows
program          `plumbline <command>`
cli/             from a command line to a configuration, a run and an exit status
orchestration/   one run: logs, task runs, progress, summary
servers          the Prefect server of a run, and the servers of `make up`
monitoring       what runs and ran; `report/` is the page of a run
"""
