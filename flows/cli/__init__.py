"""Turn a command line into a validated configuration, a run and an exit status.

    start("flows.cli.tool", "audit")       the commands without Hydra: `key=value` and a dataclass
    start("flows.chain.command")           rlhf and deliver: `entry.run_main` composes with Hydra

tool          reads the words of a command of `tasks/config/tools.py` and runs it
entry         runs Hydra with our help, errors and exit statuses; `arguments` sorts the words first
config        composes the configuration, here and in a worker
composed      resolves and checks it (pydantic), and runs a job with it
vocabulary    the names that may be typed; `peer_names` are those of other trainers
problems      what is wrong with names and values, all in one error
usage         the text of `--help`
plan          `plan=true`, and the checks that every run has to pass
output        folders as typed, and the file of a report
registry      the registered model that a command names
start, bootstrap, signals, outcome    a process from its first line to its exit status
"""
