"""build: a wheel of the stack where ROCm is, and what can be made where it is not."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import apply, hipgate, overlay, patchfile, process, status, superproject
from . import worktree
from .doctor import NOT_RUN, OK, PROBLEM, WARNING, Finding
from .errors import USAGE, StackError
from .pins import Pin, Project
from .report import Progress, Step
from .rocm import ARCH, Machine

DIST = "dist"
# What vLLM's build asks for, with the bounds of docker/Dockerfile.rocm_base.
TOOLS = ("cmake<4", "ninja", "packaging", "setuptools<80", "setuptools-scm",
         "setuptools-rust", "wheel", "jinja2")  # fmt: skip
ARCHS = (ARCH, "gfx950")
# Extension modules that hold device code.
_EXTENSIONS = ("vllm/_C.abi3.so", "vllm/_rocm_C.abi3.so", "vllm/_moe_C.abi3.so")
_COMPRESSED = b"CCOB"  # starts a compressed bundle of device code

_QUESTION = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "-")
"""


@dataclass(frozen=True)
class Source:
    """The stack that is built."""

    version: str
    tree: str
    commit: str
    patches: tuple[patchfile.Patch, ...]
    content: bytes  # of the archive
    overlay: overlay.Overlay
    overlay_version: str


@dataclass(frozen=True)
class Action:
    """One step of a build: what, and the command or file."""

    what: str
    how: str


@dataclass(frozen=True)
class Plan:
    """Everything that a build will do, and what was checked before it."""

    version: str
    arch: str
    tree: str
    wheel: bool  # else an archive and an overlay
    checks: tuple[Finding, ...]
    actions: tuple[Action, ...]
    folder: Path


@dataclass(frozen=True)
class Built:
    """What a build left."""

    plan: Plan
    files: tuple[Path, ...]
    findings: tuple[Finding, ...]


def parse_archs(text: str) -> str:
    """``text`` as PYTORCH_ROCM_ARCH wants it.

    Raises:
        StackError: if an architecture is not one of the stack's, or gfx942 is not
            among them.
    """
    archs = [part for part in re.split(r"[;, ]+", text) if part]
    wrong = [arch for arch in archs if arch not in ARCHS]
    if wrong or ARCH not in archs:
        what = f"{', '.join(wrong)} is not" if wrong else f"{ARCH} is missing:"
        raise StackError(
            f"--arch {text}: {what} what the stack is for",
            mend=f"--arch {ARCH}, or --arch '{';'.join(ARCHS)}'",
            code=USAGE,
        )
    return ";".join(dict.fromkeys(archs))


def source(
    project: Project, pin: Pin, names: tuple[str, ...], progress: Progress, step: Step
) -> Source:
    """The stack as an archive and an overlay; nothing is written.

    Args:
        project, pin: The stack.
        names: Patches of the overlay, or none for all that can be in it.
        progress, step: Told of downloads and of what is done.

    Raises:
        StackError: if the stack does not apply, or the overlay cannot be.
    """
    superproject.check_gitlink(project, pin)
    patches = patchfile.load(project.patches(pin))
    tree = worktree.Tree(project, pin)
    with tree.rehearsal(None, progress):
        commits = apply.known_commits(tree, patches)
        if not commits:
            raise StackError(
                f"{project.patches(pin)} has no patches", mend="git checkout patches"
            )
        tip = commits[-1]
        version = status.version(project, pin, tip.tree, len(commits))
        step("writing the source archive")
        plain = tree.repository.run(
            "archive", "--format=tar", f"--prefix=vllm-{version}/", tip.commit
        )
        _require_whole(tree, plain, tip.tree)
        laid = overlay.make(tree, commits, names, step)
        overlay_version = status.version(project, pin, laid.tree, len(laid.patches))
    return Source(version, tip.tree, tip.commit, tuple(patches),
                  overlay.compress(plain), laid, overlay_version)  # fmt: skip


def _require_whole(tree: worktree.Tree, plain: bytes, wanted: str) -> None:
    """Require that an archive holds a tree, whole.

    An attribute of a file, such as export-ignore, could have changed it.
    """
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        found = tree.repository.import_tree(_members(tar))
    if found != wanted:
        raise StackError(f"the source archive holds tree {found}, not {wanted}")


def _members(tar: tarfile.TarFile) -> Iterator[tuple[bytes, str, bytes]]:
    for member in tar:
        path = member.name.partition("/")[2]
        if member.issym():
            yield b"120000", path, member.linkname.encode("utf-8", "surrogateescape")
        elif member.isfile():
            stream = tar.extractfile(member)
            assert stream is not None
            mode = b"100755" if member.mode & 0o100 else b"100644"
            yield mode, path, stream.read()


def folder(project: Project, pin: Pin) -> Path:
    return project.build / DIST / pin.release


# -- what is done ----------------------------------------------------------------


def plan(
    project: Project,
    pin: Pin,
    made: Source,
    machine: Machine,
    *,
    arch: str,
    python: str,
    any_toolchain: bool,
    hip: bool,
) -> Plan:
    """What a build would do here.

    Args:
        project, pin, made: The stack.
        machine: Whether ROCm is here.
        arch: As PYTORCH_ROCM_ARCH wants it.
        python: The Python that the wheel is for.
        any_toolchain: Whether another toolchain than the pinned one will do.
        hip: Whether the HIP gate may run where there is no ROCm.

    Raises:
        StackError: if ROCm is here, but a wheel would not be the pinned one.
    """
    target = folder(project, pin)
    archive = target / f"vllm-{made.version}.tar.gz"
    laid = target / f"vllm-{made.overlay_version}-overlay.tar.gz"
    first = Action("write the source archive", f"{archive}")
    if machine.rocm is None:
        checks = (Finding("ROCm", NOT_RUN, f"none in {machine.home}: no wheel"),)
        count = len(made.overlay.patches)
        words = f"{count} of {len(made.patches)} patches"
        gate = "scripts/stack hipgate" if hip else "not run: --no-hip"
        actions = (
            first,
            Action(f"write the Python overlay, {words}", f"{laid}"),
            Action(f"compile the C++ cache writer for {ARCH}", gate),
        )
        return Plan(made.version, arch, made.tree, False, checks, actions, target)
    checks = tuple(_toolchain(machine, pin, python))
    bad = [f"{x.what}: {x.detail}" for x in checks if x.state == PROBLEM]
    different = [f"{x.what}: {x.detail}" for x in checks if x.state == WARNING]
    if bad or different and not any_toolchain:
        raise StackError(
            f"this is not the toolchain of {pin.release}",
            mend=f"build in {pin.toolchain.base_image} (scripts/stack image does)"
            + ("" if bad else ", or pass --any-toolchain"),
            details=tuple(bad + different),
        )
    variables = environment(made.version, arch)
    shown = " ".join(f"{k}='{v}'" for k, v in variables.items())
    line = " ".join(wheel_command(python, target, Path("SOURCE")))
    actions = (
        first,
        Action(f"build the wheel for {arch}", f"{shown} {line}"),
        Action("check the wheel", f"version {made.version}, device code for {arch}"),
    )
    return Plan(made.version, arch, made.tree, True, checks, actions, target)


def environment(version: str, arch: str) -> dict[str, str]:
    """What vLLM's setup.py reads."""
    return {
        "PYTORCH_ROCM_ARCH": arch,
        "VLLM_TARGET_DEVICE": "rocm",
        # Else the version would be made of git tags, which an archive has not.
        "VLLM_VERSION_OVERRIDE": version,
    }


def wheel_command(python: str, target: Path, source: Path) -> tuple[str, ...]:
    """Builds a wheel with the PyTorch that is there: pip may not fetch another."""
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", str(target))
    return (python, "-m", "pip", "wheel", *options, str(source))


def _toolchain(machine: Machine, pin: Pin, python: str) -> Iterator[Finding]:
    """What a wheel would be built with, against the pin."""
    wanted = pin.toolchain

    def compare(what: str, found: str | None, right: str) -> Finding:
        if found == right:
            return Finding(what, OK, right)
        return Finding(what, WARNING, f"{found or 'unknown'}, not {right}")

    yield compare("ROCm", machine.rocm, wanted.rocm)
    packages = machine.packages(python)
    if packages.torch is None:
        yield Finding("PyTorch", PROBLEM, f"{python} has none")
    elif packages.error:
        yield Finding("PyTorch", PROBLEM, packages.error)
    elif packages.hip is None:
        yield Finding("PyTorch", PROBLEM, f"{packages.torch} is not built for ROCm")
    else:
        yield compare("PyTorch", packages.torch, wanted.torch)
    # The only record of the other parts that an image has.
    image = machine.image
    for what, key, text in (
        ("Triton", "TRITON_BRANCH", wanted.triton),
        ("AITER", "AITER_BRANCH", wanted.aiter),
    ):
        if key in image:
            yield compare(what, image[key], text.split()[-1])
        else:
            yield Finding(what, NOT_RUN, "no /app/versions.txt says which it is")
    names = [re.split(r"[<>=]", tool)[0] for tool in TOOLS]
    done = process.run([python, "-c", _QUESTION, *names])
    pairs = [line.split() for line in done.stdout.decode().splitlines()]
    missing = [name for name, version in pairs if version == "-"]
    if missing:
        line = " ".join(f"'{tool}'" for tool in TOOLS)
        detail = f"{python} lacks {', '.join(missing)}: {python} -m pip install {line}"
        yield Finding("build tools", PROBLEM, detail)
    hipcc = machine.home / "bin" / "hipcc"
    if not hipcc.is_file():
        yield Finding("hipcc", PROBLEM, f"{hipcc} does not exist")


def build(
    project: Project,
    pin: Pin,
    made: Source,
    planned: Plan,
    *,
    python: str,
    hip: bool,
    jobs: int,
    prepare: Callable[[], None],
    progress: Progress,
    step: Step,
) -> Built:
    """Do what is planned.

    Args:
        project, pin, made, planned: As :func:`plan` had and gave them.
        python: The Python that the wheel is for.
        hip: Whether the HIP gate may run where there is no ROCm.
        jobs: How many compilations at once.
        prepare: Installs what the HIP gate needs.
        progress, step: Told of downloads and of what is done.

    Raises:
        StackError: if the build fails, or the wheel is not what it should be.
    """
    target = planned.folder
    target.mkdir(parents=True, exist_ok=True)
    archive = target / f"vllm-{made.version}.tar.gz"
    archive.write_bytes(made.content)
    if planned.wheel:
        wheel = _wheel(made, planned, python, jobs, step)
        return Built(planned, (archive, wheel), tuple(check_wheel(wheel, planned)))
    laid = target / f"vllm-{made.overlay_version}-overlay.tar.gz"
    told = overlay.manifest(made.overlay, made.overlay_version, pin.tag, pin.commit)
    overlay.write(made.overlay, told, laid)
    if not hip:
        return Built(planned, (archive, laid), (_not_run("--no-hip"),))
    prepare()
    gate = hipgate.hipgate(project, pin, jobs=jobs, progress=progress, step=step)
    if gate.missing:
        finding = _not_run("; ".join(gate.missing))
    else:
        bad = [check.name for check in gate.checks if not check.ok]
        detail = "; ".join(bad) or f"{len(gate.checks)} demands met, {gate.toolchain}"
        finding = Finding("C++ cache writer", PROBLEM if bad else OK, detail)
    return Built(planned, (archive, laid), (finding,))


def _not_run(why: str) -> Finding:
    return Finding("C++ cache writer", NOT_RUN, why)


def _wheel(made: Source, planned: Plan, python: str, jobs: int, step: Step) -> Path:
    step(f"building the wheel for {planned.arch}; this takes minutes")
    with tempfile.TemporaryDirectory(dir=planned.folder, prefix=".wheel-") as name:
        scratch = Path(name)
        with tarfile.open(fileobj=io.BytesIO(made.content)) as tar:
            tar.extractall(scratch / "source", filter="tar")
        (source,) = (scratch / "source").iterdir()
        variables = environment(made.version, planned.arch) | {"MAX_JOBS": str(jobs)}
        line = wheel_command(python, scratch / "wheel", source)
        done = process.run(line, env=variables)
        if done.returncode:
            log = planned.folder / "build.log"
            log.write_bytes(done.stdout + done.stderr)
            raise StackError(
                f"the build failed; its log is {log}",
                mend="look for the first error in it",
                details=process.tail(done.stderr or done.stdout, 5),
            )
        found = list((scratch / "wheel").glob("*.whl"))
        if len(found) != 1:
            raise StackError(
                f"pip made {len(found)} wheels, not one", mend=" ".join(line)
            )
        (wheel,) = found
        target = planned.folder / wheel.name
        shutil.move(wheel, target)
    return target


def install_command(python: str, wheel: Path) -> tuple[str, ...]:
    """Installs a wheel, and never another PyTorch along with it."""
    options = ("--no-deps", "--force-reinstall")
    return (python, "-m", "pip", "install", *options, str(wheel))


def install(command: tuple[str, ...]) -> None:
    """Run the command.

    Raises:
        StackError: if pip fails.
    """
    done = process.run(command)
    if done.returncode:
        raise StackError(
            "the wheel could not be installed",
            mend=" ".join(command),
            details=process.tail(done.stderr, 5),
        )


def check_wheel(path: Path, planned: Plan) -> Iterator[Finding]:
    """Whether a wheel is of this version and has code for the GPUs it is for."""
    version = path.name.split("-")[1]
    same = version == planned.version
    words = version if same else f"{version}, not {planned.version}"
    yield Finding("version", OK if same else PROBLEM, words)
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        for name in _EXTENSIONS:
            if name not in names:
                yield Finding(name, PROBLEM, "is not in the wheel")
                continue
            yield device_code(name, wheel.read(name), planned.arch)


def device_code(name: str, content: bytes, archs: str) -> Finding:
    """Whether an extension module has code for each of ``archs``."""
    missing = [
        arch for arch in archs.split(";") if f"amdhsa--{arch}".encode() not in content
    ]
    if not missing:
        return Finding(name, OK, f"has code for {archs}")
    if _COMPRESSED in content:
        detail = "its device code is compressed, and was not looked into"
        return Finding(name, NOT_RUN, detail)
    return Finding(name, PROBLEM, f"has no code for {', '.join(missing)}")
