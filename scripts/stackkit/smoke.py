"""smoke: whether a server's answers can be right at all.

``/health`` says nothing about them: a server whose logits are NaN stays healthy.  So
this asks for logprobs, at the prompt lengths where the model takes another path, and
compares what two servers say, of which one runs without graphs.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import prompts
from .client import Completion, Model, Server, Silence
from .doctor import NOT_RUN, OK, PROBLEM, WARNING, Finding
from .errors import USAGE, StackError
from .report import Step

# Prompt lengths, and what is new there. Decoding goes on over the next ones.
LENGTHS = {
    1: "the shortest",
    3: "no compressed key yet",
    4: "the first key that is compressed by 4",
    5: "and one token after it",
    127: "no key that is compressed by 128 yet",
    128: "the first key that is compressed by 128; the window is full",
    129: "the window moves",
    130: "and one token later",
    2047: "every compressed key is still selected",
    2048: "512 compressed keys: the last length where all are selected",
    2049: "the indexer's scores count",
    4097: "they decide about half of the keys",
}
NEW_TOKENS = 16
# Down and up again: a replay after a larger and after a smaller batch.
BATCHES = (8, 3, 1, 5, 8)
_ALTERNATIVES = 5
# A server clamps what is smaller, minus infinity included.
_CLAMPED = -9999.0
# Two tokens whose logprobs differ by less than this are equally good: it is one step
# of bfloat16 for a logit between 16 and 32.
TIE = 0.125

ANSWERS = (
    ("Question: What is 17 + 25?\nAnswer: 17 + 25 =", "42"),
    ("Question: What is 17 * 23?\nAnswer: 17 * 23 =", "391"),
    ("Question: What is the capital of France?\nAnswer: The capital of France is",
     "Paris"),
)  # fmt: skip

_BAD_LOG = (r"\bnan\b", r"memory access fault", r"falling back")
_SCHEMA = 1


@dataclass(frozen=True)
class Output:
    """What a server said to one prompt."""

    length: int
    tokens: tuple[str, ...]
    top: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Record:
    """A server's greedy answers, to compare with another server's."""

    model: str
    version: str | None
    prompts: str  # their digest
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Report:
    """What was found; ``record`` is None if the answers did not come."""

    findings: tuple[Finding, ...]
    record: Record | None
    model: str
    version: str | None

    @property
    def ok(self) -> bool:
        return all(item.state != PROBLEM for item in self.findings)

    @property
    def problems(self) -> tuple[str, ...]:
        bad = [item for item in self.findings if item.state == PROBLEM]
        return tuple(f"{item.what}: {item.detail}" for item in bad)


def smoke(
    server: Server,
    *,
    model: str | None,
    version: str | None,
    against: Record | None,
    answers: bool,
    lengths: tuple[int, ...] = tuple(LENGTHS),
    step: Step,
) -> Report:
    """Ask a server everything that shows whether its answers can be right.

    Args:
        server: Which one; it must be ready.
        model: Its name for the model, if it serves several.
        version: What it must be; None if any will do.
        against: What another server said, or None.
        answers: Whether it must know the answers to simple questions. A checkpoint
            with random weights does not.
        lengths: Prompt lengths.
        step: Told what is being asked.

    Raises:
        StackError: if it serves no such model, or cannot be spoken to.
    """
    served = server.model(model)
    told = server.version()
    findings = [_version(told, version)]
    outputs: list[Output] = []
    guessed: list[int] = []  # lengths that were sent as so many words
    sent = hashlib.sha256()

    silent = False

    def ask(what: str, question: Callable[[], Iterator[Finding]]) -> None:
        nonlocal silent
        step(what)
        if silent:
            findings.append(Finding(what, NOT_RUN, "the server no longer answers"))
            return
        try:
            findings.extend(question())
        except StackError as error:
            silent = isinstance(error, Silence)
            detail = "; ".join([error.message, *error.details])
            findings.append(Finding(what, PROBLEM, detail, error.mend))

    def length(tokens: int) -> Iterator[Finding]:
        prompt = prompts.of_length(server, served, tokens, tokens)
        sent.update(repr(prompt).encode())
        found = _complete(server, served, prompt)
        outputs.append(Output(tokens, found.tokens, found.top))
        if isinstance(prompt, str):
            guessed.append(tokens)
        elif found.prompt_tokens not in (None, tokens):
            # A path that is not taken would be called right.
            what = f"the server read {found.prompt_tokens} of them"
            yield Finding(f"{tokens} tokens", PROBLEM, what)
            return
        yield Finding(f"{tokens} tokens", *_judge(found, alone=tokens > 5))

    for tokens in lengths:
        if served.max_len and tokens + NEW_TOKENS > served.max_len:
            what = f"the server takes {served.max_len} tokens"
            mend = "serve with a larger --max-model-len"
            findings.append(Finding(f"{tokens} tokens", PROBLEM, what, mend))
        else:
            ask(f"{tokens} tokens", lambda tokens=tokens: length(tokens))
    if guessed:
        detail = "the server has no /tokenize: a word was taken for a token"
        findings.append(Finding("lengths", WARNING, detail))
    whole = len(outputs) == len(lengths)
    findings.append(_variety(outputs))
    ask("batches", lambda: _batches(server, served))
    ask("stream", lambda: _stream(server, served))
    if answers:
        for question, answer in ANSWERS:
            ask("answer", lambda q=question, a=answer: _answer(server, served, q, a))
    record = Record(served.name, told, sent.hexdigest(), tuple(outputs))
    findings.append(_agreement(record, against, whole))
    if not server.healthy():
        findings.append(Finding("afterwards", PROBLEM, "the server is not healthy"))
    return Report(tuple(findings), record if whole else None, served.name, told)


def _version(found: str | None, wanted: str | None) -> Finding:
    what, mend = "version", "serve what this checkout builds, or pass --any-version"
    if wanted is None:
        return Finding(what, NOT_RUN, f"{found or 'unknown'}; not compared")
    if found is None:
        detail = f"the server does not tell its version; {wanted} is wanted"
        return Finding(what, PROBLEM, detail, mend)
    if found != wanted:
        detail = f"the server is {found}, this checkout builds {wanted}"
        return Finding(what, PROBLEM, detail, mend)
    return Finding(what, OK, found)


def _complete(server: Server, model: Model, prompt: prompts.Prompt) -> Completion:
    return server.complete(
        model.name, prompt, NEW_TOKENS, logprobs=_ALTERNATIVES, whole=True
    )


def _judge(found: Completion, *, alone: bool) -> tuple[str, str]:
    """Whether an answer can be right: state and detail.

    Args:
        found: The answer.
        alone: Whether the prompt is long enough for the answer not to be one token
            again and again. Of shorter ones all are judged together.
    """
    count = len(found.logprobs)
    if not count:
        return PROBLEM, "the server sends no logprobs"
    bad = [x for x in found.logprobs if not _finite(x)]
    if bad:
        shown = ", ".join(dict.fromkeys(map(str, bad)))
        return PROBLEM, f"{len(bad)} of {count} logprobs are not finite: {shown[:200]}"
    positive = [x for x in found.logprobs if x is not None and x > 1e-3]
    if positive:
        return PROBLEM, f"a logprob is {positive[0]:g}, which is more than certain"
    if count != len(found.tokens) or count < NEW_TOKENS:
        return PROBLEM, f"{count} of {NEW_TOKENS} tokens came"
    lost = [x for top in found.top for x in top.values() if not _number(x)]
    if lost:
        return PROBLEM, f"the logprob of an alternative is {lost[0]}"
    if alone and len(set(found.tokens)) == 1:
        return PROBLEM, f"{count} times the same token, {found.tokens[0]!r}"
    if len(set(found.logprobs)) == 1:
        return PROBLEM, f"every token has the same logprob, {found.logprobs[0]:g}"
    return OK, f"{found.text.strip()[:60]!r}"


def _number(value: Any) -> bool:
    """Whether it is one, if only minus infinity."""
    return isinstance(value, (int, float)) and value <= sys.float_info.max


def _finite(value: Any) -> bool:
    return _number(value) and value > _CLAMPED


def _variety(outputs: list[Output]) -> Finding:
    seen = {token for output in outputs for token in output.tokens}
    what = "different tokens"
    if len(seen) < 2:
        return Finding(what, PROBLEM, f"{len(seen)} in all answers")
    return Finding(what, OK, f"{len(seen)}")


def _batches(server: Server, model: Model) -> Iterator[Finding]:
    pool = concurrent.futures.ThreadPoolExecutor(max(BATCHES))
    wanted = [prompts.of_length(server, model, 1000 + i, 100 + i) for i in range(8)]
    for number, size in enumerate(BATCHES, 1):
        found = list(pool.map(lambda p: _complete(server, model, p), wanted[:size]))
        bad = [words for state, words in (_judge(x, alone=True) for x in found)
               if state == PROBLEM]  # fmt: skip
        what = f"batch {number} of {size}"
        yield Finding(what, PROBLEM if bad else OK, "; ".join(bad) or "finite")
    pool.shutdown()


def _stream(server: Server, model: Model) -> Iterator[Finding]:
    found = server.stream(
        model.name, prompts.text(7, 20), NEW_TOKENS, logprobs=_ALTERNATIVES
    )
    yield Finding("stream", *_judge(found, alone=True))


def _answer(
    server: Server, model: Model, question: str, wanted: str
) -> Iterator[Finding]:
    found = server.complete(model.name, question, NEW_TOKENS, stop=("\n",))
    right = re.search(rf"\b{re.escape(wanted)}\b", found.text) is not None
    name = question.split("\n")[0].removeprefix("Question: ")
    detail = repr(found.text.strip())
    if not right:
        detail += f", not {wanted}"
    yield Finding(name, OK if right else PROBLEM, detail)


# -- two servers -----------------------------------------------------------------


def _agreement(record: Record, against: Record | None, whole: bool) -> Finding:
    what = "agreement"
    if against is None:
        return Finding(
            what,
            NOT_RUN,
            "there is nothing to compare with",
            "scripts/stack smoke URL --save FILE on a server with --eager, then "
            "--against FILE on this one; or smoke --recipe NAME, which does both",
        )
    if not whole:
        return Finding(what, PROBLEM, "not all answers came")
    if (against.model, against.prompts) != (record.model, record.prompts):
        return Finding(
            what,
            PROBLEM,
            f"the other answers are to other prompts, or of {against.model}",
            "save them again with this checkout",
        )
    if against.version != record.version:
        detail = f"the other server was {against.version}, this one is {record.version}"
        return Finding(what, PROBLEM, detail, "save the other answers again")
    ties, compared = 0, 0
    for mine, other in zip(record.outputs, against.outputs, strict=True):
        same = 0
        for a, b in zip(mine.tokens, other.tokens, strict=False):
            if a != b:
                break
            same += 1
        compared += same
        if same == len(mine.tokens) == len(other.tokens):
            continue
        if not _tied(mine, other, same):
            return Finding(
                what,
                PROBLEM,
                f"{mine.length} tokens: token {same + 1} is "
                f"{_at(mine, same)} here and {_at(other, same)} there",
                "a graph that replays wrongly looks like this: docs/troubleshooting.md",
            )
        ties += 1  # what follows another token cannot be compared
    words = f"{compared} tokens are the same"
    if ties:
        words += f"; {ties} answers part where two tokens are equally good"
    return Finding(what, OK, words)


def _at(output: Output, place: int) -> str:
    return repr(output.tokens[place]) if place < len(output.tokens) else "missing"


def _tied(mine: Output, other: Output, place: int) -> bool:
    """Whether both servers hold both tokens for equally good there."""
    if place >= min(len(mine.tokens), len(other.tokens)):
        return False
    a, b = mine.tokens[place], other.tokens[place]
    for output in (mine, other):
        top = output.top[place] if place < len(output.top) else {}
        if a not in top or b not in top or not abs(top[a] - top[b]) <= TIE:
            return False
    return True


def save(record: Record, path: Path) -> None:
    path.write_text(json.dumps({"schema": _SCHEMA, **asdict(record)}) + "\n")


def read(path: Path) -> Record:
    """What :func:`save` wrote.

    Raises:
        StackError: if it is not that.
    """
    try:
        told = json.loads(path.read_text("utf-8"))
        if told.pop("schema") != _SCHEMA:
            raise ValueError
        outputs = tuple(
            Output(x["length"], tuple(x["tokens"]), tuple(x["top"]))
            for x in told.pop("outputs")
        )
        return Record(**told, outputs=outputs)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise StackError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}",
            mend=f"scripts/stack smoke URL --save {path}, on the other server",
            code=USAGE,
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StackError(
            f"{path}: not what smoke --save writes",
            mend=f"scripts/stack smoke URL --save {path}, on the other server",
            code=USAGE,
        ) from error


def log(path: Path) -> Finding:
    """Lines of a server's log that speak of wrong results."""
    bad = []
    with open(path, encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            if any(re.search(x, line, re.IGNORECASE) for x in _BAD_LOG):
                bad.append(f"line {number}: {line.strip()[:120]}")
    if bad:
        more = f" (and {len(bad) - 3} more)" if len(bad) > 3 else ""
        return Finding("log", PROBLEM, f"{path}: " + "; ".join(bad[:3]) + more)
    return Finding("log", OK, f"{path}: nothing suspicious")
