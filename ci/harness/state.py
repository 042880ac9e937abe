"""The platform state of the process: taken, compared and put back.

A snapshot maps slots to values. A slot is a module global, a class attribute,
an environment variable or an entry of `sys.modules`; `capture` decides which
ones the platform state consists of.
"""

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from . import aiter, bootstrap, derived, fake_amdsmi
from .derived import MISSING, same

PLATFORMS = "vllm.platforms"
AITER_OPS = "vllm._aiter_ops"

_PLATFORM_CLASSES = (
    "vllm.platforms.interface:Platform",
    "vllm.platforms.cpu:CpuPlatform",
    "vllm.platforms.rocm:RocmPlatform",
    "vllm.platforms.cuda:CudaPlatformBase",
)


class Slot(NamedTuple):
    """A place that holds a part of the platform state."""

    kind: str  # "global", "class", "env" or "module"
    owner: str  # module name; for a class also the class name, after a colon
    name: str

    def __str__(self) -> str:
        match self.kind:
            case "env":
                return f"os.environ[{self.name!r}]"
            case "module":
                return f"sys.modules[{self.name!r}]"
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def read(self) -> Any:
        match self.kind:
            case "env":
                return os.environ.get(self.name, MISSING)
            case "module":
                return sys.modules.get(self.name, MISSING)
        owner = self.holder()
        return MISSING if owner is None else vars(owner).get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Sets the value, or removes it if it is `MISSING`."""
        if self.kind in ("env", "module"):
            table = os.environ if self.kind == "env" else sys.modules
            if value is MISSING:
                table.pop(self.name, None)
            else:
                table[self.name] = value  # type: ignore[index]
            return
        owner = self.holder()
        if owner is None:
            return
        if value is not MISSING:
            setattr(owner, self.name, value)
        elif self.name in vars(owner):
            delattr(owner, self.name)

    def holder(self) -> Any:
        """The module, class or object; None if it is not loaded."""
        module, _, cls = self.owner.partition(":")
        owner = sys.modules.get(module)
        return getattr(owner, cls, None) if cls and owner is not None else owner


class Change(NamedTuple):
    """A slot that holds something else than it did."""

    slot: Slot
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.slot}: was {_show(self.before)}, is {_show(self.after)}"


class Snapshot(NamedTuple):
    values: dict[Slot, Any]
    platform: Any  # vLLM's platform object; None if vLLM is not loaded


def capture() -> Snapshot:
    """Takes the present platform state."""
    return Snapshot({slot: slot.read() for slot in _slots()}, current_platform())


def restore(before: Snapshot) -> list[Change]:
    """Puts a state back and returns what had to be changed for it.

    A module that was imported since then gets the restored platform and
    derived constants, as if it had been imported before.
    """
    changes = []
    for slot, old in before.values.items():
        new = slot.read()
        if not same(old, new):
            changes.append(Change(slot, old, new))
            slot.write(old)
    later = {slot: slot.read() for slot in _slots() if slot not in before.values}
    if changes or later:
        _settle(before, later)
    for slot, new in later.items():
        settled = slot.read()
        if not same(settled, new):
            changes.append(Change(slot, settled, new))
    return changes


def _settle(before: Snapshot, later: dict[Slot, Any]) -> None:
    """Brings slots that are not in a snapshot to its state."""
    loaded = {slot.owner.partition(":")[0] for slot in before.values}
    for slot in later:
        if slot.name == "current_platform" and slot.owner != PLATFORMS:
            slot.write(before.platform or bootstrap.base_platform())
        elif slot.kind in ("env", "module"):
            slot.write(MISSING)
        elif slot.kind == "class" and slot.owner.partition(":")[0] in loaded:
            slot.write(MISSING)  # added to a class that was loaded before
    if Slot("global", PLATFORMS, "current_platform") in later:
        set_platform(MISSING)
    owners = {slot.owner for slot in later}
    derived.compute([p for p in derived.plans() if p.module.__name__ in owners])
    if f"{AITER_OPS}:rocm_aiter_ops" in owners:
        refresh_aiter_flags()


def current_platform() -> Any:
    """vLLM's platform object, without importing vLLM for it."""
    if PLATFORMS not in sys.modules:
        return None
    base = bootstrap.base_platform()
    return vars(sys.modules[PLATFORMS]).get("current_platform", base)


def set_platform(platform: Any) -> None:
    """Makes a platform object vLLM's, in each module that has a copy of it."""
    old = current_platform()
    # A plain attribute comes before vLLM's lazy module `__getattr__`.
    Slot("global", PLATFORMS, "current_platform").write(platform)
    new = current_platform()
    for slot in _platform_copies():
        if slot.owner != PLATFORMS and slot.read() is old:
            slot.write(new)


def refresh_aiter_flags() -> None:
    """Reads vLLM's AITER switches from the environment again."""
    module = sys.modules.get(AITER_OPS)
    if module is not None:
        module.rocm_aiter_ops.refresh_env_variables()


def _slots() -> Iterator[Slot]:
    yield Slot("global", fake_amdsmi.__name__, "ASIC")
    yield Slot("global", aiter.__name__, "TREE")
    if "torch" in sys.modules:
        yield Slot("global", "torch.version", "hip")
        # `Tensor.is_cpu` is replaced by tests of code that insists on a GPU.
        yield Slot("class", "torch:Tensor", "is_cpu")
    for name in os.environ:
        if name.startswith("VLLM_ROCM_") or name.endswith("_VISIBLE_DEVICES"):
            yield Slot("env", "", name)
    for name in sys.modules:
        if name in ("aiter", "amdsmi") or name.startswith("aiter."):
            yield Slot("module", "", name)
    if PLATFORMS in sys.modules:
        bootstrap.base_platform()
        yield Slot("global", PLATFORMS, "current_platform")
        yield Slot("global", PLATFORMS, "_current_platform")
        yield from _members("class", f"{PLATFORMS}:_current_platform")
    for owner in _PLATFORM_CLASSES:
        yield from _members("class", owner)
    yield from _members("global", derived.ROCM)
    yield from _platform_copies()
    for plan in derived.plans():
        for name in sorted(plan.names):
            yield Slot("global", plan.module.__name__, name)
    flags = getattr(sys.modules.get(AITER_OPS), "rocm_aiter_ops", None)
    for name, value in list(vars(flags).items()) if flags else []:
        if name.isupper() and not callable(value):
            yield Slot("class", f"{AITER_OPS}:rocm_aiter_ops", name)


def _members(kind: str, owner: str) -> Iterator[Slot]:
    """All names of a module, class or object; its methods are state, too."""
    members = Slot(kind, owner, "").holder()
    for name in list(vars(members)) if members is not None else []:
        if not name.startswith("__"):
            yield Slot(kind, owner, name)


def _platform_copies() -> Iterator[Slot]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and "current_platform" in vars(module):
            yield Slot("global", name, "current_platform")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
