"""The trailers of a patch: a closed list, with one validator for each.

A patch's message ends with a paragraph of ``Key: value`` lines.  A line that
starts with a space continues the one above it.  Missing and malformed are
different findings: the first says that nobody thought about it, the second that
somebody did and slipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

PATCH_NAME = r"[a-z0-9]+(?:-[a-z0-9.]+)+"
VERIFIED_ON = ("cpu", "h200", "gfx942-codegen", "gfx942")


@dataclass(frozen=True)
class Trailer:
    """One ``Key: value`` with the message line it starts on (1 is the subject)."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Rule:
    """What a trailer may say."""

    key: str
    valid: Callable[[str], bool]
    form: str
    required: bool = True
    repeatable: bool = False


@dataclass(frozen=True)
class TestId:
    """One ``Tests:`` value: a pytest id and how it fails without the patch."""

    __test__ = False

    node: str
    # The exception the code under test raises, or "" for a failed assertion.
    raises: str


_TEST = re.compile(r"(tests/[\w./-]+\.py(?:::\w+)*(?:\[[^\]]+\])?)(?: raises (\w+))?")
# What a broken test raises, and what is raised by anything, proves nothing.
PROVES_NOTHING = ("ImportError", "ModuleNotFoundError", "SyntaxError")
_TOO_WIDE = ("Exception", "BaseException", "object")


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None


def _subset(value: str) -> bool:
    parts = [part.strip() for part in value.split(",")]
    return all(part in VERIFIED_ON for part in parts) and len(set(parts)) == len(parts)


def _tests(value: str) -> bool:
    if re.fullmatch(r"none: \S.*", value):
        return True
    found = _TEST.fullmatch(value)
    return found is not None and found[2] not in (*PROVES_NOTHING, *_TOO_WIDE)


_STATUS = "|".join(
    (
        r"Pending",
        r"Submitted vllm-project/vllm#\d+",
        r"Backport [0-9a-f]{40}",
        r"Absorbed vllm-project/vllm#\d+, v\d+\.\d+\.\d+",
        r"Inappropriate \[[^\]]*\S[^\]]*\]",
    )
)

# In the order in which they stand in a message.
SCHEMA = (
    Rule("Concern", _matches(r"[a-z0-9]+(?:-[a-z0-9]+)*"), "a page of docs/concerns"),
    Rule(
        "Upstream-Status",
        _matches(_STATUS),
        "Pending | Submitted vllm-project/vllm#N | Backport <40-digit commit> | "
        "Absorbed vllm-project/vllm#N, vX.Y.Z | Inappropriate [reason]",
    ),
    Rule(
        "Depends-On",
        _matches(rf"{PATCH_NAME}(?:, {PATCH_NAME})*"),
        "patch names, separated by a comma and a space",
        required=False,
    ),
    Rule(
        "Tests",
        _tests,
        "a pytest id under tests/, with ' raises Name' if that is how it fails "
        "without the patch, or 'none: reason'",
        repeatable=True,
    ),
    Rule(
        "Verified-On", _subset, f"a comma-separated part of: {', '.join(VERIFIED_ON)}"
    ),
    Rule("Unverified", _matches(r"\S.*"), "what nobody has run"),
    Rule("Risk", _matches(r"\S.*"), "what could go wrong"),
    Rule("Change-Id", _matches(r"I[0-9a-f]{40}"), "I and 40 hexadecimal digits"),
)
KEYS = tuple(rule.key for rule in SCHEMA)
# What a person who sends the patch upstream may add.
UPSTREAM_KEYS = ("Signed-off-by", "Co-authored-by", "Fixes")


def split(message: str) -> tuple[str, list[Trailer]]:
    """The message without its trailers, and the trailers.

    The trailers are the last paragraph, if every line of it is a trailer or
    continues one.
    """
    lines = message.rstrip("\n").split("\n")
    start = len(lines)
    while start > 0 and lines[start - 1].strip():
        start -= 1
    found: list[Trailer] = []
    for number, line in enumerate(lines[start:], start + 1):
        match = re.fullmatch(r"([A-Za-z][A-Za-z-]*): ?(.*)", line)
        if match:
            found.append(Trailer(match[1], match[2], number))
        elif line.startswith(" ") and found:
            last = found[-1]
            value = f"{last.value} {line.strip()}".strip()
            found[-1] = Trailer(last.key, value, last.line)
        else:
            return message, []
    return "\n".join(lines[:start]).rstrip("\n") + "\n", found


def without_dependencies(message: str, names: set[str]) -> str:
    """The message with ``names`` taken out of its Depends-On trailers."""
    if not names & set(depends_on(split(message)[1])):
        return message
    body, found = split(message)
    lines = [body, ""]
    for trailer in found:
        value = trailer.value
        if trailer.key == "Depends-On":
            value = ", ".join(x for x in value.split(", ") if x not in names)
            if not value:
                continue
        lines.append(f"{trailer.key}: {value}")
    return "\n".join([lines[0].rstrip("\n"), *lines[1:]]) + "\n"


def values(found: list[Trailer], key: str) -> list[str]:
    return [trailer.value for trailer in found if trailer.key == key]


def problems(found: list[Trailer]) -> list[tuple[int, str]]:
    """What is wrong with a patch's trailers, as (message line, sentence)."""
    rules = {rule.key: rule for rule in SCHEMA}
    wrong: list[tuple[int, str]] = []
    last = found[-1].line if found else 1
    for rule in SCHEMA:
        present = [trailer for trailer in found if trailer.key == rule.key]
        if rule.required and not present:
            wrong.append((last, f"missing trailer {rule.key}: {rule.form}"))
        if len(present) > 1 and not rule.repeatable:
            wrong.append((present[1].line, f"trailer {rule.key} is given twice"))
    for trailer in found:
        rule = rules.get(trailer.key)
        if rule is None:
            if trailer.key not in UPSTREAM_KEYS:
                known = ", ".join(KEYS)
                wrong.append(
                    (trailer.line, f"unknown trailer {trailer.key}; known: {known}")
                )
        elif not rule.valid(trailer.value):
            wrong.append(
                (
                    trailer.line,
                    f"malformed trailer {trailer.key}: {trailer.value!r} is not "
                    f"{rule.form}",
                )
            )
    order = [KEYS.index(trailer.key) for trailer in found if trailer.key in rules]
    if order != sorted(order):
        wrong.append((last, f"trailers out of order; the order is: {', '.join(KEYS)}"))
    declared = values(found, "Tests")
    if len(declared) > 1 and any(value.startswith("none:") for value in declared):
        wrong.append((last, "Tests says both 'none' and a pytest id"))
    return wrong


def test_ids(found: list[Trailer]) -> list[TestId]:
    """The pytest ids that a patch declares (empty for ``none: reason``)."""
    ids = []
    for value in values(found, "Tests"):
        match = _TEST.fullmatch(value)
        if match:
            ids.append(TestId(match[1], match[2] or ""))
    return ids


def tests_are_declared(found: list[Trailer]) -> bool:
    """Whether there are Tests trailers, and all are well-formed."""
    declared = values(found, "Tests")
    return bool(declared) and all(map(_tests, declared))


def depends_on(found: list[Trailer]) -> list[str]:
    return [name for value in values(found, "Depends-On") for name in value.split(", ")]
