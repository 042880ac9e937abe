"""The commands that end with a server: build, image, serve, smoke, bench, accept."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from . import accept as accept_module
from . import bench as bench_module
from . import build as build_module
from . import image as image_module
from . import patchfile, preflight, recipes, serving, standin, status
from . import smoke as smoke_module
from . import verified as verified_module
from .apply import tree_of
from .cli import Session, dry_run_option, jobs_option, verb
from .client import Model, Server
from .doctor import PROBLEM, Finding
from .errors import USAGE, StackError
from .rocm import PYTHON, Machine

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}
WAIT = 1800  # seconds: reports of cold starts are of ten minutes and more

python_option = click.option(
    "--python", default=PYTHON, show_default=True, metavar="PROGRAM",
    help="The Python that has, or gets, vLLM.",
)  # fmt: skip
arch_option = click.option(
    "--arch", default="gfx942", show_default=True, help="GPUs to build for."
)


def say_findings(session: Session, findings: tuple[Finding, ...]) -> None:
    """One line for each, and what mends it."""
    table = Table("", "", "", box=None, show_header=False)
    for item in findings:
        state = f"[{COLORS.get(item.state, 'dim')}]{item.state}[/]"
        detail = escape(item.detail)
        if item.mend:
            detail += f"\n[yellow]mend:[/] {escape(item.mend)}"
        table.add_row(escape(item.what), state, detail)
    if not session.as_json:
        session.out.print(table)


def stack_version(session: Session) -> str:
    """What this checkout builds."""
    with session.lock(reading=True):
        tree, count = tree_of(session.project, session.pin, session.download)
    return status.version(session.project, session.pin, tree, count)


def serve_findings(session: Session, gpus: int, python: str) -> list[Finding]:
    """doctor --serve."""
    version = stack_version(session)
    return preflight.preflight(
        Machine(), session.pin, version, gpus=gpus, python=python
    )


# -- build and image -------------------------------------------------------------


def _source(session: Session, names: tuple[str, ...]) -> build_module.Source:
    with session.lock(reading=True):
        return build_module.source(
            session.project, session.pin, names, session.download, session.step
        )


@verb
@arch_option
@python_option
@click.option("--overlay", "names", multiple=True, metavar="PATCH",
              help="A patch of the Python overlay, may be given several times; "
              "default: all that can be in one.")  # fmt: skip
@click.option("--any-toolchain", is_flag=True,
              help="Build with another ROCm or PyTorch than the release's.")  # fmt: skip
@click.option("--install", is_flag=True,
              help="Install the wheel, and nothing else.")  # fmt: skip
@click.option("--no-hip", is_flag=True,
              help="Where there is no ROCm, compile no C++ either.")  # fmt: skip
@jobs_option
@dry_run_option
def build(
    session: Session,
    arch: str,
    python: str,
    names: tuple[str, ...],
    any_toolchain: bool,
    install: bool,
    no_hip: bool,
    jobs: int,
    dry_run: bool,
) -> None:
    """Make the wheel where ROCm is; else a source archive and a Python overlay.

    Files go to build/dist/<release>.
    """
    arch = build_module.parse_archs(arch)
    made = _source(session, names)
    plan = build_module.plan(
        session.project,
        session.pin,
        made,
        Machine(),
        arch=arch,
        python=python,
        any_toolchain=any_toolchain,
        hip=not no_hip,
    )
    if install and not plan.wheel:
        raise StackError(
            "there is no ROCm here, so there is no wheel to install",
            mend="build where ROCm is, or in the base image: scripts/stack image",
        )
    session.say(f"version {plan.version}, for {plan.arch}, tree {plan.tree[:12]}")
    say_findings(session, plan.checks)
    for number, action in enumerate(plan.actions, 1):
        session.say(f"{number}. {escape(action.what)}: {escape(action.how)}")
    told: dict[str, Any] = {
        "version": plan.version,
        "arch": plan.arch,
        "tree": plan.tree,
        "wheel": plan.wheel,
        "checks": [asdict(item) for item in plan.checks],
        "steps": [asdict(action) for action in plan.actions],
        "overlay": {
            "version": made.overlay_version,
            "patches": [patch.name for patch in made.overlay.patches],
            "left_out": made.overlay.left_out,
        },
        "dry_run": dry_run,
    }
    if dry_run:
        session.answer({**told, "files": [], "findings": []})
        return

    def prepare() -> None:
        from . import testenv

        testenv.ensure(session.project, session.step)

    built = build_module.build(
        session.project,
        session.pin,
        made,
        plan,
        python=python,
        hip=not no_hip,
        jobs=jobs,
        prepare=prepare,
        progress=session.download,
        step=session.step,
    )
    say_findings(session, built.findings)
    for path in built.files:
        session.say(f"made {escape(str(path))}, {path.stat().st_size / 1e6:.1f} MB")
    ok = all(item.state != PROBLEM for item in built.findings)
    if plan.wheel:
        line = build_module.install_command(python, built.files[-1])
        if install and ok:
            build_module.install(line)
            session.say("installed")
        else:
            session.say(f"install it: {escape(shlex.join(line))}")
    else:
        for name, why in made.overlay.left_out.items():
            session.say(f"[dim]not in the overlay: {escape(name)} {escape(why)}[/]")
    session.answer(
        {
            **told,
            "files": [str(path) for path in built.files],
            "findings": [asdict(item) for item in built.findings],
        },
        ok=ok,
    )


@verb
@click.option("--target", default="serve", show_default=True,
              type=click.Choice(image_module.TARGETS),
              help="A stage of Dockerfile.rocm.")  # fmt: skip
@arch_option
@click.option("--base", metavar="IMAGE",
              help="Another base image: NAME@sha256:...")  # fmt: skip
@click.option("--tag", help="Name of the result.")
@click.option("--source-url", default="", help="For the image's labels.")
@click.option("--any-toolchain", is_flag=True,
              help="Take a base with another PyTorch than the release's.")  # fmt: skip
@click.option("--no-attestations", is_flag=True,
              help="Without SBOM and provenance, which docker's classic image store "
              "cannot keep.")  # fmt: skip
@click.option("--context-only", is_flag=True,
              help="Write the build context, and do not build.")  # fmt: skip
@click.option("--stand-in", is_flag=True,
              help="Build only the stages that need no ROCm, with buildah.")  # fmt: skip
@click.option("--require", is_flag=True,
              help="With --stand-in: fail if there is no builder.")  # fmt: skip
@dry_run_option
def image(
    session: Session,
    target: str,
    arch: str,
    base: str | None,
    tag: str | None,
    source_url: str,
    any_toolchain: bool,
    no_attestations: bool,
    context_only: bool,
    stand_in: bool,
    require: bool,
    dry_run: bool,
) -> None:
    """Build the image of Dockerfile.rocm with docker."""
    arch = build_module.parse_archs(arch)
    made = _source(session, ())
    wanted = image_module.image(
        session.project,
        session.pin,
        made,
        target=target,
        arch=arch,
        base=base,
        tag=tag,
        source_url=source_url,
        attest=not no_attestations,
        any_toolchain=any_toolchain,
    )
    session.say(f"version {wanted.arguments['STACK_VERSION']}, for {arch}")
    session.say(f"1. write the build context: {escape(str(wanted.context))}")
    if stand_in:
        stages = ", ".join(standin.STAGES)
        session.say(f"2. build {stages} on a stand-in for the base, with buildah")
    else:
        session.say(f"2. {escape(shlex.join(wanted.command))}")
    found = standin.StandIn()
    if not dry_run:
        with session.lock():
            image_module.write_context(session.project, session.pin, made)
        if stand_in:
            found = standin.stand_in(session.project, session.pin, made, session.step)
        elif not context_only:
            image_module.build_image(wanted)
            session.say(f"made {escape(wanted.tag)}")
    say_findings(session, found.findings)
    for reason in found.missing:
        session.say(f"[yellow]not run:[/] {escape(reason)}")
    if found.missing:
        session.say(f"[yellow]mend:[/] {escape(standin.MEND)}")
    session.answer(
        {
            "context": str(wanted.context),
            "tag": wanted.tag,
            "target": target,
            "arguments": wanted.arguments,
            "command": list(wanted.command),
            "findings": [asdict(item) for item in found.findings],
            "missing": list(found.missing),
            "dry_run": dry_run,
        },
        ok=all(item.state != PROBLEM for item in found.findings)
        and not (require and found.missing),
    )


# -- serve -----------------------------------------------------------------------


@verb
@click.argument("recipe", default=recipes.DEFAULT, metavar="[RECIPE]")
@click.argument("flags", nargs=-1, metavar="[-- VLLM-FLAG...]")
@click.option("--list", "list_", is_flag=True, help="Show the recipes.")
@click.option("--model", help="A local folder, or another name, of the checkpoint.")
@click.option("--port", default=8000, show_default=True)
@click.option("--eager", is_flag=True, help="Without captured graphs.")
@click.option("--no-preflight", is_flag=True, help="Do not look at the machine first.")
@python_option
@dry_run_option
def serve(
    session: Session,
    recipe: str,
    flags: tuple[str, ...],
    list_: bool,
    model: str | None,
    port: int,
    eager: bool,
    no_preflight: bool,
    python: str,
    dry_run: bool,
) -> None:
    """Serve the model with a recipe of scripts/recipes."""
    if list_:
        found = recipes.load(session.project, session.pin)
        for item in found:
            session.say(f"{item.name}: {item.gpus} GPUs. {escape(item.about)}")
        session.answer(
            {"recipes": [{"name": x.name, "gpus": x.gpus, "about": x.about,
                          "flags": x.flags} for x in found]}
        )  # fmt: skip
        return
    wanted = recipes.find(session.project, session.pin, recipe)
    line = serving.command(wanted, model, *flags, eager=eager, port=port)
    variables = [f"{k}={v}" for k, v in wanted.environment.items()]
    session.say(escape(" ".join([*variables, shlex.join(line)])))
    if dry_run:
        told = {"command": list(line), "environment": wanted.environment}
        session.answer({**told, "gpus": wanted.gpus, "dry_run": True})
        return
    serving.program()
    if not no_preflight:
        findings = tuple(serve_findings(session, wanted.gpus, python))
        say_findings(session, findings)
        bad = [f"{x.what}: {x.detail}" for x in findings if x.state == PROBLEM]
        if bad:
            raise StackError(
                f"this machine cannot serve {wanted.name}",
                mend="mend what is named above, or pass --no-preflight",
                details=tuple(bad) if session.as_json else (),
            )
    serving.serve(wanted, line)


# -- a server that is there, or one that is started -------------------------------


def _seconds(context: click.Context, option: click.Parameter, value: float) -> float:
    least = 0.0 if option.name == "wait" else 0.001
    if not least <= value <= 1e6:  # nan is not, either
        raise click.BadParameter("seconds, 1000000 at most")
    return value


def _to_write(session: Session, path: Path | None) -> Path | None:
    """Where a user wants a file.

    Raises:
        StackError: if it could not be written; what it is to hold takes hours.
    """
    if path is None:
        return None
    path = session.directory / path
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StackError(
            f"{path} cannot be written", mend="name a file in a folder", code=USAGE
        )
    return path


def _server_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed((
        click.argument("url", required=False),
        click.option("--recipe", help="Start a server for it, and stop it again."),
        click.option("--checkpoint", metavar="PATH",
                     help="With --recipe: a local folder of the checkpoint."),
        click.option("--port", default=8000, show_default=True,
                     help="With --recipe: where it listens."),
        click.option("--model", help="Its name there, if the server has several."),
        click.option("--wait", default=0.0, show_default=True, metavar="SECONDS",
                     callback=_seconds,
                     help=f"For the server to be ready; with --recipe: {WAIT}."),
        click.option("--timeout", default=300.0, show_default=True, metavar="SECONDS",
                     callback=_seconds, help="For a whole answer."),
        click.option("--first-timeout", default=float(WAIT), show_default=True,
                     metavar="SECONDS", callback=_seconds,
                     help="Until one has come: kernels may be compiled."),
        click.option("--any-version", is_flag=True,
                     help="Take a server of another version than this checkout's."),
    )):  # fmt: skip
        function = option(function)
    return function


class Choice:
    """Which server is meant: one at a URL, or one to be started."""

    def __init__(self, session: Session, options: dict[str, Any]):
        self.session = session
        self.url: str | None = options.pop("url")
        self.recipe: str | None = options.pop("recipe")
        self.checkpoint: str | None = options.pop("checkpoint")
        self.port: int = options.pop("port")
        self.model: str | None = options.pop("model")
        self.wait: float = options.pop("wait")
        self.timeout: float = options.pop("timeout")
        self.first_timeout: float = options.pop("first_timeout")
        any_version: bool = options.pop("any_version")
        if (self.url is None) == (self.recipe is None):
            raise StackError(
                "name a server" if self.url is None else "a URL and a --recipe are two",
                mend=f"scripts/stack {session.command} http://127.0.0.1:8000, or "
                "--recipe NAME to start one",
                code=USAGE,
            )
        self.version = None if any_version else stack_version(session)

    @contextlib.contextmanager
    def open(self, *, eager: bool = False) -> Iterator[Server]:
        """The server, ready."""
        if self.url is not None:
            server = Server(
                self.url, timeout=self.timeout, first_timeout=self.first_timeout
            )
            server.wait(self.wait, self.session.step)
            yield server
            return
        assert self.recipe is not None
        found = recipes.find(self.session.project, self.session.pin, self.recipe)
        self.session.step(f"starting {found.name}{' without graphs' if eager else ''}")
        with serving.running(
            found,
            self.checkpoint,
            eager=eager,
            port=self.port,
            log=self.log(eager),
            wait=self.wait or WAIT,
            timeout=self.timeout,
            step=self.session.step,
        ) as server:
            yield server

    def log(self, eager: bool) -> Path:
        name = f"{self.recipe}{'-eager' if eager else ''}.log"
        return self.session.project.build / "logs" / name


def _smoke(
    choice: Choice,
    server: Server,
    against: smoke_module.Record | None,
    *,
    answers: bool,
    short: bool = False,
) -> smoke_module.Report:
    lengths = tuple(smoke_module.LENGTHS)
    if short:
        lengths = tuple(x for x in lengths if x in (5, 129, 2049))
    return smoke_module.smoke(
        server,
        model=choice.model,
        version=choice.version,
        against=against,
        answers=answers,
        lengths=lengths,
        step=choice.session.step,
    )


@verb
@_server_options
@click.option("--save", type=Path, metavar="FILE",
              help="Keep the answers, to compare another server with.")  # fmt: skip
@click.option("--against", type=Path, metavar="FILE",
              help="Compare with the answers of another server.")  # fmt: skip
@click.option("--log", type=Path, metavar="FILE",
              help="The server's log, to be looked through.")  # fmt: skip
@click.option("--no-answers", is_flag=True,
              help="Do not ask what only a trained model knows.")  # fmt: skip
def smoke(
    session: Session,
    save: Path | None,
    against: Path | None,
    log: Path | None,
    no_answers: bool,
    **options: Any,
) -> None:
    """Ask a server at URL whether its answers can be right.

    Logprobs must be finite and tokens must differ, at every prompt length where the
    model takes another path, in batches and in a stream. With --recipe two servers
    are started, one after the other, the first without graphs; their answers must
    agree.
    """
    choice = Choice(session, options)
    save = _to_write(session, save)
    if log and not (session.directory / log).is_file():
        raise StackError(
            f"{session.directory / log} is no file", mend="name a file", code=USAGE
        )
    other = smoke_module.read(session.directory / against) if against else None
    findings: list[Finding] = []
    if choice.recipe and other is None:
        with choice.open(eager=True) as server:
            eager = _smoke(choice, server, None, answers=not no_answers)
        findings += [
            Finding(f"eager: {x.what}", x.state, x.detail, x.mend)
            for x in eager.findings
            if x.what != "agreement"
        ]
        findings.append(smoke_module.log(choice.log(True)))
        other = eager.record
    with choice.open() as server:
        report = _smoke(choice, server, other, answers=not no_answers)
    findings += report.findings
    if choice.recipe:
        log = choice.log(False)
    if log:
        findings.append(smoke_module.log(session.directory / log))
    say_findings(session, tuple(findings))
    ok = all(item.state != PROBLEM for item in findings)
    if save and report.record:
        smoke_module.save(report.record, save)
        session.say(f"answers kept in {escape(str(save))}")
    bad = sum(item.state == PROBLEM for item in findings)
    session.say(f"{bad} problems" if bad else "nothing found that is wrong")
    session.answer(
        {
            "model": report.model,
            "version": report.version,
            "findings": [asdict(item) for item in findings],
        },
        ok=ok,
    )


@verb
@_server_options
@click.option("--concurrency", default=bench_module.CONCURRENCY, show_default=True,
              type=click.IntRange(1))  # fmt: skip
@click.option("--repeats", default=bench_module.REPEATS, show_default=True,
              type=click.IntRange(1))  # fmt: skip
@click.option("--tokenizer", metavar="PATH",
              help="A folder with the model's tokenizer.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1),
              help="How many the server has, for figures per GPU.")  # fmt: skip
@click.option("--output", type=Path, metavar="FILE", help="Keep the figures as JSON.")
@click.option("--no-answers", is_flag=True,
              help="Do not ask what only a trained model knows.")  # fmt: skip
@dry_run_option
def bench(
    session: Session,
    concurrency: int,
    repeats: int,
    tokenizer: str | None,
    gpus: int | None,
    output: Path | None,
    no_answers: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Measure a server at URL with vllm bench serve, if its answers can be right.

    512 tokens in and 512 out, all requests at once, a fixed number of them in
    flight. A server that fails smoke before or after gets no figure.
    """
    protocol = bench_module.Protocol(concurrency, repeats=repeats)
    if dry_run:
        line = bench_module.command(
            protocol,
            options["url"] or f"http://127.0.0.1:{options['port']}",
            options["model"] or "MODEL",
            tokenizer=tokenizer,
            seed=0,
            folder=Path("FOLDER"),
        )
        session.say(f"1. smoke\n2. {repeats} times, with another seed each:")
        session.say(f"   {escape(shlex.join(line))}\n3. smoke")
        session.answer({"command": list(line), "dry_run": True})
        return
    choice = Choice(session, options)
    output = _to_write(session, output)
    if choice.recipe and gpus is None:
        gpus = recipes.find(session.project, session.pin, choice.recipe).gpus
    reports: dict[str, smoke_module.Report] = {}
    with choice.open() as server:
        served: Model = server.model(choice.model)

        def gate(when: str) -> None:
            session.step(f"smoke {when}")
            report = _smoke(
                choice, server, None, answers=not no_answers, short=when == "after"
            )
            reports[when] = report
            if not report.ok:
                raise StackError(
                    f"the server fails smoke {when} the measurement: there is no "
                    "figure",
                    mend="scripts/stack smoke shows everything: docs/troubleshooting.md",
                    details=report.problems,
                )

        result = bench_module.bench(
            protocol,
            server.url,
            served,
            tokenizer=tokenizer or choice.checkpoint,
            smoke=gate,
            step=session.step,
        )
    told = {
        "model": served.name,
        "version": reports["before"].version,
        "gpus": gpus,
        "protocol": asdict(protocol),
        "runs": [asdict(run) for run in result.runs],
        "mean_output_tokens_per_second": result.mean,
        "spread": result.spread,
    }
    for run in result.runs:
        session.say(f"seed {run.seed}: {run.throughput:.2f} output tokens/s")
    per_gpu = f", {result.mean / gpus:.2f} per GPU" if gpus else ""
    session.say(
        f"mean {result.mean:.2f} output tokens/s{per_gpu}, spread "
        f"{100 * result.spread:.2f} %, {concurrency} requests in flight"
    )
    for name in bench_module.TIMES:
        cells = [
            f"p{p} {result.time(f'p{p}_{name}_ms'):.1f}"
            for p in bench_module.PERCENTILES
        ]
        session.say(f"{name} in ms: {', '.join(cells)}")
    if output:
        output.write_text(json.dumps(told, indent=1) + "\n")
        session.say(f"kept in {escape(str(output))}")
    session.answer(told)


def _lengths(context: click.Context, option: click.Parameter, text: str) -> tuple:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter("numbers, separated by commas") from error
    if min(found) < 128:
        raise click.BadParameter("at least 128 tokens")
    return found


@verb
@_server_options
@click.option("--gsm8k", type=Path, metavar="FILE",
              help="GSM8K's test.jsonl; it is not downloaded.")  # fmt: skip
@click.option("--shots", type=Path, metavar="FILE",
              help="Where the examples are from; default: the first 5 of the file, "
              "which are then not asked.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Ask fewer questions.")
@click.option("--lengths", callback=_lengths, show_default=True,
              default=",".join(map(str, accept_module.LENGTHS)),
              help="Tokens of the texts that needles hide in.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of texts and needles.")
@click.option("--jobs", default=32, show_default=True, type=click.IntRange(1),
              help="Questions at once.")  # fmt: skip
@click.option("--only", type=click.Choice(["gsm8k", "needles"]),
              help="Leave the other out.")  # fmt: skip
def accept(
    session: Session,
    gsm8k: Path | None,
    shots: Path | None,
    limit: int | None,
    lengths: tuple[int, ...],
    seed: int,
    jobs: int,
    only: str | None,
    **options: Any,
) -> None:
    """Ask a server at URL the questions of GSM8K, and for needles in long texts."""
    if gsm8k is None and only != "needles":
        raise StackError(
            "--gsm8k FILE is missing",
            mend="docs/serving.md says where the file comes from; or --only needles",
            code=USAGE,
        )
    for file in (gsm8k, shots):
        if file and only != "needles":
            # Before a server starts.
            accept_module.read_problems(session.directory / file)
    choice = Choice(session, options)
    ok = True
    told: dict[str, Any] = {"gsm8k": None, "needles": []}
    with choice.open() as server:
        model = server.model(choice.model)
        told |= {"model": model.name, "version": server.version()}
        if choice.version and told["version"] != choice.version:
            raise StackError(
                f"the server is {told['version'] or 'of an unknown version'}, this "
                f"checkout builds {choice.version}",
                mend="serve what this checkout builds, or pass --any-version",
            )
        if only != "gsm8k":
            found = accept_module.needles(
                server, model, lengths=lengths, seed=seed, step=session.step
            )
            told["needles"] = [{**asdict(x), "ok": x.ok} for x in found]
            ok = _say_needles(session, found)
        if gsm8k and only != "needles":
            score = accept_module.gsm8k(
                server,
                model,
                session.directory / gsm8k,
                shots=shots and session.directory / shots,
                limit=limit,
                jobs=jobs,
                step=session.step,
            )
            told["gsm8k"] = {**asdict(score), "score": score.value, "ok": score.ok}
            ok = _say_score(session, score) and ok
    session.say("accepted" if ok else "[red]not accepted[/]")
    session.answer(told, ok=ok)


def _say_needles(session: Session, found: list[accept_module.Needle]) -> bool:
    for item in found:
        mark = "[green]ok[/]" if item.ok else "[red]FAILED[/]"
        words = item.wanted if item.ok else f"{item.found!r}, not {item.wanted}"
        count = f"{item.tokens or 'about ' + str(item.length)} tokens"
        session.say(f"{mark} needle in {count}, at {item.depth:.0%}: {escape(words)}")
    right = sum(item.ok for item in found)
    session.say(f"{right} of {len(found)} needles found; all are wanted")
    return right == len(found)


def _say_score(session: Session, score: accept_module.Score) -> bool:
    mark = "[green]ok[/]" if score.ok else "[red]FAILED[/]"
    session.say(
        f"{mark} GSM8K: {score.value:.4f} ± {score.error:.4f}, {score.right} of "
        f"{score.asked} right; {accept_module.FAIL} is wanted, "
        f"{accept_module.EXPECTED} expected"
    )
    if score.asked < score.in_file - accept_module.SHOTS:
        session.say(f"[yellow]warning:[/] a part of the {score.in_file} questions")
    if score.ok and score.value < accept_module.EXPECTED:
        session.say("[yellow]warning:[/] lower than expected")
    if score.cut:
        session.say(
            f"{score.cut} answers ran into {accept_module.ANSWER_TOKENS} tokens"
        )
    if not score.ok:
        for line in score.wrong:
            session.say(f"  {escape(line)}")
    return score.ok


@verb
@click.option("--update", is_flag=True, help="Rewrite the table of the page.")
def verified(session: Session, update: bool) -> None:
    """Show where each patch was shown to be right, by its trailers.

    Fails if docs/verification.md says something else.
    """
    patches = patchfile.load(session.project.patches(session.pin))
    session.say(escape(verified_module.table(patches)))
    path = verified_module.page(session.project)
    text = path.read_text("utf-8")
    renewed = verified_module.renewed(text, patches)
    if update and renewed != text:
        path.write_text(renewed, "utf-8")
        session.say(f"written: {escape(str(path))}")
    stale = renewed != text and not update
    if stale:
        session.say(
            f"{escape(str(path))}: [red]its table is not this one[/]\n"
            "[yellow]mend:[/] scripts/stack verified --update"
        )
    told = {p.name: verified_module.layers(p) for p in patches}
    session.answer({"patches": told, "stale": stale}, ok=not stale)
