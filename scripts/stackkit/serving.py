"""Starts vLLM with a recipe, for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import process
from .client import Server
from .errors import USAGE, StackError
from .recipes import Recipe
from .report import Step

_GRACE = 60  # seconds to end by itself


def program() -> str:
    """The vllm on PATH.

    Raises:
        StackError: if there is none.
    """
    found = shutil.which("vllm")
    if found is None:
        raise StackError(
            "vllm is not on PATH: vLLM is not installed here",
            mend="scripts/stack build makes the wheel and says how to install it; or "
            "run this in the image: docs/serving.md",
            code=USAGE,
        )
    return found


def command(
    recipe: Recipe, checkpoint: str | None, *more: str, eager: bool, port: int
) -> tuple[str, ...]:
    """What serves a recipe; ``checkpoint`` is a folder, if not the recipe's model."""
    flags = [*more, "--port", str(port)]
    if eager:
        flags.append("--enforce-eager")
    return recipe.command(checkpoint, *flags)


def serve(recipe: Recipe, arguments: tuple[str, ...]) -> None:
    """Become the server; does not return.

    Raises:
        StackError: if vLLM is not installed.
    """
    process.become([program(), *arguments[1:]], recipe.own_environment(os.environ))


@contextlib.contextmanager
def running(
    recipe: Recipe,
    checkpoint: str | None,
    *,
    eager: bool,
    port: int,
    log: Path,
    wait: float,
    timeout: float,
    step: Step,
) -> Iterator[Server]:
    """A server that is ready when the block starts and gone when it ends.

    Args:
        recipe: What to serve.
        checkpoint: A folder, if not the recipe's model.
        eager: Whether it runs without graphs.
        port: Where it listens.
        log: Where its output goes.
        wait: Seconds until it must be ready.
        timeout: Seconds of silence after which a request is given up.
        step: Told what is being waited for.

    Raises:
        StackError: if vLLM is not installed, the server ends by itself, or it is not
            ready in time.
    """
    arguments = command(recipe, checkpoint, eager=eager, port=port)
    url = f"http://127.0.0.1:{port}"
    server = Server(url, timeout=timeout, first_timeout=wait)
    if server.healthy():
        raise StackError(
            f"port {port} is taken: another server answers at {url}",
            mend="stop it, or name another port with --port",
            code=USAGE,
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as stream:
        child = process.start(
            [program(), *arguments[1:]],
            stdout=stream.fileno(),
            stderr=subprocess.STDOUT,
            env=recipe.own_environment(os.environ),
            own_group=True,
        )
        try:
            server.wait(wait, step, alive=lambda: _require_alive(child, log))
            yield server
            _require_alive(child, log)
        finally:
            _end(child)


def _require_alive(child: subprocess.Popen[bytes], log: Path) -> None:
    status = child.poll()
    if status is not None:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise StackError(
            f"the server ended by itself with {how}",
            mend=f"its log is {log}; docs/troubleshooting.md goes by symptom",
            details=process.tail(log.read_bytes(), 5),
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the server and the workers that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # workers that outlived it
