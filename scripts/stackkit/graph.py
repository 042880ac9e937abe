"""Which patches need which: computed, and compared with what they declare.

A patch needs another one by its *text* if a merge onto the base without that one
conflicts or goes astray, and by *names* if it uses what that one brought into vLLM, or
imports a module that it made, tests included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import apply, carry, git, landing, patchfile, trailers
from .apply import Applied
from .carry import CLEAN, MERGED, Carrier
from .pins import Pin, Project
from .report import Progress, Step
from .target import Target
from .worktree import BASE, Tree


@dataclass(frozen=True)
class Node:
    """One patch and what it needs, nearest needs only."""

    patch: str
    text: tuple[str, ...]  # minimal, by merge
    names: dict[str, tuple[str, ...]]  # by patch: what it uses of it
    declared: tuple[str, ...]
    missing: tuple[str, ...] = field(default=())  # needed, and not declared
    unfound: tuple[str, ...] = field(default=())  # declared, and no need was found

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.text, *self.names)))

    @property
    def alone(self) -> bool:
        """Whether it can be applied to the base by itself."""
        return not self.needs


def graph(project: Project, pin: Pin, *, progress: Progress, step: Step) -> list[Node]:
    """The nodes of every patch, in series order; nothing is kept.

    Args:
        project, pin: The stack.
        progress: Told of download progress.
        step: Told which patch is looked at.
    """
    patches = patchfile.load(project.patches(pin))
    tree = Tree(project, pin)
    step(f"base {pin.tag}")
    with tree.rehearsal(None, progress):
        repository = tree.repository
        stack = apply.known_commits(tree, patches)
        here = Target(pin, True, "", "", None, None)
        with repository.merging() as merging:
            carrier = Carrier(repository, merging, stack, pin.tree, here)
            names = _names(carrier, stack)
            search = _Search(carrier, stack, step)
            nodes = []
            for applied in stack:
                step(applied.patch.name)
                nodes.append(search.node(applied, names[applied.patch.name]))
    return _compared(nodes)


def _compared(nodes: list[Node]) -> list[Node]:
    needs = {node.patch: set(node.needs) for node in nodes}
    declared = {node.patch: set(node.declared) for node in nodes}
    found = []
    for node in nodes:
        told, needed = closure(declared, [node.patch]), closure(needs, [node.patch])
        # What a declared patch needs is declared by it.
        missing = [x for x in node.needs if x not in told]
        unfound = [x for x in node.declared if x not in needed]
        found.append(
            Node(
                node.patch,
                node.text,
                node.names,
                node.declared,
                tuple(missing),
                tuple(unfound),
            )
        )
    return found


def closure(edges: dict[str, set[str]], names: Iterable[str]) -> set[str]:
    """All that ``names`` lead to, themselves left out unless led to."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        for other in edges.get(queue.pop(), ()):
            if other not in found:
                found.add(other)
                queue.append(other)
    return found


class _Search:
    """Finds minimal prerequisites by trying merges without them."""

    def __init__(self, carrier: Carrier, stack: list[Applied], step: Step):
        self.carrier = carrier
        self.stack = stack
        self.step = step
        base = carrier.repository.resolve(BASE)
        assert base is not None
        self.tips: dict[tuple[str, ...], str | None] = {(): base}
        self.needs: dict[str, set[str]] = {}

    def node(self, applied: Applied, names: dict[str, tuple[str, ...]]) -> Node:
        patch = applied.patch
        files = {change.path for change in patch.files}
        # A merge can only stumble over those that touch the same files.
        wanted = [
            other.patch.name
            for other in self.stack[: self.stack.index(applied)]
            if files & {change.path for change in other.patch.files}
        ]
        # By name it needs some anyway; what else does the text need?
        fixed = self._with_needs(names)
        for name in reversed(list(wanted)):
            rest = [x for x in wanted if x != name]
            if name in self._with_needs(rest) | fixed:
                continue
            if self._goes(applied, self._with_needs(rest) | fixed):
                wanted = rest
        kept = set(wanted) - closure(self.needs, wanted)
        text = tuple(
            x for x in wanted if x in kept and self._is_needed(applied, x, names)
        )
        self.needs[patch.name] = {*text, *names}
        declared = tuple(trailers.depends_on(patch.trailers))
        return Node(patch.name, text, names, declared)

    def _is_needed(self, applied: Applied, name: str, names: Iterable[str]) -> bool:
        """Whether the text needs ``name``, which may be there for its names only."""
        if name not in self._with_needs(names):
            return True
        return not self._goes(applied, self._with_needs(names) - {name})

    def _with_needs(self, names: Iterable[str]) -> set[str]:
        return {*names, *closure(self.needs, names)}

    def _goes(self, applied: Applied, names: set[str]) -> bool:
        tip = self._tip(
            tuple(x.patch.name for x in self.stack if x.patch.name in names)
        )
        return tip is not None and self._merge(applied, tip) is not None

    def _tip(self, names: tuple[str, ...]) -> str | None:
        """The base with some patches on it, or None if they do not go together."""
        if names not in self.tips:
            below = self._tip(names[:-1])
            last = next(x for x in self.stack if x.patch.name == names[-1])
            self.tips[names] = None if below is None else self._merge(last, below)
        return self.tips[names]

    def _merge(self, applied: Applied, tip: str) -> str | None:
        outcome = self.carrier.judge(applied, tip)
        if outcome.verdict not in (CLEAN, MERGED) or outcome.tree is None:
            return None
        return apply.moved_commit(
            self.carrier.repository, applied.commit, outcome.tree, tip
        )


def _names(
    carrier: Carrier, stack: list[Applied]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each patch, the names it uses that an earlier one brought, by patch."""
    used: dict[str, set[str]] = {}
    brought: dict[str, set[str]] = {}
    for applied in stack:
        name = applied.patch.name
        used[name], brought[name] = set(), set()
        for path, (_, new) in carrier.changed(applied).items():
            if new.blob == git.NO_BLOB or not path.endswith(carry.CODE):
                continue
            words = carrier.used_words(applied.commit, path)
            used[name] |= words - _bound(carrier, applied, path)
            if not path.startswith("tests/"):
                brought[name] |= words
    everything = set().union(*used.values(), *brought.values())
    known = carrier.words_in(carrier.old, everything)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    first: dict[str, str] = {}
    makers: dict[str, str] = {}
    for applied in stack:
        name = applied.patch.name
        needs: dict[str, set[str]] = {}
        for word in used[name] - known:
            if word in first:
                needs.setdefault(first[word], set()).add(word)
        for path in _imported_files(carrier, applied):
            if path in makers:
                module = path.removesuffix(".py").removesuffix("/__init__")
                word = module.rpartition("/")[2]
                needs.setdefault(makers[path], set()).add(word)
        found[name] = {other: tuple(sorted(words)) for other, words in needs.items()}
        for word in brought[name] - known:
            first.setdefault(word, name)
        for path in carrier.changed(applied):
            if path not in carrier.entries(carrier.old):
                makers.setdefault(path, name)
    return found


def _imported_files(carrier: Carrier, applied: Applied) -> set[str]:
    """Paths of the modules that a patch makes files import."""
    found: set[str] = set()
    for path, sides in carrier.changed(applied).items():
        if not path.endswith(".py"):
            continue
        was, now = (
            landing.imports(path, landing.text_of(carrier.blob(side.blob)))
            if side.blob != git.NO_BLOB
            else set()
            for side in sides
        )
        for module, name in now - was:
            stem = module.replace(".", "/")
            stems = (stem, f"{stem}/{name}") if name else (stem,)
            found.update(f"{x}{end}" for x in stems for end in (".py", "/__init__.py"))
    return found


def _bound(carrier: Carrier, applied: Applied, path: str) -> set[str]:
    """Names that a patch itself binds in a Python file: its own, whoever has them.

    That a variable has the name of a parameter does not make the parameter its own.
    """
    after = landing.text_of(carrier.read(applied.tree, path))
    try:
        tree = ast.parse(after) if path.endswith(".py") else None
    except (SyntaxError, ValueError):
        tree = None
    declared: set[str] = set()
    variables: set[str] = set()
    keywords: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            declared.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            variables.add(node.id)
        elif isinstance(node, ast.arg):
            declared.add(node.arg)
        elif isinstance(node, ast.keyword) and node.arg:
            keywords.add(node.arg)
    return (declared | (variables - keywords)) - _imported(tree)


def _imported(tree: ast.Module | None) -> set[str]:
    return {
        alias.name
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def dot(nodes: list[Node]) -> str:
    """The graph for Graphviz; what is not declared is red, what was not found gray."""
    lines = ["digraph stack {", "  rankdir=LR;", "  node [shape=box];"]
    for node in nodes:
        lines.append(f'  "{node.patch}";')
        for other in node.needs:
            color = " [color=red]" if other in node.missing else ""
            lines.append(f'  "{node.patch}" -> "{other}"{color};')
        for other in node.unfound:
            lines.append(f'  "{node.patch}" -> "{other}" [color=gray, style=dashed];')
    return "\n".join([*lines, "}"])
