"""The configuration: one dataclass per section, with types, defaults and help text.

    sections    the dataclasses of `flows/rlhf.py` and `flows/deliver.py`; reads one of plain values
    tools       those of the other commands
    defaults    rules of the defaults that depend on model, objective or machine
    checks      refuses what a type cannot express before anything starts

Hydra composes it and refuses unknown keys, pydantic checks types and bounds (`flows/cli/`). The
ranks' settings (`tasks/training/job.py`, `tasks/rl/settings.py`) are made of the same sections.
"""
