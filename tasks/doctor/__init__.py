"""The doctor: what is wrong with a checkpoint, whoever made it, from its files alone.

finding, catalogue/     what can be said: code, severity, why it fails and in which tool, how to fix
folder, weights         the opened folder: JSON, headers; bounded, never unpickled, never written to
recognise, source       what it is, in one line; what every family is given

Families, one file each, `check(source) -> Iterator[Finding]`:

place        is it a checkpoint at all; documents that cannot be read
files        the index and the files agree; nothing stray that a loader would pick up
residue      what wrappers leave in key names
headers      empty and damaged files; names and shapes against the contract of the model's class
zero         every rank of one step is there, so that it can be gathered
heads        a reward or value model has the head that its loaders look for
unsafe       pickles and code that run when they are loaded
adapter, adapter_base   pairs against adapter_config.json; coverage and sizes against the base
vocabulary   rows, ties and tokenizer agree
special_tokens, templates   what ends a text, by everyone who says so; one chat template
architecture, experts   the class, its keys, its layers, its experts
quantisation, dtypes    packed where config.json says so; one dtype, and the one that it says
serving      what vLLM would refuse
against_base merged models and adapters against the base that is given
configuration   what other readers do not find; settings that are not the base's
merge_proof  with values=true and a base: a merge, value by value
values       with values=true, the data itself: not finite, zero, other than its manifest says
contract     with values=true, names and shapes of any class that transformers has
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from tasks.doctor import (
    adapter,
    adapter_base,
    against_base,
    architecture,
    configuration,
    contract,
    dtypes,
    experts,
    files,
    headers,
    heads,
    merge_proof,
    place,
    quantisation,
    residue,
    serving,
    special_tokens,
    templates,
    unsafe,
    values,
    vocabulary,
    zero,
)
from tasks.doctor.catalogue import folder as say
from tasks.doctor.finding import Finding
from tasks.doctor.source import Source
from tasks.errors import ArtifactError

Check = Callable[[Source], Iterator[Finding]]

FAMILIES: Sequence[ModuleType] = (
    place,
    files,
    residue,
    headers,
    zero,
    heads,
    adapter,
    adapter_base,
    vocabulary,
    special_tokens,
    templates,
    architecture,
    experts,
    quantisation,
    dtypes,
    serving,
    configuration,
    against_base,
    unsafe,
    values,
    merge_proof,
    contract,
)
"""In the order of the report: what is the cause of another one's findings comes before it."""

CANNOT_GO_ON = (
    ArtifactError, ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What documents that were made to mislead may drive a family into."""


def examine(source: Source) -> list[Finding]:
    """Every family's findings, the worst first, each once."""
    found: dict[Finding, None] = {}
    for family in FAMILIES:
        try:
            for one in family.check(source):
                found[one] = None
        except CANNOT_GO_ON as error:
            # Said as an error, so that a folder that cannot be judged is never passed as good.
            name = family.__name__.rpartition(".")[2]
            said = f"{name}: {type(error).__name__}: {error}"
            as_made = "documents as their writers make them"
            found[say.CANNOT_JUDGE.at("", found=said, expected=as_made)] = None
    return sorted(found, key=lambda one: one.severity.rank)
