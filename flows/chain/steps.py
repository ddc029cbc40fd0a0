"""A chain of chains: section `chain` names its links, and what each of them overrides.

    chain:
      sft: [train=sft]
      reward: [train=reward, data.train_size=12000]
      ppo: [train=ppo, rl=ppo, reward=model]

Every link is a whole configuration: the run's own overrides, then the link's. On the command line
`ppo:train.lr=1e-5` is an override for the link `ppo` alone, and comes last. A link begins with the
model that the one before it serves; a reward model is nobody's base, and scores the links after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.cli.config import Composed, compose_config, vocabulary
from flows.cli.overrides import keys, split
from flows.cli.vocabulary import nearest
from tasks.config.checks.unread import unread
from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """One chain of a run.

    Attributes:
        name: empty where there is only one.
        composed: its configuration.
        rewarded: whether a link before it trains a reward model.
        begins_with: section `peft` of the link before it whose model this one begins with; None
            where there is no such link.
        typed: keys that the command line sets, for it alone or (in the last link) for a run none of
            whose links reads them.
    """

    name: str
    composed: Composed
    rewarded: bool = False
    begins_with: Mapping[str, Any] | None = None
    typed: tuple[str, ...] = ()

    @property
    def earlier(self) -> dict[str, bool]:
        """Keyword arguments of `preflight` that the earlier steps determine."""
        return {"rewarded": self.rewarded, "based": self.begins_with is not None}

    @property
    def objective(self) -> str:
        """What it trains for."""
        return str(self.composed.settings["train"]["objective"])


def compose(overrides: Sequence[str]) -> Composed:
    """The run's own configuration. Raises as `compose_config`."""
    return compose_config(split(overrides)[0])


def links(composed: Composed, overrides: Sequence[str]) -> list[Link]:
    """The chains that a run consists of, in order.

    Args:
        composed: the run's own configuration.
        overrides: that led to it, those of links included.

    Raises:
        ConfigError: an override for a link that there is not; a link's own overrides are wrong.
    """
    chain: dict[str, list[str]] = composed.settings["chain"]
    plain, of_links = split(overrides)
    strangers = sorted(set(of_links) - set(chain))
    if strangers:
        raise _no_step(strangers[0], of_links[strangers[0]][0], list(chain))
    if not chain:
        return [Link("", composed, typed=tuple(keys(plain)))]
    found: list[Link] = []
    for name, own in chain.items():
        models = [link for link in found if link.objective != "reward"]
        config = _composed(name, [*plain, *own, *of_links.get(name, ())])
        typed = tuple(keys(of_links.get(name, ())))
        link = Link(name, config, rewarded=len(models) < len(found), typed=typed)
        if models:
            _require_same_adapter(models[-1], link)
            link = replace(link, begins_with=models[-1].composed.settings["peft"])
        found.append(link)
    idle = (_unread(link, keys(plain)) for link in found)
    nowhere = set.intersection(*idle)  # a key of the run is for the links that read it
    found[-1] = replace(found[-1], typed=(*found[-1].typed, *sorted(nowhere)))
    return found


def continues(before: Mapping[str, Any], peft: Mapping[str, Any]) -> bool:
    """Return True if a step trains the adapter of the step before: both are QLoRA.

    Merged, the weights would be quantised again, and lose most of what the step before learned.

    Args:
        before: section `peft` of the step before.
        peft: section `peft` of this step.
    """
    return before["kind"] == peft["kind"] == "qlora"


def _require_same_adapter(before: Link, link: Link) -> None:
    """Refuse a QLoRA link that cannot go on with the adapter of the QLoRA link before it."""
    there, here = before.composed.settings["peft"], link.composed.settings["peft"]
    if not continues(there, here):
        return
    differs = [key for key in here if key not in _OWN and here[key] != there[key]]
    if differs:
        key = f"peft.{differs[0]}"
        raise ConfigError(
            f"step {link.name}: {key}={here[differs[0]]}, and step {before.name} has "
            f"{there[differs[0]]}; a QLoRA step goes on with the adapter of the step before, whose "
            "merged weights would lose in 4 bits most of what it learned",
            details=[f"peft.{one}" for one in differs],
            hint=f"the same section peft for both, or {link.name}:peft=lora",
        )


_OWN = ("dropout", "pissa_niter")
"""Settings of an adapter in which two links may differ when one goes on with the other's."""


def _no_step(name: str, override: str, steps: Sequence[str]) -> ConfigError:
    """Return the error for an override of a step that the chain does not have."""
    near = " or ".join(f"{step}:{override}" for step in nearest(name, steps, n=1))
    if vocabulary("rlhf").has(f"{name}.{override.partition('=')[0]}"):
        near = f"{name}.{override}"  # a colon typed for a dot
    known = f"its steps are {', '.join(steps)}" if steps else "+exp=qlora has one"
    return ConfigError(
        f"{name}:{override}: the chain has no step {name}; {known}",
        hint=near or f"+exp=qlora ppo:{override}",
    )


def _unread(link: Link, typed: Sequence[str]) -> set[str]:
    settings = link.composed.settings
    return {finding.what for finding in unread(settings, typed, **link.earlier)}


def _composed(name: str, overrides: Sequence[str]) -> Composed:
    """The configuration of one link; what is wrong with it says of which."""
    try:
        return compose_config(overrides)
    except ConfigError as error:
        message, details, hint = error.message, error.details, error.hint
        hint = " or ".join(f"{name}:{each}" for each in hint.split(" or ")) if "=" in hint else hint
        raise ConfigError(f"step {name}: {message}", details=details, hint=hint) from error


def about(links: Sequence[Link]) -> dict[str, Any]:
    """What the tracker keeps of the links' configurations."""
    return {link.name: link.composed.settings for link in links if link.name}
