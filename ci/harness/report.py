"""``--stack-report PATH``: a report of the session for `stack prove`.

A JSON file, written in one step at the end of the session (also by the
controller of a pytest-xdist session, and when collection fails)::

    {"schema": 1,
     "exitstatus": 1,
     "tests": [{"nodeid": "tests/test_x.py::test_y",
                "outcome": "failed",        # passed, failed, error or skipped
                "phase": "call",            # setup, call or teardown
                "exception": "builtins.AssertionError",   # null if there is none
                "mro": ["builtins.AssertionError", "builtins.Exception", ...],
                "message": "assert 1 == 2", # first line; of a skip, the reason
                "where": "tests/test_x.py:7"}],   # where it was raised
     "collect_errors": [{"nodeid": ..., "outcome": "error", "phase": "collect", ...}]}

A test has one entry: its first phase that did not pass, else its call. `failed`
is a failed call; a failed setup or teardown is an `error`. A test that was
expected to fail and did counts as skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

SCHEMA = 1

_KEY = "stack_exception"


def add_option(parser: pytest.Parser) -> None:
    """Adds ``--stack-report`` to pytest's command line."""
    group = parser.getgroup("vllm-mi300x harness")
    group.addoption(
        "--stack-report",
        metavar="PATH",
        help="write the outcome of each test, with its exception, to a JSON file",
    )


def configure(config: pytest.Config) -> None:
    """Starts the report, if one was asked for."""
    # Workers of pytest-xdist describe exceptions, too; the controller collects.
    config.pluginmanager.register(_Describer(config), "stack-describer")
    path = config.getoption("--stack-report")
    if path and not hasattr(config, "workerinput"):
        target = Path(config.invocation_params.dir, path)
        target.unlink(missing_ok=True)  # no stale report after a crash
        config.pluginmanager.register(_Report(target), "stack-report")


class _Describer:
    """Attaches to each report what its exception is."""

    # The attribute is made of strings and lists, so that pytest-xdist carries
    # it from a worker to the controller like the report's own attributes.

    def __init__(self, config: pytest.Config):
        self.root = config.invocation_params.dir

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        self._describe(report, call.excinfo)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        call = getattr(report, "call", None)
        excinfo = call.excinfo if call is not None else None
        if excinfo is not None and isinstance(excinfo.value, collector.CollectError):
            cause = excinfo.value.__cause__  # pytest wraps an error of an import
            if cause is not None:
                excinfo = pytest.ExceptionInfo.from_exception(cause)
        self._describe(report, excinfo)
        return report

    def _describe(self, report, excinfo) -> None:
        if excinfo is None:
            return
        # Without pytest's own helpers, such as the inside of `pytest.skip`.
        entries = excinfo.traceback.filter(excinfo) or excinfo.traceback
        entry = entries[-1] if entries else None
        setattr(
            report,
            _KEY,
            {
                "exception": _name(excinfo.type),
                "mro": [_name(cls) for cls in excinfo.type.__mro__],
                "message": _first_line(excinfo.value),
                "where": entry and f"{self._relative(entry.path)}:{entry.lineno + 1}",
            },
        )

    def _relative(self, path: Any) -> str:
        path = Path(path)
        inside = path.is_relative_to(self.root)
        return str(path.relative_to(self.root) if inside else path)


class _Report:
    """Collects the reports and writes the file."""

    def __init__(self, path: Path):
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}
        self.collect_errors: dict[str, dict[str, Any]] = {}

    def pytest_collectreport(self, report):
        if report.failed:  # each worker of pytest-xdist reports it
            self.collect_errors[report.nodeid] = _entry(report, "error", "collect")

    def pytest_runtest_logreport(self, report):
        known = self.tests.get(report.nodeid)
        if known is not None and known["outcome"] != "passed":
            return
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
        elif report.skipped:
            outcome = "skipped"
        elif report.when == "call":
            outcome = "passed"
        else:
            return
        self.tests[report.nodeid] = _entry(report, outcome, report.when)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        document = {
            "schema": SCHEMA,
            "exitstatus": int(exitstatus),
            "tests": list(self.tests.values()),
            "collect_errors": list(self.collect_errors.values()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def _entry(report, outcome: str, phase: str) -> dict[str, Any]:
    entry = {
        "nodeid": report.nodeid,
        "outcome": outcome,
        "phase": phase,
        "exception": None,
        "mro": [],
        "message": "",
        "where": None,
    }
    entry.update(getattr(report, _KEY, {}))
    if outcome == "failed" and entry["exception"] is None:
        entry["message"] = _first_line(report.longrepr)  # a strict xfail that passed
    elif hasattr(report, "wasxfail"):
        entry["message"] = f"expected to fail: {report.wasxfail}"
    return entry


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _first_line(value: object) -> str:
    return next(iter(str(value).splitlines()), "")
