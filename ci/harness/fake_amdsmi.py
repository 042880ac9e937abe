"""Stand-in for ROCm's `amdsmi` package: one GPU, of which `ASIC` tells the kind.

Holds the names that vLLM imports, in v0.22.0 and up to v0.33.0. `bootstrap`
puts this module into `sys.modules` as ``amdsmi``.
"""

from typing import Any, NamedTuple


class Asic(NamedTuple):
    """What `amdsmi` knows of a GPU."""

    gfx: str
    device_id: str
    market_name: str
    vram_bytes: int


#: The GPU of a box that has none. An empty `gfx` would make vLLM ask torch.cuda.
NO_GPU = Asic("none", "0x0000", "no AMD GPU", 0)

#: The GPU that the functions below describe. `platforms.use` replaces it.
ASIC = NO_GPU


class AmdSmiException(Exception):
    """Base class of amdsmi's errors."""


class AmdSmiMemoryType:
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


def amdsmi_init(*args: Any) -> None:
    """Does nothing: there is no library to start."""


def amdsmi_shut_down() -> None:
    """Does nothing: there is no library to stop."""


def amdsmi_get_processor_handles() -> list[str]:
    return ["gpu-0"]


def amdsmi_get_gpu_asic_info(handle: Any) -> dict[str, Any]:
    return {
        "target_graphics_version": ASIC.gfx,
        "device_id": ASIC.device_id,
        "market_name": ASIC.market_name,
        "vendor_id": "0x1002",
    }


def amdsmi_get_gpu_device_uuid(handle: Any) -> str:
    return "00000000-0000-0000-0000-000000000000"


def amdsmi_topo_get_link_type(handle: Any, peer: Any) -> dict[str, int]:
    return {"hops": 1, "type": 2}  # one XGMI hop


def amdsmi_topo_get_numa_node_number(handle: Any) -> int:
    return 0


def amdsmi_get_gpu_memory_total(handle: Any, kind: int) -> int:
    return ASIC.vram_bytes
