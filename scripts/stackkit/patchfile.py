"""Patch files and the series that orders them, read in bytes."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import git, trailers
from .errors import USAGE, StackError

SERIES = "series"
SUFFIX = ".patch"

_INDEX_LINE = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: \d{6})?")


@dataclass(frozen=True)
class FileChange:
    """One file of a patch: its path, and the blob before and after.

    ``old`` is :data:`git.NO_BLOB` for a new file, ``new`` for a deleted one.
    """

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """One patch file."""

    name: str
    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def _diff_start(self) -> int:
        found = re.search(rb"^diff --git ", self.content, re.MULTILINE)
        return found.start() if found else len(self.content)

    @property
    def mail(self) -> bytes:
        """Header and message."""
        return self.content[: self._diff_start]

    @property
    def diff(self) -> bytes:
        return self.content[self._diff_start :]

    @cached_property
    def files(self) -> list[FileChange]:
        """Every file the patch changes.

        Raises:
            StackError: naming the line whose ``index`` is missing or shortened, or
                the patch if it changes nothing.
        """
        changes: list[FileChange] = []
        first = self.mail.count(b"\n") + 1
        lines = self.diff.split(b"\n")
        for offset, line in enumerate(lines):
            # Content of a hunk starts with a space, +, - or \, never with a d.
            if not line.startswith(b"diff --git "):
                continue
            where = f"{self.path}:{first + offset}"
            path, (old, new) = _path(line, where), _blobs(lines, offset, where)
            if changes and (changes[-1].path, changes[-1].new) == (path, git.NO_BLOB):
                # A file that becomes a symlink is deleted, then made again.
                old = changes.pop().old
            changes.append(FileChange(path, old, new))
        if not changes:
            raise StackError(
                f"{self.path}: has no diff",
                mend=f"scripts/stack drop {self.name}, if the change is not needed",
            )
        return changes

    @cached_property
    def author_and_message(self) -> tuple[git.Identity, bytes]:
        """Author and message as git reads them.

        Raises:
            StackError: if the mail header is not one.
        """
        if not self.content.startswith(b"From " + b"0" * 40 + b" "):
            raise StackError(
                f"{self.path}:1: is not a patch in git format-patch form",
                mend="make the patch with scripts/stack export",
            )
        try:
            return git.mailinfo(self.mail + b"diff --git a/a b/a\n")
        except StackError as error:
            raise StackError(
                f"{self.path}: {error.message}",
                mend="make the patch with scripts/stack export",
                details=error.details,
            ) from error

    @property
    def message(self) -> str:
        return self.author_and_message[1].decode("utf-8", "surrogateescape")

    @property
    def subject(self) -> str:
        return self.message.split("\n", 1)[0]

    @cached_property
    def trailers(self) -> list[trailers.Trailer]:
        return trailers.split(self.message)[1]

    def trailer(self, key: str) -> str:
        """The first value of a trailer, or the empty string."""
        found = trailers.values(self.trailers, key)
        return found[0] if found else ""

    @property
    def size(self) -> tuple[int, int]:
        """Lines added and removed."""
        lines = self.diff.split(b"\n")
        added = sum(x.startswith(b"+") and not x.startswith(b"+++ ") for x in lines)
        removed = sum(x.startswith(b"-") and not x.startswith(b"--- ") for x in lines)
        return added, removed


def _path(header: bytes, where: str) -> str:
    """The path of one file's diff; both sides name the same (renames are off)."""
    text = header.removeprefix(b"diff --git ")
    old, new = text[: len(text) // 2], text[len(text) // 2 + 1 :]
    if not (old.startswith(b"a/") and new == b"b/" + old[2:]):
        raise StackError(
            f"{where}: {header.decode('utf-8', 'replace')!r} is a rename or has a "
            "quoted name",
            mend="make the patch with scripts/stack export",
        )
    return os.fsdecode(new[2:])


def _blobs(lines: list[bytes], offset: int, where: str) -> tuple[str, str]:
    """The blob before and after, from the ``index`` line under ``lines[offset]``."""
    for line in lines[offset + 1 : offset + 4]:
        found = _INDEX_LINE.fullmatch(line)
        if found:
            return found[1].decode(), found[2].decode()
    raise StackError(
        f"{where}: no full index line follows, so the blob that this was made "
        "against is unknown (a change of mode alone has none)",
        mend="make the patch with scripts/stack export",
    )


def series_lines(folder: Path) -> list[str]:
    """The lines of a series.

    Raises:
        StackError: if they are not text.
    """
    path = folder / SERIES
    try:
        return path.read_text("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise StackError(
            f"{path}: is not UTF-8 text", mend=f"git checkout {path}"
        ) from error


def names(folder: Path) -> list[str]:
    """The patch names that a series lists, in order.

    Raises:
        StackError: if there is no series, or a line of it is not a patch file name.
    """
    path = folder / SERIES
    if not path.is_file():
        raise StackError(
            f"{path} does not exist",
            mend=f"git checkout {path}, or scripts/stack export for a new release",
            code=USAGE,
        )
    found = []
    for number, line in enumerate(series_lines(folder), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        if not re.fullmatch(trailers.PATCH_NAME + re.escape(SUFFIX), entry):
            raise StackError(
                f"{path}:{number}: {entry!r} is not a legal patch file name",
                mend="name it <topic>-<what>.patch in lower case letters and digits",
            )
        found.append(entry.removesuffix(SUFFIX))
    return found


def load(folder: Path) -> list[Patch]:
    """The patches of a series, in order.

    Raises:
        StackError: if a listed file does not exist or is listed twice.
    """
    patches: list[Patch] = []
    for name in names(folder):
        path = folder / (name + SUFFIX)
        if any(patch.name == name for patch in patches):
            raise StackError(
                f"{folder / SERIES}: lists {path.name} twice",
                mend=f"delete one of the two lines in {folder / SERIES}",
            )
        if not path.is_file():
            raise StackError(
                f"{folder / SERIES}: lists {path.name}, which does not exist",
                mend=f"git checkout {path}, or delete the line",
            )
        patches.append(Patch(name, path, path.read_bytes()))
    return patches


def find(patches: list[Patch], name: str) -> Patch:
    """The patch called ``name`` (with or without .patch).

    Raises:
        StackError: if there is none.
    """
    wanted = Path(name).name.removesuffix(SUFFIX)
    for patch in patches:
        if patch.name == wanted:
            return patch
    known = ", ".join(patch.name for patch in patches)
    raise StackError(
        f"no patch {wanted!r} in the series", mend=f"one of: {known}", code=USAGE
    )
