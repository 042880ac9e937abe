"""Rules that a patch, the series and the pin must keep; none needs the base.

A rule is a function from the project to findings.  Every rule is in
:data:`RULES`, with one sentence that says what it demands.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import git, ledger, patchfile, superproject, trailers
from .base import IDENTITY
from .errors import StackError
from .patchfile import SERIES, SUFFIX, Patch
from .pins import Pin, Project

SUBJECT_WIDTH = 72
BODY_WIDTH = 72

_CONFLICT = re.compile(rb"^\+(<{7}|>{7}|\|{7}) ", re.MULTILINE)
_LOCAL_PATH = re.compile(r"(?:^|[\s(\"'=])(/(?:home|root|tmp|work|Users)/\S*)")


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    rule: str
    where: str  # file, or file:line
    what: str
    mend: str = ""


@dataclass(frozen=True)
class Subject:
    """What is linted: one release of one project."""

    project: Project
    pin: Pin
    patches: list[Patch]

    @property
    def folder(self) -> Path:
        return self.project.patches(self.pin)


Check = Callable[[Subject], Iterator[Finding]]
RULES: dict[str, tuple[str, Check]] = {}


def _rule(name: str, demand: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES[name] = (demand, check)
        return check

    return register


def lint(project: Project, pin: Pin) -> list[Finding]:
    """Every finding of every rule.

    Raises:
        StackError: if series or patch files cannot be read at all.
    """
    subject = Subject(project, pin, patchfile.load(project.patches(pin)))
    findings = []
    for _, check in RULES.values():
        findings += check(subject)
    return findings


def _files(patch: Patch) -> list[patchfile.FileChange]:
    try:
        return patch.files
    except StackError:
        return []  # the rule "diff" says why


def _message_lines(patch: Patch) -> list[tuple[int, str]]:
    return list(enumerate(patch.message.split("\n"), 1))


def _where(patch: Patch, line: int | None = None) -> str:
    """A place in the message; its first line is the Subject header's."""
    if line is None:
        return str(patch.path)
    head = patch.mail.split(b"\n")
    lines = enumerate(head, 1)
    subject = next((i for i, x in lines if x.startswith(b"Subject: ")), 1)
    if line == 1:
        return f"{patch.path}:{subject}"
    body = next((i for i, x in enumerate(head, 1) if not x), 1)
    return f"{patch.path}:{body + line - 2}"


@_rule("gitlink", "the submodule entry names the commit that stack.toml pins")
def _gitlink(subject: Subject) -> Iterator[Finding]:
    try:
        superproject.check_gitlink(subject.project, subject.pin)
    except StackError as error:
        yield Finding("gitlink", "stack.toml", error.message, error.mend)


@_rule("gitmodules", ".gitmodules names the public repository that stack.toml names")
def _gitmodules(subject: Subject) -> Iterator[Finding]:
    path = subject.project.root / ".gitmodules"
    parser = configparser.ConfigParser(strict=False)
    try:
        parser.read(path, "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        parser.clear()
    found = parser.get('submodule "vllm"', "url", fallback=None)
    if found != subject.pin.url:
        yield Finding(
            "gitmodules",
            str(path),
            f"the submodule's url is {found}, stack.toml says {subject.pin.url}",
            "git checkout .gitmodules",
        )


@_rule("listed", "every file in the patch folder is in the series")
def _listed(subject: Subject) -> Iterator[Finding]:
    known = {SERIES, *(patch.path.name for patch in subject.patches)}
    for path in sorted(subject.folder.iterdir()):
        if path.name not in known:
            kind = "patch" if path.suffix == SUFFIX else "file"
            yield Finding(
                "listed",
                str(path),
                f"this {kind} is not in the series",
                f"add {path.name} to {subject.folder / SERIES}, or delete it",
            )


@_rule("attributes", "git keeps patch files byte for byte (patches/** -text)")
def _attributes(subject: Subject) -> Iterator[Finding]:
    for path in (subject.folder / SERIES, *(patch.path for patch in subject.patches)):
        value = superproject.attributes(subject.project, path, "text")
        if value != "unset":
            yield Finding(
                "attributes",
                str(path),
                f"git's text attribute is {value}, so a checkout may rewrite it",
                "put 'patches/** -text' last in .gitattributes",
            )


@_rule("diff", "a patch has a diff whose index lines name full blob ids")
def _diff(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        try:
            _ = patch.files
        except StackError as error:
            yield Finding("diff", str(patch.path), error.message, error.mend)


@_rule("leftovers", "a patch adds no conflict marker and no .rej or .orig file")
def _leftovers(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        if _CONFLICT.search(patch.diff):
            yield Finding("leftovers", str(patch.path), "adds a conflict marker")
        for change in _files(patch):
            if change.path.endswith((".rej", ".orig")) and change.new != git.NO_BLOB:
                yield Finding("leftovers", str(patch.path), f"adds {change.path}")


@_rule("whitespace", "an added line has no trailing space, nor a new file CRLF")
def _whitespace(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        first = patch.mail.count(b"\n")
        is_new = False
        for number, line in enumerate(patch.diff.split(b"\n"), first + 1):
            if line.startswith(b"diff --git "):
                is_new = False
            elif line.startswith(b"new file mode "):
                is_new = True
            elif line.startswith(b"+") and not line.startswith(b"+++ "):
                text = line[1:].removesuffix(b"\r")
                if text != text.rstrip():
                    yield Finding(
                        "whitespace", f"{patch.path}:{number}", "trailing whitespace"
                    )
                if is_new and text != line[1:]:
                    yield Finding(
                        "whitespace", f"{patch.path}:{number}", "CRLF in a new file"
                    )


@_rule("author", "the author of a patch in the tree is the project")
def _author(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        author = patch.author_and_message[0]
        if (author.name, author.email) != (IDENTITY.name, IDENTITY.email):
            yield Finding(
                "author",
                str(patch.path),
                f"the author is {author.name} <{author.email}>, not {IDENTITY.name} "
                f"<{IDENTITY.email}>",
                "scripts/stack pr makes the person who sends it the author",
            )


@_rule("subject", f"a subject is '[Tag]... What', at most {SUBJECT_WIDTH} columns")
def _subject(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        if not re.fullmatch(r"(\[[^\[\]]+\])+ [^\s\[].*[^\s.]", patch.subject):
            yield Finding(
                "subject",
                _where(patch, 1),
                f"{patch.subject!r} is not '[Tag][Tag] What it does' without a period",
            )
        if len(patch.subject) > SUBJECT_WIDTH:
            yield Finding(
                "subject", _where(patch, 1), f"{len(patch.subject)} columns wide"
            )


@_rule("message", f"a message says why, in lines of at most {BODY_WIDTH} columns")
def _message(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        body, found = trailers.split(patch.message)
        first_trailer = min((t.line for t in found), default=None)
        if not "".join(body.split("\n")[1:]).strip():
            yield Finding("message", _where(patch, 1), "there is no text that says why")
        for number, line in _message_lines(patch):
            in_trailers = first_trailer is not None and number >= first_trailer
            if number > 1 and len(line) > BODY_WIDTH and not in_trailers:
                yield Finding(
                    "message", _where(patch, number), f"{len(line)} columns wide"
                )
            if re.match(r"---|diff -|Index: |From .*:\d\d", line):
                yield Finding(
                    "message",
                    _where(patch, number),
                    f"{line!r} ends the message for git",
                    "indent the line",
                )
            local = _LOCAL_PATH.search(line)
            if local:
                yield Finding(
                    "message", _where(patch, number), f"names a local path {local[1]}"
                )


@_rule("trailers", "the trailers are those of the closed list, in order, well-formed")
def _trailers(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        for line, sentence in trailers.problems(patch.trailers):
            yield Finding("trailers", _where(patch, line), sentence)


@_rule("concern", "the concern of a patch has a page in docs/concerns")
def _concern(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        slug = patch.trailer("Concern")
        page = subject.project.root / "docs" / "concerns" / f"{slug}.md"
        if slug and not page.is_file():
            yield Finding("concern", str(patch.path), f"{page} does not exist")


@_rule("change-id", "no two patches share a Change-Id")
def _change_id(subject: Subject) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for patch in subject.patches:
        change = patch.trailer("Change-Id")
        if change and change in seen:
            yield Finding(
                "change-id", str(patch.path), f"{seen[change]} has the same Change-Id"
            )
        seen[change] = patch.name


@_rule("dependencies", "what a patch depends on is in the series, before it")
def _dependencies(subject: Subject) -> Iterator[Finding]:
    before: set[str] = set()
    everything = {patch.name for patch in subject.patches}
    for patch in subject.patches:
        for name in trailers.depends_on(patch.trailers):
            if name not in before:
                problem = "comes later" if name in everything else "is not in it"
                yield Finding(
                    "dependencies",
                    str(patch.path),
                    f"depends on {name}, which {problem} in the series",
                    f"order the lines of {subject.folder / SERIES}",
                )
        before.add(patch.name)


@_rule("tests", "a patch carries the test files that its Tests trailers name")
def _tests(subject: Subject) -> Iterator[Finding]:
    for patch in subject.patches:
        changed = {change.path for change in _files(patch)}
        for test in trailers.test_ids(patch.trailers):
            path = test.node.split("::")[0]
            if path not in changed:
                yield Finding(
                    "tests",
                    str(patch.path),
                    f"names {path}, which the patch does not touch",
                    "put the test into the patch, or correct the trailer",
                )


@_rule("ledger", "the ledger says what became of each concern that no patch carries")
def _ledger(subject: Subject) -> Iterator[Finding]:
    path = ledger.place(subject.project)
    try:
        ledger.load(subject.project)
    except StackError as error:
        yield Finding("ledger", str(path), error.message, error.mend)
        return
    found = ledger.problems(subject.project, subject.pin, subject.patches)
    for sentence in (*found, *ledger.strays(subject.project)):
        yield Finding(
            "ledger", str(path), sentence, "scripts/stack ledger shows what it says"
        )
