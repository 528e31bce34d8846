"""Options of ``vllm serve`` from the source: what its own parser would hold, nothing imported.

vLLM makes its options from the fields of its configuration classes (``get_kwargs`` in
``vllm/engine/arg_utils.py``) and from ``add_argument`` calls. The first is followed rule by rule
in :meth:`Reader.kwargs`, the second by walking the statements of the functions that add them
(:class:`_Walk`). Tests compare the result with dumps of the real parsers of two releases.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.engine_data.source import Definition, Hint, Sources, is_dataclass, is_enum

ARG_UTILS = "vllm.engine.arg_utils"
CLI_ARGS = (
    "vllm.entrypoints.common.cli_args",  # since 0.33
    "vllm.entrypoints.launchers.cli_args",  # since 0.29
    "vllm.entrypoints.openai.cli_args",
)
SERVE = ("vllm.entrypoints.cli.serve",)
SUPPRESS = "==SUPPRESS=="
BOOLEAN = "BooleanOptionalAction"


@dataclass(frozen=True)
class Opaque:
    """A value that only running vLLM would give; its source."""

    source: str


@dataclass(frozen=True)
class Kind:
    """What converts an option's text: int, float, str, json, loads, dict_or_str, lower, ...

    ``json`` reports a bad value by name, ``loads`` by JSON's own message; ``config`` is a JSON
    object checked against the fields of the class ``of``.
    """

    name: str
    optional: bool = False  # "" and "None" stand for no value
    of: str = ""


@dataclass(frozen=True)
class Class:
    """A class of vLLM's, as a value."""

    module: str
    node: ast.ClassDef


@dataclass(frozen=True)
class Bound:
    """A method and what it was taken from."""

    owner: object
    name: str


class Reader:
    """Reads one release."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        rules = sources.lookup(ARG_UTILS, "_compute_kwargs")
        if rules is None:
            raise LookupError("vllm/engine/arg_utils.py has no _compute_kwargs")
        text = ast.unparse(rules.node)
        self.human_int = _set_with(rules.node, "max_num_batched_tokens")
        self.none_choice: str | None = None if ".append(None)" in text else "None"
        self.bare_or_value = "{bool, str, type(None)}" in text
        self.dict_subclasses = "is_dict_subclass" in text
        # config class -> names of its fields; filled while options are read
        self.configs: dict[str, list[str]] = {}

    def options(self) -> list[dict[str, Any]]:
        """Every option of ``vllm serve``, in the order of its parser."""
        module = next(m for m in CLI_ARGS if self.sources.file(m))
        parser = _Parser()
        parser.add(["-h", "--help"], {"action": "help", "default": SUPPRESS})
        function = self.sources.lookup(module, "make_arg_parser")
        if function is None or not isinstance(function.node, ast.FunctionDef):
            raise LookupError(f"{module} has no make_arg_parser")
        _Walk(self, function.module, {"parser": parser}).body(function.node.body)
        for name in SERVE:
            command, node = self.sources.get_class(name, "ServeSubcommand")
            init = next(
                n
                for n in node.body
                if isinstance(n, ast.FunctionDef) and n.name == "subparser_init"
            )
            walk = _Walk(self, command, {"serve_parser": parser})
            for statement in init.body:
                if isinstance(statement, ast.Expr):
                    walk.statement(statement)
        return parser.options

    def made(self, value: Opaque) -> Any:
        """What a default comes to, where a member of an enumeration or an empty config is made."""
        name, _, member = value.source.partition(".")
        for module in (ARG_UTILS, "vllm.config"):
            found = self.sources.lookup(module, name.removesuffix("()"))
            if found is not None and isinstance(found.node, ast.ClassDef):
                for statement in found.node.body if is_enum(found.node) else ():
                    if isinstance(statement, ast.Assign) and member in map(
                        ast.unparse, statement.targets
                    ):
                        return _Walk(self, found.module, {}).value(statement.value)
                return {} if name.endswith("()") else None
        return {} if name.endswith("()") else None

    # -- the fields of a configuration class, as get_kwargs turns them into options

    def fields(self, module: str, node: ast.ClassDef) -> dict[str, tuple[str, ast.AnnAssign]]:
        """Fields of a dataclass and of its bases: name -> module and statement."""
        found: dict[str, tuple[str, ast.AnnAssign]] = {}
        for base_module, base in self.sources.bases(module, node):
            if is_dataclass(base):
                found.update(self.fields(base_module, base))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotation = ast.unparse(statement.annotation)
                if annotation.startswith(("ClassVar", "InitVar")):
                    continue
                found[statement.target.id] = (module, statement)
        return found

    def note_config(self, module: str, name: str) -> None:
        """Remember the field names of a configuration class, nested ones too."""
        if name in self.configs:
            return
        try:
            module, node = self.sources.get_class(module, name)
        except LookupError:
            return
        fields = self.fields(module, node)
        self.configs[name] = sorted(fields)
        init_only = [
            s.target.id
            for s in node.body
            if isinstance(s, ast.AnnAssign)
            and isinstance(s.target, ast.Name)
            and ast.unparse(s.annotation).startswith("InitVar")
        ]
        self.configs[name] = sorted({*fields, *init_only})

    def kwargs(self, module: str, node: ast.ClassDef) -> dict[str, dict[str, Any]]:
        """vLLM's ``get_kwargs``: field name -> keywords for ``add_argument``."""
        return {
            name: self._field(name, origin, statement, Class(origin, node))
            for name, (origin, statement) in self.fields(module, node).items()
        }

    def _field(
        self, name: str, module: str, statement: ast.AnnAssign, owner: Class
    ) -> dict[str, Any]:
        hints = self.sources.hints(module, statement.annotation)
        result: dict[str, Any] = {"help": ""}
        result.update(self._default(module, statement.value, owner))
        if self.dict_subclasses:
            hints = frozenset(Hint("dict") if h.kind == "dict_subclass" else h for h in hints)
        kinds = {h.kind for h in hints}
        config = next((h for h in hints if h.kind == "dataclass"), None)
        if config is not None:
            self.note_config(module, config.name)
            result["type"] = Kind("config", of=config.name)
        elif self.bare_or_value and kinds == {"bool", "str", "none"}:
            result.update(type=Kind("str"), nargs="?")
        elif "bool" in kinds:
            result["action"] = BOOLEAN
        elif "literal" in kinds:
            result.update(_literal(hints))
        elif kinds & {"tuple", "list", "set"}:
            result.update(self._collection(hints))
        elif "int" in kinds:
            if name == "max_model_len":
                result["type"] = Kind("human_int_or_auto")
            elif name in self.human_int:
                result["type"] = Kind("human_int")
            else:
                result["type"] = Kind("int")
        elif "float" in kinds:
            result["type"] = Kind("float")
        elif "dict" in kinds:
            foreign = kinds & {"str", "other", "any", "dict_subclass"}
            result["type"] = Kind("dict_or_str" if foreign else "json")
        else:
            result["type"] = Kind("str")
        if "none" in kinds and "bool" not in kinds:
            kind = result["type"]
            result["type"] = Kind(kind.name, optional=True, of=kind.of)
            if result.get("choices"):
                result["choices"] = [*result["choices"], self.none_choice]
        return result

    def _collection(self, hints: frozenset[Hint]) -> dict[str, Any]:
        for kind in ("tuple", "list", "set"):
            for hint in hints:
                if hint.kind != kind:
                    continue
                inner = hint.args[0] if hint.args else frozenset({Hint("str")})
                literal = next((h for h in inner if h.kind == "literal"), None)
                ellipsis = any(h.kind == "ellipsis" for a in hint.args for h in a)
                nargs: str | int = "+" if kind != "tuple" or ellipsis else len(hint.args)
                if literal is not None:
                    return {**_literal(frozenset({literal})), "nargs": nargs}
                names = {h.kind for h in inner}
                name = names.pop() if len(names) == 1 else "str"
                return {"type": Kind(name if name in {"int", "float"} else "str"), "nargs": nargs}
        raise LookupError(f"no collection in {hints}")

    def _default(self, module: str, node: ast.expr | None, owner: Class) -> dict[str, Any]:
        if node is None:
            return {"default": None}
        walk = _Walk(self, module, {}, owner=owner)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in (
            "Field",
            "field",
        ):
            result: dict[str, Any] = {}
            if node.args:
                result["default"] = walk.value(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "default":
                    result["default"] = walk.value(keyword.value)
                elif keyword.arg == "default_factory":
                    result["default"] = walk.factory(keyword.value)
                elif keyword.arg in {"gt", "ge", "lt", "le"}:
                    result.setdefault("range", {})[keyword.arg] = walk.value(keyword.value)
            result.setdefault("default", None)
            return result
        return {"default": walk.value(node)}


def _literal(hints: frozenset[Hint]) -> dict[str, Any]:
    literal = next(h for h in hints if h.kind == "literal")
    values = sorted(literal.values)  # type: ignore[type-var]  # all of one type
    kind = Kind(type(literal.values[0]).__name__)
    if any(h.kind == "str" for h in hints):
        return {"type": kind, "known": values}
    return {"type": kind, "choices": values}


def _set_with(node: ast.AST, member: str) -> set[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Set | ast.Tuple | ast.List):
            names = {e.value for e in inner.elts if isinstance(e, ast.Constant)}
            if member in names:
                return {n for n in names if isinstance(n, str)}
    return {member}


class _Parser:
    """Stands for vLLM's parser and its groups: collects what is added."""

    def __init__(self, options: list[dict[str, Any]] | None = None, group: str = "") -> None:
        self.options: list[dict[str, Any]] = [] if options is None else options
        self.group = group

    def add(self, names: list[str], keywords: dict[str, Any]) -> None:
        """One ``add_argument`` call."""
        option = {k: v for k, v in keywords.items() if k not in {"help", "metavar", "const"}}
        action = option.pop("action", "store")
        if action == "store_true":
            option.setdefault("default", False)
        if isinstance(action, Opaque | Class):
            action = action.source if isinstance(action, Opaque) else action.node.name
        if action == BOOLEAN:
            names = [
                spelling
                for n in names
                for spelling in ([n, f"--no-{n[2:]}"] if n.startswith("--") else [n])
            ]
            option.pop("type", None)
        positional = not names[0].startswith("-")
        first = next((n for n in names if n.startswith("--")), names[0])
        option["dest"] = option.get("dest") or first.lstrip("-").replace("-", "_")
        option["opts"] = [] if positional else names
        option["action"] = action
        option["group"] = self.group or ("positional arguments" if positional else "options")
        self.options.append(option)


class _Walk:
    """Follows the statements of one function, with values where the source gives them."""

    def __init__(
        self,
        reader: Reader,
        module: str,
        names: dict[str, Any],
        owner: Class | None = None,
        cls: Class | None = None,
    ) -> None:
        self.reader = reader
        self.sources = reader.sources
        self.module = module
        self.names = dict(names)
        self.owner = owner  # the class whose body is read
        self.cls = cls  # the class that ``cls`` stands for
        self.returned: Any = None

    # -- statements

    def body(self, statements: list[ast.stmt]) -> bool:
        """Follow statements; True once one of them returned."""
        return any(self.statement(s) for s in statements)

    def statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Return):
            self.returned = self.value(node.value) if node.value else None
            return True
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            value = self.value(ast.BinOp(_load(node.target), node.op, node.value))
            self._assign(node.target, value)
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.If):
            return self.body(node.body if self.value(node.test) else node.orelse)
        elif isinstance(node, ast.For):
            for item in self.value(node.iter):
                self._assign(node.target, item)
                if self.body(node.body):
                    return True
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    self.value(target.value).pop(self.value(target.slice), None)
        return False

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            for inner, item in zip(target.elts, value, strict=True):
                self._assign(inner, item)
        elif isinstance(target, ast.Subscript):
            self.value(target.value)[self.value(target.slice)] = value

    # -- expressions

    def value(self, node: ast.expr) -> Any:
        """Value of an expression; Opaque where only running it would tell."""
        method: Callable[[Any], Any] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method(node) if method else Opaque(ast.unparse(node))

    def factory(self, node: ast.expr) -> Any:
        """What a default factory makes."""
        if isinstance(node, ast.Lambda):
            return self.value(node.body)
        if isinstance(node, ast.Name) and node.id in {"dict", "list", "set", "tuple"}:
            return {"dict": {}, "list": [], "set": [], "tuple": []}[node.id]
        return Opaque(f"{ast.unparse(node)}()")

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _list(self, node: ast.List) -> Any:
        return [self.value(e) for e in node.elts]

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Any:
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                result.update(self.value(value))
            else:
                result[self.value(key)] = self.value(value)
        return result

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        parts = []
        for part in node.values:
            value = self.value(part.value if isinstance(part, ast.FormattedValue) else part)
            if isinstance(value, Opaque):
                return Opaque(ast.unparse(node))
            parts.append(str(value))
        return "".join(parts)

    def _lambda(self, node: ast.Lambda) -> Any:
        return Kind("lower" if ".lower()" in ast.unparse(node.body) else "call")

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.names:
            return self.names[node.id]
        if node.id in {"int", "float", "str"} and not self.sources.names(self.module).get(node.id):
            return Kind(node.id)
        if self.owner is not None:  # a name of the same class body, such as DEFAULT_BLOCK_SIZE
            for statement in self.owner.node.body:
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and statement.target.id == node.id
                    and statement.value is not None
                ):
                    return self.value(statement.value)
        return self._definition(self.sources.lookup(self.module, node.id), node)

    def _definition(self, found: Definition | None, node: ast.expr) -> Any:
        if found is None:
            return Opaque(ast.unparse(node))
        if isinstance(found.node, ast.ClassDef):
            return Class(found.module, found.node)
        if isinstance(found.node, ast.FunctionDef):
            special = {
                "human_readable_int": Kind("human_int"),
                "human_readable_int_or_auto": Kind("human_int_or_auto"),
                "union_dict_and_str": Kind("dict_or_str"),
            }
            return special.get(found.node.name, Kind("call", of=found.node.name))
        if isinstance(found.node, ast.expr):
            return _Walk(self.reader, found.module, {}).value(found.node)
        return Opaque(ast.unparse(node))

    def _attribute(self, node: ast.Attribute) -> Any:
        known = {
            "argparse.BooleanOptionalAction": BOOLEAN,
            "argparse.SUPPRESS": SUPPRESS,
            "json.loads": Kind("loads"),
            "sys.argv": ["vllm", "serve"],
            "ssl.CERT_NONE": 0,
            "current_platform.device_type": "cuda",
            "envs.VLLM_SERVER_DEV_MODE": False,
            "envs.VLLM_LOGGING_CONFIG_PATH": None,
        }
        text = ast.unparse(node)
        if text in known:
            return known[text]
        owner = self.value(node.value)
        if isinstance(owner, Class):
            return self._class_attribute(owner, node)
        if isinstance(owner, Opaque):
            return Opaque(text)
        return Bound(owner, node.attr)

    def _class_attribute(self, owner: Class, node: ast.Attribute) -> Any:
        if node.attr == "__name__":
            return owner.node.name
        if node.attr == "__doc__":
            return ""
        if is_enum(owner.node):
            return Opaque(f"{owner.node.name}.{node.attr}")
        fields = self.reader.fields(owner.module, owner.node)
        if node.attr in fields:
            module, statement = fields[node.attr]
            walk = self.reader._default(module, statement.value, Class(module, owner.node))
            return walk["default"]
        if self._method(owner, node.attr):
            return Bound(owner, node.attr)
        return Opaque(ast.unparse(node))

    def _method(
        self, owner: Class, name: str, skip: ast.ClassDef | None = None
    ) -> tuple[Class, ast.FunctionDef] | None:
        line = [(owner.module, owner.node)]
        while line:
            module, node = line.pop(0)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name and node is not skip:
                    return Class(module, node), item
            line.extend(self.sources.bases(module, node))
        return None

    def _subscript(self, node: ast.Subscript) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, Opaque | Class):
            return Opaque(ast.unparse(node))
        if isinstance(node.slice, ast.Slice):
            low, high = (self.value(e) if e else None for e in (node.slice.lower, node.slice.upper))
            return owner[low:high]
        return owner[self.value(node.slice)]

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, Opaque | Class | Kind) or isinstance(right, Opaque | Class | Kind):
            return Opaque(ast.unparse(node))
        operations: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
            ast.Add: lambda a, b: a + b,
            ast.Sub: lambda a, b: a - b,
            ast.Mult: lambda a, b: a * b,
            ast.Pow: lambda a, b: a**b,
            ast.LShift: lambda a, b: a << b,
        }
        operation = operations.get(type(node.op))
        return operation(left, right) if operation else Opaque(ast.unparse(node))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return Opaque(ast.unparse(node))

    def _boolop(self, node: ast.BoolOp) -> Any:
        values = [self.value(v) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)

    def _compare(self, node: ast.Compare) -> Any:
        left, right = self.value(node.left), self.value(node.comparators[0])
        if isinstance(right, Opaque) or isinstance(left, Opaque):
            return Opaque(ast.unparse(node))
        operator = node.ops[0]
        if isinstance(operator, ast.In):
            return left in right
        if isinstance(operator, ast.NotIn):
            return left not in right
        if isinstance(operator, ast.Eq):
            return left == right
        if isinstance(operator, ast.Is | ast.IsNot):
            return (left is right) == isinstance(operator, ast.Is)
        return Opaque(ast.unparse(node))

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        items = self.value(node.generators[0].iter)
        if isinstance(items, Opaque | Class):
            return Opaque(ast.unparse(node))
        result = []
        for item in items:
            self._assign(node.generators[0].target, item)
            if all(self.value(c) for c in node.generators[0].ifs):
                result.append(self.value(node.elt))
        return result

    _generatorexp = _listcomp

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name == "get_kwargs":
            owner = self.value(node.args[0])
            return self.reader.kwargs(owner.module, owner.node)
        if name in {"optional_type", "parse_type"}:
            kind = self.value(node.args[0])
            json = "json" if kind.name == "loads" else kind.name
            return Kind(json, optional=name == "optional_type" or kind.optional, of=kind.of)
        if name == "get_args":
            hints = self.sources.hints(self.module, node.args[0])
            return [v for h in hints for v in h.values]
        if name == "permutations":
            size = next(self.value(k.value) for k in node.keywords if k.arg == "r")
            return list(itertools.permutations(self.value(node.args[0]), size))
        if name == "get_field":
            owner, wanted = self.value(node.args[0]), self.value(node.args[1])
            module, statement = self.reader.fields(owner.module, owner.node)[wanted]
            return self.reader._default(module, statement.value, owner)["default"]
        if name in {"list", "sorted", "int", "set"} and node.args:
            value = self.value(node.args[0])
            if isinstance(value, Opaque):
                return value
            if name == "int":
                return int(value)
            return sorted(value) if name == "sorted" else list(value)
        if name.startswith("super()."):
            return self._super(name.split(".", 1)[1], node)
        function = self.value(node.func)
        if isinstance(function, Bound):
            return self._bound(function, node)
        return Opaque(ast.unparse(node))

    def _super(self, name: str, node: ast.Call) -> Any:
        assert self.cls is not None
        assert self.owner is not None
        found = self._method(self.cls, name, skip=self.owner.node)
        if found is None:
            return Opaque(ast.unparse(node))
        return self._enter(found[0], found[1], node, self.cls)

    def _bound(self, function: Bound, node: ast.Call) -> Any:
        owner, name = function.owner, function.name
        if isinstance(owner, _Parser):
            if name == "add_argument_group":
                title = next((self.value(k.value) for k in node.keywords if k.arg == "title"), "")
                if not title and node.args:
                    title = self.value(node.args[0])
                return _Parser(owner.options, title)
            if name == "add_argument":
                owner.add(self._arguments(node), self._keywords(node))
            return None
        if isinstance(owner, Class):
            found = self._method(owner, name)
            return self._enter(*found, node, owner) if found else None
        if isinstance(owner, dict | list | str):
            arguments = [self.value(a) for a in node.args]
            if any(isinstance(a, Opaque) for a in arguments):
                return Opaque(ast.unparse(node))
            if name == "remove" and arguments[0] not in owner:
                return None
            return getattr(owner, name)(*arguments)
        return Opaque(ast.unparse(node))

    def _enter(self, defined_in: Class, method: ast.FunctionDef, node: ast.Call, cls: Class) -> Any:
        names = [a.arg for a in method.args.args]
        values: dict[str, Any] = {}
        if any(ast.unparse(d) == "classmethod" for d in method.decorator_list):
            values[names.pop(0)] = cls
        for name, default in zip(reversed(names), reversed(method.args.defaults), strict=False):
            values[name] = self.value(default)
        values.update(zip(names, (self.value(a) for a in node.args), strict=False))
        walk = _Walk(self.reader, defined_in.module, values, owner=defined_in, cls=cls)
        walk.body(method.body)
        return walk.returned

    def _arguments(self, node: ast.Call) -> list[Any]:
        result: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                result.extend(self.value(argument.value))
            else:
                result.append(self.value(argument))
        return result

    def _keywords(self, node: ast.Call) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg == "help":
                continue
            if keyword.arg is None:
                result.update(self.value(keyword.value))
            else:
                result[keyword.arg] = self.value(keyword.value)
        return result


def _load(node: ast.expr) -> ast.expr:
    """The same target, to be read."""
    return ast.parse(ast.unparse(node), mode="eval").body
