"""What became of each concern on each release: carried, or why not any more.

Carried is what the patches say.  docs/ledger.toml holds the rest, one ``[[fate]]`` for
each patch that a release no longer needs, so that none vanishes without a word.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from . import patchfile
from .errors import USAGE, StackError
from .patchfile import Patch
from .pins import Pin, Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNDECIDED = "undecided"
CARRIED = "carried"
FORM = (
    "absorbed vllm-project/vllm#N, vX.Y.Z | absorbed vX.Y.Z | superseded [by what] | "
    "not applicable [why] | undecided [why]"
)
_RELEASE = r"(?:v\d+\.\d+\.\d+(?:\.?(?:rc|post)\d+)?|[gt][0-9a-f]{12})"
_FATE = re.compile(
    rf"absorbed (?:vllm-project/vllm#\d+, )?{_RELEASE}"
    r"|(?:superseded|not applicable|undecided) \[[^\]]*\S[^\]]*\]"
)
_HEAD = """\
# What became of the patches that a release no longer needs; `scripts/stack ledger`
# shows it with what is carried, `scripts/stack rebase` adds to it.
# fate: absorbed vllm-project/vllm#N, vX.Y.Z | absorbed vX.Y.Z | superseded [by what]
#       | not applicable [why] | undecided [why]
"""


@dataclass(frozen=True)
class Entry:
    """One patch that a release does not carry."""

    release: str
    patch: str
    change_id: str
    concern: str
    fate: str
    how: str  # how that was found

    def toml(self) -> str:
        lines = ["", "[[fate]]"]
        for field in fields(self):
            key = field.name.replace("_", "-")
            value = json.dumps(getattr(self, field.name), ensure_ascii=False)
            lines.append(f"{key} = {value}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Row:
    """One concern on one release."""

    concern: str
    release: str
    carried: tuple[str, ...]  # patches
    dropped: tuple[Entry, ...]

    @property
    def fate(self) -> str:
        """In a few words; empty if nobody knows."""
        told = [f"{CARRIED} by {', '.join(self.carried)}"] if self.carried else []
        return "; ".join([*told, *(f"{x.patch} {x.fate}" for x in self.dropped)])


def place(project: Project) -> Path:
    return project.root / "docs" / "ledger.toml"


def load(project: Project) -> list[Entry]:
    """The entries of docs/ledger.toml (none, if there is no such file).

    Raises:
        StackError: naming the entry and key that is missing, unknown or malformed.
    """
    path = place(project)
    if not path.is_file():
        return []
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _error(project, f"not valid TOML: {error}") from error
    entries = []
    wanted = [field.name.replace("_", "-") for field in fields(Entry)]
    tables = data.pop("fate", [])
    if not isinstance(tables, list) or not all(isinstance(x, dict) for x in tables):
        raise _error(project, "fate must be given as [[fate]] tables")
    for number, table in enumerate(tables, 1):
        if sorted(table) != sorted(wanted):
            raise _error(
                project,
                f"fate {number} has the keys {', '.join(sorted(table))}; they are: "
                f"{', '.join(wanted)}",
            )
        if not all(
            isinstance(value, str) and value.strip() for value in table.values()
        ):
            raise _error(project, f"fate {number} has a value that is not text")
        entries.append(Entry(**{k.replace("-", "_"): v for k, v in table.items()}))
    if data:
        raise _error(project, f"unknown keys: {', '.join(sorted(data))}")
    return entries


def _error(project: Project, what: str) -> StackError:
    path = place(project)
    return StackError(f"{path}: {what}", mend=f"git checkout {path}", code=USAGE)


def is_fate(text: str) -> bool:
    return _FATE.fullmatch(text) is not None


def add(project: Project, entries: list[Entry]) -> None:
    """Write entries that are not there yet; the file is whole at any time."""
    known = load(project)
    new = [entry for entry in entries if entry not in known]
    if new:
        text = _text(project) or _HEAD
        _write(project, text + "".join(entry.toml() for entry in new))


def remove(project: Project, entries: list[Entry]) -> None:
    """Take back what :func:`add` wrote."""
    text = _text(project)
    for entry in entries:
        text = text.replace(entry.toml(), "", 1)
    if text == _HEAD:
        place(project).unlink()
    elif text != _text(project):
        _write(project, text)


def _text(project: Project) -> str:
    path = place(project)
    return path.read_text("utf-8") if path.is_file() else ""


def _write(project: Project, text: str) -> None:
    path = place(project)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def table(project: Project) -> list[Row]:
    """Every concern on every release of stack.toml."""
    entries = load(project)
    patches = {pin.release: _patches(project, pin) for pin in project.pins.values()}
    concerns = {path.stem for path in _pages(project)}
    concerns |= {p.trailer("Concern") for found in patches.values() for p in found}
    rows = []
    for concern in sorted(concerns):
        for release, found in patches.items():
            carried = [p.name for p in found if p.trailer("Concern") == concern]
            dropped = [
                e for e in entries if (e.concern, e.release) == (concern, release)
            ]
            rows.append(Row(concern, release, tuple(carried), tuple(dropped)))
    return rows


def _pages(project: Project) -> list[Path]:
    return sorted((project.root / "docs" / "concerns").glob("*.md"))


def _patches(project: Project, pin: Pin) -> list[Patch]:
    folder = project.patches(pin)
    return patchfile.load(folder) if folder.is_dir() else []


def problems(project: Project, pin: Pin, patches: list[Patch]) -> Iterator[str]:
    """Where the ledger and the patches of one release disagree, one sentence each."""
    entries = [entry for entry in load(project) if entry.release == pin.release]
    carried = {patch.trailer("Change-Id"): patch.name for patch in patches}
    told = {entry.change_id for entry in entries}
    for entry in entries:
        if entry.change_id in carried:
            name = carried[entry.change_id]
            yield f"says {entry.fate} of {entry.patch}, but {name} is in the series"
        if not is_fate(entry.fate):
            yield f"{entry.patch}: fate {entry.fate!r} is not one of: {FORM}"
        elif entry.fate.startswith(UNDECIDED):
            yield f"{entry.patch}: say what became of it, it is {entry.fate}"
        page = project.root / "docs" / "concerns" / f"{entry.concern}.md"
        if not page.is_file():
            yield f"{entry.patch}: {page} does not exist"
    known = {*(p.trailer("Concern") for p in patches), *(e.concern for e in entries)}
    for page in _pages(project):
        if page.stem not in known:
            yield f"no patch carries {page.stem}, and nothing says what became of it"
    for other in project.pins.values():
        if _older(other.release, pin.release):
            for patch in _patches(project, other):
                change = patch.trailer("Change-Id")
                if change not in carried and change not in told:
                    yield (
                        f"{patch.name} of {other.release} is not in the series, and "
                        "nothing says what became of it"
                    )
    for patch in patches:
        status = re.search(r"^Absorbed .*, (v\S+)$", patch.trailer("Upstream-Status"))
        if status and not _older(pin.release, status[1]):
            yield f"{patch.name} is carried, but its Upstream-Status says {status[0]}"


def strays(project: Project) -> Iterator[str]:
    """Entries about a release that stack.toml does not have."""
    for entry in load(project):
        if entry.release not in project.pins:
            yield f"{entry.patch}: stack.toml has no release {entry.release}"


def _older(one: str, other: str) -> bool:
    versions = [re.match(r"v(\d+)\.(\d+)\.(\d+)", x) for x in (one, other)]
    if None in versions:
        return False
    first, second = (tuple(map(int, x.groups())) for x in versions if x)
    return first < second
