"""Turn a command line into a validated configuration, a run and an exit status.

    start("flows.cli.tool", "audit")       the commands without Hydra: `key=value` and a dataclass
    start("flows.chain.run_chain")         rlhf and deliver: `config.run_main` composes with Hydra

start         a process from its first line to its exit status; signals
tool          reads the words of a command of `tasks/config/tools.py` and runs it
config        reads the words of rlhf and deliver, with Hydra's flags, and composes
composed      resolves and checks a configuration (pydantic), and runs a job with it
vocabulary    the names that may be typed, and one error for all that is wrong
usage         the text of `--help`
bootstrap     the environment of a run
output        folders as typed, and the file of a report
registry      the registered model that a command names
"""
