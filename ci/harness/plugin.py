"""The pytest plugin: ``python -m pytest -p harness.plugin --noconftest ...``.

- vLLM can be imported from a source tree on a CPU box (see `bootstrap`).
- With ``TRITON_INTERPRET=1`` Triton's interpreter computes bfloat16 and FP8 as
  the hardware does (see `triton_interpreter`).
- The fixture `fake_platform` pretends a platform (see `platforms`).
- A test that leaves the platform state changed gets an error at its teardown.
- ``--check-accesses``: every interpreted launch of a test is looked at as memcheck and
  racecheck would (see `sanitizer`).
- ``--stack-report PATH`` writes a report for other programs (see `report`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from . import bootstrap, platforms, report, state

# At import, and not in a hook: test files and other plugins import vLLM early.
bootstrap.install()


def triton_interpreted() -> bool:
    if "TRITON_INTERPRET" not in os.environ:
        return False
    import triton

    return triton.knobs.runtime.interpret  # Triton decides which values mean yes


if triton_interpreted():
    from . import triton_interpreter

    triton_interpreter.install()

#: How many changes an error names.
_SHOWN = 12

_before = pytest.StashKey[state.Snapshot]()


class PlatformLeak(Exception):
    """A test left the platform state changed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    report.add_option(parser)
    group = parser.getgroup("vllm-mi300x harness")
    group.addoption(
        "--check-accesses",
        action="store_true",
        help="fail a launch in Triton's interpreter that leaves its tensors, or races",
    )


def pytest_configure(config: pytest.Config) -> None:
    report.configure(config)
    if config.getoption("--check-accesses") and not triton_interpreted():
        raise pytest.UsageError("--check-accesses needs TRITON_INTERPRET=1")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item):
    item.stash[_before] = state.capture()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    if not item.config.getoption("--check-accesses"):
        return (yield)
    from . import sanitizer  # imports torch

    with sanitizer.check():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item):
    try:
        return (yield)
    finally:
        changes = state.restore(item.stash[_before])
        if changes:
            raise PlatformLeak(_describe(item.nodeid, changes))


def _describe(nodeid: str, changes: list[state.Change]) -> str:
    lines = [f"{nodeid} left the platform state changed (it is mended now):"]
    lines += [f"  {change}" for change in changes[:_SHOWN]]
    if len(changes) > _SHOWN:
        lines.append(f"  and {len(changes) - _SHOWN} more")
    return "\n".join(lines)


# Set up before all fixtures of the test, and so undone after them: what a
# `monkeypatch` changes under a pretended platform must go first.
@pytest.fixture(autouse=True)
def _platform_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fake_platform(_platform_stack: ExitStack) -> Callable[..., Any]:
    """Pretends a platform until the end of the test.

    ``fake_platform("gfx942", aiter=..., aiter_enabled=...)`` returns vLLM's
    platform object; the arguments are those of `platforms.use`. Another call
    replaces the platform.
    """

    def select(name: str, **kwargs: Any) -> Any:
        _platform_stack.close()
        return _platform_stack.enter_context(platforms.use(name, **kwargs))

    return select
