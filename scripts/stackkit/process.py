"""Starts processes: the one environment that the tool's children see."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_inherited_fds: set[int] = set()


def keep_open_in_children(fd: int) -> None:
    """Let every child inherit ``fd``.

    The project lock is held this way: if the tool is killed while git still
    writes, the lock stays taken until git is done too.
    """
    _inherited_fds.add(fd)


def forget_fd(fd: int) -> None:
    """Undo :func:`keep_open_in_children` before ``fd`` is closed."""
    _inherited_fds.discard(fd)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without anything that redirects git or Python.

    Git exports ``GIT_DIR`` and ``GIT_INDEX_FILE`` to its hooks; a tool that runs
    inside a hook and passes them on would act on the wrong repository.
    """
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") and key not in ("PYTHONPATH", "PYTHONHOME")
    }
    env["LC_ALL"] = "C.UTF-8"
    env.update(extra or {})
    return env


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    capture: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run ``command`` to its end; the exit status is the caller's to judge."""
    return subprocess.run(
        [os.fspath(part) for part in command],
        cwd=cwd,
        env=clean_environment(env),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE if capture else None,
        pass_fds=tuple(_inherited_fds),
        timeout=timeout,
    )


def start(
    command: Sequence[str | os.PathLike[str]],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
    own_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``command`` with pipes, for streams too large to hold in memory.

    With ``own_group`` it leads a process group, so that its children can be ended
    with it.
    """
    return subprocess.Popen(
        [os.fspath(part) for part in command],
        env=clean_environment(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_group,
        pass_fds=tuple(_inherited_fds),
    )


def become(
    command: Sequence[str | os.PathLike[str]], env: Mapping[str, str] | None = None
) -> None:
    """Let ``command`` take this process's place; does not return."""
    arguments = [os.fspath(part) for part in command]
    os.execve(arguments[0], arguments, clean_environment(env))


def tail(text: bytes, lines: int = 20) -> tuple[str, ...]:
    """The last ``lines`` lines of a program's output, for an error's details."""
    decoded: Iterable[str] = text.decode("utf-8", "replace").splitlines()
    return tuple(list(decoded)[-lines:])
