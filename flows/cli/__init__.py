"""Turn a command line into a validated configuration, a run and an exit status.

    start("flows.cli.tool", "audit")       the commands without Hydra: `key=value` and a dataclass
    start("flows.chain.command")           rlhf and deliver: `entry.run_main` composes with Hydra

start         a process from its first line to its exit status; signals
tool          reads the words of a command of `tasks/config/tools.py` and runs it
entry         reads the words of rlhf and deliver, with Hydra's flags
config        composes their configuration, here and in a worker
composed      resolves and checks a configuration (pydantic), and runs a job with it
vocabulary    the names that may be typed, and one error for all that is wrong
usage         the text of `--help`
plan          `plan=true`, and the checks that every run has to pass
bootstrap     the environment of a run; `outcome` is its end
output        folders as typed, and the file of a report
registry      the registered model that a command names
"""
