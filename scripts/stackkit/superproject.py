"""This repository's own git: the submodule entry and the attributes of patches."""

from __future__ import annotations

from pathlib import Path

from . import git
from .errors import StackError
from .pins import Pin, Project


def repository(project: Project) -> git.Repository | None:
    """The git repository whose top is the project, or None (an exported tree)."""
    link = project.root / ".git"
    if link.is_file():  # a linked work tree
        target = Path(link.read_text().removeprefix("gitdir:").strip())
        return git.Repository((project.root / target).resolve(), project.root)
    return git.Repository(link, project.root) if link.is_dir() else None


def gitlink(project: Project) -> str | None:
    """The commit that the submodule entry names, or None if there is no entry."""
    own = repository(project)
    if own is None:
        return None
    entry = own.entries([project.submodule.name]).get(project.submodule.name)
    return entry.blob if entry and entry.mode == "160000" else None


def check_gitlink(project: Project, pin: Pin) -> None:
    """Require that submodule and stack.toml name the same commit.

    Raises:
        StackError: if they do not.
    """
    if pin.release != project.default_release or repository(project) is None:
        return
    linked = gitlink(project)
    if linked == pin.commit:
        return
    raise StackError(
        f"stack.toml pins {pin.tag} at commit {pin.commit}, but the submodule entry "
        f"of vllm is {linked or 'missing'}",
        mend="git diff stack.toml shows what was edited; the submodule entry is set "
        f"with: git update-index --add --cacheinfo 160000,{pin.commit},vllm",
    )


def attributes(project: Project, path: Path, name: str) -> str:
    """The value of a git attribute of ``path`` (``unset`` for ``-text``)."""
    own = repository(project)
    if own is None:
        return "unset"
    relative = path.relative_to(project.root)
    line = own.text("check-attr", "-z", name, "--", str(relative))
    return line.split("\0")[2]
