"""Python source as data: modules, names and type hints, resolved without importing anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

BUILTIN = {"bool", "int", "float", "str", "dict", "list", "tuple", "set", "object", "type"}


@dataclass(frozen=True, eq=False)
class Definition:
    """A class, a function, or the right side of an assignment, and the module it stands in."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Hint:
    """One alternative of a type hint: a kind, and the arguments of a generic one."""

    kind: str  # a builtin's name, none, any, literal, dataclass, dict_subclass, other
    name: str = ""
    values: tuple[object, ...] = ()  # of a literal
    args: tuple[frozenset[Hint], ...] = ()  # of list[...], tuple[...], dict[...]


@dataclass(eq=False)
class Sources:
    """The modules of one release, parsed when first asked for."""

    texts: Mapping[str, str]  # file name in the wheel -> text
    _names: dict[str, dict[str, ast.AST]] = field(default_factory=dict)

    def file(self, module: str) -> str | None:
        """File name of a module in the wheel, or None where it is not there."""
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in self.texts:
                return name
        return None

    @cache  # noqa: B019  # one object for one run of the tool
    def tree(self, module: str) -> ast.Module:
        """Syntax tree of a module; KeyError where it is not in the wheel."""
        name = self.file(module)
        if name is None:
            raise KeyError(module)
        return ast.parse(self.texts[name])

    def names(self, module: str) -> dict[str, ast.AST]:
        """What the names at module level stand for: definitions, values, import statements."""
        if module not in self._names:
            found: dict[str, ast.AST] = {}
            for node in _module_statements(self.tree(module).body):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found[node.name] = node
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            found[target.id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    if node.value is not None:
                        found[node.target.id] = node.value
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    for alias in node.names:
                        if alias.name == "*" and isinstance(node, ast.ImportFrom):
                            found.update(self._starred(module, node))
                            continue
                        found[alias.asname or alias.name.split(".")[0]] = node
            self._names[module] = found
        return self._names[module]

    def _starred(self, module: str, node: ast.ImportFrom) -> dict[str, ast.AST]:
        """Names of ``from x import *``, each as an import of its own."""
        origin = self._origin(module, node)
        if self.file(origin) is None:
            return {}
        return {
            name: ast.ImportFrom(origin, [ast.alias(name)], 0)
            for name in self.names(origin)
            if not name.startswith("_")
        }

    def lookup(self, module: str, name: str) -> Definition | None:
        """Follow a name through imports to its definition; None where it leaves vLLM."""
        for step in range(20):
            if self.file(module) is None:
                return None
            node = self.names(module).get(name)
            if node is None and step and "__getattr__" not in self.names(module):
                raise LookupError(f"{module} has no {name} that can be read")
            if node is None:
                return None
            if isinstance(node, ast.Import):
                return None
            if not isinstance(node, ast.ImportFrom):
                return Definition(module, node)
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            origin = self._origin(module, node)
            if self.file(f"{origin}.{alias.name}"):
                return None  # a module, not a name
            module, name = origin, alias.name
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        name = self.file(module) or ""
        parts = module.split(".")
        if not name.endswith("__init__.py"):
            parts = parts[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def get_class(self, module: str, name: str) -> tuple[str, ast.ClassDef]:
        """Module and node of a class; LookupError where the name is none."""
        found = self.lookup(module, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            raise LookupError(f"{name} in {module} is no class of vLLM")
        return found.module, found.node

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Base classes that vLLM itself defines."""
        for base in node.bases:
            if isinstance(base, ast.Name):
                found = self.lookup(module, base.id)
                if found and isinstance(found.node, ast.ClassDef):
                    yield found.module, found.node

    def hints(self, module: str, node: ast.AST) -> frozenset[Hint]:
        """The alternatives of an annotation."""
        if isinstance(node, ast.Constant):
            if node.value is None:
                return frozenset({Hint("none")})
            if isinstance(node.value, str):
                return self.hints(module, ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.hints(module, node.left) | self.hints(module, node.right)
        if isinstance(node, ast.Name):
            return self._named_hint(module, node.id)
        if isinstance(node, ast.Subscript):
            return self._generic_hint(module, node)
        return frozenset({Hint("other", ast.unparse(node))})

    def _named_hint(self, module: str, name: str) -> frozenset[Hint]:
        found = self.lookup(module, name)
        if found is None:
            if name in BUILTIN:
                return frozenset({Hint(name)})
            return frozenset({Hint("any" if name == "Any" else "other", name)})
        if isinstance(found.node, ast.ClassDef):
            kind = "other"
            if is_dataclass(found.node):
                kind = "dataclass"
            elif any(re.match(r"dict\b", ast.unparse(b)) for b in found.node.bases):
                kind = "dict_subclass"
            return frozenset({Hint(kind, name)})
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return frozenset({Hint("other", name)})
        return self.hints(found.module, found.node)

    def _generic_hint(self, module: str, node: ast.Subscript) -> frozenset[Hint]:
        base = ast.unparse(node.value).rsplit(".", 1)[-1]
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if base == "Literal":
            return frozenset({Hint("literal", values=tuple(self.literals(module, items)))})
        if base in {"Annotated", "SkipValidation", "Required", "Final"}:
            return self.hints(module, items[0])
        if base == "Union":
            return frozenset().union(*(self.hints(module, i) for i in items))
        if base == "Optional":
            return self.hints(module, items[0]) | {Hint("none")}
        if base in {"list", "tuple", "set", "dict", "type"}:
            args = tuple(
                frozenset({Hint("ellipsis")})
                if isinstance(i, ast.Constant) and i.value is Ellipsis
                else self.hints(module, i)
                for i in items
            )
            return frozenset({Hint(base, args=args)})
        return frozenset({Hint("other", ast.unparse(node))})

    def literals(self, module: str, items: list[ast.expr]) -> Iterator[object]:
        """Values of a Literal, nested aliases included."""
        for item in items:
            if isinstance(item, ast.Constant):
                yield item.value
            elif isinstance(item, ast.Name):
                for hint in self._named_hint(module, item.id):
                    yield from hint.values
            elif isinstance(item, ast.Subscript):
                for hint in self._generic_hint(module, item):
                    yield from hint.values
            else:
                raise LookupError(f"Literal holds {ast.unparse(item)} in {module}")


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is decorated as a dataclass, vLLM's own ``config`` included."""
    names = (
        ast.unparse(d.func if isinstance(d, ast.Call) else d).rsplit(".", 1)[-1]
        for d in node.decorator_list
    )
    return any(name in {"config", "dataclass"} for name in names)


def is_enum(node: ast.ClassDef) -> bool:
    """Whether a class is an enumeration, by the name of its bases or metaclass."""
    words = [ast.unparse(b) for b in node.bases] + [ast.unparse(k.value) for k in node.keywords]
    return any("Enum" in w for w in words)


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported; of ``if TYPE_CHECKING`` the else part.

    What only a type checker sees comes first, so that the run-time part overrides it.
    """
    for node in body:
        if isinstance(node, ast.If):
            yield from _module_statements(node.body)
            yield from _module_statements(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _module_statements(node.body)
        else:
            yield node
