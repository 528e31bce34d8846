"""``fleet size CONFIG_OR_DIR --gpu NAME --count N``: does a model fit, and how much KV is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from vllm_fleet.sizing import Sizing, SizingError, find_gpu, load_config
from vllm_fleet.sizing import size as size_model
from vllm_fleet.sizing.choose import refusals
from vllm_fleet.sizing.rules import DEFAULT_VERSION

KV_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
)


@click.command()
@click.argument("model", metavar="CONFIG_OR_DIR", type=click.Path())
@click.option("--gpu", required=True, help="Kind of card, or its memory in GiB as torch sees it.")
@click.option(
    "--count", type=click.IntRange(1), default=1, show_default=True, help="Cards of the server."
)
@click.option(
    "--hosts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Hosts of one server, with --count cards each: TP inside a host and PP across.",
)
@click.option(
    "--tp", type=click.IntRange(1), help="Tensor parallel size. Default: all cards of a host."
)
@click.option("--pp", type=click.IntRange(1), help="Pipeline parallel size. Default: the rest.")
@click.option("--dcp", type=click.IntRange(1), default=1, help="Decode context parallel size.")
@click.option("--expert-parallel", is_flag=True, help="Divide whole experts over the cards.")
@click.option("--vllm", "version", default=DEFAULT_VERSION, show_default=True, help="vLLM version.")
@click.option("--gpu-memory-utilization", type=float, help="Default: the version's.")
@click.option("--max-model-len", type=click.IntRange(1), help="Default: the model's.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Default: the version's.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Default: the version's.")
@click.option("--kv-cache-dtype", type=click.Choice(KV_DTYPES), default="auto")
@click.option("--dtype", default="auto", help="auto, bfloat16, float16 (half), float32.")
@click.option("--quantization", help="As given to vllm serve.")
@click.option("--block-size", type=click.IntRange(1), help="Default: the attention backend's.")
@click.option(
    "--speculative-tokens",
    type=click.IntRange(0),
    default=0,
    help="Tokens that the model's own MTP layers predict.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=None,
    help="Matters for models with linear attention. Default: the version's.",
)
@click.option("--task", type=click.Choice(("chat", "embed", "rerank")), default="chat")
@click.option("--language-model-only", is_flag=True, help="Leave the vision tower out.")
@click.option("--enforce-eager", is_flag=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def size(
    model: str,
    gpu: str,
    count: int,
    hosts: int,
    tp: int | None,
    pp: int | None,
    dcp: int,
    expert_parallel: bool,
    version: str,
    gpu_memory_utilization: float | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    kv_cache_dtype: str,
    dtype: str,
    quantization: str | None,
    block_size: int | None,
    speculative_tokens: int,
    prefix_caching: bool | None,
    task: str,
    language_model_only: bool,
    enforce_eager: bool,
    as_json: bool,
) -> None:
    """Say whether a model fits on cards, and what vLLM would print, per card.

    CONFIG_OR_DIR is a config.json or a directory with weights. Exit 1 where it does not fit or
    cannot be sized.
    """
    world = count * hosts
    cards = f"--count {count}" + (f" x --hosts {hosts}" if hosts > 1 else "")
    if tp is None:
        if pp is not None and world % pp:
            raise click.UsageError(f"--pp {pp} does not divide {cards}.")
        tp = world // pp if pp else count
    if pp is None:
        if world % tp:
            raise click.UsageError(f"--tp {tp} does not divide {cards}.")
        pp = world // tp
    if tp * pp != world:
        raise click.UsageError(f"--tp {tp} x --pp {pp} is not {cards}.")
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise click.UsageError("--gpu-memory-utilization is a share above 0 up to 1.")
    try:
        config, directory = load_config(model)
        where = str(Path(model) / "config.json") if directory else model
        card = find_gpu(gpu)
        found = size_model(
            config,
            gpu=card,
            tp=tp,
            pp=pp,
            dcp=dcp,
            expert_parallel=expert_parallel,
            vllm_version=version,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
            quantization=quantization,
            enforce_eager=enforce_eager,
            block_size=block_size,
            speculative_tokens=speculative_tokens,
            prefix_caching=prefix_caching,
            pooling=task != "chat",
            vision=not language_model_only,
            weights_dir=directory,
            where=where,
        )
        if card.known:
            refused = refusals(config, card, vllm_version=version, dtype=dtype)
            said = tuple(f"vLLM would not start on this card: {one}" for one in refused)
            found = replace(found, warnings=(*found.warnings, *said))
    except SizingError as error:
        if as_json:
            click.echo(json.dumps({"fits": False, "error": str(error)}, ensure_ascii=False))
        click.echo(str(error), err=True)
        raise SystemExit(1) from None
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        click.echo(table(found, count, hosts))
        for warning in found.warnings:
            click.echo(f"warning: {warning}", err=True)
        if found.reason:
            click.echo(f"does not fit: {found.reason}", err=True)
    raise SystemExit(0 if found.fits else 1)


def table(found: Sizing, count: int, hosts: int = 1) -> str:
    """The figures for people, plain text."""
    settings = found.settings
    tokens = found.spread["kv_cache_tokens"]
    rows = [
        (
            "cards",
            (f"{hosts} hosts with " if hosts > 1 else "")
            + f"{count} x {settings['gpu']}, {settings['gpu_gib']:.2f} GiB as torch sees it; "
            f"TP {settings['tensor_parallel_size']}, "
            f"PP {settings['pipeline_parallel_size']}",
        ),
        (
            "vLLM",
            f"{settings['vllm']}, {settings['dtype']}, weights "
            f"{settings['quantization']}, KV cache {settings['kv_cache_dtype']}",
        ),
        (
            "allowed",
            f"{found.requested_gib:.2f} GiB a card (gpu_memory_utilization "
            f"{settings['gpu_memory_utilization']:g})",
        ),
        ("weights", f"{found.weights_gib:.2f} GiB a card"),
        (
            "activations",
            f"{found.activation_gib:.2f} GiB ({settings['max_num_batched_tokens']} "
            f"tokens, {settings['max_num_seqs']} sequences a step)",
        ),
        ("CUDA graphs", f"{found.graphs_gib:.2f} GiB"),
        ("CUDA, NCCL", f"{found.non_torch_gib:.2f} GiB"),
        (
            "KV cache",
            f"{found.kv_cache_gib:.2f} GiB a card, {found.kv_bytes_per_token:.0f} bytes "
            f"a token, blocks of {found.block_size}",
        ),
        (
            "KV tokens",
            f"{found.kv_cache_tokens:,} (between {int(tokens.low):,} and {int(tokens.high):,})",
        ),
        ("concurrency", f"{found.max_concurrency:.2f} requests of {found.max_model_len:,} tokens"),
        ("longest", f"{found.max_model_len_max:,} tokens"),
        ("fits", "yes" if found.fits else "no"),
    ]
    if len(found.ranks) > 1:
        rows += [
            (
                f"rank {i}",
                f"{r.layers} layers, weights {r.weights_gib:.2f} GiB, KV cache "
                f"{r.kv_cache_gib:.2f} GiB",
            )
            for i, r in enumerate(found.ranks)
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
