"""A small project to try the tool on: a made-up release, its archive and patches.

Everything is made with plain git, so that it can be an oracle for the tool.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click.testing
from stackkit import cli

ROOT = Path(__file__).resolve().parent.parent.parent
STACK = ROOT / "scripts" / "stack"
RELEASE = "v1.2.0"
NAME = "vllm-mi300x maintainers"
EMAIL = "maintainers@vllm-mi300x.example"
URL = "https://example.invalid/vllm.git"
GENERATED = ["PKG-INFO", "setup.cfg", "vllm.egg-info/", "vllm/_version.py"]

SHAPE = "def {name}(x):\n    y = x + 1\n    y = y * 2\n    return y\n"
# Two functions that differ by name only, too long for a diff's context to tell apart.
TWIN = "def {name}(x):\n" + "".join(f"    x = x + {i}\n" for i in range(12))
TWIN += "    return x\n"
TWINS = "\n\n".join(TWIN.format(name=name) for name in ("a", "b"))
BASE: dict[str, tuple[str, bytes]] = {
    ".gitignore": ("100644", b"__pycache__/\n*.pyc\n*.log\n"),
    "README.md": ("100644", b"# A small release\n"),
    "assets/logo.bin": ("100644", bytes(range(256)) * 3),
    "docs/crlf.md": ("100644", b"one\r\ntwo\r\nthree\r\nfour\r\n"),
    "docs/na\u00efve.md": ("100644", b"plain\n"),
    "docs/with space.md": ("100644", b"spaced\n"),
    "docs/no_end.txt": ("100644", b"first\nlast without a newline"),
    "link.py": ("120000", b"vllm/alpha.py"),
    "tests/nested/deep/test_deep.py": ("100644", b"def test_deep():\n    pass\n"),
    "tools/run.sh": ("100755", b"#!/bin/sh\nexec true\n"),
    "vllm/__init__.py": ("100644", b""),
    "vllm/alpha.py": (
        "100644",
        "\n\n".join(SHAPE.format(name=f"f{i}") for i in range(6)).encode(),
    ),
    "vllm/beta.py": ("100644", b"".join(b"B%d = %d\n" % (i, i) for i in range(40))),
    "vllm/old.py": ("100644", b"GONE = True\n"),
    "vllm/twin.py": ("100644", TWINS.encode()),
}


def git(where: Path, *arguments: str, stdin: bytes | None = None, **env: str) -> str:
    """Plain git, with no configuration but its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", where, *arguments],
        input=stdin,
        capture_output=True,
        env={
            **clean,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TEMPLATE_DIR": "",
            "GIT_AUTHOR_NAME": NAME,
            "GIT_AUTHOR_EMAIL": EMAIL,
            "GIT_COMMITTER_NAME": NAME,
            "GIT_COMMITTER_EMAIL": EMAIL,
            "GIT_AUTHOR_DATE": "1700000000 +0200",
            "GIT_COMMITTER_DATE": "1700000000 +0200",
            **env,
        },
    )
    assert done.returncode == 0, (arguments, done.stderr.decode())
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def put(folder: Path, path: str, content: bytes | str, mode: str = "100644") -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    data = content.encode() if isinstance(content, str) else content
    if mode == "120000":
        target.symlink_to(os.fsdecode(data))
    else:
        target.write_bytes(data)
        target.chmod(0o755 if mode == "100755" else 0o644)


def upstream(
    lab: Lab, edit: Callable[[Path], None], subject: str = "Go on (#7)"
) -> str:
    """A commit of upstream's; ``edit`` changes the files of its clone."""
    edit(lab.clone)
    git(lab.clone, "add", "-A")
    git(lab.clone, "commit", "-q", "-m", subject)
    return git(lab.clone, "rev-parse", "HEAD")


def release(lab: Lab, version: str = "1.3.0") -> None:
    """Tag what upstream has, and put its archive beside the first one."""
    git(lab.clone, "tag", f"v{version}")
    make_sdist(lab.clone, lab.sdist.with_name(f"vllm-{version}.tar.gz"), version)


def change_id(name: str) -> str:
    return "I" + hashlib.sha1(name.encode()).hexdigest()


def message(
    name: str,
    subject: str = "[Bugfix][ROCm] Do it",
    *,
    body: str = "It was wrong, and users saw it.",
    tests: tuple[str, ...] = ("none: nothing runs it",),
    depends: str = "",
    **trailers: str | None,
) -> str:
    """A commit message that lint accepts; a trailer of None is left out."""
    lines = {
        "Concern": "small",
        "Upstream-Status": "Pending",
        "Depends-On": depends or None,
        "Tests": tests,
        "Verified-On": "cpu",
        "Unverified": "everything on a GPU",
        "Risk": "low",
        "Change-Id": change_id(name),
        **{key.replace("_", "-"): value for key, value in trailers.items()},
    }
    text = ""
    for key, value in lines.items():
        for one in value if isinstance(value, tuple) else (value,):
            text += f"{key}: {one}\n" if one is not None else ""
    return f"{subject}\n\n{body}\n\n{text}"


TEST_ALPHA = """from vllm import alpha


def test_f3():
    assert alpha.f3(1) == 5
"""


def edit_alpha(tree: Path) -> None:
    text = (tree / "vllm/alpha.py").read_text()
    old = SHAPE.format(name="f3")
    assert old in text
    new = old.replace("return y", "return y + 1")
    put(tree, "vllm/alpha.py", text.replace(old, new))
    put(tree, "tests/test_alpha.py", TEST_ALPHA)


def edit_docs(tree: Path) -> None:
    crlf = (tree / "docs/crlf.md").read_bytes()
    put(tree, "docs/crlf.md", crlf.replace(b"three\r\n", b"three\r\nand a half\r\n"))
    put(tree, "docs/no_end.txt", "first\nchanged, still without a newline")
    put(tree, "assets/logo.bin", bytes(range(255, -1, -1)) * 4)


def edit_beta(tree: Path) -> None:
    text = (tree / "vllm/beta.py").read_text()
    put(tree, "vllm/beta.py", text.replace("B20 = 20\n", "B20 = 2020\n"))


def edit_names(tree: Path) -> None:
    put(tree, "docs/with space.md", "spaced\nmore\n")
    put(tree, "docs/na\u00efve.md", "plain\nm\u00f6re\n")
    put(tree, "link.py", "vllm/beta.py", "120000")
    put(tree, "tools/new.sh", "#!/bin/sh\n", "100755")
    (tree / "vllm/old.py").unlink()


def edit_more(tree: Path) -> None:
    text = (tree / "vllm/alpha.py").read_text()
    end = "\n\n\ndef f4"
    put(tree, "vllm/alpha.py", text.replace(f"y + 1{end}", f"y + 1  # f3{end}"))
    beta = (tree / "vllm/beta.py").read_text()
    put(tree, "vllm/beta.py", beta.replace("B38 = 38\n", "B38 = 3838\n"))


EDITS = {
    "core-alpha": (
        edit_alpha,
        {"tests": ("tests/test_alpha.py::test_f3",), "subject": "[Bugfix] Alpha"},
    ),
    "docs-crlf": (edit_docs, {"subject": "[Doc] Docs  with two spaces"}),
    "core-beta": (edit_beta, {"subject": "[ROCm][Bugfix] Beta"}),
    "misc-names": (edit_names, {"subject": "[kv_offload] N\u00e4mes"}),
    "core-more": (edit_more, {"subject": "[Misc] More", "depends": "core-alpha"}),
}


def make_release(folder: Path) -> Path:
    """A clone of the made-up upstream, with one tagged commit."""
    clone = folder / "upstream"
    clone.mkdir()
    git(clone, "init", "-q", "-b", "main")
    for path, (mode, content) in BASE.items():
        put(clone, path, content, mode)
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "The release")
    git(clone, "tag", RELEASE)
    return clone


def members(clone: Path) -> dict[str, tuple[str, bytes]]:
    listing = git(clone, "-c", "core.quotePath=off", "ls-tree", "-r", "HEAD")
    found = {}
    for line in listing.splitlines():
        meta, path = line.split("\t")
        mode, _, blob = meta.split()
        raw = subprocess.run(
            ["git", "-C", clone, "cat-file", "blob", blob], stdout=subprocess.PIPE
        )
        found[path] = (mode, raw.stdout)
    return found


def archive(
    target: Path, files: dict[str, tuple[str, bytes]], top: str, mode: str = "w:gz"
) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, mode, format=tarfile.PAX_FORMAT) as tar:
        for path, (file_mode, content) in files.items():
            info = tarfile.TarInfo(f"{top}/{path}")
            info.mtime = 1700000000
            if file_mode == "120000":
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
                tar.addfile(info)
            else:
                info.mode = 0o755 if file_mode == "100755" else 0o664
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return target


def make_sdist(clone: Path, target: Path, version: str = "1.2.0") -> Path:
    """The archive that a build backend makes: the tree and what it generates."""
    files = dict(members(clone))
    for name in GENERATED:
        path = name + "SOURCES.txt" if name.endswith("/") else name
        files[path] = ("100644", b"generated\n")
    commit = git(clone, "rev-parse", "--short=9", "HEAD")
    files["vllm/_version.py"] = (
        "100644",
        f"__commit_id__ = commit_id = 'g{commit}'\n".encode(),
    )
    return archive(target, files, f"vllm-{version}")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def format_patch(clone: Path, commit: str) -> bytes:
    """A commit as git itself writes it, with nothing configured."""
    done = subprocess.run(
        [
            *("git", "-c", "core.quotePath=false", "-C", clone, "format-patch", "-k"),
            *("--stdout", "--no-stat", "--no-signature", "--zero-commit"),
            *("--full-index", "--binary", "--no-renames", f"{commit}^..{commit}"),
        ],
        stdout=subprocess.PIPE,
        check=True,
        env={
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        },
    )
    return done.stdout


def toml(clone: Path, sdist: Path, release: str = RELEASE) -> str:
    return f"""default = "{release}"

[release."{release}"]
tag = "{release}"
url = "{URL}"
commit = "{git(clone, "rev-parse", "HEAD")}"
tree = "{git(clone, "rev-parse", "HEAD^{tree}")}"

[release."{release}".sdist]
name = "vllm"
sha256 = "{sha256(sdist)}"
generated = {json.dumps(GENERATED)}

[release."{release}".toolchain]
rocm = "7.2.2"
torch = "2.10.0"
triton = "3.9.0"
aiter = "v0.1.13"
base_image = "image:1"
ruff = "0.14.0"
"""


def make_project(folder: Path, names: tuple[str, ...] = tuple(EDITS)) -> Lab:
    """A project with its release beside it; ``names`` are the patches it has."""
    folder.mkdir(parents=True, exist_ok=True)
    clone = make_release(folder)
    sdist = make_sdist(clone, folder / "wheels" / "vllm-1.2.0.tar.gz")
    root = folder / "project"
    put(root, "stack.toml", toml(clone, sdist))
    put(root, ".gitattributes", "patches/** -text\n")
    put(root, ".gitignore", "/build/\n")
    put(root, ".gitmodules", f'[submodule "vllm"]\n\tpath = vllm\n\turl = {URL}\n')
    put(root, "docs/concerns/small.md", "# Small\n")
    work = folder / "work"
    git(folder, "clone", "-q", str(clone), "work")
    git(work, "config", "core.autocrlf", "false")
    series = ""
    for name in names:
        edit, words = EDITS[name]
        edit(work)
        git(work, "add", "-A")
        git(work, "commit", "-q", "-F", "-", stdin=message(name, **words).encode())
        put(root, f"patches/{RELEASE}/{name}.patch", format_patch(work, "HEAD"))
        series += f"{name}.patch\n"
    put(root, f"patches/{RELEASE}/series", series)
    git(root, "init", "-q", "-b", "main")
    (root / "vllm").mkdir()
    link = f"160000,{git(clone, 'rev-parse', 'HEAD')},vllm"
    git(root, "update-index", "--add", "--cacheinfo", link)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "The project")
    return Lab(folder)


@dataclass(frozen=True)
class Result:
    """How one run of the tool ended."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass(frozen=True)
class Lab:
    """A project, its release, and a cache of its own."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "project"

    @property
    def clone(self) -> Path:
        return self.folder / "upstream"

    @property
    def sdist(self) -> Path:
        return self.folder / "wheels" / "vllm-1.2.0.tar.gz"

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "vllm-mi300x"

    @property
    def cached(self) -> Path:
        return self.cache / "sdist" / "vllm-1.2.0.tar.gz"

    @property
    def tree(self) -> Path:
        return self.root / "build" / RELEASE

    @property
    def patches(self) -> Path:
        return self.root / "patches" / RELEASE

    @property
    def env(self) -> dict[str, str]:
        """The environment of a run: no network, and the archive in find-links."""
        return {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.sdist.parent),
            "PYTHONUTF8": "1",  # saves the tool a second start
        }

    def add_patch(self, name: str, edit: Callable[[Path], None], **words) -> None:
        """One more patch, made on top of the others with plain git."""
        work = self.folder / "work"
        edit(work)
        git(work, "add", "-A")
        git(work, "commit", "-q", "-F", "-", stdin=message(name, **words).encode())
        put(self.patches, f"{name}.patch", format_patch(work, "HEAD"))
        put(
            self.patches,
            "series",
            (self.patches / "series").read_text() + f"{name}.patch\n",
        )

    def git(self, *arguments: str, **kwargs) -> str:
        """Plain git in the applied tree."""
        return git(self.tree, *arguments, **kwargs)

    def fill_cache(self) -> None:
        self.cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.sdist, self.cached)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> Result:
        """Run the tool in this process; an unexpected exception passes through."""
        verb, *rest = arguments
        runner = click.testing.CliRunner()
        done = runner.invoke(
            cli.main,
            [verb, "-C", str(self.root), *rest],
            env={**self.env, **(env or {})},
            prog_name="stack",
        )
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    def ok(self, *arguments: str, env: dict[str, str] | None = None) -> Result:
        result = self.run(*arguments, env=env)
        assert result.code == 0, result.text
        return result

    def spawn(
        self,
        *arguments: str,
        env: dict[str, str | None] | None = None,
        prefix: tuple[str, ...] = (),
        **options,
    ) -> Result:
        """Run the tool as its own process; a value of None unsets a variable."""
        merged: dict[str, str | None] = {**os.environ, **self.env, **(env or {})}
        verb, *rest = arguments
        if "cwd" not in options:
            rest = ["-C", str(self.root), *rest]
        done = subprocess.run(
            [*prefix, sys.executable, STACK, verb, *rest],
            env={k: v for k, v in merged.items() if v is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            **options,
        )
        out = done.stdout.decode("utf-8", "backslashreplace")
        err = done.stderr.decode("utf-8", "backslashreplace")
        assert "Traceback" not in err, err
        return Result(done.returncode, out, err)

    # -- what is there -------------------------------------------------------

    def head(self) -> str:
        return self.git("rev-parse", "refs/heads/stack")

    def patch_files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(self.patches.iterdir())}

    def series(self) -> list[str]:
        return (self.patches / "series").read_text().split()

    def files(self) -> dict[str, tuple[str, bytes]]:
        """The applied tree's files as they are on disk, .git left out."""
        return snapshot(self.tree, skip=(".git",))

    def everything(self) -> dict[str, tuple[str, bytes]]:
        """All that is below the project, git directories too."""
        return snapshot(self.root)

    def commit(self, name: str, text: str | bytes | None = None, *more: str) -> str:
        """Commit the applied tree's changes as a person would."""
        data = text if text is not None else message(name)
        data = data.encode() if isinstance(data, str) else data
        self.git("add", "-A")
        self.git("commit", "-q", "--cleanup=verbatim", *more, "-F", "-", stdin=data)
        return self.head()


def snapshot(folder: Path, skip: tuple[str, ...] = ()) -> dict[str, tuple[str, bytes]]:
    found = {}
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if n not in skip)
        for name in [*names, *folders]:
            path = Path(base) / name
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = ("link", os.fsencode(os.readlink(path)))
            elif path.is_dir():
                found[key] = ("dir", b"")
            else:
                kind = "exec" if path.stat().st_mode & 0o100 else "file"
                found[key] = (kind, path.read_bytes())
    return found


def flip(path: Path, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def replace(path: Path, old: str | bytes, new: str | bytes) -> None:
    """Change one place of a file; it is an error if it is not there."""
    old, new = (x.encode() if isinstance(x, str) else x for x in (old, new))
    data = path.read_bytes()
    assert old in data, f"{old!r} is not in {path}"
    path.write_bytes(data.replace(old, new, 1))


def mentions(result: Result, *words: str) -> None:
    """Require that a refusal names all of ``words`` and says what mends it."""
    flat = re.sub(r"\s+", " ", result.text)
    for word in words:
        assert word in flat, f"{word!r} is not in: {result.text}"


@contextlib.contextmanager
def changes_nothing(lab: Lab):
    before = lab.everything()
    yield
    after = lab.everything()
    assert sorted(after) == sorted(before)
    assert after == before
