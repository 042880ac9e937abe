"""Finds or fetches a HIP compiler and headers; nothing is installed.

There are several sources, because each of them moves: a ROCm that is installed,
and Debian suites with ROCm's headers, from whatever mirror this machine's apt is
set up with.  Packages are unpacked into the cache.  The first source that compiles
``ci/hip/probe.hip`` is taken.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import process
from .base import hash_file
from .errors import StackError
from .pins import Project
from .report import Step

SUITES = ("experimental", "forky", "sid")
CLANGS = (22, 21, 20, 19)
ARCH = "gfx942"

_HEADERS = ("libamdhip64-dev", "librocthrust-dev", "librocprim-dev", "libhipcub-dev")
_DEVICE_LIBRARIES = "rocm-device-libs-"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Files of known content. Of others apt's own signatures are believed.
KNOWN = {
    "libamdhip64-dev_7.2.4-1~exp2_amd64.deb":
        "28ae316c5be2d33b53fae8f2151e76a758f84aa3493abafeaef935e49cc5ba07",
    "libhipcub-dev_7.2.4-1~exp1_all.deb":
        "a32723c857d3e7d1ac7efcb20cd9405f3f6bb52ed9e63b2515eb3a17d868c341",
    "librocprim-dev_7.2.4-1~exp1_all.deb":
        "648c0803bf8c9813a9d8cb35313b05aa0b4395e447ddffcc1d75c4abb76dcdf3",
    "librocthrust-dev_7.2.4-1~exp1_all.deb":
        "400afb0f869891dd527e5b16f59fc6aeb68182a3aa3da603f4f78f0e7c9d8c70",
    "rocm-device-libs-22_7.2.4+dfsg-1~exp1_amd64.deb":
        "24b439be7c151ff67bc1f4f4f42a7c4047b3e6fd7905b9e6df89c0fa5dea8031",
    "libamdhip64-dev_6.4.3-5_amd64.deb":
        "f2a3a542d41883f87a45e2d0554c1c84ccf350c836b9e8b35473dadbc34ced5e",
    "libhipcub-dev_6.4.3-2_all.deb":
        "e450e4c090a519e6de81fad726d91c8429a24dc5d7cdca3568d092182a328cee",
    "librocprim-dev_6.4.3-2_all.deb":
        "d8af1b39b28dbb812441f17aef456722534f4837c996415fa160c2434629522c",
    "librocthrust-dev_6.4.4-1_all.deb":
        "2f5ea09ac67ab71fce706e7c6480dcd2866a5d7495b5b4ba12b30dd78950ee00",
    "rocm-device-libs-21_7.0.2+dfsg-3_amd64.deb":
        "5b22b3d5acaf1a282a4a6404d387c356899100f389564d7b27c2000885683287",
}  # fmt: skip

MEND = (
    "install ROCm; or, on Debian: apt-get update && apt-get install -y "
    f"--no-install-recommends clang-{CLANGS[0]}. Headers, and a clang if there is "
    "none, come from the mirror of the Debian archive that apt is set up with"
)


@dataclass(frozen=True)
class Compiler:
    """A clang for AMD GPUs."""

    path: Path
    version: str
    libraries: Path | None = None  # its own, if it is not installed


@dataclass(frozen=True)
class Toolchain:
    """A compiler with HIP headers and device libraries."""

    name: str
    compiler: Compiler
    flags: tuple[str, ...]

    @property
    def id(self) -> str:
        """Changes with anything that can change the code that comes out."""
        content = f"{self.name}\n{self.compiler.version}"
        return hashlib.sha256(content.encode()).hexdigest()

    def compile(
        self, source: Path, arch: str, target: Path, *flags: str
    ) -> process.subprocess.CompletedProcess[bytes]:
        """Compile the device code of ``source`` to assembly."""
        environment = {}
        if self.compiler.libraries:
            environment["LD_LIBRARY_PATH"] = os.fspath(self.compiler.libraries)
        return process.run(
            [
                *(self.compiler.path, "-x", "hip", f"--offload-arch={arch}"),
                *("--cuda-device-only", "--no-gpu-bundle-output", "-O3", "-S"),
                *self.flags,
                *flags,
                *("-o", target, source),
            ],
            env=environment,
        )


@dataclass(frozen=True)
class Missing:
    """No source gave a toolchain that works, and why."""

    reasons: tuple[str, ...]


def find(project: Project, step: Step) -> Toolchain | Missing:
    """The first toolchain that works.

    Args:
        project: Its cache keeps what was fetched.
        step: Told what is being downloaded, with its size.
    """
    reasons = []
    for source in (_installed, *(_suite(name) for name in SUITES)):
        try:
            toolchain = source(project, step)
            _probe(project, toolchain)
            return toolchain
        except StackError as error:
            last = f" ({error.details[-1].strip()})" if error.details else ""
            reasons.append(error.message + last)
    return Missing(tuple(dict.fromkeys(reasons)))


def _probe(project: Project, toolchain: Toolchain) -> None:
    source = project.root / "ci" / "hip" / "probe.hip"
    done_before = (
        project.cache / "hip" / "works" / f"{toolchain.id}-{hash_file(source)}"
    )
    if done_before.is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "probe.s"
        done = toolchain.compile(source, ARCH, target, "-std=c++20")
        if done.returncode:
            errors = [x for x in process.tail(done.stderr, 200) if "error" in x]
            raise StackError(
                f"{toolchain.name} cannot compile ci/hip/probe.hip",
                details=tuple(errors[:1]),
            )
    done_before.parent.mkdir(parents=True, exist_ok=True)
    done_before.touch()


def _installed(project: Project, step: Step) -> Toolchain:
    home = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    clang = home / "llvm" / "bin" / "clang"
    if not clang.is_file():
        raise StackError(f"no ROCm in {home}")
    flags = (f"--rocm-path={home}",)
    return Toolchain(f"the ROCm in {home}", Compiler(clang, _version(clang)), flags)


def _suite(name: str):
    def source(project: Project, step: Step) -> Toolchain:
        folder = project.cache / "hip" / name
        root = _complete(folder)
        if root is None:
            apt = Apt.of_suite(name, folder)
            libraries = apt.newest(_DEVICE_LIBRARIES)
            root = apt.unpack((*_HEADERS, libraries), step)
        bitcode = next(iter(sorted(root.glob("usr/**/amdgcn/bitcode"))), None)
        if bitcode is None:
            raise StackError(f"Debian {name}: {_DEVICE_LIBRARIES}* holds no bitcode")
        packages = " ".join(sorted(x.stem for x in (folder / "debs").glob("*.deb")))
        flags = (
            f"--rocm-path={root / 'usr'}",
            f"--rocm-device-lib-path={bitcode}",
            # ROCm 6's headers want it, and newer clangs do not define it.
            "-D__AMDGCN_WAVEFRONT_SIZE=64",
        )
        return Toolchain(
            f"{packages} of Debian {name}", _compiler(project, step), flags
        )

    return source


def _compiler(project: Project, step: Step) -> Compiler:
    for number in CLANGS:
        path = shutil.which(f"clang-{number}")
        if path:
            return Compiler(Path(path), _version(Path(path)))
    folder = project.cache / "hip" / "clang"
    root = _complete(folder)
    if root is None:
        apt = Apt.of_machine(folder)
        known = apt.names("clang-")
        number = next((x for x in CLANGS if f"clang-{x}" in known), None)
        if number is None:
            raise StackError(
                f"no clang-{CLANGS[-1]} or newer is installed, and apt knows none"
            )
        wanted = (f"clang-{number}", f"libclang-cpp{number}", f"libllvm{number}",
                  f"libclang-common-{number}-dev")  # fmt: skip
        root = apt.unpack(wanted, step)
    found = sorted(root.glob("usr/lib/llvm-*/bin/clang"))
    if not found:
        raise StackError(f"{root}: there is no clang in it")
    libraries = next(iter(sorted(root.glob("usr/lib/*-linux-gnu"))))
    return Compiler(found[0], _version(found[0], libraries), libraries)


def _version(clang: Path, libraries: Path | None = None) -> str:
    environment = {"LD_LIBRARY_PATH": os.fspath(libraries)} if libraries else {}
    done = process.run([clang, "--version"], env=environment)
    if done.returncode:
        raise StackError(
            f"{clang} does not start", details=process.tail(done.stderr, 1)
        )
    return done.stdout.decode().splitlines()[0]


def _complete(folder: Path) -> Path | None:
    """What was unpacked before, if it was unpacked whole."""
    root = folder / "root"
    return root if root.is_dir() else None


class Apt:
    """apt with lists and a cache of its own: it needs no root and installs nothing.

    Args:
        folder: Where both are kept, and packages are unpacked.
        what: Named in messages.
        options: Say where packages come from.
    """

    def __init__(self, folder: Path, what: str, options: tuple[str, ...] = ()):
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise StackError("there is no apt on this machine")
        self.folder, self.what = folder, what
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        settings = (
            f"Dir::State::Lists={folder / 'lists'}",
            f"Dir::Cache={folder / 'cache'}",
            "Acquire::Languages=none",
            "APT::Sandbox::User=",
            *options,
        )
        self.options = [part for setting in settings for part in ("-o", setting)]
        self._run("apt-get", "-qq", "update")

    @classmethod
    def of_machine(cls, folder: Path) -> Apt:
        """Packages of the machine's own sources."""
        return cls(folder, "the machine's own packages")

    @classmethod
    def of_suite(cls, name: str, folder: Path) -> Apt:
        """Packages of another Debian suite, from the machine's own mirror."""
        mirror = debian_mirror()
        folder.mkdir(parents=True, exist_ok=True)
        sources = folder / "sources.list"
        signed = f"[signed-by={_KEYRING}] " if _KEYRING.is_file() else ""
        sources.write_text(f"deb {signed}{mirror} {name} main\n")
        options = (f"Dir::Etc::SourceList={sources}", "Dir::Etc::SourceParts=/dev/null")
        return cls(folder, f"Debian {name}", options)

    def _run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        done = process.run([program, *self.options, *arguments], cwd=cwd)
        if done.returncode:
            raise StackError(
                f"{self.what}: {program} {arguments[-1]} failed",
                details=process.tail(done.stderr, 1),
            )
        return done.stdout.decode()

    def names(self, prefix: str) -> list[str]:
        return self._run("apt-cache", "pkgnames", prefix).split()

    def newest(self, prefix: str) -> str:
        """The package whose name is ``prefix`` and the highest number."""
        numbers = [name.removeprefix(prefix) for name in self.names(prefix)]
        found = [int(number) for number in numbers if number.isdigit()]
        if not found:
            raise StackError(f"{self.what} has no {prefix}*")
        return f"{prefix}{max(found)}"

    def unpack(self, packages: tuple[str, ...], step: Step) -> Path:
        """Download packages and unpack them side by side.

        Returns:
            The folder that holds their files.

        Raises:
            StackError: if one cannot be had, or is not the known file of its name.
        """
        listing = self._run("apt-get", "download", "--print-uris", *packages)
        size = sum(int(line.split()[2]) for line in listing.splitlines())
        step(
            f"downloading {len(packages)} packages of {self.what}, {size / 1e6:.1f} MB"
        )
        debs = self.folder / "debs"
        shutil.rmtree(debs, ignore_errors=True)
        debs.mkdir()
        self._run("apt-get", "-qq", "download", *packages, cwd=debs)
        root = self.folder / "root"
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            half = Path(scratch) / "root"
            for deb in sorted(debs.iterdir()):
                name = deb.name.replace("%3a", ":")
                if KNOWN.get(name, hash_file(deb)) != hash_file(deb):
                    raise StackError(f"{self.what}: {name} is not the file it was")
                self._extract(deb, half)
            half.rename(root)
        return root

    def _extract(self, deb: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        done = process.run(["dpkg-deb", "-x", deb, target])
        if done.returncode:
            raise StackError(
                f"{deb.name} cannot be unpacked", details=process.tail(done.stderr, 1)
            )


def debian_mirror() -> str:
    """The mirror of the Debian archive that this machine's apt is set up with.

    Raises:
        StackError: if apt is not there, or knows no such mirror.
    """
    if not shutil.which("apt-get"):
        raise StackError("there is no apt on this machine")
    wanted = "$(ORIGIN)|$(SITE)|$(RELEASE)"
    done = process.run(
        ["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"]
    )
    for line in done.stdout.decode().splitlines():
        origin, site, release = line.split("|")
        if origin == "Debian" and "security" not in release:
            return site
    raise StackError("apt on this machine is not set up with a mirror of Debian")
