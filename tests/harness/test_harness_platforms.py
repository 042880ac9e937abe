"""Pretended platforms: what they change in vLLM, and that it is all put back."""

import gc
import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import vllm._aiter_ops as aiter_ops
import vllm.kernels.aiter_ops as kernels
import vllm.model_executor.layers.quantization.utils.quant_utils as quant_utils
import vllm.platforms.rocm as rocm
import vllm.v1.attention.ops.rocm_aiter_mla_sparse as mla_sparse
from harness import HarnessError, bootstrap, platforms, state
from harness.platforms import use
from vllm._aiter_ops import rocm_aiter_ops
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import HAS_TRITON

import vllm

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

# kind, FP8 type, capability, then the flags that are true
TRUTH = {
    "cpu": ("cpu", FN, None, ""),
    "gfx90a": ("rocm", FN, (9, 0), "gfx9 gfx90a"),
    "gfx942": ("rocm", FNUZ, (9, 4), "gfx9 mi3xx gfx942"),
    "gfx950": ("rocm", FN, (9, 5), "gfx9 mi3xx gfx950"),
    "gfx1201": ("rocm", FN, (12, 0), "gfx1x gfx12x"),
    "cuda": ("cuda", FN, (9, 0), ""),
}
FLAGS = "gfx1x gfx12x mi3xx gfx9 gfx90a gfx942 gfx950".split()

PAGED_MQA_LOGITS = "ops.triton.attention.pa_mqa_logits"


INT8_UTILS = "vllm.model_executor.layers.quantization.utils.int8_utils"
MERGE_ATTN_STATES = "vllm.v1.attention.ops.triton_merge_attn_states"


@pytest.fixture
def unloaded(monkeypatch):
    """Modules that have not been imported yet; what was loaded is back later."""
    for name in (INT8_UTILS, MERGE_ATTN_STATES):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_base_state():
    assert type(vllm.platforms.current_platform) is CpuPlatform
    assert current_platform is vllm.platforms.current_platform
    assert vllm.__version__ == "0.22.0"
    assert vllm.version._prev_minor_version() == "0.21"
    assert HAS_TRITON
    assert vllm.triton_utils.triton is sys.modules["triton"]
    assert rocm._GCN_ARCH == "none"
    assert not any(getattr(rocm, f"on_{flag}")() for flag in FLAGS)
    assert find_spec("aiter") is None and not aiter_ops.IS_AITER_FOUND


def test_install_is_idempotent_and_must_come_first(monkeypatch):
    finders = list(sys.meta_path)
    bootstrap.install()
    assert sys.meta_path == finders
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(HarnessError, match="vllm was imported before the harness"):
        bootstrap.install()


def test_another_platform_detection_is_refused_by_name():
    finder = bootstrap._PlatformsFinder(gpus=False)
    load = finder._then_replace(lambda module: None)
    with pytest.raises(HarnessError, match="builtin_platform_plugins is not a dict"):
        load(ModuleType("vllm.platforms"))


def test_a_version_file_of_the_tree_comes_first(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    package.joinpath("__init__.py").write_text("from ._version import __version__")
    script = "from harness import bootstrap as b; b.install(); import vllm"
    run = [sys.executable, "-c", f"{script}; print(vllm.__version__)"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    }
    assert subprocess.check_output(run, env=env, text=True) == "0.22.0\n"
    package.joinpath("_version.py").write_text("__version__ = '1.2.3'")
    assert subprocess.check_output(run, env=env, text=True) == "1.2.3\n"


def test_the_tree_is_not_written_to():
    assert vllm.version.__version__ == bootstrap.VERSION
    spec = sys.modules["vllm._version"].__spec__
    assert not spec.has_location


@pytest.mark.parametrize("name", TRUTH)
def test_truth_table(name, fake_platform):
    kind, fp8, capability, flags = TRUTH[name]
    platform = fake_platform(name)
    assert vllm.platforms.current_platform is platform
    for other in ("cpu", "rocm", "cuda", "xpu", "tpu", "out_of_tree", "unspecified"):
        assert getattr(platform, f"is_{other}")() == (other == kind), other
    assert platform.is_cuda_alike() == (kind != "cpu")
    assert platform.fp8_dtype() == fp8
    assert platform.is_fp8_fnuz() == (fp8 == FNUZ)
    assert platform.get_device_capability() == (
        capability and DeviceCapability(*capability)
    )
    assert platform.supports_mx() == (name == "gfx950")
    assert rocm._GCN_ARCH == (name if kind == "rocm" else "none")
    for flag in FLAGS:
        expected = flag in flags.split()
        assert getattr(rocm, f"on_{flag}")() == expected, flag
        assert getattr(rocm, f"_ON_{flag.upper()}") == expected, flag


def test_the_table_has_the_platforms_that_are_tested():
    assert list(platforms.PLATFORMS) == list(TRUTH)


@pytest.mark.parametrize(
    "name, device, units, gib",
    [
        ("gfx90a", "AMD Instinct MI210", 104, 64),
        ("gfx942", "AMD_Instinct_MI300X", 304, 192),
        ("gfx950", "AMD Instinct MI355X", 256, 288),
        ("cuda", "NVIDIA H200", 132, 139),
    ],
)
def test_device_answers(name, device, units, gib, fake_platform):
    platform = fake_platform(name)
    assert platform.get_device_name() == device
    assert platform.num_compute_units() == units
    assert platform.get_device_total_memory() == gib << 30
    assert platform.device_count() == 1
    assert platform.is_fully_connected([0])


@pytest.mark.parametrize("name", TRUTH)
def test_copies_by_value_follow(name, fake_platform):
    _, fp8, _, flags = TRUTH[name]
    platform = fake_platform(name)
    assert current_platform is platform  # of this test file
    assert mla_sparse.current_platform is platform
    assert aiter_ops.current_platform is platform
    assert mla_sparse._ON_GFX942 == ("gfx942" in flags)
    assert mla_sparse._ON_GFX950 == ("gfx950" in flags)
    assert aiter_ops.FP8_DTYPE == fp8
    assert quant_utils.FP8_DTYPE == fp8
    # Computed from the copy, and then copied once more.
    assert quant_utils.kFp8StaticTensorSym.dtype == fp8
    backend = sys.modules["vllm.v1.attention.backend"]
    assert backend.kFp8StaticTensorSym is quant_utils.kFp8StaticTensorSym


@pytest.mark.parametrize("name", TRUTH)
def test_everything_is_restored(name):
    before = state.capture()
    key = quant_utils.kFp8StaticTensorSym
    with use(name, aiter={"rms_norm": max}):
        pass
    after = state.capture()
    assert after.platform is before.platform
    assert after.values == before.values
    assert quant_utils.kFp8StaticTensorSym is key
    assert state.restore(before) == []


def test_everything_is_restored_after_an_exception():
    before = state.capture()
    with pytest.raises(ZeroDivisionError), use("gfx942", aiter={}):
        assert mla_sparse._ON_GFX942
        raise ZeroDivisionError
    assert state.capture() == before


def test_everything_is_restored_when_entering_fails(monkeypatch):
    before = state.capture()
    monkeypatch.setattr(mla_sparse, "current_platform", None)
    changed = state.capture()
    with pytest.raises(HarnessError, match=r"rocm_aiter_mla_sparse line \d+"):
        use("gfx942").__enter__()
    assert state.capture() == changed != before


def test_uses_nest():
    with use("gfx950") as outer:
        with use("gfx942") as inner:
            assert current_platform is inner is not outer
            assert rocm.on_gfx942() and not rocm.on_gfx950()
        assert current_platform is outer
        assert rocm.on_gfx950() and not rocm.on_gfx942()
        with use("cpu") as cpu:
            assert type(cpu) is CpuPlatform and not rocm.on_gfx950()
    assert type(current_platform) is CpuPlatform


def test_the_fixture_replaces_the_platform(fake_platform):
    fake_platform("gfx950")
    fake_platform("gfx942")
    assert rocm.on_gfx942() and not rocm.on_gfx950()
    assert fake_platform("cpu") is bootstrap.base_platform()
    assert not rocm.on_gfx942()


def test_a_forgotten_use_does_not_restore_later():
    forgotten = use("gfx950")
    before = state.capture()
    forgotten.__enter__()
    state.restore(before)
    with use("gfx942"):
        del forgotten
        gc.collect()
        assert rocm.on_gfx942()


def test_a_state_of_before_vllm_was_loaded_is_restored():
    before = state.capture()
    values = before.values.items()
    cold = state.Snapshot(
        {slot: value for slot, value in values if not slot.owner.startswith("vllm")},
        None,
    )
    use("gfx942", aiter={"mla": {}}).__enter__()
    rocm_aiter_ops._MHA_ENABLED = None
    changed = {str(change.slot) for change in state.restore(cold)}
    assert state.capture() == before
    assert {
        "vllm.platforms.current_platform",
        "vllm.platforms.rocm._ON_GFX942",
        "vllm._aiter_ops.current_platform",
        "vllm._aiter_ops.FP8_DTYPE",
        "vllm._aiter_ops.rocm_aiter_ops._MHA_ENABLED",
        "os.environ['VLLM_ROCM_USE_AITER']",
    } <= changed


def test_unknown_platform():
    with pytest.raises(HarnessError, match="no platform 'gfx999'; there are cpu, gfx9"):
        use("gfx999")


def test_cached_answers_do_not_survive(fake_platform):
    fake_platform("gfx950")
    # Asked of vLLM's own class, whose cache does not know of the platform.
    assert rocm.RocmPlatform.get_device_capability() == DeviceCapability(9, 5)
    fake_platform("gfx942")
    assert rocm.RocmPlatform.get_device_capability() == DeviceCapability(9, 4)
    assert rocm.RocmPlatform.get_device_name() == "AMD_Instinct_MI300X"


def test_a_module_first_imported_inside_keeps_nothing(unloaded):
    before = state.capture()
    with use("gfx942") as platform:
        module = importlib.import_module(MERGE_ATTN_STATES)
        assert module.current_platform is platform
        assert module.float8_info.dtype == "float8_e4m3fnuz"
    assert module.current_platform is before.platform
    assert module.float8_info.dtype == "float8_e4m3fn"


def test_rocm_first_imported_inside_keeps_nothing(monkeypatch):
    monkeypatch.setattr(vllm.platforms, "rocm", rocm)
    monkeypatch.delitem(sys.modules, "vllm.platforms.rocm")
    monkeypatch.setattr(platforms, "_objects", {})
    with use("gfx942"):
        module = sys.modules["vllm.platforms.rocm"]
        assert module is not rocm and module.on_gfx942()
    assert module._GCN_ARCH == "none" and not module.on_gfx942()


def test_another_branch_at_import_is_an_error(unloaded):
    message = r"int8_utils was first imported while gfx942 .* its line 85 went another"
    with pytest.raises(HarnessError, match=message), use("gfx942"):
        importlib.import_module(INT8_UTILS)
    assert type(sys.modules[INT8_UTILS].current_platform) is CpuPlatform


def test_another_branch_at_import_does_not_hide_an_error(unloaded):
    with pytest.raises(ZeroDivisionError), use("gfx942"):
        importlib.import_module(INT8_UTILS)
        raise ZeroDivisionError


def test_the_same_branch_at_import_is_none(unloaded):
    with use("cuda"):
        importlib.import_module(INT8_UTILS)


def test_without_aiter(fake_platform):
    fake_platform("gfx942")
    assert find_spec("aiter") is None
    with pytest.raises(ModuleNotFoundError, match="aiter"):
        importlib.import_module("aiter")
    assert not aiter_ops.IS_AITER_FOUND and not kernels.AITER_SUPPORTED
    assert not aiter_ops.is_aiter_found_and_supported()
    assert not rocm_aiter_ops.is_enabled()
    assert mla_sparse.paged_mqa_logits_module() is None


@pytest.mark.parametrize("name", TRUTH)
def test_aiter_is_used_on_its_gpus_only(name, fake_platform):
    fake_platform(name, aiter={"rms_norm": max})
    assert find_spec("aiter") is not None
    assert importlib.import_module("aiter").rms_norm is max
    assert aiter_ops.IS_AITER_FOUND
    assert kernels.AITER_SUPPORTED
    supported = name in ("gfx942", "gfx950")
    assert aiter_ops.is_aiter_found_and_supported() == supported
    assert bool(rocm_aiter_ops.is_enabled()) == supported
    assert bool(rocm_aiter_ops.is_mla_enabled()) == supported


def test_aiter_that_is_not_enabled(fake_platform):
    fake_platform("gfx942", aiter={}, aiter_enabled=False)
    assert aiter_ops.is_aiter_found_and_supported()
    assert os.environ["VLLM_ROCM_USE_AITER"] == "0"
    assert not rocm_aiter_ops.is_enabled()


def test_aiter_submodules_are_found_where_they_are(fake_platform):
    kernel = {"deepgemm_fp8_paged_mqa_logits": max}
    fake_platform("gfx942", aiter={PAGED_MQA_LOGITS: kernel})
    assert find_spec("aiter.ops.triton.pa_mqa_logits") is None
    module = mla_sparse.paged_mqa_logits_module()
    assert module.__name__ == f"aiter.{PAGED_MQA_LOGITS}"
    assert module.deepgemm_fp8_paged_mqa_logits is max
    # The old place of the same module; the lookup of before is forgotten.
    fake_platform("gfx942", aiter={"ops.triton.pa_mqa_logits": kernel})
    module = mla_sparse.paged_mqa_logits_module()
    assert module.__name__ == "aiter.ops.triton.pa_mqa_logits"


def test_aiter_that_lacks_a_symbol(fake_platform):
    fake_platform("gfx942", aiter={PAGED_MQA_LOGITS: {}})
    module = mla_sparse.paged_mqa_logits_module()
    with pytest.raises(AttributeError, match="deepgemm_fp8_paged_mqa_logits"):
        _ = module.deepgemm_fp8_paged_mqa_logits
    with pytest.raises(ImportError, match="cannot import name 'rms_norm'"):
        exec("from aiter import rms_norm")


def test_aiter_that_raises(fake_platform):
    broken = RuntimeError("ROCm version file not found")
    fake_platform("gfx942", aiter=broken)
    assert find_spec("aiter") is not None and aiter_ops.IS_AITER_FOUND
    with pytest.raises(RuntimeError, match="ROCm version file not found"):
        importlib.import_module("aiter")
    # One submodule: vLLM takes an ImportError, and nothing else, as its absence.
    fake_platform("gfx942", aiter={PAGED_MQA_LOGITS: ImportError("no gluon")})
    assert mla_sparse.paged_mqa_logits_module() is None
    fake_platform("gfx942", aiter={PAGED_MQA_LOGITS: broken})
    with pytest.raises(RuntimeError, match="ROCm version file not found"):
        mla_sparse.paged_mqa_logits_module()


def test_aiter_as_a_module(fake_platform):
    package, submodule = ModuleType("aiter"), ModuleType("aiter.mla")
    package.mla, submodule.mla_decode_fwd = submodule, max
    fake_platform("gfx942", aiter=package)
    assert importlib.import_module("aiter") is package
    assert importlib.import_module("aiter.mla") is submodule
    assert importlib.import_module("aiter.mla").mla_decode_fwd is max


def test_aiter_is_gone_afterwards():
    with use("gfx942", aiter={"ops.triton": {"x": 1}}):
        importlib.import_module("aiter.ops.triton")
        assert os.environ["VLLM_ROCM_USE_AITER"] == "1"
    assert not [name for name in sys.modules if name.partition(".")[0] == "aiter"]
    assert find_spec("aiter") is None
    assert "VLLM_ROCM_USE_AITER" not in os.environ
    assert not aiter_ops.IS_AITER_FOUND and not rocm_aiter_ops._AITER_ENABLED


def test_aiter_of_nested_uses():
    with use("gfx942", aiter={"outer": 1, "ops": {}}):
        importlib.import_module("aiter.ops")
        with use("gfx942"):
            assert find_spec("aiter") is None
        with use("gfx942", aiter={"inner": 2}):
            assert find_spec("aiter.ops") is None
            assert importlib.import_module("aiter").inner == 2
        assert importlib.import_module("aiter").outer == 1
        assert "aiter.ops" in sys.modules


def test_stand_in_that_contradicts_itself():
    for stand_in, message in (
        ({"mla": ImportError(), "mla.x": {}}, "aiter.mla raises on import"),
        ({"mla": ImportError(), "mla.x": 1}, "aiter.mla raises on import"),
        ({"mla.x": 1, "mla": ImportError()}, "aiter.mla is a module"),
        ({"mla": 1, "mla.x": 1}, "aiter.mla is a module and a symbol"),
    ):
        with pytest.raises(HarnessError, match=message):
            use("gfx942", aiter=stand_in).__enter__()
        assert type(current_platform) is CpuPlatform
