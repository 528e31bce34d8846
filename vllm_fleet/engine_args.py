"""A command line of ``vllm serve`` checked against a version, without vLLM. Pure.

The words are read as vLLM's own parser reads them (underscores for dashes, dotted JSON keys,
``-O3``, abbreviations, ``--no-`` forms); then every value is checked, also those its parser lets
through and the engine refuses minutes later.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet import engine_data, engine_removed
from vllm_fleet.engine_data import EngineData, Option
from vllm_fleet.jsontext import parsed

# Options whose values are checked by the lists of the data, and the option that adds to the list.
PARSERS = {
    "tool_call_parser": "tool_parser_plugin",
    "reasoning_parser": "reasoning_parser_plugin",
}
EXTENSIBLE = {"distributed_executor_backend", "load_format"}  # an import path is a value too
COUNTS = {  # at least one, also in versions whose fields do not say so
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
    "max_num_seqs",
    "max_num_batched_tokens",
}
PORTS = {"port", "master_port", "data_parallel_rpc_port", "grpc_port"}
TRUTH = {"true", "false", "yes", "no", "on", "off", "1", "0"}
NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")  # argparse takes these for values, not for options
DIGITS = re.compile(r"^[0-9]+$")
HUMAN = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT])?$")
SAME = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}  # of dtypes
FALSY = {"", "None"}
# (option, what it needs beside it, what vLLM does else, how that is written)
NEEDED_WITH = (
    (
        "enable_auto_tool_choice",
        "tool_call_parser",
        "vLLM refuses to start without a parser for the calls",
        "--tool-call-parser NAME",
    ),
    (
        "enable_log_outputs",
        "enable_log_requests",
        "vLLM refuses to start with outputs logged and requests not",
        "--enable-log-requests",
    ),
)


@dataclass(frozen=True)
class ArgError:
    """One finding: the words as written, what is wrong, and what to write instead."""

    arg: str
    problem: str
    instead: str  # "" where there is nothing to say

    def __str__(self) -> str:
        return f"{self.arg}: {self.problem}" + (f"; write {self.instead}" if self.instead else "")


@dataclass(frozen=True)
class Findings:
    """Errors stop a start or change its meaning; hints do not."""

    errors: tuple[ArgError, ...]
    hints: tuple[ArgError, ...] = ()


@dataclass(frozen=True)
class Given:
    """An option as it stands in a command line."""

    option: Option
    spelling: str  # the option string it stands for
    written: str  # as written, values included
    values: tuple[str, ...]


def check_args(version: str, args: Sequence[str]) -> tuple[ArgError, ...]:
    """What a version would refuse in a command line, or silently read otherwise than meant.

    ``args`` are the words after ``vllm serve``; the model may be among them.
    """
    return examine(version, args).errors


def examine(version: str, args: Sequence[str]) -> Findings:
    """Errors as :func:`check_args`, and hints: what works and is seldom wanted."""
    data = engine_data.nearest(version)
    errors: list[ArgError] = []
    hints: list[ArgError] = []
    given = list(_read(data, list(args), errors))
    seen = {g.option.dest: g for g in given}
    for item in given:
        errors.extend(_value_errors(data, item, seen))
    errors.extend(_combination_errors(seen))
    hints.extend(_hints(data, seen))
    if data.version != version:
        hints.append(
            ArgError(f"vLLM {version}", f"has no data here; checked against {data.version}", "")
        )
    return Findings(tuple(errors), tuple(hints))


def check_request(version: str, parameters: Sequence[str]) -> tuple[ArgError, ...]:
    """Parameters of a chat request that this version ignores without a word."""
    known = engine_data.nearest(version).sampling_parameters
    found = []
    for name in parameters:
        gone = engine_removed.REQUEST.get(name)
        if gone is not None and name not in known:
            found.append(ArgError(name, gone.why, _token_budget(version, gone.instead)))
        elif name == "thinking_token_budget" and name not in known:
            first = _first(lambda d: "thinking_token_budget" in d.sampling_parameters)
            found.append(ArgError(name, f"is ignored by vLLM {version}", f"vLLM {first} or later"))
    return tuple(found)


# -- reading the words


def _read(data: EngineData, words: list[str], errors: list[ArgError]) -> Iterator[Given]:
    for prefix in ("vllm", "serve"):
        if words and words[0] == prefix:
            words.pop(0)
    dotted: dict[str, tuple[Option, dict[str, Any], list[str]]] = {}
    model_seen = False
    while words:
        word = words.pop(0)
        if not word.startswith("-") or NUMBER.match(word) or word == "-" or " " in word:
            if model_seen:
                errors.append(_stray(word))
            model_seen = True
            continue
        name, equals, value = _normal(word).partition("=")
        if name == "--model":
            model_seen = True
            if not equals and words:
                words.pop(0)
            continue
        key, dot, path = name.partition(".")
        option, spelling = _find(data, key, word, errors)
        if option is None:
            if not equals:
                while words and not words[0].startswith("-"):
                    words.pop(0)  # its values, so that each mistake is told once
            continue
        if spelling != key and spelling.startswith(key) is False:
            value, equals = key[len(spelling) :], "="  # -qawq
        if dot:
            if not equals and not words:
                errors.append(ArgError(word, "has no value", f"{name} VALUE"))
                continue
            text = value if equals else words.pop(0)
            entry = dotted.setdefault(spelling, (option, {}, []))
            if not _put(entry[1], path.removesuffix("+").split("."), _json_or_text(text)):
                said = "part of it has a value of its own already, given before"
                errors.append(ArgError(f"{name} {text}", said, "one of the two"))
            entry[2].append(f"{name} {text}")
            continue
        item = _take(option, spelling, word, value if equals else None, words, errors)
        if item is not None:
            yield item
    for spelling, (option, tree, written) in dotted.items():
        yield Given(option, spelling, " ".join(written), (json.dumps(tree),))


def _normal(word: str) -> str:
    """Underscores in an option's name as dashes; -O3 as its long form."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        key, dot, path = name.partition(".")
        return f"{key.replace('_', '-')}{dot}{path}{equals}{value}"
    if word.startswith("-O") and len(word) > 2:
        return f"--optimization-level={word[2:].removeprefix('=')}"
    if word == "-O":
        return "--optimization-level"
    return word


def _find(
    data: EngineData, name: str, word: str, errors: list[ArgError]
) -> tuple[Option | None, str]:
    """The option a word stands for and its spelling, as argparse finds them."""
    if name in data.options and name.startswith("-"):
        return data.options[name], name
    matches = sorted(o for o in data.options if o.startswith(name))
    if not name.startswith("--"):
        matches = [o for o in matches if not o.startswith("--")]
    if name not in engine_removed.OPTIONS and matches:
        return _abbreviated(data, name, matches, errors)
    for length in (3, 2):  # a short option with its value behind it: -qawq
        short = name[:length]
        if len(name) > length and short in data.options and not data.options[short].is_flag:
            if length == 2:
                return data.options[short], short
            errors.append(
                ArgError(
                    word,
                    f"argparse does not split {short} from its value",
                    f"{short} {name[length:]}",
                )
            )
            return None, name
    errors.append(_unknown(data, name, word))
    return None, name


def _abbreviated(
    data: EngineData, name: str, matches: list[str], errors: list[ArgError]
) -> tuple[Option | None, str]:
    """argparse takes the beginning of a name where no second one begins so; it is told."""
    if len(matches) == 1:
        full = matches[0]
        said = f"is short for {full}; vLLM takes it until another option begins like it"
        errors.append(ArgError(name, said, full))
        return data.options[full], full
    one = len({data.options[m].dest for m in matches}) == 1
    shown = ", ".join(matches[:4]) + (" and others" if len(matches) > 4 else "")
    instead = matches[0] if one else "the one you mean in full"
    errors.append(ArgError(name, f"could be {shown}", instead))
    return None, name


def _take(
    option: Option,
    spelling: str,
    word: str,
    value: str | None,
    words: list[str],
    errors: list[ArgError],
) -> Given | None:
    """The option with the values that belong to it."""
    if option.is_flag:
        following = words[0] if words else ""
        if value is not None or following.lower() in TRUTH:
            text = value if value is not None else words.pop(0)
            wanted = text.lower() in {"true", "yes", "on", "1"}
            positive = option.name
            instead = positive if wanted else f"--no-{positive[2:]}"
            if instead not in option.opts:
                instead = "nothing: leave it out"
            errors.append(ArgError(f"{spelling} {text}", "is a switch and takes no value", instead))
            return None
        return Given(option, spelling, word, ())
    if value is not None:
        values = [value]
    elif option.nargs in {"+", "*"}:
        values = []
        while words and not _is_option(words[0]):
            values.append(words.pop(0))
    elif option.nargs == "?":
        values = [words.pop(0)] if words and not _is_option(words[0]) else []
        return Given(option, spelling, " ".join([spelling, *values]), tuple(values))
    elif words and not _is_option(words[0]):
        values = [words.pop(0)]
    else:
        values = []
    if not values:
        errors.append(ArgError(spelling, "has no value", f"{spelling} {_example(option)}"))
        return None
    return Given(option, spelling, " ".join([spelling, *values]), tuple(values))


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not NUMBER.match(word) and " " not in word


def _stray(word: str) -> ArgError:
    return ArgError(word, "belongs to no option and is not the model", "the option before it")


def _unknown(data: EngineData, name: str, word: str) -> ArgError:
    gone = engine_removed.OPTIONS.get(name) or engine_removed.OPTIONS.get(
        name.replace("--no-", "--", 1)
    )
    having = [v for v in engine_data.versions() if name in engine_data.load(v).options]
    here = engine_data.versions().index(data.version)
    later = [v for v in having if engine_data.versions().index(v) > here]
    earlier = [v for v in having if engine_data.versions().index(v) < here]
    if gone is not None:
        when = ""
        if earlier:
            after = engine_data.versions().index(earlier[-1]) + 1
            when = f" (gone since {engine_data.versions()[after]})"
        return ArgError(name, gone.why + when, _known_only(data, gone.instead))
    if later:
        return ArgError(
            name, f"is not in vLLM {data.version}, it came with {later[0]}", f"vLLM {later[0]}"
        )
    if earlier:
        after = engine_data.versions().index(earlier[-1]) + 1
        return ArgError(
            name, f"was removed in vLLM {engine_data.versions()[after]}", "nothing: leave it out"
        )
    close = difflib.get_close_matches(name, list(data.options), n=1, cutoff=0.7)
    return ArgError(
        name,
        f"is no option of vLLM {data.version}",
        close[0] if close else "nothing: leave it out",
    )


def _known_only(data: EngineData, instead: str) -> str:
    """A remedy without the options that this version lacks."""
    parts = instead.split(", or ")
    kept = [
        p
        for p in parts
        if all(o.split(".")[0] in data.options for o in re.findall(r"--[a-z][a-z0-9-]*", p))
    ]
    return ", or ".join(kept or parts[:1])


# -- checking values


def _value_errors(data: EngineData, item: Given, seen: dict[str, Given]) -> Iterator[ArgError]:
    option = item.option
    for value in item.values:
        if option.optional and value in FALSY:
            continue
        error = (
            _special_error(data, item, value)
            or _type_error(data, item, value)
            or _limit_error(item, value)
            or _list_error(data, item, value, seen)
        )
        if error is not None:
            yield error


def _special_error(data: EngineData, item: Given, value: str) -> ArgError | None:
    dest = item.option.dest
    if dest == "limit_mm_per_prompt" and _json_or_text(value) is value:
        switch = ", or --language-model-only" if "--language-model-only" in data.options else ""
        return ArgError(
            item.written,
            f"{value!r} is not JSON: a number for each kind of input is meant",
            f"""--limit-mm-per-prompt '{{"image": 0, "video": 0}}'{switch}""",
        )
    if dest == "chat_template":
        built_in = data.values.get("chat_template", ())
        literal = any(c in value for c in "{}\n")
        if not literal and "/" not in value and value not in built_in:
            return ArgError(
                item.written,
                f"no chat template is called {value!r}: a file is meant",
                "nothing, for the model's own template, or --chat-template /PATH.jinja",
            )
    if dest == "override_generation_config":
        keys = _json_or_text(value)
        for name in keys if isinstance(keys, dict) else ():
            gone = engine_removed.REQUEST.get(name)
            if gone is not None and name not in data.sampling_parameters:
                return ArgError(
                    item.written, f"{name} {gone.why}", _token_budget(data.version, gone.instead)
                )
    if dest in PORTS and DIGITS.match(value) and not 1 <= float(value) <= 65535:
        return ArgError(item.written, "is no port", f"{item.spelling} 1 to 65535")
    return None


def _type_error(data: EngineData, item: Given, value: str) -> ArgError | None:
    option = item.option
    kind = option.type
    if kind == "int" and not re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", value):
        return ArgError(item.written, f"{value!r} is no whole number", f"{item.spelling} NUMBER")
    if kind == "float":
        try:
            float(value)
        except ValueError:
            return ArgError(item.written, f"{value!r} is no number", f"{item.spelling} NUMBER")
    if kind in {"human_int", "human_int_or_auto"}:
        allowed = {"auto", "-1"} if kind == "human_int_or_auto" else set[str]()
        if value.lower() not in allowed and not HUMAN.match(value):
            return ArgError(
                item.written, f"{value!r} is no number such as 32768 or 32k", f"{item.spelling} 32k"
            )
        if "." in value and value[-1] in "KMGT":
            small = f"{value[:-1]}{value[-1].lower()}"
            return ArgError(
                item.written,
                f"K, M, G and T are powers of 1024 and take no decimals: {value!r}",
                f"{item.spelling} {small}, in powers of 1000",
            )
    if kind in {"json", "loads", "config"}:
        return _json_error(data, item, value)
    if kind == "dict_or_str" and re.match(r"(?s)^\s*{.*}\s*$", value):
        return _json_error(data, item, value)
    if kind == "call" and option.dest == "device_ids" and not re.fullmatch(r"[\w:.,\s-]+", value):
        return ArgError(item.written, f"{value!r} is no list of devices", "--device-ids 0,1")
    return None


def _json_error(data: EngineData, item: Given, value: str) -> ArgError | None:
    try:
        found = parsed(_expanded(value))
    except ValueError as error:
        place = str(error)
        if isinstance(error, json.JSONDecodeError):
            place = f"{error.msg} at character {error.pos + 1}"
        return ArgError(
            item.written,
            f"is not JSON: {place}",
            f"""{item.spelling} '{{"key": value}}' in single quotes""",
        )
    config = item.option.of or ("SpeculativeConfig" if _speculative(item) else "")
    fields = data.configs.get(config, ())
    if not fields or not isinstance(found, dict):
        return None
    for key in found:
        if key in fields or (_speculative(item) and key.replace("-", "_") in fields):
            continue
        close = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
        return ArgError(
            item.written,
            f"{key!r} is no setting of {item.option.name}",
            close[0] if close else f"one of {', '.join(f for f in fields if f[0] != '_')}",
        )
    return None


def _speculative(item: Given) -> bool:
    return item.option.dest == "speculative_config"


def _limit_error(item: Given, value: str) -> ArgError | None:
    amount = number(value)
    if amount is None:
        return None
    checks: dict[str, tuple[Callable[[float, float], bool], str]] = {
        "gt": (lambda n, b: n > b, "more than"),
        "ge": (lambda n, b: n >= b, "at least"),
        "lt": (lambda n, b: n < b, "less than"),
        "le": (lambda n, b: n <= b, "at most"),
    }
    limits = item.option.limits or ((("ge", 1),) if item.option.dest in COUNTS else ())
    for name, bound in limits:
        holds, words = checks[name]
        if not holds(amount, bound):
            allowed = " and ".join(f"{checks[n][1]} {b:g}" for n, b in limits)
            instead = f"{item.spelling} NUMBER, {allowed}"
            if item.option.dest == "gpu_memory_utilization":
                instead = f"{item.spelling} 0.90, a share of the card's memory up to 1"
            return ArgError(item.written, f"{value} must be {words} {bound:g}", instead)
    return None


def _list_error(
    data: EngineData, item: Given, value: str, seen: dict[str, Given]
) -> ArgError | None:
    option = item.option
    dest = option.dest
    if option.choices:
        text = value.lower().replace("-", "_") if option.type == "lower" else value
        if text in option.choices:
            return None
        # A number may be written in more than one way: 016 is 16.
        if option.type == "int" and (value.strip().lstrip("0") or "0") in option.choices:
            return None
        return _not_listed(item, value, option.choices, data)
    if dest in PARSERS:
        if PARSERS[dest] in seen:
            return None  # the plugin may bring any name
        listed = data.tool_parsers if dest == "tool_call_parser" else data.reasoning_parsers
        if value in listed or (option.type == "call" and value.lower() == "none"):
            return None
        return _not_listed(item, value, listed, data)
    if dest == "attention_backend":
        listed = data.values.get(dest, ())
        if value.upper().split(".")[-1] in listed:
            return None
        return _not_listed(item, value, listed, data)
    if dest == "quantization":
        return _quantization_error(data, item, value, seen)
    listed = data.values.get(dest, ()) if dest != "chat_template" else ()
    if dest == "kv_cache_dtype":
        listed = option.known
    if not listed or value in listed or (dest in EXTENSIBLE and "." in value):
        return None
    return _not_listed(item, value, listed, data)


def _quantization_error(
    data: EngineData, item: Given, value: str, seen: dict[str, Given]
) -> ArgError | None:
    listed = data.values["quantization"]
    if value not in listed:
        if value in engine_removed.QUANTIZATION:
            return ArgError(
                item.written,
                f"vLLM {data.version} has no method {value!r}",
                engine_removed.QUANTIZATION[value],
            )
        return _not_listed(item, value, listed, data)
    deprecated = data.values.get("deprecated_quantization", ())
    if value in deprecated and "allow_deprecated_quantization" not in seen:
        return ArgError(
            item.written,
            f"{value!r} is deprecated and refused at start",
            f"{item.written} --allow-deprecated-quantization, or another checkpoint",
        )
    return None


def _not_listed(item: Given, value: str, listed: Sequence[str], data: EngineData) -> ArgError:
    by_lower = {name.lower(): name for name in listed}
    close = difflib.get_close_matches(value.lower(), list(by_lower), n=1, cutoff=0.6)
    shown = ", ".join(listed[:30]) + (" ..." if len(listed) > 30 else "")
    if SAME.get(value.lower()) in listed:
        close = [SAME[value.lower()]]
    instead = f"{item.spelling} {by_lower[close[0]]}" if close else f"one of {shown}"
    problem = f"vLLM {data.version} knows no {value!r} here; it knows {shown}"
    if item.option.dest in PARSERS:
        kind = "tool" if item.option.dest == "tool_call_parser" else "reasoning"
        later = _first(
            lambda d: value in (d.tool_parsers if kind == "tool" else d.reasoning_parsers)
        )
        versions = engine_data.versions()
        if later and versions.index(later) > versions.index(data.version):
            problem = f"vLLM {data.version} has no {kind} parser {value!r}, it came with {later}"
    return ArgError(item.written, problem, instead)


def _combination_errors(seen: dict[str, Given]) -> Iterator[ArgError]:
    for asked, needed, problem, option in NEEDED_WITH:
        given = seen.get(asked)
        if given and not given.spelling.startswith("--no-") and needed not in seen:
            yield ArgError(given.spelling, problem, f"{given.spelling} {option}")


def _hints(data: EngineData, seen: dict[str, Given]) -> Iterator[ArgError]:
    quantization = seen.get("quantization")
    # Since 0.24 the name stands for "the best AWQ kernel" and does no harm.
    slow = "auto_awq" not in data.values.get("quantization", ())
    if quantization and quantization.values == ("awq",) and slow:
        yield ArgError(
            quantization.written,
            "forces the slow AWQ kernel",
            "nothing: without it vLLM reads config.json and takes the Marlin kernel",
        )
    key = seen.get("api_key")
    if key:
        yield ArgError(
            "--api-key",
            "every user of the host can read it in the list of processes",
            "VLLM_API_KEY in the environment file",
        )


# -- small things


def _token_budget(version: str, instead: str) -> str:
    """The remedy, with the version it needs where this one lacks thinking_token_budget."""
    name = "thinking_token_budget"
    if name not in instead or name in engine_data.nearest(version).sampling_parameters:
        return instead
    first = _first(lambda d: name in d.sampling_parameters)
    return f"{instead} (from vLLM {first})"


def _first(holds: Callable[[EngineData], bool]) -> str | None:
    return next((v for v in engine_data.versions() if holds(engine_data.load(v))), None)


def number(value: str) -> float | None:
    """A number as vLLM reads it, 32k and 32K too; None for anything else."""
    match = HUMAN.match(value)
    if match and match[2]:
        powers = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
        binary = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
        return float(match[1]) * (powers | binary)[match[2]]
    try:
        return float(value)
    except ValueError:
        return None


def _expanded(value: str) -> str:
    """Numbers such as 80m in JSON, outside its texts, as vLLM expands them."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', value)
    parts[::2] = [
        re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda m: str(int(number(m[0]) or 0)), p)
        for p in parts[::2]
    ]
    return "".join(parts)


def _json_or_text(text: str) -> Any:
    try:
        return parsed(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], path: list[str], value: Any) -> bool:
    """Whether the value found its place: what stands on the way must be a mapping."""
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            return False
        tree = below
    tree[path[-1]] = value
    return True


def _example(option: Option) -> str:
    if option.choices:
        return option.choices[0]
    return {"int": "NUMBER", "float": "NUMBER", "config": "'{...}'", "json": "'{...}'"}.get(
        option.type, "VALUE"
    )
