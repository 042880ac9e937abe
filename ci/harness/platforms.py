"""Pretended platforms: the table, and ``use(name)``.

Within ``use("gfx942")`` vLLM behaves as on a box with that GPU: its platform
object, the architecture flags of `vllm.platforms.rocm`, what other modules
copied from both (see `derived`), AITER's presence and switches, and the caches
of such answers. All of it is put back at the end.

The base state of a process, outside of `use`, is vLLM's CPU platform.

Not pretended: what a module decides once while it is imported (which classes,
functions and custom ops exist). Import modules in the base state, at the top of
the test file. `use` refuses to end quietly if a module was first imported
inside it and took another branch than it would have outside.
"""

import dataclasses
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from . import HarnessError, aiter, bootstrap, derived, fake_amdsmi, state
from .aiter import StandIn

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Spec:
    """One platform that can be pretended."""

    #: vLLM's class for it.
    cls: str
    #: The GPU, as `amdsmi` would describe it; NO_GPU if it is not AMD's.
    asic: fake_amdsmi.Asic = fake_amdsmi.NO_GPU
    #: Answers that vLLM's class would ask a driver for, by method name.
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


def _rocm(gfx: str, device_id: str, name: str, gib: int, units: int | None) -> Spec:
    answers: dict[str, Any] = {"get_device_total_memory": gib * GIB, "device_count": 1}
    if units is not None:
        answers["num_compute_units"] = units
    asic = fake_amdsmi.Asic(gfx, device_id, name, gib * GIB)
    return Spec("vllm.platforms.rocm.RocmPlatform", asic, answers)


#: All platforms. Architecture flags and dtypes are not here: vLLM computes them.
PLATFORMS: dict[str, Spec] = {
    "cpu": Spec(bootstrap.CPU_PLATFORM),
    "gfx90a": _rocm("gfx90a", "0x740f", "AMD Instinct MI210", 64, 104),
    "gfx942": _rocm("gfx942", "0x74a1", "AMD Instinct MI300X", 192, 304),
    "gfx950": _rocm("gfx950", "0x75a3", "AMD Instinct MI355X", 288, 256),
    "gfx1201": _rocm("gfx1201", "0x7550", "AMD Radeon RX 9070 XT", 16, None),
    "cuda": Spec(
        "vllm.platforms.cuda.CudaPlatformBase",
        answers={
            "get_device_capability": (9, 0),
            "get_device_name": "NVIDIA H200",
            "get_device_uuid": "GPU-00000000-0000-0000-0000-000000000000",
            "get_device_total_memory": 139 * GIB,
            "device_count": 1,
            "num_compute_units": 132,
            "is_fully_connected": True,
            "is_arch_support_pdl": True,
            "is_integrated_gpu": False,
        },
    ),
}

#: Extensions that vLLM's CUDA platform imports without a guard.
_CUDA_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch")

_objects: dict[str, Any] = {}


class use:
    """Context manager: vLLM is on platform `name` for the duration.

    Entering returns vLLM's platform object. Uses can be nested.

    Args:
        name: a key of `PLATFORMS`.
        aiter: what ``import aiter`` finds: nothing (None), a module, a mapping of
            symbols, or an exception that the import raises (see `harness.aiter`).
        aiter_enabled: the value of ``VLLM_ROCM_USE_AITER``; None means that it is
            on if there is an `aiter`. vLLM's own default is off.

    Raises:
        HarnessError: there is no such platform; or, at the end, a module was
            first imported inside and took a branch of its own there.
    """

    # A class and not a generator: one that a test forgets to leave must not
    # restore anything when the garbage collector finds it in a later test.

    def __init__(
        self, name: str, *, aiter: StandIn = None, aiter_enabled: bool | None = None
    ):
        if name not in PLATFORMS:
            known = ", ".join(PLATFORMS)
            raise HarnessError(f"no platform {name!r}; there are {known}")
        self.name = name
        self.aiter = aiter
        self.enabled = aiter is not None if aiter_enabled is None else aiter_enabled

    def __enter__(self) -> Any:
        bootstrap.base_platform()  # vLLM is loaded in the base state
        self.before = state.capture()
        self.loaded = derived.plans()
        try:
            return self._pretend()
        except BaseException:
            state.restore(self.before)
            raise

    def __exit__(self, kind, error, traceback) -> None:
        later = [plan for plan in derived.plans() if plan not in self.loaded]
        inside = [derived.branches(plan) for plan in later]
        state.restore(self.before)
        if kind is not None:
            return
        for plan, taken in zip(later, inside, strict=True):
            for line, way in derived.branches(plan).items():
                if taken.get(line, way) != way:
                    raise HarnessError(
                        f"{plan.module.__name__} was first imported while "
                        f"{self.name} was pretended, and its line {line} went "
                        f"another way for it. Import it at the top of the test file"
                    )

    def _pretend(self) -> Any:
        environ = state.Slot("env", "", "VLLM_ROCM_USE_AITER")
        environ.write("1" if self.enabled else "0")
        for name in list(sys.modules):
            if name == "aiter" or name.startswith("aiter."):
                del sys.modules[name]
        aiter.TREE = aiter.tree(self.aiter)
        if self.aiter is None and importlib.util.find_spec("aiter") is not None:
            sys.modules["aiter"] = None  # type: ignore[assignment]
        fake_amdsmi.ASIC = PLATFORMS[self.name].asic
        platform = _object(self.name)
        state.set_platform(platform)
        derived.compute(derived.plans())
        state.refresh_aiter_flags()
        return platform


def _object(name: str) -> Any:
    """The platform object of a name; always the same one."""
    if name == "cpu":
        return bootstrap.base_platform()
    if name not in _objects:
        spec = PLATFORMS[name]
        cls = _class(spec.cls)
        members = {
            method: classmethod(lambda cls, *_, _answer=answer, **__: _answer)
            for method, answer in _answers(spec).items()
            if hasattr(cls, method)
        }
        _objects[name] = type(f"Pretended{cls.__name__}", (cls,), members)()
    return _objects[name]


def _answers(spec: Spec) -> dict[str, Any]:
    from vllm.platforms.interface import DeviceCapability

    answers = dict(spec.answers)
    if "get_device_capability" in answers:
        capability = DeviceCapability(*answers["get_device_capability"])
        answers["get_device_capability"] = capability
    return answers


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    missing = [
        extension
        for extension in _CUDA_EXTENSIONS
        if module.endswith(".cuda") and extension not in sys.modules
    ]
    for extension in missing:
        sys.modules[extension] = ModuleType(extension)
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        for extension in missing:
            del sys.modules[extension]
