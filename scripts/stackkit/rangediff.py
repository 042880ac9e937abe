"""Compares two states of the stack patch by patch."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import apply, git, patchfile, pins, superproject
from .errors import USAGE, StackError
from .patchfile import SUFFIX
from .pins import Pin, Project
from .report import Progress
from .worktree import BASE, BRANCH, Tree

_KINDS = {"=": "same", "!": "changed", "<": "removed", ">": "added"}
_LINE = re.compile(r"\s*(?:\d+|-): +[0-9a-f-]+ ([=!<>]) +(?:\d+|-): +[0-9a-f-]+ (.*)")


@dataclass(frozen=True)
class Pair:
    """What became of one patch between the two states."""

    kind: str  # same, changed, removed or added
    subject: str


@dataclass(frozen=True)
class RangeDiff:
    text: str  # as git range-diff prints it
    pairs: tuple[Pair, ...]


def range_diff(
    project: Project, pin: Pin, old: str, new: str, progress: Progress
) -> RangeDiff:
    """Compare two states of the stack.

    Args:
        project, pin: The checkout, and the release of a state that names none.
        old, new: A release of stack.toml (its patch files as they are now);
            ``build/RELEASE`` (the commits in that tree); a commit of the project's
            own git, or ``COMMIT:RELEASE`` (the patch files at that commit).
        progress: Told of download progress.

    Raises:
        StackError: if a state cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="stack-range-") as folder:
        meeting = git.Repository.create(Path(folder) / "bare.git")
        ends = [
            _bring(meeting, project, pin, text, Path(folder) / str(number), progress)
            for number, text in enumerate((old, new))
        ]
        text = meeting.range_diff(*ends)
    pairs = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found:
            pairs.append(Pair(_KINDS[found[1]], found[2]))
    return RangeDiff(text, tuple(pairs))


def _bring(
    meeting: git.Repository,
    project: Project,
    pin: Pin,
    text: str,
    folder: Path,
    progress: Progress,
) -> tuple[str, str]:
    """Copy one state's commits into ``meeting``; returns base and tip."""
    built = git.Repository(project.root / text / ".git")
    if text.startswith("build/") and built.git_dir.is_dir() and built.resolve(BASE):
        base, tip = built.resolve(BASE), built.resolve(BRANCH)
        assert base and tip
        meeting.copy_from(built, tip)
        return base, tip
    if text in project.pins or "v" + text in project.pins:
        found = project.pin(text)
        patches = patchfile.load(project.patches(found))
    else:
        project, found, patches = _at_commit(project, pin, text, folder)
    tree = Tree(project, found)
    with tree.rehearsal(None, progress):
        base = tree.repository.resolve(BASE)
        commits = apply.commits_of(tree.repository, patches)
        assert base is not None
        tip = commits[-1].commit if commits else base
        meeting.copy_from(tree.repository, tip)
    return base, tip


def _at_commit(
    project: Project, pin: Pin, text: str, folder: Path
) -> tuple[Project, Pin, list[patchfile.Patch]]:
    """The stack as a commit of the project's own git has it."""
    revision, _, release = text.partition(":")
    own = superproject.repository(project)
    commit = own and own.resolve(revision + "^{commit}")
    if own is None or commit is None:
        raise StackError(
            f"{text!r} is no release, no build/RELEASE, and no commit of this project",
            mend="for example: scripts/stack range-diff HEAD~1 v0.22.0",
            code=USAGE,
        )
    there = own.entries(tree=commit)
    content = own.read(there["stack.toml"].blob) if "stack.toml" in there else b""
    past = pins.parse(project.root, Path(f"{revision}:stack.toml"), content)
    found = past.pin(release or pin.release)
    place = f"patches/{found.release}/"
    folder.mkdir()
    for path, entry in there.items():
        name = path.removeprefix(place)
        if path.startswith(place) and "/" not in name:
            if name.endswith(SUFFIX) or name == patchfile.SERIES:
                (folder / name).write_bytes(own.read(entry.blob))
    return past, found, patchfile.load(folder)
