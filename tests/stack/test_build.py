"""build and the Python overlay: what is made, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lab import ROOT, changes_nothing, flip, mentions, replace
from stackkit import overlay, patchfile, pins, trailers

INSTALLER = ROOT / "scripts" / "image" / "overlay.py"
ARCH = b"hipv4-amdgcn-amd-amdhsa--gfx942"


@pytest.fixture
def project(lab):
    """The lab, each patch of a concern of its own, and no ROCm on the machine."""
    for name in ("core-alpha", "docs-crlf", "core-beta", "misc-names", "core-more"):
        path = lab.patches / f"{name}.patch"
        replace(path, "Concern: small", f"Concern: {name}")
    return lab


def build(lab, *options, rocm="none", env=None, **arguments):
    variables = {"ROCM_PATH": str(lab.folder / rocm), **(env or {})}
    return lab.run("build", *options, env=variables, **arguments)


def dist(lab) -> Path:
    return lab.root / "build" / "dist" / "v1.2.0"


def unpack(path: Path, target: Path) -> Path:
    with tarfile.open(path) as tar:
        tar.extractall(target, filter="tar")
    return target


# -- without ROCm ----------------------------------------------------------------


def test_a_plan_prints_every_step_and_does_nothing(project):
    version = project.ok("version").out.strip()
    with changes_nothing(project):
        result = build(project, "--dry-run")
    assert result.code == 0
    mentions(result, f"version {version}, for gfx942, tree", "not run", "no wheel",
             "1. write the source archive", "2. write the Python overlay, 3 of 5",
             "3. compile the C++ cache writer for gfx942")  # fmt: skip
    found = build(project, "--dry-run", "--json").json
    assert (found["version"], found["wheel"], found["files"]) == (version, False, [])


def test_without_rocm_an_archive_and_an_overlay_are_made(project):
    project.ok("apply")
    result = build(project, "--no-hip", "--json")
    assert result.code == 0, result.text
    archive, laid = map(Path, result.json["files"])
    assert result.json["findings"][0]["state"] == "not run"
    (top,) = unpack(archive, project.folder / "source").iterdir()
    assert top.name == f"vllm-{result.json['version']}"
    from lab import snapshot

    assert snapshot(top) == project.files()
    assert sorted(p.name for p in dist(project).iterdir()) == sorted(
        [archive.name, laid.name]
    )


def test_the_same_bytes_are_made_again(project):
    first = [Path(x).read_bytes() for x in build(project, "--no-hip", "--json").json[
        "files"]]  # fmt: skip
    project.ok("clean")
    assert not dist(project).exists()
    again = build(project, "--no-hip", "--json").json["files"]
    assert [Path(x).read_bytes() for x in again] == first


def test_nothing_of_the_applied_tree_changes(project):
    project.ok("apply")
    before = project.files()
    build(project, "--no-hip")
    assert project.files() == before
    assert project.git("status", "--porcelain") == ""


@pytest.mark.parametrize("arch", ["gfx90a", "gfx950", "gfx942;gfx1100", "", "sm_90"])
def test_a_wrong_gpu_is_a_usage_error(project, arch):
    result = build(project, "--arch", arch)
    assert result.code == 2
    mentions(result, "what the stack is for", "--arch gfx942")


def test_gfx950_can_be_built_along(project):
    found = build(project, "--dry-run", "--arch", "gfx942, gfx950", "--json").json
    assert found["arch"] == "gfx942;gfx950"


# -- the overlay -----------------------------------------------------------------


@dataclass
class Made:
    """As much of a patch as the rules look at."""

    name: str
    paths: tuple[str, ...]
    concern: str
    depends: str = ""
    extra: dict = field(default_factory=dict)

    @property
    def files(self):
        return [patchfile.FileChange(path, "0", "1") for path in self.paths]

    @property
    def trailers(self):
        return [trailers.Trailer("Depends-On", self.depends, 1)] if self.depends else []

    def trailer(self, key):
        return {"Concern": self.concern}[key]


STACK = [
    Made("a-one", ("vllm/a.py", "tests/test_a.py", "docs/a.md"), "a"),
    Made("b-table", ("vllm/b.py",), "b"),
    Made("b-code", ("csrc/b.cu", "vllm/b.py"), "b"),
    Made("b-read", ("vllm/r.py",), "b"),
    Made("c-uses", ("vllm/c.py",), "c", "b-read"),
    Made("d-free", ("vllm/d.json",), "d", "a-one"),
    Made("e-more", ("vllm/e.py",), "c"),
]


def test_what_is_compiled_is_left_out_with_its_concern_and_what_needs_it():
    assert overlay.left_out(STACK) == {
        "b-code": "changes csrc/b.cu, which takes a build",
        "b-table": "is half of b, as b-code is left out",
        "b-read": "is half of b, as b-code is left out",
        "c-uses": "depends on b-read",
        "e-more": "is half of c, as c-uses is left out",
    }
    assert [p.name for p in overlay.choose(STACK, ())] == ["a-one", "d-free"]


@pytest.mark.parametrize(
    "path", ["csrc/x.cu", "setup.py", "CMakeLists.txt", "requirements/rocm.txt",
             "cmake/utils.cmake", "pyproject.toml"],
)  # fmt: skip
def test_whatever_only_a_build_brings_in_is_compiled(path):
    assert overlay.compiled(Made("x-y", (path, "vllm/x.py"), "x")) == [path]


def test_half_a_dialect_is_refused_by_the_projects_own_patches():
    project = pins.load(ROOT)
    patches = patchfile.load(project.patches(project.pin("v0.22.0")))
    names = {patch.name for patch in patches}
    why = overlay.left_out(patches)
    assert "csrc/" in why["swa-kv-insert-fnuz"]
    dialect = {p.name for p in patches if p.trailer("Concern") == "fp8-dialect"}
    assert dialect <= set(why)
    assert {p.name for p in overlay.choose(patches, ())} == names - set(why)
    for name in dialect:
        with pytest.raises(overlay.StackError) as error:
            overlay.choose(patches, (name,))
        assert name in error.value.details[0]


def test_a_named_half_is_refused(project):
    for names, words in {
        ("core-more",): ["half of something", "core-alpha: core-more depends on it"],
        ("docs-crlf",): ["cannot be laid over", "changes assets/logo.bin"],
        ("core-nothing",): ["no patch core-nothing in the series"],
    }.items():
        options = [part for name in names for part in ("--overlay", name)]
        result = build(project, "--no-hip", *options)
        assert result.code == 1
        mentions(result, *words, "mend:")
    assert not dist(project).exists()
    replace(
        project.patches / "core-more.patch", "Concern: core-more", "Concern: core-beta"
    )
    result = build(project, "--no-hip", "--overlay", "core-beta")
    assert result.code == 1
    mentions(result, "core-more: is half of core-beta")


def test_an_overlay_that_conflicts_without_the_others_is_told(project):
    replace(project.patches / "core-more.patch", "Depends-On: core-alpha\n", "")
    result = build(project, "--no-hip", "--overlay", "core-more")
    assert result.code == 3
    mentions(result, "core-more conflicts without the patches", "vllm/alpha.py")


@pytest.fixture
def laid(project):
    """An overlay, and an installed vLLM of the release."""
    found = build(project, "--no-hip", "--json").json
    assert found["overlay"]["patches"] == ["core-alpha", "core-beta", "core-more"]
    site = project.folder / "site"
    shutil.copytree(project.clone / "vllm", site / "vllm")
    return Laid(project, Path(found["files"][1]), site)


@dataclass
class Laid:
    lab: object
    archive: Path
    site: Path

    def run(self, *options):
        versions = self.lab.folder / "app" / "versions.txt"
        command = [sys.executable, INSTALLER, self.archive, "--versions", versions]
        done = subprocess.run(
            [*command, "--site", self.site, *options], capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def files(self):
        return {p.name: p.read_bytes() for p in (self.site / "vllm").iterdir()}


def test_an_overlay_changes_what_its_patches_change(laid):
    done = laid.run()
    assert done.returncode == 0, done.stderr
    laid.lab.ok("apply")
    for name in ("alpha.py", "beta.py"):
        wanted = (laid.lab.tree / "vllm" / name).read_bytes()
        assert laid.files()[name] == wanted
    assert "old.py" in laid.files()  # misc-names, which deletes it, is not in it
    assert "docs-crlf changes assets/logo.bin" in done.stdout
    record = (laid.lab.folder / "app" / "versions.txt").read_text()
    assert record.count("MI300X_OVERLAY: 1.2.0+rocm722.mi300x.3.g") == 1
    after = laid.files()
    again = laid.run()
    assert "nothing to change" in again.stdout and laid.files() == after
    assert (laid.lab.folder / "app" / "versions.txt").read_text() == record


def test_an_overlay_refuses_another_release(laid):
    flip(laid.site / "vllm" / "beta.py", 0)
    before = laid.files()
    done = laid.run()
    assert done.returncode == 1
    assert "not the files of vLLM v1.2.0:\n  vllm/beta.py\nmend:" in done.stderr
    assert laid.files() == before
    assert not (laid.lab.folder / "app").exists()


def test_an_overlay_refuses_a_half_changed_installation(laid):
    """One of two files is changed already: nobody knows by whom."""
    before = laid.files()
    laid.run()
    (laid.site / "vllm" / "beta.py").write_bytes(before["beta.py"])
    done = laid.run()
    assert done.returncode == 1 and "vllm/alpha.py" in done.stderr


def test_a_damaged_overlay_is_refused(laid):
    content = laid.archive.read_bytes()
    before = laid.files()
    for damaged in (content[: len(content) // 2], b"", content[:-20]):
        laid.archive.write_bytes(damaged)
        done = laid.run()
        assert done.returncode == 1 and "is not an overlay" in done.stderr
    assert laid.files() == before


def test_what_is_no_manifest_is_refused(laid):
    before = laid.files()
    for told in (b"[]", b"{}", b'{"files": []}', b'{"files": {"x": 1}}'):
        overlay.write_tar([(overlay.MANIFEST, told)], laid.archive)
        done = laid.run()
        assert done.returncode == 1 and "is not an overlay" in done.stderr
    assert laid.files() == before


def test_a_record_that_cannot_be_written_is_told_before_anything_changes(laid):
    before = laid.files()
    (laid.lab.folder / "app").write_text("no folder")
    done = laid.run()
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert laid.files() == before


def test_without_vllm_the_installer_says_so(laid):
    command = [sys.executable, "-S", INSTALLER, laid.archive]
    done = subprocess.run(command, capture_output=True, text=True, cwd=laid.site.parent)
    assert done.returncode == 1
    assert done.stderr == "error: vLLM is not installed for this Python\n"


# -- where ROCm is ---------------------------------------------------------------

FAKE_PIP = """
import json, os, sys, zipfile
from pathlib import Path
told = json.loads(os.environ["FAKE_PIP"])
keys = ("PYTORCH_ROCM_ARCH", "VLLM_TARGET_DEVICE", "VLLM_VERSION_OVERRIDE", "MAX_JOBS")
source = Path(sys.argv[-1])
Path(told["call"]).write_text(json.dumps({
    "arguments": sys.argv[1:],
    "environment": {key: os.environ.get(key) for key in keys},
    "files": sorted(str(p.relative_to(source)) for p in source.rglob("*.py")),
}))
if told.get("exit"):
    print("fatal error: hip/hip_fp8.h: no such file", file=sys.stderr)
    sys.exit(told["exit"])
if sys.argv[1] == "install":
    sys.exit(0)
target = Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
target.mkdir(exist_ok=True)
if told.get("nothing"):
    sys.exit(0)
version = told.get("version") or os.environ["VLLM_VERSION_OVERRIDE"]
with zipfile.ZipFile(target / f"vllm-{version}-cp312-cp312-linux_x86_64.whl", "w") as z:
    for name, code in told["extensions"].items():
        z.writestr(name, code)
"""


class Rocm:
    """A made-up ROCm machine: ROCm, a compiler, and a Python with its packages."""

    def __init__(self, lab):
        self.lab = lab
        self.home = lab.folder / "rocm"
        self.put("rocm/.info/version", "7.2.2-93")
        self.put("rocm/bin/hipcc")
        self.torch("2.10.0", "'7.2.2'")
        for name in ("cmake", "ninja", "packaging", "setuptools", "setuptools-scm",
                     "setuptools-rust", "wheel", "jinja2"):  # fmt: skip
            self.package(name, "1")
        self.put("modules/pip/__init__.py")
        self.put("modules/pip/__main__.py", FAKE_PIP)
        self.told = {
            "call": str(lab.folder / "call.json"),
            "extensions": {
                f"vllm/{name}.abi3.so": ARCH.decode()
                for name in ("_C", "_rocm_C", "_moe_C")
            },
        }

    def put(self, path, text=""):
        target = self.lab.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def package(self, name, version):
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.put(f"modules/{folder}/METADATA", text)

    def torch(self, version, hip):
        for path in (self.lab.folder / "modules").glob("torch*"):
            shutil.rmtree(path)
        self.package("torch", version)
        self.put("modules/torch/__init__.py", f"class version: hip = {hip}\n")

    def build(self, *options):
        line = f'PYTHONPATH={self.lab.folder}/modules exec {sys.executable} -S "$@"\n'
        program = self.put("bin/python", "#!/bin/sh\n" + line)
        program.chmod(0o755)
        env = {"FAKE_PIP": json.dumps(self.told)}
        options = ("--python", str(program), "--jobs", "3", *options)
        return build(self.lab, *options, rocm="rocm", env=env)

    @property
    def call(self):
        return json.loads((self.lab.folder / "call.json").read_text())


@pytest.fixture
def machine(project):
    return Rocm(project)


def test_where_rocm_is_a_wheel_is_made(machine):
    result = machine.build("--json")
    assert result.code == 0, result.text
    found, call = result.json, machine.call
    assert call["environment"] == {
        "PYTORCH_ROCM_ARCH": "gfx942",
        "VLLM_TARGET_DEVICE": "rocm",
        "VLLM_VERSION_OVERRIDE": found["version"],
        "MAX_JOBS": "3",
    }
    # PyTorch must stay the one that is there.
    assert {"--no-build-isolation", "--no-deps"} < set(call["arguments"])
    assert "vllm/alpha.py" in call["files"] and "vllm/old.py" not in call["files"]
    wheel = Path(found["files"][1])
    assert wheel.name == f"vllm-{found['version']}-cp312-cp312-linux_x86_64.whl"
    assert sorted(dist(machine.lab).iterdir()) == sorted(map(Path, found["files"]))
    assert {x["state"] for x in found["findings"]} == {"ok"}
    mentions(machine.build(), "install it:", "pip install --no-deps")


def test_a_plan_where_rocm_is_names_command_arch_and_version(machine):
    result = machine.build("--dry-run", "--arch", "gfx942;gfx950")
    assert result.code == 0, result.text
    mentions(result, "PYTORCH_ROCM_ARCH='gfx942;gfx950'", "VLLM_VERSION_OVERRIDE=",
             "-m pip wheel --no-build-isolation --no-deps")  # fmt: skip
    assert not (machine.lab.folder / "call.json").exists()


def test_another_toolchain_is_refused_unless_it_may_be(machine):
    machine.torch("2.11.0", "'7.2.2'")
    result = machine.build()
    assert result.code == 1
    mentions(result, "this is not the toolchain of v1.2.0", "PyTorch: 2.11.0, not",
             "--any-toolchain")  # fmt: skip
    machine.put("rocm/.info/version", "7.1.1")
    mentions(machine.build(), "ROCm: 7.1.1, not 7.2.2")
    assert machine.build("--any-toolchain").code == 0


def test_what_cannot_give_a_wheel_is_refused_in_any_case(machine):
    machine.torch("2.10.0", "None")
    result = machine.build("--any-toolchain")
    assert result.code == 1
    mentions(result, "PyTorch: 2.10.0 is not built for ROCm")
    machine.torch("2.10.0", "'7.2.2'")
    (machine.home / "bin" / "hipcc").unlink()
    mentions(machine.build("--any-toolchain"), "hipcc does not exist")
    machine.put("rocm/bin/hipcc")
    shutil.rmtree(machine.lab.folder / "modules" / "cmake-1.dist-info")
    mentions(machine.build(), "lacks cmake", "'cmake<4'")
    assert not (machine.lab.folder / "call.json").exists()


def test_a_build_that_fails_ends_with_its_last_words(machine):
    machine.told["exit"] = 1
    result = machine.build()
    assert result.code == 1
    mentions(result, "the build failed; its log is", "hip/hip_fp8.h: no such file")
    assert not list(dist(machine.lab).glob("*.whl"))
    assert not list(dist(machine.lab).glob(".wheel-*"))


def test_a_pip_that_makes_nothing_is_a_sentence(machine):
    machine.told["nothing"] = True
    result = machine.build()
    assert result.code == 1
    mentions(result, "pip made 0 wheels, not one", "pip wheel")


def test_the_wheel_is_installed_alone(machine):
    result = machine.build("--install")
    assert result.code == 0, result.text
    (wheel,) = dist(machine.lab).glob("*.whl")
    options = ["install", "--no-deps", "--force-reinstall", str(wheel)]
    assert machine.call["arguments"] == options
    machine.told["extensions"] = {}  # nothing is installed that is not right
    assert machine.build("--install").code == 1
    assert machine.call["arguments"][0] == "wheel"


def test_without_rocm_there_is_nothing_to_install(project):
    result = build(project, "--install")
    assert result.code == 1
    mentions(result, "there is no wheel to install", "scripts/stack image")
    assert not dist(project).exists()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "0.22.1.dev3"}, "0.22.1.dev3, not 1.2.0+rocm722"),
        ({"extensions": {}}, "is not in the wheel"),
        ({"extensions": {f"vllm/{x}.abi3.so": "amdgcn-amd-amdhsa--gfx90a" for x in
                         ("_C", "_rocm_C", "_moe_C")}}, "has no code for gfx942"),
    ],
)  # fmt: skip
def test_a_wheel_that_is_not_what_it_should_be(machine, change, words):
    machine.told |= change
    result = machine.build()
    assert result.code == 1
    mentions(result, words)


def test_compressed_code_is_said_to_be_unread(machine):
    name = "vllm/_rocm_C.abi3.so"
    machine.told["extensions"][name] = "CCOB"
    found = {x["what"]: x["state"] for x in machine.build("--json").json["findings"]}
    assert found[name] == "not run"


def test_a_python_that_is_none_is_a_usage_error(machine):
    env = {"ROCM_PATH": str(machine.home)}
    result = machine.lab.run("build", "--python", "/does/not/exist", env=env)
    assert result.code == 2
    mentions(result, "/does/not/exist cannot be started")
