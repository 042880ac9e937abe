"""Removes what the tool made, never what a person made."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from . import git, upstream, worktree
from .errors import REFUSED, StackError
from .pins import Project
from .prove import SLOTS
from .worktree import APPLIED, BACKUP, BASE, HALF_MADE, Tree

# Folders of build/ that are made anew whenever they are needed.
_MADE = (SLOTS, upstream.FOLDER, "dist", "image", "logs")


def targets(project: Project, *, cache: bool) -> list[Path]:
    """What a clean would remove."""
    made = [
        path
        for path in (project.build.iterdir() if project.build.is_dir() else ())
        if path.name in _MADE or path.name.startswith(HALF_MADE) or _is_ours(path)
    ]
    return sorted(made) + ([project.cache] if cache and project.cache.exists() else [])


def _is_ours(path: Path) -> bool:
    return git.Repository(path / ".git").resolve(BASE) is not None


def _trees(project: Project) -> Iterator[Tree]:
    """The applied trees, also of releases that stack.toml no longer has."""
    pin = project.pin(None)
    for path in targets(project, cache=False):
        if _is_ours(path) and not path.name.startswith(HALF_MADE):
            yield Tree(project, dataclasses.replace(pin, release=path.name))


def require_no_work(project: Project) -> None:
    """Require that no applied tree holds work that exists nowhere else.

    Raises:
        StackError: (refused) listing it.
    """
    for place in sorted((project.build / upstream.FOLDER).glob("*")):
        lines = upstream.edited(place)
        if lines:
            raise StackError(
                f"{place} was edited since it was prepared",
                mend="move it away; scripts/stack clean --discard removes it for good",
                details=lines,
                code=REFUSED,
            )
    for tree in _trees(project):
        work = _work(tree)
        if work:
            raise StackError(
                f"{tree.path} holds work that no patch file has",
                mend="scripts/stack export saves commits; scripts/stack clean "
                "--discard removes it for good",
                details=work,
                code=REFUSED,
            )


def _work(tree: Tree) -> tuple[str, ...]:
    repository, state = tree.repository, tree.state()
    # Other branches, a detached HEAD, tags and stashes, too.
    places = [ref for ref in ("HEAD", "refs/stash") if repository.resolve(ref)]
    everywhere = (*places, "--branches", "--tags")
    known = [ref for ref in (BASE, APPLIED) if repository.resolve(ref)]
    listed = repository.text("rev-list", *everywhere, "--not", *known)
    told = {commit.id for commit in (*state.unexported, *state.removed)}
    others = [repository.commit(x) for x in listed.split() if x not in told]
    return (
        *state.work,
        *(f"commit {commit.id[:12]} {commit.subject}" for commit in others),
        *(f"backup {ref}" for ref in repository.refs(BACKUP)),
    )


def clean(
    project: Project, *, cache: bool, discard: bool, waiting: Callable[[], None]
) -> list[Path]:
    """Remove the applied trees, and with ``cache`` what is kept outside.

    The caller holds the project's lock.

    Args:
        project: The checkout.
        cache: Whether archives and results go, too.
        discard: Whether work that exists nowhere else goes, too.
        waiting: Called once if a prove is at work.

    Raises:
        StackError: (refused) if an applied tree holds work that exists nowhere else.
    """
    if not discard:
        for tree in _trees(project):
            tree.recover()
        require_no_work(project)
    found = targets(project, cache=cache)
    slots = project.build / SLOTS
    for path in found:
        if path == slots:
            with worktree.lock(project, waiting, slots):
                _remove(path, project)
        else:
            _remove(path, project)
    return found


def _remove(path: Path, project: Project) -> None:
    if path.parent == project.build:
        # Out of sight first, so that a killed run leaves no half of a tree.
        path = path.rename(path.with_name(f"{HALF_MADE}{path.name}"))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
