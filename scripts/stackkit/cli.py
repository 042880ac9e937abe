"""The command line: options, output and exit codes; the only layer that prints."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from . import bisect as bisect_module
from . import clean as clean_module
from . import codegen as codegen_module
from . import carry, git, pins, rangediff, worktree
from . import doctor as doctor_module
from . import drift as drift_module
from . import export as export_module
from . import graph as graph_module
from . import hipgate as hipgate_module
from . import ledger as ledger_module
from . import lint as lint_module
from . import prove as prove_module
from . import rebase as rebase_module
from . import status as status_module
from . import suite as suite_module
from . import upstream as upstream_module
from . import verify as verify_module
from .apply import apply as apply_stack
from .apply import tree_of
from .errors import CONFLICT, FOUND_PROBLEMS, USAGE, StackError

SCHEMA = 1
_MARKS = {True: "[green]ok[/]", False: "[red]FAILED[/]"}


class Session:
    """One run of one command: where it works and how it speaks."""

    def __init__(
        self, command: str, directory: Path, release: str | None, as_json: bool
    ):
        self.command = command
        self.directory = directory
        self.release = release
        self.as_json = as_json
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        # A pipe has no width; a table must not be cut for it.
        width = None if sys.stdout.isatty() else 200
        self.out = Console(highlight=False, soft_wrap=True, width=width)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self.err,
            transient=True,
            disable=not self.err.is_terminal,
        )
        self.task = self.bar.add_task(command, total=None)
        self.started = time.monotonic()

    @functools.cached_property
    def project(self) -> pins.Project:
        return pins.find_project(self.directory)

    @property
    def pin(self) -> pins.Pin:
        return self.project.pin(self.release)

    def step(self, what: str) -> None:
        """Say what is being done now, where a person is watching."""
        self.bar.update(self.task, description=escape(what))
        if self.err.is_terminal and time.monotonic() - self.started > 2:
            self.bar.console.print(f"[dim]{escape(what)}[/]")

    def download(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total or None)

    @contextlib.contextmanager
    def lock(self, *, reading: bool = False) -> Iterator[None]:
        with worktree.lock(self.project, self.waiting, reading=reading):
            yield

    def waiting(self) -> None:
        self.err.print("waiting for another scripts/stack to finish")

    def answer(
        self, value: dict[str, Any], *, ok: bool = True, code: int = FOUND_PROBLEMS
    ) -> None:
        """Print the machine-readable answer, if it was asked for, and end.

        The schema number changes when a key is removed or changes its meaning.

        Args:
            value: The answer's own keys.
            ok: Whether all is well.
            code: The exit code if it is not.
        """
        if self.as_json:
            head = {"schema": SCHEMA, "command": self.command, "ok": ok}
            print(json.dumps({**head, **value}, indent=2, default=str))
        if not ok:
            sys.exit(code)

    def say(self, text: str) -> None:
        if not self.as_json:
            self.out.print(text)

    def fail(self, error: StackError) -> None:
        if self.as_json:
            told = {
                "message": error.message,
                "mend": error.mend,
                "details": list(error.details),
                "exit": error.code,
            }
            head = {"schema": SCHEMA, "command": self.command, "ok": False}
            print(json.dumps({**head, "error": told}, indent=2))
        else:
            self.err.print(f"[red]error:[/] {escape(error.message)}")
            for line in error.details:
                self.err.print(f"  {escape(line)}")
            if error.mend:
                self.err.print(f"[yellow]mend:[/] {escape(error.mend)}")
        sys.exit(error.code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The vllm-mi300x patch stack: apply, prove and export patches on a pinned vLLM.

    Exit codes: 0 done, 1 found problems, 2 usage, 3 conflict, 4 refused to protect
    work.
    """


def verb(function: Callable[..., None]) -> click.Command:
    """A command with the options that every command has."""
    name = function.__name__.rstrip("_").replace("_", "-")

    @main.command(name=name, help=function.__doc__)
    @click.option("-C", "directory", type=Path, default=".", metavar="DIR",
                  help="Work as if started in DIR.")  # fmt: skip
    @click.option("--release", metavar="RELEASE",
                  help="A release of stack.toml, else its default.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True,
                  help="Print one JSON object on standard output.")  # fmt: skip
    @functools.wraps(function)
    def command(
        directory: Path, release: str | None, as_json: bool, **options: Any
    ) -> None:
        session = Session(name, directory, release, as_json)
        try:
            found = git.version()
            if found < git.MINIMUM_VERSION:
                raise StackError(
                    f"git {'.'.join(map(str, found))} is too old",
                    mend="install git 2.34 or newer",
                )
            with session.bar:
                function(session, **options)
        except StackError as error:
            session.fail(error)
        except OSError as error:
            session.fail(_os_error(error))

    return command


def _os_error(error: OSError) -> StackError:
    path = error.filename if error.filename is not None else "?"
    why = (error.strerror or str(error)).lower()
    mend = (
        "the checkout and the cache must be writable and have room; clone the project "
        "to such a place, or set XDG_CACHE_HOME for the cache"
    )
    if isinstance(error, FileNotFoundError):
        mend = "git status shows whether the checkout lacks it"
    return StackError(f"{os.fsdecode(path)}: {why}", mend=mend)


dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Say what would be done, and change nothing."
)
discard_option = click.option(
    "--discard", is_flag=True, help="Give up unexported work."
)
jobs_option = click.option(
    "--jobs", type=click.IntRange(1), default=suite_module.default_jobs,
    show_default="one for each core", help="How many at once.",
)  # fmt: skip


@verb
@click.option("--serve", is_flag=True,
              help="Say, too, what the machine lacks to serve the model.")  # fmt: skip
@click.option("--gpus", default=1, show_default=True, type=click.IntRange(1),
              help="With --serve: how many GPUs are wanted.")  # fmt: skip
@click.option("--python", default="python3", show_default=True, metavar="PROGRAM",
              help="With --serve: the Python that vLLM is installed for.")  # fmt: skip
def doctor(session: Session, serve: bool, gpus: int, python: str) -> None:
    """Say what this machine and checkout lack, and what mends it."""
    findings = doctor_module.doctor(session.project, session.pin)
    if serve:
        findings += cli_ship.serve_findings(session, gpus, python)
    colors = {"ok": "green", "warning": "yellow", "problem": "red"}
    table = Table("", "", "", box=None, show_header=False)
    for item in findings:
        state = f"[{colors.get(item.state, 'dim')}]{item.state}[/]"
        detail = escape(item.detail) + (
            f"\n[yellow]mend:[/] {escape(item.mend)}" if item.mend else ""
        )
        table.add_row(escape(item.what), state, detail)
    if not session.as_json:
        session.out.print(table)
    ok = all(item.state != doctor_module.PROBLEM for item in findings)
    session.answer({"findings": [asdict(item) for item in findings]}, ok=ok)


@verb
@click.option("--base", type=Path, metavar="PATH",
              help="Take vLLM from a clone, a bundle or an archive.")  # fmt: skip
@discard_option
@dry_run_option
def apply(session: Session, base: Path | None, discard: bool, dry_run: bool) -> None:
    """Put every patch on the pinned vLLM, in build/<release>."""
    with session.lock(reading=dry_run):
        result = apply_stack(
            session.project,
            session.pin,
            option=base and session.directory / base,
            discard=discard,
            dry_run=dry_run,
            progress=session.download,
            step=session.step,
        )
    if result.source:
        session.say(f"base {session.pin.tag} from {escape(result.source)}, verified")
    if result.backup:
        session.say(f"what was discarded is kept in {result.backup}")
    words = "is up to date" if not result.changed else "has been made"
    if dry_run and result.changed:
        words = "would be made"
    count = len(result.commits)
    session.say(f"{result.path} {words}: {count} patches, tree {result.tree_id[:12]}")
    session.answer(
        {
            "path": result.path,
            "changed": result.changed,
            "dry_run": dry_run,
            "base": session.pin.commit,
            "source": result.source,
            "backup": result.backup,
            "tree": result.tree_id,
            "patches": [
                {"name": a.patch.name, "commit": a.commit, "tree": a.tree}
                for a in result.commits
            ],
        }
    )


@verb
def status(session: Session) -> None:
    """Show pin, patches and the applied tree."""
    found = status_module.status(session.project, session.pin)
    state = found.state
    work = list(state.work) if state else []
    pin = session.pin
    session.say(f"vLLM {pin.tag}, commit {pin.commit[:12]}; base: {found.base}")
    tools = pin.toolchain
    session.say(
        f"built with ROCm {tools.rocm}, torch {tools.torch}, triton {tools.triton}, "
        f"AITER {tools.aiter}, image {tools.base_image}"
    )
    table = Table("patch", "concern", "upstream", "size", "applied", box=None)
    rows = []
    for patch in found.patches:
        added, removed = patch.size
        row = {
            "name": patch.name,
            "concern": patch.trailer("Concern"),
            "upstream": patch.trailer("Upstream-Status"),
            "added": added,
            "removed": removed,
            "applied": found.applied.get(patch.name, False),
        }
        rows.append(row)
        table.add_row(
            *map(escape, (patch.name, row["concern"], row["upstream"])),
            f"+{added} -{removed}",
            "yes" if row["applied"] else "no",
        )
    if not session.as_json:
        session.out.print(table)
    if found.tree_id:
        session.say(f"build/{pin.release}: tree {found.tree_id[:12]}")
    else:
        session.say(f"build/{pin.release}: not applied; scripts/stack apply makes it")
    for label, lines in (
        ("unexported work", work),
        ("patch files differ from the tree",
         [f"{change.name}: {change.what}" for change in found.drift]),
        ("problem", [found.problem] if found.problem else []),
    ):  # fmt: skip
        if lines:
            session.say(f"[yellow]{label}:[/]")
            for line in lines:
                session.say(f"  {escape(line)}")
    session.answer(
        {
            "pin": {key: value for key, value in asdict(pin).items() if key != "sdist"},
            "base": found.base,
            "patches": rows,
            "tree": found.tree_id,
            "work": work,
            "drift": [asdict(change) for change in found.drift],
            "problem": found.problem,
        },
        ok=not found.problem,
    )


@verb
def lint(session: Session) -> None:
    """Check patches, series and pin against the project's rules."""
    findings = lint_module.lint(session.project, session.pin)
    for item in findings:
        where = _relative(session, item.where)
        session.say(f"{escape(where)}: [red]{item.rule}[/]: {escape(item.what)}")
        if item.mend:
            session.say(f"  [yellow]mend:[/] {escape(item.mend)}")
    if not findings:
        session.say(f"{len(lint_module.RULES)} rules, nothing found")
    rules = {name: demand for name, (demand, _) in lint_module.RULES.items()}
    session.answer(
        {"rules": rules, "findings": [asdict(item) for item in findings]},
        ok=not findings,
    )


def _relative(session: Session, where: str) -> str:
    return where.removeprefix(f"{session.project.root}{os.sep}")


@verb
def verify(session: Session) -> None:
    """Prove from scratch that base, patches and tree are what they say."""
    with session.lock():
        checks = verify_module.verify(
            session.project, session.pin, progress=session.download, step=session.step
        )
    for item in checks:
        session.say(f"{_MARKS[item.ok]} {escape(item.name)}: {escape(item.detail)}")
    session.answer(
        {"checks": [asdict(item) for item in checks]},
        ok=all(item.ok for item in checks),
    )


@verb
@click.argument("patches", nargs=-1, metavar="[PATCH]...")
@jobs_option
def prove(session: Session, patches: tuple[str, ...], jobs: int) -> None:
    """Show that each patch's tests fail without it and pass with it."""
    from . import testenv

    testenv.ensure(session.project, session.step)
    proofs = prove_module.prove(
        session.project,
        session.pin,
        patches,
        jobs=jobs,
        progress=session.download,
        step=session.step,
    )
    for proof in proofs:
        cached = " (cached)" if proof.cached else ""
        session.say(f"{_MARKS[proof.ok]} [bold]{escape(proof.patch)}[/]{cached}")
        if proof.reason:
            session.say(f"   no tests: {escape(proof.reason)}")
        for test in proof.tests:
            session.say(f"   {_MARKS[test.ok]} {escape(test.node)}")
            session.say(f"      without: {escape(test.red)}")
            session.say(f"      with:    {escape(test.green)}")
    session.answer(
        {"proofs": [{**asdict(proof), "ok": proof.ok} for proof in proofs]},
        ok=all(proof.ok for proof in proofs),
    )


@verb
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--arch", "archs", multiple=True,
              type=click.Choice(codegen_module.ARCHS),
              help="Only for this GPU; may be given twice.")  # fmt: skip
@click.option("--update", is_flag=True,
              help="Rewrite budgets and docs/codegen.md.")  # fmt: skip
@jobs_option
def codegen(
    session: Session,
    kernels: tuple[str, ...],
    archs: tuple[str, ...],
    update: bool,
    jobs: int,
) -> None:
    """Compile the Triton kernels for AMD GPUs and check the machine code."""
    from . import testenv

    testenv.ensure(session.project, session.step)
    report = codegen_module.codegen(
        session.project,
        session.pin,
        kernels,
        archs=archs,
        update=update,
        jobs=jobs,
        progress=session.download,
        step=session.step,
    )
    for item in report.findings:
        color = "red" if item.problem else "yellow"
        session.say(f"[{color}]{escape(item.cell)}[/]: {escape(item.what)}")
    for path in report.written:
        session.say(f"written: {escape(_relative(session, str(path)))}")
    failed = sum(cell.figures is None for cell in report.cells)
    session.say(
        f"{len(report.cells)} compiled kernels, {failed} of them failed; "
        f"{report.cached} of {report.runs} runs cached"
    )
    if report.problems and not update:
        session.say("[yellow]mend:[/] if it is meant: scripts/stack codegen --update")
    session.answer(
        {
            "kernels": [asdict(cell) for cell in report.cells],
            "findings": [asdict(item) for item in report.findings],
            "written": report.written,
        },
        ok=not report.problems,
    )


@verb
@click.option("--require", is_flag=True,
              help="Fail if there is no compiler to run it with.")  # fmt: skip
@jobs_option
def hipgate(session: Session, require: bool, jobs: int) -> None:
    """Compile the C++ writer of the KV cache for AMD GPUs and check its code."""
    from . import testenv

    testenv.ensure(session.project, session.step)
    gate = hipgate_module.hipgate(
        session.project,
        session.pin,
        jobs=jobs,
        progress=session.download,
        step=session.step,
    )
    for item in gate.checks:
        session.say(f"{_MARKS[item.ok]} {escape(item.name)}: {escape(item.detail)}")
    if gate.toolchain:
        session.say(f"compiled with {escape(gate.toolchain)}")
    for reason in gate.missing:
        session.say(f"[yellow]not run:[/] {escape(reason)}")
    if gate.missing and gate.mend:
        session.say(f"[yellow]mend:[/] {escape(gate.mend)}")
    session.answer(
        {"ran": not gate.missing, **asdict(gate)},
        ok=gate.ok and not (require and gate.missing),
    )


@verb
@click.argument("parts", nargs=-1, type=click.Choice(suite_module.PARTS))
@jobs_option
def test(session: Session, parts: tuple[str, ...], jobs: int) -> None:
    """Run everything that can be shown on this machine, or the named parts.

    \b
    lint    the rules of patches, series and pin
    apply   base and patches
    verify  the proofs from scratch
    tool    tests of this tool, and the rules that all patches keep
    harness tests that import vLLM: of the harness, of gfx942, of codegen
    prove   red and green of each patch
    tree    the patches' tests on the whole stack
    codegen the Triton kernels as machine code
    hip     the C++ writer of the KV cache as machine code
    """
    if session.as_json:  # pytest's own output must not mix with the answer
        os.dup2(2, 1)
    done = suite_module.run(
        session.project,
        session.pin,
        parts,
        jobs=jobs,
        progress=session.download,
        step=session.step,
    )
    for part in done:
        detail = escape(part.detail)
        session.say(f"{_MARKS[part.ok]} {part.name} ({part.seconds:.0f} s): {detail}")
    session.answer(
        {"parts": [asdict(part) for part in done]}, ok=all(part.ok for part in done)
    )


@verb
@dry_run_option
def export(session: Session, dry_run: bool) -> None:
    """Write the commits of build/<release> as patch files."""
    with session.lock(reading=dry_run):
        result = export_module.export(
            session.project, session.pin, dry_run=dry_run, step=session.step
        )
    _say_changes(session, result.changes)
    for path in result.dirty:
        session.err.print(f"[yellow]uncommitted, in no patch:[/] {escape(path)}")
    session.answer(
        {
            "dry_run": dry_run,
            "changes": [asdict(change) for change in result.changes],
            "uncommitted": list(result.dirty),
        }
    )


def _say_changes(session: Session, changes: list[export_module.Change]) -> None:
    for change in changes:
        if change.what != "unchanged":
            session.say(f"{change.what}: {escape(change.name)}")
    same = sum(change.what == "unchanged" for change in changes)
    session.say(f"{same} patches unchanged")


@verb
@click.argument("name")
@click.option("--subject", default="[Bugfix][ROCm] Say what it does",
              show_default=True, help="Subject of a commit made of uncommitted "
              "changes.")  # fmt: skip
@dry_run_option
def new(session: Session, name: str, subject: str, dry_run: bool) -> None:
    """Make uncommitted changes, or the newest commit, the patch NAME."""
    with session.lock(reading=dry_run):
        commit = export_module.new(
            session.project, session.pin, name, subject, dry_run=dry_run
        )
    tree = session.project.tree(session.pin)
    session.say(escape(commit.message.decode("utf-8", "replace")))
    session.say(
        f"fill in message and trailers: git -C {tree} commit --amend\n"
        "then write the patch file: scripts/stack export"
    )
    session.answer({"name": name, "commit": commit.id, "dry_run": dry_run})


@verb
@click.argument("patch")
@dry_run_option
def drop(session: Session, patch: str, dry_run: bool) -> None:
    """Take PATCH out of the series, merging the later ones over the gap."""
    with session.lock(reading=dry_run):
        changes = export_module.drop(
            session.project, session.pin, patch, dry_run=dry_run, step=session.step
        )
    _say_changes(session, changes)
    session.answer(
        {"dry_run": dry_run, "changes": [asdict(change) for change in changes]}
    )


@verb
@click.argument("patch")
def show(session: Session, patch: str) -> None:
    """Show one patch: why, trailers, files, commit."""
    found = status_module.describe(session.project, session.pin, patch)
    session.say(f"[bold]{escape(found['subject'])}[/]\n")
    session.say(escape(found["body"]) + "\n")
    for key, value in found["trailers"]:
        session.say(f"[cyan]{key}:[/] {escape(value)}")
    session.say(f"\n{found['file']}: +{found['added']} -{found['removed']}")
    for path in found["files"]:
        session.say(f"  {escape(path)}")
    session.say(f"commit {found['commit'] or '(not applied)'}")
    session.answer({"patch": found})


@verb
def version(session: Session) -> None:
    """Print the PEP 440 version of a build of this stack."""
    with session.lock(reading=True):
        tree, count = tree_of(session.project, session.pin, session.download)
    text = status_module.version(session.project, session.pin, tree, count)
    session.say(text)
    session.answer({"version": text, "tree": tree})


@verb
@click.option("--cache", is_flag=True,
              help="Also remove downloaded archives and cached results.")  # fmt: skip
@discard_option
@dry_run_option
def clean(session: Session, cache: bool, discard: bool, dry_run: bool) -> None:
    """Remove build/, unless it holds work that no patch file has."""
    with session.lock(reading=dry_run):
        if dry_run:
            if not discard:
                clean_module.require_no_work(session.project)
            removed = clean_module.targets(session.project, cache=cache)
        else:
            removed = clean_module.clean(
                session.project, cache=cache, discard=discard, waiting=session.waiting
            )
    for path in removed:
        session.say(f"{'would remove' if dry_run else 'removed'} {escape(str(path))}")
    session.answer({"removed": [str(path) for path in removed], "dry_run": dry_run})


@verb
@click.option("--to", "text", metavar="RELEASE|REF|PATH|newest",
              help="A release, the newest one, a ref of the submodule, or a clone, "
              "bundle or archive (CLONE@REF for another commit than its "
              "HEAD).")  # fmt: skip
@click.option("--continue", "continue_", is_flag=True,
              help="Take the files as they are for the patch it stopped at.")  # fmt: skip
@click.option("--skip", is_flag=True, help="Drop the patch it stopped at.")
@click.option("--fate", default="", metavar="TEXT",
              help=f"With --skip, what became of it: {ledger_module.FORM}.")  # fmt: skip
@click.option("--abort", is_flag=True, help="Take everything back.")
@dry_run_option
def rebase(
    session: Session,
    text: str | None,
    continue_: bool,
    skip: bool,
    fate: str,
    abort: bool,
    dry_run: bool,
) -> None:
    """Move the stack to another vLLM, patch by patch, by true merges.

    The new stack is patches/<release> and build/<release>; the old one stays as it
    is. It stops where a person has to decide: edit the files there and --continue, or
    --skip the patch.
    """
    actions = [
        name
        for name, given in (
            (rebase_module.CONTINUE, continue_),
            (rebase_module.SKIP, skip),
            (rebase_module.ABORT, abort),
        )
        if given
    ]
    if len(actions) + (text is not None) > 1 or (dry_run and text is None):
        raise StackError(
            "one of --to, --continue, --skip and --abort at a time; --dry-run goes "
            "with --to",
            mend="scripts/stack rebase --help",
            code=USAGE,
        )
    if fate and not skip:
        raise StackError("--fate goes with --skip", code=USAGE)
    if dry_run and text:
        _report_drift(session, text)
    elif abort:
        with session.lock():
            gone = rebase_module.abort(session.project)
        session.say(f"removed {escape(str(gone))}; all else is as it was")
        session.answer({"aborted": True, "removed": gone})
    else:
        _rebase(session, text, actions[0] if actions else "", fate)


def _rebase(session: Session, text: str | None, action: str, fate: str) -> None:
    with session.lock():
        result = rebase_module.run(
            session.project,
            session.pin,
            text=text,
            action=action,
            fate=fate,
            directory=session.directory,
            progress=session.download,
            step=session.step,
        )
        stop = result.stop
        session.say(f"{result.origin} to {escape(str(result.target))}")
        for outcome in result.outcomes:
            _say_outcome(session, outcome)
        if stop:
            _say_outcome(session, stop, whole=True)
            session.say("\nwhat the patch is for:")
            session.say(escape("  " + result.why.rstrip("\n").replace("\n", "\n  ")))
            session.say(
                f"\nstopped at {stop.patch}, {result.left - 1} patches to go. Edit the "
                f"files in {escape(str(result.path))}, git add those in conflict, then:\n"
                "  scripts/stack rebase --continue   takes the files as they are\n"
                "  scripts/stack rebase --skip --fate TEXT   drops the patch\n"
                "  scripts/stack rebase --abort"
            )
            sys.stdout.flush()
            rebase_module.told(session.project)
        else:
            _say_end(session, result)
    session.answer(
        {
            "from": result.origin,
            "to": result.target.describe(),
            "finished": stop is None,
            "path": result.path,
            "patches": [asdict(outcome) for outcome in result.outcomes],
            "stop": asdict(stop) if stop else None,
            "left": result.left,
            "new_pin": result.new_pin,
        },
        ok=stop is None,
        code=_code([stop] if stop else []),
    )


def _code(outcomes: Iterable[carry.Outcome]) -> int:
    verdicts = {outcome.verdict for outcome in outcomes}
    return CONFLICT if carry.CONFLICT in verdicts else FOUND_PROBLEMS


def _say_end(session: Session, result: rebase_module.Result) -> None:
    release = result.target.release
    session.say(f"written: {escape(_relative(session, str(result.patches)))}")
    if result.new_pin:
        session.say(f"stack.toml has a table for {release} now: look it over")
    session.say(
        "what became of dropped patches is in docs/ledger.toml; next:\n"
        f"  scripts/stack range-diff {result.origin} {release}\n"
        f"  scripts/stack lint --release {release}\n"
        f"  scripts/stack prove --release {release}   (a test that passes without its "
        "patch: upstream has mended it)"
    )


_COLORS = {
    carry.CLEAN: "green",
    carry.MERGED: "green",
    carry.EMPTY: "cyan",
    carry.ABSORBED: "cyan",
    carry.SUSPECT: "yellow",
    carry.CONFLICT: "red",
}


def _say_outcome(
    session: Session, outcome: carry.Outcome, *, whole: bool = False
) -> None:
    decision = outcome.decision and f" ({outcome.decision})"
    if outcome.fate:
        decision = f" ({outcome.decision}: {outcome.fate})"
    rests = f", builds on {', '.join(outcome.rests_on)}" if outcome.rests_on else ""
    session.say(
        f"[{_COLORS[outcome.verdict]}]{outcome.verdict:9}[/] {outcome.patch}"
        + escape(decision + rests)
    )
    for reason in (*outcome.reasons, *outcome.moved):
        session.say(f"    {escape(reason)}")
    for conflict in outcome.conflicts:
        session.say(f"    {escape(conflict.path)}: {conflict.kind}")
        for hunk in conflict.hunks:
            place = f" in {hunk.place}" if hunk.place else ""
            session.say(f"      line {hunk.line}{escape(place)}")
            if whole:
                for mark, lines in (("upstream", hunk.upstream), ("patch", hunk.patch)):
                    for line in lines[:_SHOWN]:
                        session.say(f"        {mark:8} {escape(line)}")
                    if len(lines) > _SHOWN:
                        session.say(f"        {mark:8} ... {len(lines)} lines")
                    if not lines:
                        session.say(f"        {mark:8} has taken these lines away")
            for path in hunk.now_in:
                session.say(f"        now in   {escape(path)}")
            for cause in hunk.causes:
                session.say(f"        changed by {escape(cause)}")
        if not any(hunk.causes for hunk in conflict.hunks):
            for cause in conflict.causes:
                session.say(f"      touched by {escape(cause)}")


_SHOWN = 12


@verb
@click.option("--to", "texts", metavar="RELEASE|REF|PATH|newest", multiple=True,
              help="As for rebase; may be given more than once.")  # fmt: skip
@click.option("--update", is_flag=True, help="Rewrite docs/drift.md.")
@click.option("--check", is_flag=True,
              help="Fail if, and only if, docs/drift.md is not as --update would "
              "write it.")  # fmt: skip
def drift(session: Session, texts: tuple[str, ...], update: bool, check: bool) -> None:
    """Say how each patch would fare on another vLLM, and keep nothing.

    Without --to, on the releases that docs/drift.md records. Exit code 3 if a patch
    conflicts, 1 if one is suspect.
    """
    _report_drift(session, *texts, update=update, check=check)


def _report_drift(
    session: Session, *texts: str, update: bool = False, check: bool = False
) -> None:
    wanted = texts or drift_module.recorded(session.project)
    found = []
    for text in wanted:
        with session.lock(reading=True):
            found.append(
                drift_module.drift(
                    session.project,
                    session.pin,
                    text,
                    directory=session.directory,
                    progress=session.download,
                    step=session.step,
                )
            )
        one = found[-1]
        session.say(f"{session.pin.release} to {escape(str(one.target))}")
        if one.target.history is None:
            session.say(
                "  (no clone with both at hand: upstream commits are not named)"
            )
        for outcome in one.outcomes:
            _say_outcome(session, outcome)
    path = drift_module.page(session.project)
    if update:
        drift_module.write(session.project, session.pin, found)
        session.say(f"written: {escape(_relative(session, str(path)))}")
    current = path.read_text("utf-8") if check and path.is_file() else ""
    stale = check and current != drift_module.render(
        session.project, session.pin, found
    )
    if stale:
        session.say(f"[red]{escape(_relative(session, str(path)))} is not as this[/]")
        session.say("[yellow]mend:[/] scripts/stack drift --update")
    outcomes = [outcome for one in found for outcome in one.outcomes]
    session.answer(
        {
            "from": session.pin.release,
            "targets": [
                {
                    "to": one.target.describe(),
                    "counts": {v: len(one.having(v)) for v in carry.VERDICTS},
                    "patches": [asdict(outcome) for outcome in one.outcomes],
                }
                for one in found
            ],
            "stale": stale,
        },
        ok=not stale
        if check or update
        else not any(o.verdict in carry.STOPPING for o in outcomes),
        code=FOUND_PROBLEMS if stale else _code(outcomes),
    )


@verb
def ledger(session: Session) -> None:
    """Show what became of every concern on every supported release."""
    rows = ledger_module.table(session.project)
    table = Table("concern", "release", "what became of it", box=None)
    for row in rows:
        table.add_row(*map(escape, (row.concern, row.release, row.fate or "unknown")))
    if not session.as_json:
        session.out.print(table)
    session.answer(
        {"concerns": [{**asdict(row), "fate": row.fate} for row in rows]},
        ok=all(row.fate for row in rows),
    )


@verb
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
def range_diff(session: Session, old: str, new: str) -> None:
    """Compare two states of the stack, patch by patch.

    A and B are each a release, build/RELEASE (the commits there), or a commit of this
    project (COMMIT:RELEASE for another release than the default).
    """
    with session.lock(reading=True):
        found = rangediff.range_diff(
            session.project, session.pin, old, new, session.download
        )
    if not session.as_json:
        print(found.text, end="")
    session.answer({"pairs": [asdict(pair) for pair in found.pairs]})


@verb
@click.option("--dot", "as_dot", is_flag=True, help="Print it for Graphviz.")
def graph(session: Session, as_dot: bool) -> None:
    """Compute which patches need which, and compare with what they declare.

    Exit code 1 if a patch needs another one that it does not declare.
    """
    with session.lock(reading=True):
        nodes = graph_module.graph(
            session.project, session.pin, progress=session.download, step=session.step
        )
    if as_dot and not session.as_json:
        print(graph_module.dot(nodes))
    else:
        for node in nodes:
            _say_node(session, node)
    session.answer(
        {
            "patches": [
                {**asdict(node), "needs": list(node.needs), "alone": node.alone}
                for node in nodes
            ]
        },
        ok=not any(node.missing for node in nodes),
    )


def _say_node(session: Session, node: graph_module.Node) -> None:
    session.say(f"[bold]{node.patch}[/]" + (": goes alone" if node.alone else ""))
    for other in node.needs:
        why = ["its text"] if other in node.text else []
        names = node.names.get(other, ())
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            why.append(f"{', '.join(names[:4])}{more}")
        mark = " [red]not declared[/]" if other in node.missing else ""
        session.say(f"   needs {other} ({escape('; '.join(why))}){mark}")
    for other in node.unfound:
        session.say(f"   declares {other}, [yellow]for no need that was found[/]")


@verb
@click.argument("action", type=click.Choice(["run"]))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def bisect(session: Session, action: str, command: tuple[str, ...]) -> None:
    """Find the patch from which on COMMAND fails: bisect run COMMAND ARGUMENT...

    It runs in a checkout of each prefix that is tried, in the environment of the
    tests. Exit code 0 says good, 125 cannot be tried, another one below 128 bad.
    """
    if session.as_json:  # the command's own output must not mix with the answer
        os.dup2(2, 1)
    result = bisect_module.bisect(
        session.project,
        session.pin,
        command,
        progress=session.download,
        step=session.step,
    )
    if len(result.suspects) == 1:
        session.say(f"the first bad patch is [bold]{result.suspects[0]}[/]")
    else:
        session.say(f"one of these, the others could not be tried: "
                    f"{', '.join(result.suspects)}")  # fmt: skip
    session.answer(asdict(result))


@verb
@click.argument("patch")
@click.option("--onto", required=True, metavar="PATH|RELEASE",
              help="What the branch starts from; as --to of rebase.")  # fmt: skip
@click.option("--remote", type=Path, metavar="PATH",
              help="A local clone of vLLM that gets the branch, too.")  # fmt: skip
@click.option("--without", "left_out", multiple=True, metavar="CHECK",
              help="A check of the target that is not to run; may be given more than "
              "once.")  # fmt: skip
@discard_option
@jobs_option
def pr(
    session: Session,
    patch: str,
    onto: str,
    remote: Path | None,
    left_out: tuple[str, ...],
    discard: bool,
    jobs: int,
) -> None:
    """Prepare PATCH for a vLLM pull request: branch, title, text, checks.

    In build/pr/PATCH. Nothing is pushed or opened: a person reviews it, fills in what
    only a person can say, and sends it.
    """
    prepared = upstream_module.prepare(
        session.project,
        session.pin,
        patch,
        onto=onto,
        remote=remote and session.directory / remote,
        left_out=left_out,
        discard=discard,
        jobs=jobs,
        directory=session.directory,
        progress=session.download,
        step=session.step,
    )
    session.say(f"onto {escape(str(prepared.target))}")
    colors = {"passed": "green", "failed": "red", "not run": "yellow"}
    for check in prepared.checks:
        color = colors.get(check.state, "dim")
        session.say(
            f"[{color}]{check.state:8}[/] {escape(check.name)}: {escape(check.detail)}"
        )
    session.say(
        f"branch {prepared.branch}, {len(prepared.commits)} commits, in "
        f"{escape(_relative(session, str(prepared.tree)))}"
        + (f" and {escape(prepared.remote)}" if prepared.remote else "")
    )
    session.say(f"title: {escape(prepared.title)}")
    session.say(
        f"text, to be finished: {escape(_relative(session, str(prepared.body)))}"
    )
    session.answer(
        {
            **upstream_module.summary(prepared),
            "checks": [asdict(check) for check in prepared.checks],
            "proofs": [{**asdict(proof), "ok": proof.ok} for proof in prepared.proofs],
        },
        ok=prepared.ok,
    )


from . import cli_ship  # noqa: E402  (its commands need the above)
