"""``vllm_args`` and architectures against what the wanted vLLM version knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from vllm_fleet import engine, engine_data
from vllm_fleet.engine_args import ArgError, check_args
from vllm_fleet.model_options import given_options, setting_options, unheard
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.entries import holds_nul
from vllm_fleet.spec.findings import At, Findings, placed
from vllm_fleet.spec.inputs import config_path, read_config
from vllm_fleet.spec.layers import Layer, Loaded, LoadedHost
from vllm_fleet.spec.model import CARDS_OF_KIND, Instance, Model

TRANSFORMERS = "transformers"  # value of model-impl that serves what vLLM itself does not know


def check_engine(found: Findings, warnings: Findings, loaded: Loaded) -> None:
    """Options and architectures of every placed instance, each at the place it is written."""
    configs: dict[str, dict[str, Any] | None] = {}
    for host in loaded.hosts:
        for at, instance in placed(host):
            model = host.settings.models.get(instance.model)
            models = host.sources.get("models")
            if model is None or models is None:
                continue  # told as an unknown model
            version, version_at = _version(host, at, instance, model, models)
            if version is None or version_at is None:
                continue  # told as a missing release
            if version not in engine_data.versions():
                near = engine_data.nearest(version).version
                text = (
                    f"vLLM {version} has no data here: its options are checked against {near}; "
                    "see `fleet args`"
                )
                warnings.say(version_at, text)
            _options(found, at, instance, model, models, version)
            _ranks(found, at, instance, model)
            path = config_path(instance.model, model)
            if path not in configs:
                try:
                    configs[path] = read_config(loaded.root, path)
                except SpecError as error:
                    configs[path] = None
                    found.add(error.complaints[0], error.complaints[0].text)
            config = configs[path]
            args = given_options(instance.model, model, instance)
            if config and (problem := architecture_problem(version, config, args)):
                found.say(At(models, ("models", instance.model, "repo")), problem)


def architecture_problem(
    version: str, config: Mapping[str, Any], args: Mapping[str, object]
) -> str | None:
    """Why a version cannot serve a config's architecture; None where it can, or may."""
    listed = config.get("architectures")
    if not isinstance(listed, list) or not listed or not all(isinstance(a, str) for a in listed):
        return None  # sizing complains of what it lacks
    named = {str(key).replace("_", "-"): value for key, value in args.items()}
    if named.get("model-impl") == TRANSFORMERS or "auto_map" in config:
        return None  # its code comes with transformers or with the repository
    problems = [engine_data.architecture_problem(version, a) for a in listed]
    return problems[0] if all(problems) else None


def _version(
    host: LoadedHost, at: At, instance: Instance, model: Model, models: Layer
) -> tuple[str | None, At | None]:
    """The wanted version of an instance and where it is written."""
    if instance.vllm_version:
        return instance.vllm_version, At(at.layer, (*at.loc, "vllm_version"))
    if model.vllm_version:
        return model.vllm_version, At(models, ("models", instance.model, "vllm_version"))
    layer = host.sources.get("vllm_version")
    return host.settings.vllm_version, At(layer, ("vllm_version",)) if layer else None


def _options(
    found: Findings, at: At, instance: Instance, model: Model, models: Layer, version: str
) -> None:
    """Wrong options of one instance: the model's and its own, as vLLM will get them together."""
    owners: dict[str, At] = {}
    words: list[str] = []
    alone: dict[ArgError, str] = {}
    settings = setting_options(instance.model, model)
    for name, (setting, value) in settings.items():
        place = At(models, ("models", instance.model, setting))
        its = [word for line in engine.option_words(name, value) for word in line]
        words += its
        owners[name] = place
        for error in _checked(version, tuple(its)):
            alone.setdefault(error, name)
    for key, since in unheard(model, version).items():
        place = At(models, ("models", instance.model, "generation_config", key))
        text = f"vLLM {version} leaves it out without a word; from vLLM {since} on it holds"
        found.say(place, text, at_key=True)
    for name, value, place in _written(at, instance, model, models):
        plain = _plain(name).removeprefix("no-").partition(".")[0]
        if plain in settings:
            text = f"is set by `{settings[plain][0]}` of model {instance.model}: write it there"
            found.say(place, text, at_key=True)
            continue
        if place.layer.flawed(place.loc) or not _is_name(name) or holds_nul(value):
            continue  # refused already
        its = [word for line in engine.option_words(_plain(name), value) for word in line]
        words += its
        owners[name] = place
        for error in _checked(version, tuple(its)):
            alone.setdefault(error, name)
    for error in _checked(version, tuple(words)):
        owner = alone.get(error) or _named_in(error, owners)
        place = owners[owner] if owner else At(at.layer, at.loc)
        text = error.problem + (
            f"; write {_as_yaml(error.instead, version)}" if error.instead else ""
        )
        if owner in settings:
            text = f"option `{owner}` of it: {text}"
        found.say(place, text, at_key=True)


def _ranks(found: Findings, at: At, instance: Instance, model: Model) -> None:
    """More ranks than cards, where the number of cards is written and no `span` counts them."""
    if instance.span is not None:
        return
    written = instance.cards
    kind = CARDS_OF_KIND.match(written) if isinstance(written, str) else None
    cards = int(kind["count"]) if kind else len(written)
    args = {_plain(k): v for k, v in {**model.vllm_args, **instance.vllm_args}.items()}
    if cards and (problem := engine.too_many_ranks(args, cards)):
        found.say(At(at.layer, (*at.loc, "cards")), problem)


def _written(
    at: At, instance: Instance, model: Model, models: Layer
) -> Iterator[tuple[str, object, At]]:
    """Every option once; the instance's own over the model's of the same name."""
    own = {_plain(name) for name in instance.vllm_args}
    for name, value in model.vllm_args.items():
        if _plain(name) not in own:
            yield name, value, At(models, ("models", instance.model, "vllm_args", name))
    for name, value in instance.vllm_args.items():
        yield name, value, At(at.layer, (*at.loc, "vllm_args", name))


def _plain(name: str) -> str:
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def _is_name(name: str) -> bool:
    """Whether an option is passed on at all: what is ours or no name is refused elsewhere."""
    try:
        engine.options({name: None})
    except engine.EngineError:
        return False
    return not name.isdigit()


def _as_yaml(instead: str, version: str) -> str:
    """A remedy for the command line as a line of ``vllm_args``; other texts as they are."""
    match = re.fullmatch(r"--([a-z][a-z0-9.-]*)(?:[ =](\S+))?", instead)
    if match is None:
        return re.sub(r"--([a-z][a-z0-9-]*)", r"`\1`", instead)
    name, value = match[1], match[2]
    if value is None and name.startswith("no-"):
        return f"`{name.removeprefix('no-')}: false`"
    option = engine_data.nearest(version).options.get(f"--{name}")
    if value is None and option is not None and not option.is_flag:
        return f"`{name}`"  # with the value that stands there
    return f"`{name}: {'true' if value is None else value}`"


def _named_in(error: ArgError, owners: Mapping[str, At]) -> str | None:
    """The option that a finding about several of them begins with."""
    written = error.arg.lstrip("-").replace("_", "-")
    matching = [name for name in owners if written.startswith(_plain(name))]
    return max(matching, key=len, default=None)


@lru_cache(maxsize=4096)
def _checked(version: str, words: tuple[str, ...]) -> tuple[ArgError, ...]:
    return check_args(version, words)
