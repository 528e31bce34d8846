"""What a person needs to use the fleet: addresses, names, settings of clients. Pure.

For `fleet status --clients`. Shapes of clients' own files are as their documentation has them:
Claude Code (docs.anthropic.com, LLM gateway), Codex (developers.openai.com/codex, custom
providers), CC Switch (github.com/farion1231/cc-switch, deep links), Open WebUI
(docs.openwebui.com, environment), Continue (docs.continue.dev, config.yaml).
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from vllm_fleet import engine
from vllm_fleet.causes import load
from vllm_fleet.model_options import given_options
from vllm_fleet.spec.model import Fleet, HostSpec, Task

KEY = "YOUR_KEY"
Format = Literal["sh", "python", "json", "toml", "yaml", "url"]
PORTS = {"http": 80, "https": 443}
# What a client shows, and the entry that explains it.
SEEN: tuple[tuple[str, str], ...] = (
    ("401, AuthenticationError, invalid x-api-key", "key-wrong"),
    ("404, NotFoundError, model does not exist", "model-name-wrong"),
    ("400, BadRequestError, maximum context length", "context-too-long"),
    ("429, RateLimitError, too many requests", "too-many-requests"),
    ("503, ServiceUnavailableError, InternalServerError, overloaded", "http-503"),
    ("502, BadGatewayError", "http-502"),
    ("504, GatewayTimeoutError", "http-504"),
    ("APITimeoutError, Read timed out, a stream that stops", "client-timeout"),
    ("APIConnectionError, Connection refused", "client-connect"),
    ("CERTIFICATE_VERIFY_FAILED, self-signed certificate", "certificate-verify"),
)


@dataclass(frozen=True)
class Name:
    """One name that clients may give as `model`."""

    name: str
    kind: Literal["model", "alias", "adapter"]
    of: str  # the model that it stands for
    task: Task


@dataclass(frozen=True)
class Snippet:
    """Ready settings of one client."""

    client: str
    format: Format
    text: str
    tested: bool  # run by our tests against the real gateway, as it stands here
    note: str = ""


@dataclass(frozen=True)
class Seen:
    """An error as a client shows it, what it means and what to do."""

    shows: str
    id: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Page:
    """Everything for clients of one fleet."""

    bases: tuple[str, ...]  # without /v1
    asks_key: bool
    names: tuple[Name, ...]
    snippets: tuple[Snippet, ...] = ()
    errors: tuple[Seen, ...] = field(default=())


def page(fleet: Fleet) -> Page:
    """The client page of a fleet; no addresses where nobody is in group gateway."""
    gateways = fleet.group("gateway")
    bases = tuple(dict.fromkeys(base_of(spec) for spec in gateways))
    names = tuple(_names(fleet))
    chat = next((n.name for n in names if n.task == "chat" and n.kind == "model"), None)
    small = next(
        (n.name for n in names if n.task == "chat" and n.kind == "model" and n.name != chat), chat
    )
    embed = next((n.name for n in names if n.task == "embed"), None)
    rerank = next((n.name for n in names if n.task == "rerank"), None)
    snippets: list[Snippet] = []
    if bases:
        if chat and small:
            snippets += _chat(bases[0], chat, small)
        if embed:
            snippets += _embeddings(bases[0], embed)
        if rerank:
            snippets.append(_rerank(bases[0], rerank))
    causes = {cause.id: cause for cause in load()}
    return Page(
        bases,
        any(spec.settings.api_keys is not None for spec in gateways),
        names,
        tuple(snippets),
        tuple(Seen(shows, i, causes[i].cause, causes[i].remedy) for shows, i in SEEN),
    )


def base_of(spec: HostSpec) -> str:
    """The address that clients use of a gateway: a name of its certificate, the shared one, its
    own.
    """
    settings = spec.settings.gateway
    names: tuple[str, ...] = ()
    if settings.tls:
        names = settings.tls.names or (settings.tls.acme.domains if settings.tls.acme else ())
    plain = [name for name in names if not name.startswith("*")]
    if plain:
        where = plain[0]
    elif settings.keepalived:
        where = str(ipaddress.ip_interface(settings.keepalived.address).ip)
    else:
        where = spec.address
    scheme = "https" if settings.tls else "http"
    port = "" if settings.listen == PORTS[scheme] else f":{settings.listen}"
    return f"{scheme}://{f'[{where}]' if ':' in where else where}{port}"


def _names(fleet: Fleet) -> list[Name]:
    found: dict[str, Name] = {}
    for host in fleet.hosts:
        for one in host.instances:
            model = host.settings.models[one.model]
            found.setdefault(one.model, Name(one.model, "model", one.model, model.task))
            for alias in model.aliases:
                found.setdefault(alias, Name(alias, "alias", one.model, model.task))
            for adapter in sorted(engine.lora_names(given_options(one.model, model, one))):
                found.setdefault(adapter, Name(adapter, "adapter", one.model, model.task))
    return list(found.values())


def _chat(base: str, model: str, small: str) -> list[Snippet]:
    """Clients that chat; base addresses of OpenAI's kind end in /v1, Anthropic's do not."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    return [
        Snippet(
            "curl",
            "sh",
            f"curl {base}/v1/chat/completions \\\n"
            f"  -H 'Authorization: Bearer {KEY}' \\\n"
            "  -H 'Content-Type: application/json' \\\n"
            f"  -d '{json.dumps(body)}'\n",
            True,
        ),
        Snippet(
            "openai-python",
            "python",
            "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{base}/v1", api_key="{KEY}", timeout=600)\n'
            "stream = client.chat.completions.create(\n"
            f'    model="{model}",\n'
            '    messages=[{"role": "user", "content": "Hello"}],\n'
            "    stream=True,\n"
            ")\n"
            "for chunk in stream:\n"
            "    if chunk.choices:\n"
            '        print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
            "print()\n",
            True,
            "thinking: extra_body={'chat_template_kwargs': {'enable_thinking': False}}",
        ),
        Snippet(
            "LangChain",
            "python",
            "from langchain_openai import ChatOpenAI\n\n"
            "chat = ChatOpenAI(\n"
            f'    base_url="{base}/v1", api_key="{KEY}", model="{model}", timeout=600\n'
            ")\n"
            'print(chat.invoke("Hello").content)\n',
            True,
        ),
        Snippet(
            "anthropic-python",
            "python",
            "from anthropic import Anthropic\n\n"
            f'client = Anthropic(base_url="{base}", api_key="{KEY}", timeout=600)\n'
            "message = client.messages.create(\n"
            f'    model="{model}",\n'
            "    max_tokens=1024,\n"
            '    messages=[{"role": "user", "content": "Hello"}],\n'
            ")\n"
            "print(message.content[0].text)\n",
            True,
        ),
        Snippet(
            "Claude Code",
            "json",
            _json({"env": _claude(base, model, small)}),
            False,
            "in ~/.claude/settings.json; ANTHROPIC_API_KEY must not be set beside it",
        ),
        Snippet(
            "CC Switch, for Claude Code",
            "url",
            _ccswitch("claude", base, model),
            False,
            "opened on the machine where CC Switch is installed",
        ),
        Snippet(
            "CC Switch, for Codex",
            "url",
            _ccswitch("codex", f"{base}/v1", model),
            False,
        ),
        Snippet(
            "Codex",
            "toml",
            f'model = "{model}"\n'
            'model_provider = "fleet"\n\n'
            "[model_providers.fleet]\n"
            'name = "vLLM fleet"\n'
            f'base_url = "{base}/v1"\n'
            'env_key = "FLEET_API_KEY"\n'
            'wire_api = "responses"\n',
            False,
            "in ~/.codex/config.toml; the key in the environment as FLEET_API_KEY",
        ),
        Snippet(
            "Open WebUI",
            "sh",
            f"OPENAI_API_BASE_URL={base}/v1\nOPENAI_API_KEY={KEY}\nENABLE_OLLAMA_API=false\n",
            False,
            "its environment; models are listed by themselves",
        ),
        Snippet(
            "Continue",
            "yaml",
            "name: fleet\n"
            "version: 1.0.0\n"
            "schema: v1\n"
            "models:\n"
            f'  - name: "{model}"\n'
            "    provider: openai\n"
            f'    model: "{model}"\n'
            f'    apiBase: "{base}/v1"\n'
            f'    apiKey: "{KEY}"\n'
            "    roles: [chat, edit, apply]\n",
            False,
            "~/.continue/config.yaml",
        ),
    ]


def _claude(base: str, model: str, small: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": model,
        # What it asks in the background: without these it asks for models of Anthropic's.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": small,
        "API_TIMEOUT_MS": "600000",
    }


def _ccswitch(app: str, endpoint: str, model: str) -> str:
    query = {
        "resource": "provider",
        "app": app,
        "name": "vLLM fleet",
        "homepage": endpoint,
        "endpoint": endpoint,
        "apiKey": KEY,
        "model": model,
    }
    return f"ccswitch://v1/import?{urlencode(query)}\n"


def _embeddings(base: str, model: str) -> list[Snippet]:
    body = json.dumps({"model": model, "input": ["Hello"]})
    return [
        Snippet(
            "curl, embeddings",
            "sh",
            f"curl {base}/v1/embeddings \\\n"
            f"  -H 'Authorization: Bearer {KEY}' \\\n"
            "  -H 'Content-Type: application/json' \\\n"
            f"  -d '{body}'\n",
            True,
        ),
        Snippet(
            "LangChain, embeddings",
            "python",
            "from langchain_openai import OpenAIEmbeddings\n\n"
            "embeddings = OpenAIEmbeddings(\n"
            f'    base_url="{base}/v1", api_key="{KEY}", model="{model}",\n'
            "    check_embedding_ctx_length=False,  # texts, not tokens of another model\n"
            ")\n"
            'print(len(embeddings.embed_query("Hello")))\n',
            True,
        ),
    ]


def _rerank(base: str, model: str) -> Snippet:
    body = json.dumps({"model": model, "query": "capital", "documents": ["Paris", "bread"]})
    return Snippet(
        "curl, rerank",
        "sh",
        f"curl {base}/v1/rerank \\\n"
        f"  -H 'Authorization: Bearer {KEY}' \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n",
        False,
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
