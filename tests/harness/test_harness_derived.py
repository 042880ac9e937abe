"""Which module constants are computed anew, on modules written for it."""

import importlib
import sys
import textwrap

import pytest
import torch
import vllm.platforms.rocm as rocm
from harness import HarnessError, derived, state
from harness.platforms import use

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports a source text as a module of vLLM."""
    monkeypatch.setattr(sys.modules["vllm"], "__path__", [*vllm_path(), str(tmp_path)])

    def load(name, source):
        path = tmp_path.joinpath(f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        full = f"vllm.{name.replace('/', '.').removesuffix('.__init__')}"
        monkeypatch.setitem(sys.modules, full, None)  # gone after the test
        monkeypatch.delitem(sys.modules, full)
        importlib.invalidate_caches()
        return importlib.import_module(full)

    return load


def vllm_path():
    return list(sys.modules["vllm"].__path__)


def test_assignments_follow(module):
    probe = module(
        "probe",
        """
        import dataclasses, enum
        import torch
        from vllm.platforms import current_platform

        class Color(enum.Enum):
            RED = 1
            BLUE = 2

        @dataclasses.dataclass(frozen=True)
        class Key:
            dtype: torch.dtype

        DTYPE = current_platform.fp8_dtype()
        annotated: bool = current_platform.is_rocm()
        INFO = torch.finfo(DTYPE)
        PAIR = (DTYPE, 1 if annotated else 2)
        KEY = Key(DTYPE)
        COLOR = Color.RED if annotated else Color.BLUE
        SECOND = (
            KEY.dtype
        )
        FIXED = torch.float8_e4m3fn
        """,
    )
    names = "DTYPE annotated INFO PAIR KEY COLOR SECOND FIXED".split()
    before = {name: getattr(probe, name) for name in names}
    with use("gfx942"):
        assert probe.DTYPE == FNUZ and probe.annotated is True
        assert probe.INFO.max == 240 and probe.PAIR == (FNUZ, 1)
        assert probe.KEY == probe.Key(FNUZ) and probe.SECOND == FNUZ
        assert probe.COLOR is probe.Color.RED and probe.FIXED == FN
    with use("cuda"):  # equal values are not replaced
        assert all(getattr(probe, name) == before[name] for name in names)
    assert all(getattr(probe, name) is before[name] for name in names)


def test_copies_of_copies_follow(module):
    module("one", "from vllm.platforms import current_platform as p\nX = 0")
    module(
        "two",
        """
        from vllm.platforms import current_platform
        DTYPE = current_platform.fp8_dtype()
        """,
    )
    three = module("three", "from .two import (\n    DTYPE as D,\n)\nTEXT = str(D)")
    four = module("four", "from vllm.three import TEXT\nLONG = TEXT * 2")
    with use("gfx942"):
        assert three.D == FNUZ
        assert four.LONG == "torch.float8_e4m3fnuz" * 2
    assert four.LONG == "torch.float8_e4m3fn" * 2


def test_relative_imports_follow(module):
    package = module("package/__init__", "NAME = 'package'")
    module(
        "package/base",
        """
        from vllm.platforms import current_platform
        DTYPE = current_platform.fp8_dtype()
        """,
    )
    sibling = module("package/sibling", "from .base import DTYPE")
    parent = module("package/parent", "from ..package.base import DTYPE")
    del sys.modules["vllm.package"]
    package = module("package/__init__", "from .base import DTYPE")
    with use("gfx942"):
        assert (sibling.DTYPE, parent.DTYPE, package.DTYPE) == (FNUZ, FNUZ, FNUZ)


def test_branches_follow(module):
    probe = module(
        "probe",
        """
        from vllm.platforms import current_platform

        if current_platform.is_rocm():
            from vllm.platforms.rocm import _ON_GFX942 as HERE, on_gfx950
            KIND = "rocm"
            if HERE:
                "nothing to see"
                GPU: str = "mi300"
            else:
                GPU = "other"
        elif current_platform.is_cuda():
            pass
            HERE = False
            KIND = "cuda"
        else:
            HERE = None
            KIND = "none"
        """,
    )
    assert (probe.HERE, probe.KIND) == (None, "none")
    with use("gfx942"):
        assert (probe.HERE, probe.KIND, probe.GPU) == (True, "rocm", "mi300")
        assert probe.on_gfx950 is rocm.on_gfx950
    with use("gfx950"):
        assert (probe.HERE, probe.KIND, probe.GPU) == (False, "rocm", "other")
    with use("cuda"):
        assert (probe.HERE, probe.KIND) == (False, "cuda")
    assert (probe.HERE, probe.KIND) == (None, "none")
    assert not hasattr(probe, "GPU") and not hasattr(probe, "on_gfx950")
    (plan,) = [plan for plan in derived.plans() if plan.module is probe]
    assert derived.branches(plan) == {}  # all of it is followed


OPAQUE = """
    from vllm.platforms import current_platform

    FLAG = False
    if current_platform.is_rocm():
        import sys as system

        FLAG = True
        WHERE = system.maxsize
        THERE = 1
        if current_platform.is_fp8_fnuz():
            def function(): return "fnuz"
            INSIDE = function()
    else:
        system = 0
        WHERE = 0
        THERE = system
"""


def test_what_a_left_out_statement_defines_is_not_used(module):
    probe = module("probe", OPAQUE)
    with use("gfx942"):
        assert probe.FLAG is True
        assert probe.WHERE == 0  # `system` was not imported here
        assert probe.THERE == 1  # but what is left out there matters only there
        assert not hasattr(probe, "INSIDE")
        with use("cuda"):
            assert probe.THERE == 0
    assert probe.FLAG is False


def test_opaque_branches(module):
    probe = module("probe", OPAQUE)
    (plan,) = [plan for plan in derived.plans() if plan.module is probe]
    assert derived.branches(plan) == {5: False}
    with use("gfx950"):
        assert derived.branches(plan) == {5: True, 11: False}
    with use("gfx942"):
        assert derived.branches(plan) == {5: True, 11: True}


def test_mutable_values_stay(module):
    probe = module(
        "probe",
        """
        from vllm.platforms import current_platform
        TABLE = {current_platform.fp8_dtype(): 1}
        """,
    )
    table = probe.TABLE
    with use("gfx942"):
        assert probe.TABLE is table


def test_a_constant_that_cannot_be_computed_is_an_error(module):
    module(
        "probe",
        """
        from vllm.platforms import current_platform
        COUNT = 0 if current_platform.is_cpu() else current_platform.no_such()
        """,
    )
    before = state.capture()
    with pytest.raises(
        HarnessError, match="vllm.probe line 3: cannot compute .*NoneType"
    ):
        use("gfx942").__enter__()
    assert state.capture() == before


def test_a_reloaded_module_is_read_again(module):
    source = "from vllm.platforms import current_platform\nX = {}"
    first = module("probe", source.format("current_platform.is_rocm()"))
    with use("gfx942"):
        assert first.X is True
    second = module("probe", source.format("current_platform.is_cuda()") + "\n\n")
    with use("gfx942"):
        assert second.X is False
    with use("cuda"):
        assert second.X is True
