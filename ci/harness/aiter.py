"""Stand-ins for the AITER package, which cannot be imported without ROCm.

A stand-in is a mapping from dotted names below `aiter` to what is there::

    {
        "rms_norm": my_function,  # aiter.rms_norm
        "ops.triton.attention.pa_mqa_logits": {  # a module with one symbol
            "deepgemm_fp8_paged_mqa_logits": my_kernel,
        },
        "mla": {},  # a module that lacks everything
        "fused_moe": RuntimeError("ROCm version file not found"),  # its import fails
    }

The package itself can be a module, or an exception that ``import aiter``
raises. `importlib.util.find_spec` finds all of them, as it finds a broken AITER.
"""

import importlib.abc
import importlib.machinery
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from . import HarnessError

#: What may stand in for AITER; None is a box without it.
StandIn = Mapping[str, Any] | ModuleType | BaseException | None

#: Full module name -> its symbols, itself, or the exception its import raises.
TREE: dict[str, dict[str, Any] | ModuleType | BaseException] = {}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `TREE`, and none while it is empty."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in TREE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        content = TREE[spec.name]
        return content if isinstance(content, ModuleType) else None

    def exec_module(self, module):
        content = TREE[module.__name__]
        if isinstance(content, BaseException):
            raise content
        if not isinstance(content, ModuleType):
            vars(module).update(content)


FINDER = _Finder()


def tree(stand_in: StandIn) -> dict[str, dict[str, Any] | ModuleType | BaseException]:
    """Flattens a stand-in to the form of `TREE`.

    Raises:
        HarnessError: a name is two of symbol, module and exception.
    """
    modules: dict[str, dict[str, Any] | ModuleType | BaseException] = {}
    if isinstance(stand_in, ModuleType):
        _add_module(modules, "aiter", stand_in)
    elif isinstance(stand_in, BaseException):
        modules["aiter"] = stand_in
    elif stand_in is not None:
        _add_symbols(modules, "aiter", stand_in)
    return modules


def _add_module(modules, name, module):
    modules[name] = module
    for attribute, value in list(vars(module).items()):
        child = f"{name}.{attribute}"
        if isinstance(value, ModuleType) and value not in modules.values():
            _add_module(modules, child, value)


def _add_symbols(modules, name, symbols):
    _symbols(modules, name)
    for path, value in symbols.items():
        *parents, last = path.split(".")
        module = name
        for parent in parents:
            module = f"{module}.{parent}"
            _symbols(modules, module)
        child = f"{module}.{last}"
        if isinstance(value, Mapping):
            _add_symbols(modules, child, value)
        elif isinstance(value, BaseException):
            if child in modules:
                raise HarnessError(f"{child} is a module, so its import cannot raise")
            modules[child] = value
        else:
            _symbols(modules, module)[last] = value


def _symbols(modules, name):
    symbols = modules.setdefault(name, {})
    if not isinstance(symbols, dict):
        raise HarnessError(f"{name} raises on import, so nothing can be below it")
    parent, _, last = name.rpartition(".")
    if last in modules.get(parent, {}):
        raise HarnessError(f"{name} is a module and a symbol")
    return symbols
