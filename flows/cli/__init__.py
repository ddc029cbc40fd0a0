"""The command lines: from words typed to a validated configuration and an exit status.

entry         Hydra with our help, errors and exit statuses; `arguments` sorts the words before it
config        composes the configuration, here and in a worker; `config_errors` names what is wrong
plan          `plan=true`, and the check that every run passes first
*_command     one for each of `flows/rlhf.py`, `flows/deliver.py` and `flows/audit.py`
"""
