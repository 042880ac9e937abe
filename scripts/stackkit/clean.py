"""Removes what the tool made, never what a person made."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import worktree
from .errors import REFUSED, StackError
from .pins import Project


def targets(project: Project, *, cache: bool) -> list[Path]:
    """What a clean would remove."""
    made = [
        path
        for path in (project.build.iterdir() if project.build.is_dir() else ())
        if path.name != worktree.LOCK
    ]
    return sorted(made) + ([project.cache] if cache and project.cache.exists() else [])


def clean(project: Project, *, cache: bool, discard: bool) -> list[Path]:
    """Empty build/, and with ``cache`` remove the archives and results kept outside.

    The caller holds the project's lock.

    Raises:
        StackError: (refused) if an applied tree holds work that exists nowhere else.
    """
    for pin in project.pins.values():
        tree = worktree.Tree(project, pin)
        if tree.exists and not discard:
            state = tree.state()
            backups = tree.repository.refs(worktree.BACKUP)
            work = (*state.work, *(f"backup {ref}" for ref in backups))
            if work:
                raise StackError(
                    f"{tree.path} holds work that no patch file has",
                    mend="scripts/stack export saves commits; scripts/stack clean "
                    "--discard removes it for good",
                    details=work,
                    code=REFUSED,
                )
    found = targets(project, cache=cache)
    for path in found:
        if path.parent == project.build:
            # Out of sight first, so that a killed run leaves no half of a tree.
            hidden = path.with_name(f"{worktree.HALF_MADE}{path.name}")
            path = path.rename(hidden)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found
