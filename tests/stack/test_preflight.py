"""doctor --serve names what a machine lacks to serve the model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lab import ROOT
from stackkit import pins, preflight, rocm

PIN = pins.load(ROOT).pin("v0.22.0")
VERSION = "0.22.0+rocm722.mi300x.16.g01234567"


class Host:
    """A made-up machine: a file tree, and a Python with packages."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = {}
        self.memlock, self.files = rocm.UNLIMITED, 1 << 20
        self.modules = root / "modules"
        self.gpus("gfx942", 8)
        self.put("dev/kfd")
        self.put("dev/dri/renderD128")
        (root / "dev/shm").mkdir()
        self.put("opt/rocm/.info/version", "7.2.4-117\n")
        self.package("torch", PIN.toolchain.torch, "class version: hip = '7.2.2'\n")
        self.package("triton", "3.4.0")
        self.package("vllm", VERSION)
        self.package("aiter", "0.1.13")
        self.put("modules/aiter/jit/module_rmsnorm.so")

    def put(self, path, text=""):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def gpus(self, arch, count):
        number = {"gfx942": 90402, "gfx90a": 90010, "gfx950": 90500}[arch]
        nodes = "sys/class/kfd/kfd/topology/nodes"
        self.put(f"{nodes}/0/properties", "cpu_cores_count 64\ngfx_target_version 0\n")
        for i in range(1, count + 1):
            text = f"simd_count 304\ngfx_target_version {number}\n"
            self.put(f"{nodes}/{i}/properties", text)

    def package(self, name, version, code=""):
        self.put(f"modules/{name}/__init__.py", code)
        info = f"modules/{name}-{version}.dist-info/METADATA"
        self.put(info, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def remove(self, name):
        import shutil

        for path in self.modules.glob(f"{name}*"):
            shutil.rmtree(path)

    def python(self):
        program = self.put("bin/python")
        line = f'PYTHONPATH={self.modules} exec {sys.executable} -S "$@"\n'
        program.write_text("#!/bin/sh\n" + line)
        program.chmod(0o755)
        return str(program)

    def findings(self, gpus=8, version=VERSION):
        machine = rocm.Machine(self.root, self.environment, self.memlock, self.files)
        found = preflight.preflight(
            machine, PIN, version, gpus=gpus, python=self.python()
        )
        return {item.what: item for item in found}

    def bad(self, **options):
        found = self.findings(**options).values()
        return {x.what: x.state for x in found if x.state != "ok"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(rocm.Machine, "shared_memory", 64_000_000_000)
    return Host(tmp_path)


def test_a_good_machine_has_one_warning_about_its_rocm(host):
    # 7.2.4 is not the pinned one; its replay is not the one of the reports.
    assert host.bad() == {"ROCm": "warning"}
    assert host.findings()["GPUs"].detail == "8 of gfx942"


@pytest.mark.parametrize(
    "version, warned", [("7.1.1", False), ("7.2.0", True), ("7.2.2", True),
                        ("7.2.3", True), ("7.2.4", False), ("7.13.0", False)],
)  # fmt: skip
def test_the_rocms_that_replay_wrongly_are_warned_of(host, version, warned):
    host.put("opt/rocm/.info/version", f"{version}-1\n")
    found = host.findings()
    assert ("graph replay" in found) is warned
    assert (found["ROCm"].state == "ok") is (version == "7.2.2")
    if warned:
        assert "--eager" in found["graph replay"].mend


def test_another_gpu_is_named(host):
    host.gpus("gfx90a", 8)
    found = host.findings()["GPUs"]
    assert (found.state, found.detail) == ("problem", "0 of gfx942, 8 of gfx90a")
    host.gpus("gfx950", 8)
    assert "gfx950" in host.findings()["GPUs"].detail


def test_too_few_gpus_are_a_problem(host):
    host.gpus("gfx90a", 8)
    host.gpus("gfx942", 4)
    found = host.findings(gpus=8)["GPUs"]
    assert found.state == "problem" and "4 of gfx942, 4 of gfx90a; 8" in found.detail
    assert host.findings(gpus=4)["GPUs"].state == "warning"


def test_no_device_at_all(host):
    import shutil

    shutil.rmtree(host.root / "sys")
    shutil.rmtree(host.root / "dev/dri")
    (host.root / "dev/kfd").unlink()
    bad = host.bad()
    assert [bad[x] for x in ("GPUs", "/dev/kfd", "/dev/dri")] == ["problem"] * 3
    assert "--device /dev/kfd --device /dev/dri" in host.findings()["/dev/kfd"].mend


def test_a_device_of_another_group_is_told_with_the_number(host, monkeypatch):
    kfd = host.root / "dev/kfd"
    os.chown(kfd, -1, os.getgid())
    allowed = os.access
    monkeypatch.setattr(
        rocm.os, "access", lambda path, mode: path != kfd and allowed(path, mode)
    )
    found = host.findings()["/dev/kfd"]
    assert found.state == "problem"
    assert f"--group-add {os.getgid()}" in found.mend


def test_limits_that_are_too_low(host, monkeypatch):
    monkeypatch.setattr(rocm.Machine, "shared_memory", 64_000_000)
    host.memlock, host.files = 8 << 20, 1024
    assert host.bad() == {
        "ROCm": "warning", "/dev/shm": "problem", "memlock": "warning",
        "open files": "warning",
    }  # fmt: skip
    found = host.findings()
    assert "--shm-size 16g" in found["/dev/shm"].mend
    assert "memlock=-1" in found["memlock"].mend
    assert "nofile=65536" in found["open files"].mend


def test_a_pytorch_that_is_not_for_rocm(host):
    host.package("torch", PIN.toolchain.torch, "class version: hip = None\n")
    assert host.findings()["PyTorch"].state == "problem"
    host.package("torch", PIN.toolchain.torch, "raise OSError('libamdhip64.so')\n")
    assert "libamdhip64.so" in host.findings()["PyTorch"].detail
    host.remove("torch")
    assert "has none" in host.findings()["PyTorch"].detail
    host.package("torch", "2.11.0", "class version: hip = '7.2'\n")
    assert host.findings()["PyTorch"].state == "warning"


def test_a_vllm_of_another_version_and_an_image_that_says_another(host):
    host.remove("vllm")
    assert host.findings()["vLLM"].detail == "not installed"
    host.package("vllm", "0.22.0+rocm722")
    found = host.findings()
    assert found["vLLM"].state == "problem"
    assert f"installed is 0.22.0+rocm722, this checkout builds {VERSION}" in (
        found["vLLM"].detail
    )
    host.put("app/versions.txt", f"AITER_BRANCH: v0.1.13\nMI300X_VERSION: {VERSION}\n")
    assert host.findings()["image"].state == "problem"


def test_aiter_kernels_that_are_hidden_absent_or_cannot_be_added(host, monkeypatch):
    host.environment["AITER_JIT_DIR"] = "/cache"
    assert "unset AITER_JIT_DIR" in host.findings()["AITER kernels"].mend
    del host.environment["AITER_JIT_DIR"]
    (host.root / "modules/aiter/jit/module_rmsnorm.so").unlink()
    assert "none are built" in host.findings()["AITER kernels"].detail
    jit = host.root / "modules/aiter/jit"
    allowed = os.access
    monkeypatch.setattr(
        preflight.os, "access", lambda path, mode: path != jit and allowed(path, mode)
    )
    assert "cannot be written" in host.findings()["AITER kernels"].detail
    host.remove("aiter")
    assert host.findings()["AITER"].state == "problem"


def test_the_command_fails_where_nothing_is(lab):
    result = lab.run("doctor", "--serve", "--json", "--python", sys.executable)
    assert result.code == 1
    found = {x["what"]: x["state"] for x in result.json["findings"]}
    assert (found["vLLM"], found["git"]) == ("problem", "ok")


def test_a_python_that_is_none_is_a_usage_error(lab):
    result = lab.run("doctor", "--serve", "--python", "/does/not/exist")
    assert result.code == 2
    assert "/does/not/exist cannot be started" in result.text
