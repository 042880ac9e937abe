"""The gate on the C++ writer sees each defect in assembly as clang 22 prints it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from stackkit import cli, hipgate, hiptools, pins, process, testenv
from stackkit.errors import StackError

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = pins.load(ROOT)

SYMBOL = "_ZN4vllm47fusedDeepseekV4QNormRopeKVRopeQuantInsertKernelIN3c104HalfELi{}EEEv"

# Shortened from what clang 22 makes of the patched source: the scale of a block,
# one value, and the scale's byte.
GOOD = """\
{symbol}:                                ; @kernel
; %bb.0:
	s_mov_b32 s10, 0x43600000
	v_div_scale_f32 v18, s[2:3], s10, s10, v3
	v_div_fixup_f32 v3, v18, s10, v3
	s_mov_b32 s2, 0xc3600000
	v_mov_b32_e32 v19, 0x43600000
	v_mul_f32_e32 v18, v9, v34
	v_med3_f32 v18, v18, s2, v19
	s_mov_b32 s10, 0x43700000
	v_mov_b32_e32 v20, 0xc3700000
	v_med3_f32 v21, v18, s10, v20
	v_cvt_pk_fp8_f32 v21, v18, v18
	v_cvt_i32_f32_e32 v8, v8
	s_endpgm
.Lfunc_end{number}:
"""

# The release's: each value goes through an integer, and for OCP.
BAD = (
    GOOD.replace("0x43600000", "0x43e00000")
    .replace("0xc3600000", "0xc3e00000")
    .replace(
        "\tv_med3_f32 v18, v18, s2, v19\n",
        "\tv_cvt_i32_f32_e32 v18, v18\n"
        "\tv_cvt_f32_i32_sdwa v18, sext(v18) src0_sel:WORD_0\n"
        "\tv_med3_f32 v18, v18, s2, v19\n",
    )
)


def text(kernel: str) -> str:
    return "".join(
        kernel.format(symbol=SYMBOL.format(heads), number=number)
        for number, heads in enumerate((8, 64))
    )


def failed(checks) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_the_patched_writer_passes():
    assert failed(hipgate.gfx942(text(GOOD))) == []


def test_the_writer_of_the_release_fails():
    assert failed(hipgate.gfx942(text(BAD))) == [
        "gfx942: values are clamped to 224",
        "gfx942: values are scaled for 224",
        "gfx942: no value becomes an integer",
    ]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("v_cvt_pk_fp8_f32 v21", "v_mov_b32_e32 v21", "the hardware converts to FP8"),
        ("s2, 0xc3600000", "s2, 0xc3e00000", "values are clamped to 224"),
        ("s10, 0x43600000", "s10, 0x43e00000", "values are scaled for 224"),
        (
            "\ts_endpgm",
            "\tv_cvt_i32_f32_e32 v9, v9\n\ts_endpgm",
            "no value becomes an integer",
        ),
        ("\ts_endpgm", "\ts_trap 2\n\ts_endpgm", "nothing traps"),
    ],
)
def test_one_wrong_line_fails(old, new, name):
    assert GOOD.count(old) == 1
    assert failed(hipgate.gfx942(text(GOOD.replace(old, new)))) == [f"gfx942: {name}"]


def test_no_kernel_at_all_fails():
    assert "gfx942: the hardware converts to FP8" in failed(hipgate.gfx942(""))


def test_a_product_with_the_reciprocal_is_a_division():
    product = GOOD.replace(
        "\tv_div_fixup_f32 v3, v18, s10, v3\n", "\tv_mul_f32_e32 v3, 0x3b924925, v3\n"
    )
    assert product != GOOD
    assert failed(hipgate.gfx942(text(product))) == []


def test_a_constant_is_forgotten_when_its_register_is_written():
    kernel = GOOD.format(symbol=SYMBOL.format(8), number=0)
    kernel = kernel.replace(
        "\tv_med3_f32 v18, v18, s2, v19\n",
        "\ts_load_dwordx2 s[2:3], s[0:1], 0x0\n\tv_med3_f32 v18, v18, s2, v18\n",
    )
    assert hipgate.constants(kernel)["clamp"] == {240.0, -240.0}


def test_gfx950_must_be_ocp_and_as_it_was():
    ocp = BAD.replace("\tv_cvt_f32_i32_sdwa v18, sext(v18) src0_sel:WORD_0\n", "")
    assert failed(hipgate.gfx950(text(ocp), text(ocp))) == []
    moved = text(ocp).replace("; %bb.0:", "; %bb.1:")
    assert failed(hipgate.gfx950(moved, text(ocp))) == []
    changed = text(ocp).replace("v9, v34", "v9, v35", 1)
    assert failed(hipgate.gfx950(changed, text(ocp))) == [
        "gfx950: the code is that of the release"
    ]
    assert failed(hipgate.gfx950(text(GOOD), text(ocp))) == [
        "gfx950: values are clamped to 448",
        "gfx950: values are scaled for 448",
        "gfx950: the code is that of the release",
    ]


def test_the_control_fails_if_the_gate_sees_nothing_in_the_release():
    assert hipgate.control(text(GOOD), text(BAD)).ok
    other = text(GOOD).replace("v9, v34", "v9, v35")
    assert not hipgate.control(text(GOOD), other).ok


def fake_clang(path: Path, exit_code: int) -> hiptools.Compiler:
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.write('error: no')\n"
                    f"sys.exit({exit_code})\n")  # fmt: skip
    path.chmod(0o755)
    return hiptools.Compiler(path, "clang version 1")


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return PROJECT


def sources(monkeypatch, *found):
    """Makes a source give each of ``found``, or raise it."""

    def source(item):
        def give(project, step):
            if isinstance(item, Exception):
                raise item
            return item

        return give

    monkeypatch.setattr(hiptools, "_installed", source(found[0]))
    monkeypatch.setattr(hiptools, "SUITES", tuple(range(1, len(found))))
    monkeypatch.setattr(hiptools, "_suite", lambda number: source(found[number]))


def test_the_next_source_is_taken_if_one_does_not_compile(
    project, tmp_path, monkeypatch
):
    broken = hiptools.Toolchain("broken", fake_clang(tmp_path / "a", 1), ())
    works = hiptools.Toolchain("works", fake_clang(tmp_path / "b", 0), ())
    sources(monkeypatch, StackError("no ROCm"), broken, works)
    assert hiptools.find(project, lambda what: None) is works


def test_every_reason_is_told_if_no_source_works(project, tmp_path, monkeypatch):
    broken = hiptools.Toolchain("broken", fake_clang(tmp_path / "a", 1), ())
    sources(monkeypatch, StackError("no ROCm in /opt/rocm"), broken)
    found = hiptools.find(project, lambda what: None)
    assert found == hiptools.Missing(
        (
            "no ROCm in /opt/rocm",
            "broken cannot compile ci/hip/probe.hip (error: no)",
        )
    )


def test_a_machine_without_apt_is_told(project, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    found = hiptools.find(project, lambda what: None)
    assert isinstance(found, hiptools.Missing)
    assert found.reasons == (
        f"no ROCm in {tmp_path}",
        "there is no apt on this machine",
    )


@pytest.mark.parametrize(
    ("listing", "mirror"),
    [
        ("Debian|https://m.example/debian|bookworm\n", "https://m.example/debian"),
        (
            "Other|https://o.example|stable\n"
            "Debian|https://s.example/debian|bookworm-security\n"
            "Debian|https://m.example/debian|trixie\n",
            "https://m.example/debian",
        ),
        ("Ubuntu|https://m.example/ubuntu|noble\n", None),
        ("", None),
    ],
)
def test_the_mirror_is_the_one_that_apt_is_set_up_with(monkeypatch, listing, mirror):
    done = process.subprocess.CompletedProcess([], 0, listing.encode(), b"")
    monkeypatch.setattr(hiptools.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hiptools.process, "run", lambda *args, **kwargs: done)
    if mirror:
        assert hiptools.debian_mirror() == mirror
    else:
        with pytest.raises(StackError, match="not set up with a mirror of Debian"):
            hiptools.debian_mirror()


def test_a_known_package_with_other_content_is_refused(tmp_path, monkeypatch):
    name = next(iter(hiptools.KNOWN))
    apt = object.__new__(hiptools.Apt)
    apt.folder, apt.what, apt.options = tmp_path, "Debian experimental", []

    def run(program, *arguments, cwd=None):
        if "--print-uris" in arguments:
            return f"'https://m.example/{name}' {name} 7 SHA256:00\n"
        (cwd / name).write_bytes(b"altered")
        return ""

    monkeypatch.setattr(apt, "_run", run)
    with pytest.raises(StackError, match="is not the file it was"):
        apt.unpack(("libamdhip64-dev",), lambda what: None)
    assert not (tmp_path / "root").exists()


def test_a_toolchain_is_another_one_if_its_compiler_is():
    one = hiptools.Toolchain("x", hiptools.Compiler(Path("clang"), "1"), ())
    newer = dataclasses.replace(one, compiler=hiptools.Compiler(Path("clang"), "2"))
    assert one.id != newer.id


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--require"], 1)])
def test_no_compiler_is_told_and_fails_only_if_required(monkeypatch, options, code):
    gate = hipgate.Gate(missing=("there is no apt on this machine",), mend="get one")
    monkeypatch.setattr(testenv, "ensure", lambda project, step: None)
    monkeypatch.setattr(hipgate, "hipgate", lambda *args, **kwargs: gate)
    result = CliRunner().invoke(cli.main, ["hipgate", "-C", str(ROOT), *options])
    assert result.exit_code == code
    assert "not run: there is no apt on this machine" in result.output
    assert "get one" in result.output
