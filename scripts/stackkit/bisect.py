"""Finds the patch from which on a command fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import process, prove, testenv
from .errors import USAGE, StackError
from .pins import Pin, Project
from .report import Progress, Step

SKIP = 125  # as for git bisect run: this tree cannot be tested
BASE_NAME = "(base)"


@dataclass(frozen=True)
class Trial:
    """One run of the command; ``patch`` is the last one applied."""

    patch: str
    code: int


@dataclass(frozen=True)
class Result:
    """The first bad patch, or those of which one is it, if some could not be tried."""

    suspects: tuple[str, ...]
    trials: tuple[Trial, ...]


def bisect(
    project: Project,
    pin: Pin,
    command: Sequence[str],
    *,
    progress: Progress,
    step: Step,
) -> Result:
    """Run ``command`` on prefixes of the stack until the first bad patch is known.

    It runs in a checkout of its own, in the environment of the tests, and says by its
    exit code: 0 good, 125 cannot be tried, another below 128 bad.

    Args:
        project, pin: The stack.
        command: Program and arguments.
        progress: Told of download progress.
        step: Told what is tried.

    Raises:
        StackError: if the base is bad or the whole stack good, or the command dies.
    """
    with prove.opened(project, pin, progress, step) as (tree, commits, folder):
        names = [BASE_NAME, *(applied.patch.name for applied in commits)]
        trees = [pin.tree, *(applied.tree for applied in commits)]
        slot = folder / "bisect"
        trials: list[Trial] = []

        def run(position: int) -> int:
            step(f"trying {names[position]}")
            prove.check_out(tree, trees[position], slot)
            environment = testenv.environment(project, slot)
            path = os.pathsep.join(
                (os.path.dirname(sys.executable), os.environ["PATH"])
            )
            try:
                done = process.run(
                    command,
                    cwd=slot,
                    env={**environment, "PATH": path, "STACK_PATCH": names[position]},
                    capture=False,
                )
            except (FileNotFoundError, PermissionError) as error:
                raise StackError(
                    f"{command[0]} cannot be run: {error.strerror}",
                    mend="scripts/stack bisect run COMMAND ARGUMENT...",
                    code=USAGE,
                ) from error
            if not 0 <= done.returncode < 128:
                raise StackError(f"the command died on {names[position]}")
            trials.append(Trial(names[position], done.returncode))
            return done.returncode

        suspects = search(len(trees), run, names)
    return Result(tuple(names[i] for i in suspects), tuple(trials))


def search(count: int, run: Callable[[int], int], names: Sequence[str]) -> list[int]:
    """Positions of which one is the first bad one; 0 is good, the last one bad.

    Raises:
        StackError: if that is not so.
    """
    if count < 2:
        raise StackError("the series has no patch", code=USAGE)
    for position, wanted in ((count - 1, "bad"), (0, "good")):
        code = run(position)
        if code == SKIP or (code == 0) != (wanted == "good"):
            told = {0: "good", SKIP: "not to be tried"}.get(code, "bad")
            raise StackError(
                f"{names[position]} is {told}, so that no patch makes the difference",
                mend="the command has to end with 0 on the base and not on the stack",
            )
    good, bad, untried = 0, count - 1, set[int]()
    while True:
        between = [i for i in range(good + 1, bad) if i not in untried]
        if not between:
            return list(range(good + 1, bad + 1))
        position = between[len(between) // 2]
        code = run(position)
        if code == SKIP:
            untried.add(position)
        elif code == 0:
            good = position
        else:
            bad = position
