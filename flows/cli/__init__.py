"""Turn a command line into a validated configuration, a run and an exit status.

entry         runs Hydra with our help, errors, signals and exit statuses; `arguments` sorts the
              words first
config        composes the configuration, here and in a worker; `config_errors` explains errors
plan          `plan=true`, and the checks that every run has to pass
start         starts a command; the commands themselves are in `flows/commands`
"""
