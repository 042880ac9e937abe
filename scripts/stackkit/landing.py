"""Where a change lands, and whether what it lands in still fits it.

A merge that meets no conflict can still put a line into another function, or beside
the same fix that upstream made in other words.  Here a change is described by what it
does to each *place* of a file (a function, a class, a key of a YAML file), so that the
description does not depend on how a diff happens to align lines.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import symtable
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_C_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp")
_MODULE_NAMES = {*dir(builtins), "__file__", "__path__", "__builtins__", "__class__"}
# A line that says something: enough text, and more than one word.
_DISTINCT_WIDTH = 15
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@dataclass
class Delta:
    """Lines that a change adds to a place and takes from it, ends trimmed."""

    added: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)


def text_of(content: bytes | None) -> str:
    """The text of a file; nothing for no file, or one that is not text."""
    if content is None or b"\0" in content[:8000]:
        return ""
    return content.decode("utf-8", "replace")


def parses(path: str, text: str) -> bool:
    """Whether a file is no Python, or Python that parses."""
    return not any(fault.startswith("does not parse") for fault in faults(path, text))


@functools.lru_cache(maxsize=512)
def places(path: str, text: str, loose: bool = False) -> tuple[str, ...]:
    """The place of each line of ``text``; the empty string is the file itself.

    Args:
        path: Tells the language.
        text: The file.
        loose: Go by indentation, also where the syntax would tell more: what is to be
            compared with a file that does not parse has to be told in the same way.
    """
    lines = text.split("\n")
    if path.endswith((".py", ".pyi")):
        if loose or not parses(path, text):
            return _indented_places(lines)
        return _python_places(ast.parse(text), len(lines))
    if path.endswith((".yaml", ".yml")):
        return _yaml_places(lines)
    if path.endswith(_C_SUFFIXES):
        return _c_places(lines)
    return _section_places(path, lines)


def _indented_places(lines: list[str]) -> tuple[str, ...]:
    found: list[str] = []
    above: list[tuple[int, str]] = []
    for line in lines:
        text = line.strip()
        if text:
            indent = len(line) - len(line.lstrip())
            while above and above[-1][0] >= indent and text[0] not in ")]}":
                above.pop()
            kind = re.match(r"(?:async def|def|class) (\w+)", text)
            if kind:
                above.append((indent, kind[1]))
        found.append(".".join(name for _, name in above))
    return tuple(found)


def _python_places(tree: ast.Module, count: int) -> tuple[str, ...]:
    found = [""] * count

    def fill(node: ast.stmt, first: int, name: str) -> None:
        for line in range(first, (node.end_lineno or first) + 1):
            found[line - 1] = name

    def visit(node: ast.AST, name: str, in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}" if name else child.name
                lines = [x.lineno for x in child.decorator_list]
                fill(child, min([child.lineno, *lines]), own)
                visit(child, own, not isinstance(child, ast.ClassDef))
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not in_function:
                targets = child.targets if isinstance(child, ast.Assign) else []
                target = targets[0] if targets else getattr(child, "target", None)
                if isinstance(target, ast.Name):
                    own = f"{name}.{target.id}" if name else target.id
                    fill(child, child.lineno, own)
            else:
                visit(child, name, in_function)

    visit(tree, "", False)
    return tuple(found)


def _yaml_places(lines: list[str]) -> tuple[str, ...]:
    found = []
    above: list[tuple[int, str]] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            found.append("/".join(label for _, label in above))
            continue
        indent = len(line) - len(line.lstrip())
        while above and above[-1][0] >= indent:
            above.pop()
        found.append("/".join(label for _, label in above))
        label = text if text.startswith("- ") else text.split(":")[0]
        above.append((indent, label))
    return tuple(found)


def _c_places(lines: list[str]) -> tuple[str, ...]:
    found, now = [], ""
    for number, line in enumerate(lines):
        if re.match(r"[A-Za-z_]", line) and not re.match(
            r"(?:template|namespace|using|extern|public|private|protected)\b", line
        ):
            now = _c_name(lines[number : number + 8])
        found.append(now)
        if line.startswith("}"):
            now = ""
    return tuple(found)


def _c_name(lines: list[str]) -> str:
    """The name of what a declaration at the left margin declares."""
    head = re.split(r"[{;]", "\n".join(lines), maxsplit=1)[0]
    for name in re.findall(r"([A-Za-z_][\w:]*)\s*\(", head):
        if not name.startswith("__"):  # __launch_bounds__ and the like
            return name
    kind = re.match(r"(?:struct|class|enum|union)\b.*?(\w+)\s*(?::|$)", head, re.DOTALL)
    if kind:
        return kind[1]
    variable = re.search(r"(\w+)(?:\[[^\]]*\])?\s*(?:=|$)", head.split("=")[0] + "=")
    return variable[1] if variable else lines[0].strip()


def _section_places(path: str, lines: list[str]) -> tuple[str, ...]:
    """By headings: of Markdown, or of what has ``[section]`` lines."""
    pattern = r"#{1,6} \S" if path.endswith(".md") else r"\[[^\]]+\]\s*$"
    found, now = [], ""
    for line in lines:
        if re.match(pattern, line):
            now = line.strip()
        found.append(now)
    return tuple(found)


def change(
    path: str, before: bytes | None, after: bytes | None, loose: bool = False
) -> dict[str, Delta]:
    """What a change of one file does to each of its places; see :func:`places`."""
    old, new = (_by_place(path, text_of(side), loose) for side in (before, after))
    deltas = {}
    for place in old.keys() | new.keys():
        was, now = old.get(place, Counter()), new.get(place, Counter())
        if was != now:
            deltas[place] = Delta(now - was, was - now)
    return deltas


def _by_place(path: str, text: str, loose: bool) -> dict[str, Counter[str]]:
    return {place: Counter(lines) for place, lines in bodies(path, text, loose).items()}


@functools.lru_cache(maxsize=512)
def bodies(path: str, text: str, loose: bool = False) -> dict[str, tuple[str, ...]]:
    """The lines of each place, trimmed, in order."""
    found: dict[str, list[str]] = {}
    for place, line in zip(places(path, text, loose), text.split("\n"), strict=True):
        if line.strip():
            found.setdefault(place, []).append(line.strip())
    return {place: tuple(lines) for place, lines in found.items()}


def strays(meant: dict[str, Delta], landed: dict[str, Delta]) -> Iterator[str]:
    """Sentences about lines that a merge moved to another place.

    Args:
        meant: What the change does to the file it was made for.
        landed: What the merge did to the file it was merged into.
    """
    for verb, side in (("adds to", "added"), ("takes from", "removed")):
        lacking: dict[str, set[str]] = {}
        for place, delta in meant.items():
            for line in _less(getattr(delta, side), landed.get(place), side):
                lacking.setdefault(line, set()).add(place)
        for place, delta in sorted(landed.items()):
            extra = _less(getattr(delta, side), meant.get(place), side)
            # A bracket alone says nothing about where it belongs.
            moved = [x for x in extra if x in lacking and re.search(r"\w", x)]
            if moved:
                line = max(moved, key=lambda x: (is_distinct(x), len(x)))
                origins = sorted(x or "the top level" for x in lacking[line])
                yield (
                    f"{verb} {place or 'the top level'} what was made for "
                    f"{' or '.join(origins)}: {line!r}"
                )
            elif any(is_distinct(line) for line in extra):
                line = next(line for line in extra if is_distinct(line))
                yield f"{verb} {place or 'the top level'} what it never did: {line!r}"


def _less(have: Counter[str], other: Delta | None, side: str) -> Counter[str]:
    return have - getattr(other, side) if other else have


def is_distinct(line: str) -> bool:
    return len(line) >= _DISTINCT_WIDTH and len(_WORD.findall(line)) >= 2


def already_there(
    path: str, before: bytes | None, after: bytes | None, there: bytes | None
) -> tuple[int, int]:
    """How many distinct lines that a change adds the other file has, and of how many.

    Lines that the file had before the change do not count.
    """
    old = {line.strip() for line in text_of(before).split("\n")}
    new = {line.strip() for line in text_of(after).split("\n")}
    fresh = {line for line in new - old if is_distinct(line)}
    other = {line.strip() for line in text_of(there).split("\n")}
    return len(fresh & other), len(fresh)


@functools.lru_cache(maxsize=512)
def faults(path: str, text: str) -> frozenset[str]:
    """What makes a Python file wrong by itself, one sentence each."""
    if not path.endswith((".py", ".pyi")):
        return frozenset()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return frozenset({f"does not parse: {error}"})
    return frozenset(_duplicates(tree)) | frozenset(
        f"uses {name}, which nothing in it defines" for name in _undefined(path, text)
    )


def _duplicates(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            names = Counter(
                child.name
                for child in node.body
                if isinstance(
                    child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                )
            )
            for name, count in names.items():
                if count > 1:
                    yield f"defines {name} {count} times"


def _undefined(path: str, text: str) -> set[str]:
    if re.search(r"^\s*from \S+ import \*", text, re.MULTILINE):
        return set()
    top = symtable.symtable(text, path, "exec")
    tables, known, used = [top], set(_MODULE_NAMES), set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            bound = symbol.is_assigned() or symbol.is_imported()
            if bound and (table is top or symbol.is_declared_global()):
                known.add(symbol.get_name())
            elif symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return {name for name in used - known if not name.startswith("__")}


def code_words(path: str, text: str, lines: set[str]) -> set[str]:
    """Names that the given lines (trimmed) of a file use; no comments or strings."""
    if path.endswith((".py", ".pyi")):
        try:
            return _python_words(text, lines)
        except (tokenize.TokenError, SyntaxError):
            pass  # part of a file: then as any other text
    words: set[str] = set()
    for line in lines:
        bare = re.sub(r"//.*|#.*|\"[^\"]*\"|'[^']*'", "", line)
        words.update(_WORD.findall(bare))
    return words


def _python_words(text: str, lines: set[str]) -> set[str]:
    words = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.line.strip() in lines:
            if _WORD.fullmatch(token.string):
                words.add(token.string)
    return words


def all_words(content: bytes) -> set[bytes]:
    """Every word of a file, whatever it stands in."""
    return set(re.findall(rb"[A-Za-z_][A-Za-z0-9_]{3,}", content))


def imports(path: str, text: str) -> set[tuple[str, str]]:
    """(module, name) that a Python file imports from its own project."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set()
    package = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found.update((module, alias.name) for alias in node.names)
    return found


@functools.lru_cache(maxsize=512)
def exports(text: str) -> frozenset[str] | None:
    """Names that a module has at its top level; None if they cannot be told."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names.update(a.asname or a.name.split(".")[0] for a in node.names)
            else:
                names.update(
                    x.id
                    for x in ast.walk(node)
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                )
                for part in ("body", "orelse", "finalbody"):
                    visit(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    visit(handler.body)

    visit(tree.body)
    return None if names & {"*", "__getattr__"} else frozenset(names)
