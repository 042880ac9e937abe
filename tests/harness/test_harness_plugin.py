"""The plugin in pytest sessions of its own: leaks, and the report."""

import json
import os

import pytest
import vllm._aiter_ops
import vllm.platforms.rocm
import vllm.v1.attention.ops.rocm_aiter_mla_sparse  # noqa: F401
from harness import state

pytest_plugins = "pytester"

# Without plugins that take time: one collects all garbage at the end.
PLUGIN = ["-p", "harness.plugin"]
for _plugin in "cacheprovider unraisableexception asyncio hypothesispytest".split():
    PLUGIN += ["-p", f"no:{_plugin}"]

LEAKS = """
    import importlib.util, os, sys, types
    import pytest, torch
    import vllm.platforms, vllm.platforms.rocm
    import vllm._aiter_ops as aiter_ops
    import vllm.v1.attention.ops.rocm_aiter_mla_sparse as mla_sparse
    from vllm.platforms import current_platform
    from harness import platforms, state

    CPU = current_platform

    @pytest.fixture(autouse=True)
    def clean():
        assert vllm.platforms.current_platform is CPU is current_platform
        assert not vllm.platforms.rocm.on_gfx942() and not mla_sparse._ON_GFX942
        assert mla_sparse.current_platform is CPU and not CPU.is_rocm()
        assert aiter_ops.FP8_DTYPE == torch.float8_e4m3fn
        assert not aiter_ops.rocm_aiter_ops._MHA_ENABLED is None
        assert "VLLM_ROCM_USE_AITER" not in os.environ
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert importlib.util.find_spec("aiter") is None
        assert torch.zeros(1).is_cpu and torch.version.hip is None

    def test_platform():
        vllm.platforms.current_platform = types.SimpleNamespace()

    def test_platform_copy():
        mla_sparse.current_platform = types.SimpleNamespace()

    def test_own_copy():
        global current_platform
        current_platform = types.SimpleNamespace()

    def test_platform_method():
        CPU.is_rocm = lambda: True

    def test_platform_class():
        vllm.platforms.rocm.RocmPlatform.is_fp8_fnuz = classmethod(lambda cls: True)

    def test_arch_flag():
        vllm.platforms.rocm._ON_GFX942 = True

    def test_arch_function():
        vllm.platforms.rocm.on_gfx942 = lambda: True

    def test_arch_copy():
        mla_sparse._ON_GFX942 = True

    def test_fp8_copy():
        aiter_ops.FP8_DTYPE = torch.float8_e4m3fnuz

    def test_aiter_flag():
        aiter_ops.rocm_aiter_ops._MHA_ENABLED = None

    def test_aiter_module():
        sys.modules["aiter"] = types.ModuleType("aiter")

    def test_aiter_environment():
        os.environ["VLLM_ROCM_USE_AITER"] = "1"

    def test_visible_devices():
        del os.environ["CUDA_VISIBLE_DEVICES"]

    def test_is_cpu():
        torch.Tensor.is_cpu = property(lambda self: False)

    def test_hip():
        torch.version.hip = "7.2"

    def test_use():
        platforms.use("gfx942", aiter={"mla": {}}).__enter__()

    def test_failure_and_leak():
        vllm.platforms.rocm._ON_GFX950 = True
        assert False
"""

#: What the error of a test must name.
NAMED = {
    "test_platform": "vllm.platforms.current_platform: was <missing>, is namespace()",
    "test_platform_copy": "rocm_aiter_mla_sparse.current_platform: was <vllm.platf",
    "test_own_copy": "test_leaks.current_platform: was <vllm.platforms.cpu.CpuPl",
    "test_platform_method": "vllm.platforms._current_platform.is_rocm: was <missing>",
    "test_platform_class": "vllm.platforms.rocm.RocmPlatform.is_fp8_fnuz: was <cl",
    "test_arch_flag": "vllm.platforms.rocm._ON_GFX942: was False, is True",
    "test_arch_function": "vllm.platforms.rocm.on_gfx942: was <function on_gfx942",
    "test_arch_copy": "rocm_aiter_mla_sparse._ON_GFX942: was False, is True",
    "test_fp8_copy": "vllm._aiter_ops.FP8_DTYPE: was torch.float8_e4m3fn, is torch.fl",
    "test_aiter_flag": "vllm._aiter_ops.rocm_aiter_ops._MHA_ENABLED: was True, is N",
    "test_aiter_module": "sys.modules['aiter']: was <missing>, is <module 'aiter'>",
    "test_aiter_environment": "os.environ['VLLM_ROCM_USE_AITER']: was <missing>, is",
    "test_visible_devices": "os.environ['CUDA_VISIBLE_DEVICES']: was '', is <missing>",
    "test_is_cpu": "torch.Tensor.is_cpu: was <missing>, is <property",
    "test_hip": "torch.version.hip: was None, is '7.2'",
    "test_use": "harness.fake_amdsmi.ASIC: was Asic(gfx='none', device_id='0x0000'",
    "test_failure_and_leak": "vllm.platforms.rocm._ON_GFX950: was False, is True",
}


def test_each_leak_is_an_error_that_names_it_and_is_mended(pytester):
    pytester.makepyfile(test_leaks=LEAKS)
    before = state.capture()
    result = pytester.runpytest_inprocess(*PLUGIN, "--stack-report=report.json")
    assert state.capture() == before
    # `clean` fails the setup of a test if the one before was not mended.
    result.assert_outcomes(passed=len(NAMED) - 1, failed=1, errors=len(NAMED))
    output = result.stdout.str()
    for test, name in NAMED.items():
        section = output.partition(f"_ ERROR at teardown of {test} _")[2]
        section = section.partition("_ ERROR at")[0]
        assert f"test_leaks.py::{test} left the platform state changed" in section
        assert name in section, section[-2000:]
    leaks = read(pytester)["tests"]
    assert [test["nodeid"].partition("::")[2] for test in leaks] == list(NAMED)
    assert {test["exception"] for test in leaks[:-1]} == {"harness.plugin.PlatformLeak"}
    assert leaks[-1]["exception"] == "builtins.AssertionError"  # the first error


def test_what_is_undone_in_time_is_no_leak(pytester):
    pytester.makepyfile(
        """
        import os
        import pytest
        import vllm.platforms, vllm.platforms.rocm
        from harness.platforms import use

        @pytest.mark.parametrize("name", ["gfx942", "gfx950", "cuda", "cpu"])
        def test_fixture(fake_platform, name):
            fake_platform(name, aiter={"mla": {}})

        def test_monkeypatch(monkeypatch):
            monkeypatch.setattr(vllm.platforms.rocm, "_ON_GFX942", True)
            monkeypatch.setattr(vllm.platforms, "current_platform", None)
            monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")

        def test_both(monkeypatch, fake_platform):
            fake_platform("gfx942")
            monkeypatch.setattr(vllm.platforms.rocm, "_ON_GFX942", False)
            fake_platform("gfx950")

        def test_exception():
            with pytest.raises(KeyError), use("gfx942"):
                raise KeyError
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=7)


def test_vllm_first_imported_by_a_test(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported_yet():
            assert not {"torch", "vllm"} & set(sys.modules)

        def test_inside(fake_platform):
            assert fake_platform("gfx942").is_fp8_fnuz()
            from vllm.platforms.rocm import on_gfx942
            assert on_gfx942()

        def test_after():
            import torch
            from vllm.platforms import current_platform, rocm
            assert current_platform.is_cpu() and not rocm.on_gfx942()
            assert torch.version.hip is None

        def test_leak():
            import vllm.platforms
            import vllm.v1.attention.ops.triton_merge_attn_states as module
            module.current_platform = None
            module.float8_info = None
        """
    )
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*triton_merge_attn_states.current_platform: was <vllm.pl*, is None",
            "*triton_merge_attn_states.float8_info: was finfo(*, is None",
        ]
    )


OUTCOMES = """
    import pytest

    class Special(AssertionError):
        pass

    @pytest.fixture
    def broken_setup():
        raise Special("one\\ntwo")

    @pytest.fixture
    def broken_teardown():
        yield
        {}["key"]

    def test_passed(): pass
    def test_assertion(): assert 1 == 2
    def test_exception(): raise Special("first\\nsecond")
    def test_import(): import no_such_module
    def test_setup(broken_setup): pass
    def test_teardown(broken_teardown): pass
    def test_both(broken_teardown): assert 1 == 3
    @pytest.mark.skip(reason="no GPU")
    def test_skip(): pass
    def test_skip_inside(): pytest.skip("nor here")
    @pytest.mark.xfail(reason="known")
    def test_xfail(): assert 0
    @pytest.mark.xfail(strict=True, reason="known")
    def test_xpass(): pass
"""

#: nodeid -> outcome, phase, exception, message, line
EXPECTED = {
    "test_passed": ("passed", "call", None, "", None),
    "test_assertion": (
        "failed",
        "call",
        "builtins.AssertionError",
        "assert 1 == 2",
        16,
    ),
    "test_exception": ("failed", "call", "test_outcomes.Special", "first", 17),
    "test_import": (
        "failed",
        "call",
        "builtins.ModuleNotFoundError",
        "No module named 'no_such_module'",
        18,
    ),
    "test_setup": ("error", "setup", "test_outcomes.Special", "one", 8),
    "test_teardown": ("error", "teardown", "builtins.KeyError", "'key'", 13),
    "test_both": ("failed", "call", "builtins.AssertionError", "assert 1 == 3", 21),
    "test_skip": ("skipped", "setup", "builtins.Skipped", "no GPU", None),
    "test_skip_inside": ("skipped", "call", "builtins.Skipped", "nor here", 24),
    "test_xfail": (
        "skipped",
        "call",
        "builtins.AssertionError",
        "expected to fail: known",
        26,
    ),
    "test_xpass": ("failed", "call", None, "[XPASS(strict)] known", None),
}

BROKEN = {
    "test_missing": ("import no_such_module", "builtins.ModuleNotFoundError", 1),
    "test_name": ("from os import no_such_name", "builtins.ImportError", 1),
    "test_syntax": ("def f(:\n", "builtins.SyntaxError", None),
    "test_assert": ("x = 1\nassert x == 2", "builtins.AssertionError", 2),
}


def read(pytester, name="report.json"):
    report = json.loads(pytester.path.joinpath(name).read_text())
    assert report["schema"] == 1
    assert not list(pytester.path.glob("*.partial"))
    return report


def check_outcomes(report):
    assert report["exitstatus"] == 1
    tests = {test["nodeid"]: test for test in report["tests"]}
    assert len(tests) == len(report["tests"])
    assert set(tests) == {f"test_outcomes.py::{name}" for name in EXPECTED}
    for name, (outcome, phase, exception, message, line) in EXPECTED.items():
        test = tests[f"test_outcomes.py::{name}"]
        assert (test["outcome"], test["phase"]) == (outcome, phase), name
        assert (test["exception"], test["message"]) == (exception, message), name
        assert test["mro"][:1] == ([exception] if exception else []), name
        if line is not None:
            assert test["where"] == f"test_outcomes.py:{line}", name
    special = tests["test_outcomes.py::test_exception"]["mro"]
    assert special == ["test_outcomes.Special"] + [
        f"builtins.{name}"
        for name in ("AssertionError", "Exception", "BaseException", "object")
    ]


def check_collect_errors(report):
    errors = {error["nodeid"]: error for error in report["collect_errors"]}
    assert set(errors) == {f"{name}.py" for name in BROKEN}
    assert len(errors) == len(report["collect_errors"])
    for name, (_, exception, line) in BROKEN.items():
        error = errors[f"{name}.py"]
        assert (error["outcome"], error["phase"]) == ("error", "collect")
        assert error["exception"] == exception == error["mro"][0]
        assert error["message"]
        if line is not None:
            assert error["where"] == f"{name}.py:{line}"
    assert errors["test_missing.py"]["message"] == "No module named 'no_such_module'"
    assert "builtins.ImportError" in errors["test_missing.py"]["mro"]


def test_report_of_outcomes(pytester):
    pytester.makepyfile(test_outcomes=OUTCOMES)
    pytester.runpytest_inprocess(*PLUGIN, "--stack-report", "sub/report.json")
    report = read(pytester, "sub/report.json")
    check_outcomes(report)
    assert report["collect_errors"] == []


def test_report_of_collect_errors(pytester):
    pytester.makepyfile(**{name: source for name, (source, *_) in BROKEN.items()})
    pytester.runpytest_inprocess(*PLUGIN, "--stack-report=report.json")
    report = read(pytester)
    check_collect_errors(report)
    assert report["tests"] == []
    assert report["exitstatus"] == pytest.ExitCode.INTERRUPTED


def test_report_with_xdist(pytester, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")  # workers need not import Triton
    pytester.makepyfile(test_outcomes=OUTCOMES)
    pytester.makepyfile(**{name: source for name, (source, *_) in BROKEN.items()})
    pytester.runpytest_subprocess(
        *PLUGIN, "-n2", "--continue-on-collection-errors", "--stack-report=report.json"
    )
    check_outcomes(read(pytester))
    check_collect_errors(read(pytester))


def test_report_of_a_test_that_is_not_there(pytester):
    pytester.makepyfile(test_outcomes=OUTCOMES)
    pytester.path.joinpath("report.json").write_text("stale")
    pytester.runpytest_inprocess(
        *PLUGIN, "--stack-report=report.json", "test_outcomes.py::test_no_such"
    )
    report = read(pytester)
    assert report["exitstatus"] == pytest.ExitCode.USAGE_ERROR
    assert report["tests"] == report["collect_errors"] == []


def test_report_is_replaced_in_one_step(pytester, monkeypatch):
    pytester.makepyfile("def test_passed(): pass")
    pytester.path.joinpath("report.json").write_text("stale")
    moved = []

    def replace(source, target):
        # The file of a crashed session must not look like this one's.
        assert not os.path.exists(target)
        moved.append((json.loads(open(source).read())["schema"], str(target)))

    monkeypatch.setattr("harness.report.os.replace", replace)
    pytester.runpytest_inprocess(*PLUGIN, "--stack-report=report.json")
    assert moved == [(1, str(pytester.path / "report.json"))]


def test_without_the_option_there_is_no_report(pytester):
    pytester.makepyfile("def test_passed(): pass")
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)
    assert not list(pytester.path.glob("*.json"))


RACE = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, tl.program_id(0))

    def test_race():
        kernel[(2,)](torch.zeros(1, dtype=torch.int32))
"""


def test_accesses_are_checked_if_asked_for(pytester):
    pytester.makepyfile(RACE)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)
    result = pytester.runpytest_inprocess(*PLUGIN, "--check-accesses")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*Race: kernel: programs 0 and 1 write one byte")


def test_accesses_can_be_checked_in_the_interpreter_only(pytester, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    pytester.makepyfile("def test_passed(): pass")
    result = pytester.runpytest_inprocess(*PLUGIN, "--check-accesses")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
