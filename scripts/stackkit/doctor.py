"""Whether this machine and checkout have what the tool needs, and what mends it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import base, git, superproject, testenv, worktree
from .errors import StackError
from .pins import Pin, Project

OK, WARNING, PROBLEM = "ok", "warning", "problem"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str  # OK, WARNING, PROBLEM or NOT_RUN
    detail: str
    mend: str = ""


def doctor(project: Project, pin: Pin) -> list[Finding]:
    """Look at everything; nothing is changed and no network is used."""
    return [
        *_programs(),
        *_places(project),
        *_submodule(project, pin),
        *_tree(project, pin),
        *_tests(),
    ]


def _programs() -> Iterator[Finding]:
    yield Finding("Python", OK, platform.python_version())
    found = git.version()
    text = ".".join(map(str, found))
    minimum = ".".join(map(str, git.MINIMUM_VERSION))
    if found < git.MINIMUM_VERSION:
        yield Finding(
            "git", PROBLEM, f"{text} is older than {minimum}", "apt-get install git"
        )
    else:
        yield Finding("git", OK, text)
    if shutil.which("make"):
        yield Finding("make", OK, str(shutil.which("make")))
    else:
        mend = "apt-get install make, or call scripts/stack directly"
        yield Finding("make", WARNING, "not installed", mend)


def _places(project: Project) -> Iterator[Finding]:
    for what, path in (("checkout", project.root), ("cache", project.cache)):
        place = path
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / 1e9
        if not os.access(place, os.W_OK):
            yield Finding(
                what, PROBLEM, f"{path} cannot be written", f"chmod -R u+w {place}"
            )
        elif free < 1:
            yield Finding(
                what, WARNING, f"{path}: {free:.1f} GB free", "free some space"
            )
        else:
            yield Finding(what, OK, f"{path}: {free:.0f} GB free")


def _submodule(project: Project, pin: Pin) -> Iterator[Finding]:
    try:
        superproject.check_gitlink(project, pin)
    except StackError as error:
        yield Finding("submodule entry", PROBLEM, error.message, error.mend)
    else:
        linked = superproject.gitlink(project)
        yield Finding("submodule entry", OK, linked or "not a git checkout")
    repository = base.submodule_repository(project)
    if repository is None:
        # A new work tree of the project has an empty vllm/ too.
        detail = "not initialised; the base comes from the cache or the package index"
        yield Finding("submodule", OK, detail)
    elif (repository.git_dir / "rebase-apply").exists():
        path = repository.git_dir / "rebase-apply"
        yield Finding(
            "submodule",
            PROBLEM,
            f"a git am was interrupted in vllm/ ({path})",
            "git -C vllm am --abort",
        )
    elif git.Repository(repository.git_dir, project.submodule).dirty():
        yield Finding(
            "submodule",
            PROBLEM,
            "vllm/ was edited; nothing builds from it",
            f"move the edit to build/{pin.release}, then: git -C vllm checkout .",
        )
    else:
        yield Finding("submodule", OK, str(repository.resolve("HEAD")))


def _tree(project: Project, pin: Pin) -> Iterator[Finding]:
    tree = worktree.Tree(project, pin)
    if not tree.exists:
        yield Finding("applied tree", OK, "none yet; scripts/stack apply makes it")
        return
    state = tree.state()
    if state.interrupted:
        yield Finding(
            "applied tree", WARNING, "an apply was interrupted", "scripts/stack apply"
        )
    elif state.operation:
        mend = f"finish it in {tree.path}"
        yield Finding("applied tree", PROBLEM, f"unfinished {state.operation}", mend)
    elif state.work:
        detail = f"{len(state.work)} pieces of work that no patch file holds"
        yield Finding("applied tree", WARNING, detail, "scripts/stack export")
    else:
        yield Finding("applied tree", OK, str(state.head))


def _tests() -> Iterator[Finding]:
    stamp = Path(sys.prefix) / testenv.STAMP
    if stamp.is_file():
        yield Finding("test packages", OK, "installed")
    else:
        yield Finding(
            "test packages",
            NOT_RUN,
            "PyTorch and Triton are not installed",
            f"scripts/stack test installs them ({testenv.TORCH_INDEX} names an index "
            "with CPU builds)",
        )
