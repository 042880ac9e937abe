"""Text of any length, the same on every machine, to ask a server about."""

from __future__ import annotations

import random
from collections.abc import Callable

from .client import Model, Prompt, Server
from .errors import StackError

_WHO = ("the baker", "a sailor", "the old teacher", "our neighbor", "a young doctor",
        "the gardener", "my cousin", "a painter", "the mayor", "the night watchman",
        "a tired nurse", "the clockmaker")  # fmt: skip
_DID = ("walked past", "wrote about", "remembered", "painted", "sold", "repaired",
        "looked for", "talked about", "photographed", "measured", "carried home",
        "could not find")  # fmt: skip
_WHAT = ("the stone bridge", "a blue bicycle", "the railway station", "an empty house",
         "the apple orchard", "a broken radio", "the harbor wall", "a wooden chest",
         "the village well", "an iron gate", "the library", "a copper kettle")  # fmt: skip
_WHEN = ("on a rainy morning", "before the harvest", "late in the evening",
         "during the long winter", "on the first day of spring", "after the market",
         "while the bells rang", "in the heat of August")  # fmt: skip


def sentences(seed: int) -> Callable[[], str]:
    """A source of sentences that no number occurs in."""
    random_ = random.Random(seed)

    def next_() -> str:
        who, did = random_.choice(_WHO), random_.choice(_DID)
        what, when = random_.choice(_WHAT), random_.choice(_WHEN)
        return f"{who.capitalize()} {did} {what} {when}."

    return next_


def text(seed: int, words: int) -> str:
    """About ``words`` words of sentences."""
    source, parts, count = sentences(seed), [], 0
    while count < words:
        parts.append(source())
        count += parts[-1].count(" ") + 1
    return " ".join(parts)


def of_length(server: Server, model: Model, seed: int, tokens: int) -> Prompt:
    """A prompt of exactly ``tokens`` tokens, or about as many words.

    Token numbers, if the server tells them; else text, whose length it decides.

    Raises:
        StackError: if the server makes fewer tokens than words of a text.
    """
    source = text(seed, tokens + 8)
    numbers = server.tokenize(model.name, source)
    if numbers is None:
        return " ".join(source.split(" ")[:tokens])
    if len(numbers) < tokens:
        raise StackError(
            f"{server.url}/tokenize makes {len(numbers)} tokens of {tokens + 8} words"
        )
    return numbers[:tokens]
