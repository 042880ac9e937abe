"""Module constants that vLLM computed from the platform when it was imported.

``FP8_DTYPE = current_platform.fp8_dtype()`` and ``from vllm.platforms.rocm
import _ON_GFX942`` are copies by value: they do not follow a platform that is
pretended later. This module finds them by reading the source of the loaded
`vllm` modules, and computes them anew with vLLM's own expressions.

Followed, at the top level of a module and in its ``if <platform>`` branches:
assignments to one name whose value is plain data (numbers, strings, dtypes,
enum members, frozen dataclasses, tuples of them), and imports of such names.
Not followed: classes, functions, decorators, registries and other imports. An
``if`` that holds one of these is *opaque*: see `branches`.
"""

import ast
import dataclasses
import enum
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import HarnessError

#: The names from which the platform enters a module.
SEEDS = frozenset({"current_platform", "_get_gcn_arch", "is_aiter_found"})

ROCM = "vllm.platforms.rocm"

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_IMPORT = re.compile(r"^from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class _Assign:
    name: str
    value: CodeType
    line: int


@dataclasses.dataclass(frozen=True)
class _Import:
    source: str
    names: tuple[tuple[str, str], ...]  # (name there, name here)
    line: int


@dataclasses.dataclass(frozen=True)
class _If:
    test: CodeType
    body: tuple["_Statement", ...]
    orelse: tuple["_Statement", ...]
    opaque: bool
    line: int


_Statement = _Assign | _Import | _If


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How to compute the derived constants of one loaded module."""

    module: ModuleType
    statements: tuple[_Statement, ...]
    names: frozenset[str]


#: Plans by the id of their module, which they keep alive, in an order in which
#: they can be computed: a module after its imports.
_plans: dict[int, Plan] = {}


def plans() -> list[Plan]:
    """The plans of all `vllm` modules that are loaded and need one."""
    for name, module in list(sys.modules.items()):
        if name == "vllm" or name.startswith("vllm."):
            _analyze(module)
    return [
        plan
        for plan in _plans.values()
        if plan.statements and sys.modules.get(plan.module.__name__) is plan.module
    ]


def compute(some: list[Plan]) -> None:
    """Computes the constants of modules for the platform that is on now.

    The architecture flags come first, since the platform's methods read them.
    Then vLLM's `functools` caches are emptied: they may hold platform answers.
    """
    flags = [plan for plan in some if plan.module.__name__ == ROCM]
    for plan in flags:
        _compute(plan)
    for cache in _caches():
        cache.cache_clear()
    for plan in some:
        if plan not in flags:
            _compute(plan)


def _compute(plan: Plan) -> None:
    for name, value in _run(plan.statements, plan.module):
        if value is MISSING:
            vars(plan.module).pop(name, None)
        elif not same(vars(plan.module).get(name, MISSING), value):
            setattr(plan.module, name, value)


def same(a: Any, b: Any) -> bool:
    """Whether two pieces of platform state are interchangeable."""
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, ModuleType) and bool(a == b)


def branches(plan: Plan) -> dict[int, bool]:
    """Which way the opaque ``if`` statements of a module go now, by line.

    If it differs from the way at import, the module holds classes, functions
    or imports of another platform, and `compute` cannot mend that.
    """
    return dict(_branches(plan.statements, plan.module))


def _analyze(module: ModuleType | None) -> frozenset[str]:
    if module is None:
        return frozenset()
    known = _plans.get(id(module))
    if known is not None:
        return known.names
    # Entered first, empty, so that an import cycle ends.
    _plans[id(module)] = Plan(module, (), frozenset())
    source = _source(module)
    tainted = {seed for seed in SEEDS if seed in source}
    imported = False
    for match in _IMPORT.finditer(source):
        origin = _absolute(module, match[1])
        if not origin.startswith("vllm.") or origin == module.__name__:
            continue
        derived = _analyze(sys.modules.get(origin))
        if derived and derived & set(re.findall(r"\w+", match[2])):
            imported = True
    plan = Plan(module, (), frozenset())
    if tainted or imported or ROCM in source:
        reader = _Reader(module, tainted)
        statements = reader.block(ast.parse(source).body)
        plan = Plan(module, statements, frozenset(reader.names))
    del _plans[id(module)]  # now behind the modules that it imports
    _plans[id(module)] = plan
    return plan.names


def _source(module: ModuleType) -> str:
    path = getattr(module, "__file__", None) or ""
    return Path(path).read_text(encoding="utf-8") if path.endswith(".py") else ""


def _absolute(module: ModuleType, name: str) -> str:
    if not name.startswith("."):
        return name
    package = module.__name__
    if not hasattr(module, "__path__"):
        package = package.rpartition(".")[0]
    relative = name.lstrip(".")
    for _ in range(len(name) - len(relative) - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{relative}" if relative else package


class _Reader:
    """Picks the statements of one module that depend on the platform."""

    def __init__(self, module: ModuleType, tainted: set[str]):
        self.module = module
        self.tainted = tainted
        self.names: set[str] = set()
        #: Names that only a left-out statement of the present branch defines.
        self.lost: set[str] = set()

    def block(self, nodes: list[ast.stmt]) -> tuple[_Statement, ...]:
        """The statements of a module."""
        found = (self.statement(node, conditional=False) for node in nodes)
        return tuple(statement for statement in found if statement is not None)

    def statement(self, node: ast.stmt, conditional: bool) -> _Statement | None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return self.assign(name, value, node.lineno, conditional)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                return self.assign(name, value, node.lineno, conditional)
            case ast.ImportFrom():
                return self.imports(node)
            case ast.If() if self.depends(node.test):
                return self.branch(node)
        return None

    def depends(self, node: ast.AST) -> bool:
        return not self.tainted.isdisjoint(_loads(node))

    def assign(self, name, value, line, conditional) -> _Assign | None:
        if not (conditional or self.depends(value)):
            return None
        if not self.lost.isdisjoint(_loads(value)):
            return None
        if not _is_plain(vars(self.module).get(name, MISSING)):
            return None
        self.names.add(name)
        self.tainted.add(name)
        return _Assign(name, self.expression(value), line)

    def imports(self, node: ast.ImportFrom) -> _Import | None:
        origin = _absolute(self.module, "." * node.level + (node.module or ""))
        derived = _analyze(sys.modules.get(origin))
        pairs = tuple(
            (alias.name, alias.asname or alias.name)
            for alias in node.names
            if origin == ROCM or alias.name in derived
        )
        if not pairs:
            return None
        here = {name for _, name in pairs}
        self.names |= here
        self.tainted |= here
        return _Import(origin, pairs, node.lineno)

    def branch(self, node: ast.If) -> _If:
        body, rest = self.side(node.body)
        orelse, other_rest = self.side(node.orelse)
        test = self.expression(node.test)
        return _If(test, body, orelse, rest or other_rest, node.lineno)

    def side(self, nodes: list[ast.stmt]) -> tuple[tuple[_Statement, ...], bool]:
        """The statements of one side, and whether it has more than these."""
        statements: list[_Statement] = []
        rest = False
        lost = set(self.lost)
        for node in nodes:
            found = self.statement(node, conditional=True)
            if found is not None:
                statements.append(found)
            elif not _is_trivial(node):
                rest = True
                self.lost |= _binds(node)
        self.lost = lost
        return tuple(statements), rest

    def expression(self, node: ast.expr) -> CodeType:
        tree = ast.Expression(node)
        return compile(tree, self.module.__file__ or self.module.__name__, "eval")


def _is_trivial(node: ast.stmt) -> bool:
    match node:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
    return False


def _loads(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _binds(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        match child:
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def _is_plain(value: Any) -> bool:
    if value is MISSING or value is None:
        return True
    if isinstance(value, bool | int | float | str | bytes | enum.Enum):
        return True
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__dataclass_params__.frozen
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(
        value, torch.dtype | torch.device | torch.finfo | torch.iinfo
    )


def _evaluate(code: CodeType, module: ModuleType, line: int) -> Any:
    try:
        return eval(code, vars(module))
    except Exception as error:
        raise HarnessError(
            f"{module.__name__} line {line}: cannot compute this constant for the "
            f"pretended platform: {error!r}"
        ) from error


def _run(
    statements: tuple[_Statement, ...], module: ModuleType
) -> Iterator[tuple[str, Any]]:
    for statement in statements:
        match statement:
            case _Assign(name, value, line):
                yield name, _evaluate(value, module, line)
            case _Import(source, names):
                origin = sys.modules.get(source)
                for there, here in names:
                    yield here, getattr(origin, there, MISSING)
            case _If(test, body, orelse, _, line):
                taken = _evaluate(test, module, line)
                yield from _run(body if taken else orelse, module)


def _branches(
    statements: tuple[_Statement, ...], module: ModuleType
) -> Iterator[tuple[int, bool]]:
    for statement in statements:
        if isinstance(statement, _If):
            taken = bool(_evaluate(statement.test, module, statement.line))
            if statement.opaque:
                yield statement.line, taken
            yield from _branches(statement.body if taken else statement.orelse, module)


def _caches() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if not (name == "vllm" or name.startswith("vllm.")) or module is None:
            continue
        for value in list(vars(module).values()):
            yield from _cache_of(value)
            if isinstance(value, type) and value.__module__ == name:
                for member in list(vars(value).values()):
                    yield from _cache_of(member)


def _cache_of(function: Any) -> Iterator[Any]:
    # The type is compared, and nothing but functions is looked into: asking an
    # arbitrary object for an attribute may run its `__getattr__`.
    while type(function) is not functools._lru_cache_wrapper:
        if type(function) in (classmethod, staticmethod):
            function = function.__func__
        elif type(function) is FunctionType:
            function = vars(function).get("__wrapped__")
        else:
            return
    yield function
