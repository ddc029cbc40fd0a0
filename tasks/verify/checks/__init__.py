"""Checks of a running server: each takes `Asked`, and returns one verdict."""

from collections.abc import Callable, Mapping

from tasks.verify.asked import Asked
from tasks.verify.checks.load import batching, leak, long_prompts, prefix_cache, streaming
from tasks.verify.checks.prompt import context, eos, template, tokens
from tasks.verify.checks.sampling import sampling
from tasks.verify.checks.weights import adapter, base, distribution
from tasks.verify.report import Row

CHECKS: Mapping[str, Callable[[Asked], Row]] = {
    # the weights, and the likely cause if they are others; the last two of adapters only
    "distribution": distribution,
    "adapter": adapter,
    "base": base,
    # what a prompt becomes, and where a response ends
    "template": template,
    "tokens": tokens,
    "eos": eos,
    "context": context,
    # the server's own temperature, top-k and top-p
    "sampling": sampling,
    # alone and in a crowd, again, streamed, and beside other adapters
    "leak": leak,
    "batching": batching,
    "prefix-cache": prefix_cache,
    "long-prompts": long_prompts,
    "streaming": streaming,
}
"""All checks by name, in their order."""
