"""What a process needs before it imports vLLM from a source tree on a CPU box.

`install` makes the base state of the process: vLLM is on its CPU platform,
`vllm.platforms.rocm` can be imported, Triton is the real one, AITER is absent.
Nothing is written into the tree, and vLLM itself is not imported here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

from . import HarnessError, aiter, fake_amdsmi

#: The version that vLLM reports when the tree has no `vllm/_version.py`.
VERSION = "0.22.0"

#: The platform class of the base state.
CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"

_base_platform: Any = None


class _VersionFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides `vllm._version`, which the pinned tree lacks.

    It is the last finder, so a tree that has the file keeps its own.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "vllm._version":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__version__ = module.version = VERSION
        module.__version_tuple__ = tuple(int(part) for part in VERSION.split("."))
        module.version_tuple = module.__version_tuple__


class _PlatformsFinder(importlib.abc.MetaPathFinder):
    """Leaves vLLM's platform detection one answer: CPU.

    Detection looks for an installed `vllm` distribution, which a source tree
    is not, and would find the fake `amdsmi`. The detectors are replaced right
    after `vllm.platforms` is imported, before anybody asks them.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "vllm.platforms":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader.exec_module = self._then_replace(spec.loader.exec_module)
        return spec

    def __init__(self, gpus: bool):
        self.gpus = gpus

    def _then_replace(self, original):
        def exec_module(module):
            original(module)
            detectors = getattr(module, "builtin_platform_plugins", None)
            if not isinstance(detectors, dict):
                raise HarnessError(
                    "vllm.platforms.builtin_platform_plugins is not a dict in this "
                    "vLLM: adapt ci/harness/bootstrap.py"
                )
            detectors.clear()
            detectors["cpu"] = lambda: CPU_PLATFORM
            if self.gpus:
                _know_the_gpu()

        return exec_module


def _know_the_gpu() -> None:
    """Let vLLM's CPU platform say how many compute units the GPU has."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.cuda.get_device_properties(device_id).multi_processor_count

    CpuPlatform.num_compute_units = classmethod(num_compute_units)


def install(hide_gpus: bool = True) -> None:
    """Puts the process into the base state. Idempotent: the first call decides.

    Args:
        hide_gpus: whether the box's own GPUs are hidden. A process that runs
            kernels on an NVIDIA GPU keeps them; vLLM's platform is the CPU all
            the same, because its CUDA platform needs the compiled extensions.

    Raises:
        HarnessError: vLLM is imported already, so it is too late.
    """
    if any(isinstance(finder, _PlatformsFinder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules:
        raise HarnessError("vllm was imported before the harness was installed")
    if hide_gpus:
        # vLLM replaces Triton by placeholders unless exactly one driver is
        # active, or none is and this variable is empty.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.pop("HIP_VISIBLE_DEVICES", None)
    sys.modules["amdsmi"] = fake_amdsmi
    if importlib.util.find_spec("aiter") is not None:
        # A real AITER would make the results depend on the box.
        sys.modules["aiter"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _PlatformsFinder(gpus=not hide_gpus))
    sys.meta_path.insert(0, aiter.FINDER)
    sys.meta_path.append(_VersionFinder())


def base_platform() -> Any:
    """vLLM's platform object in the base state (imports `vllm.platforms`)."""
    global _base_platform
    if _base_platform is None:
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        current = vllm.platforms._current_platform
        if current is None:
            current = vllm.platforms._current_platform = CpuPlatform()
        # Not what a test has put there before the harness looked.
        _base_platform = current if type(current) is CpuPlatform else CpuPlatform()
    return _base_platform
