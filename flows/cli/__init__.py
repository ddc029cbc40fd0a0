"""Turn a command line into a validated configuration, a run and an exit status.

    start("flows.cli.tool", "audit")       the commands without Hydra: `key=value` and a dataclass
    start("flows.chain.command")           rlhf and deliver: `entry.run_main` composes with Hydra

tool          reads the words of a command of `tasks/config/tools.py` and runs it
entry         runs Hydra with our help, errors and exit statuses; `arguments` sorts the words first
config        composes the configuration, here and in a worker; `composed` is the result
usage         the text of `--help`; `problems` and `config_errors` explain mistakes
plan          `plan=true`, and the checks that every run has to pass
"""
