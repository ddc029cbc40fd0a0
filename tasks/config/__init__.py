"""The configuration: one dataclass per section, with types, defaults and help text.

Hydra composes it and refuses unknown keys, pydantic checks types and bounds (`flows/cli/`).
`section` reads a section from plain values, `defaults` has the rules of computed defaults, and
`checks` refuses what a type cannot express before anything starts. The ranks' settings
(`tasks/training/job.py`, `tasks/rl/settings.py`) are made of the same sections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.after_training import (
    Convert,
    Eval,
    Gate,
    Merge,
    Paths,
    Register,
    Smoke,
    Timeouts,
    Tracking,
)
from tasks.config.inputs import Data, Model
from tasks.config.learning import Peft, Train, Zero
from tasks.config.online import Reward, Rl, Rollout
from tasks.config.section import Section


@dataclass(frozen=True)
class Rlhf(Section):
    """The whole configuration of `flows/rlhf.py`."""

    plan: bool = False  # true: print what would be done, start nothing
    force: list[str] = field(default_factory=list)  # stages to run again, by name
    tag: str = ""  # free text that tells runs apart
    seed: int = 0  # of training
    steps: dict[str, list[str]] = field(default_factory=dict)  # overrides of each, by its name
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    rl: Rl = field(default_factory=Rl)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    merge: Merge = field(default_factory=Merge)
    convert: Convert = field(default_factory=Convert)
    smoke: Smoke = field(default_factory=Smoke)
    eval: Eval = field(default_factory=Eval)
    gate: Gate = field(default_factory=Gate)
    register: Register = field(default_factory=Register)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
    timeouts: Timeouts = field(default_factory=Timeouts)
