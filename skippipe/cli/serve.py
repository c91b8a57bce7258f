"""The command `serve`: a model over many nodes, behind HTTP."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.cli import options as cli_options
from skippipe.codecs import CodecId
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.value_ranges import CONTEXT, HEARTBEAT_S, NODES, PORT, THREADS, WAIT_S, Range

if TYPE_CHECKING:
    from skippipe.cluster import Cluster

TOKEN_VARIABLE = "SKIPPIPE_API_TOKEN"
DEFAULT_CACHE_TOKENS = 2**16
SERVER, LIMITS = "Server", "Limits"


def serve(
    checkpoint: cli_options.Checkpoint,
    host: Annotated[
        str,
        typer.Option(
            help="Address of the HTTP server; other than loopback: with a token only.", rich_help_panel=SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[int, PORT, typer.Option(help="Port of the HTTP server; 0: any.", rich_help_panel=SERVER)] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"A file with bearer tokens, one a line; any of them admits requests. Or one in {TOKEN_VARIABLE}.",
            show_default="none: every request from this machine is admitted",
            rich_help_panel=SERVER,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        NODES,
        typer.Option(
            help="Number of processes on this machine, which get the stages in turn.",
            show_default="two for every stage; one, if there are more than 8 stages",
            rich_help_panel=cli_options.NODES,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster file: its nodes get stages in their order, and answers take the fastest route.",
            rich_help_panel=cli_options.NODES,
        ),
    ] = None,
    keys: cli_options.Keys = None,
    listen: Annotated[
        str, typer.Option(help="host:port where nodes join, with --keys.", rich_help_panel=cli_options.NODES)
    ] = "0.0.0.0:5555",
    heartbeat: Annotated[
        float,
        HEARTBEAT_S,
        typer.Option(
            help="Seconds without a heartbeat after which a node is declared dead.", rich_help_panel=cli_options.NODES
        ),
    ] = TIMEOUT_S,
    device: cli_options.DeviceOption = "cpu",
    dtype: cli_options.Dtype = "fp32",
    wire: Annotated[
        CodecId | None,
        typer.Option(
            help="Type of hidden states between nodes.", show_default="like --dtype", rich_help_panel=cli_options.WORK
        ),
    ] = None,
    threads: Annotated[int, THREADS, typer.Option(help="Threads of a node.", rich_help_panel=cli_options.WORK)] = 1,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the logs of nodes on this machine.",
            show_default="not kept",
            rich_help_panel=cli_options.NODES,
        ),
    ] = None,
    cut: cli_options.Cut = None,
    floor: Annotated[
        str,
        typer.Option(
            help="Share of the stages (1/2, 50%) below which nothing is answered (503).",
            show_default="0: stage 0 alone will do",
            rich_help_panel=cli_options.PART,
        ),
    ] = "0",
    name: Annotated[
        str | None,
        typer.Option(help="The model's name, to clients.", show_default="the folder's", rich_help_panel=SERVER),
    ] = None,
    context: Annotated[
        int | None,
        CONTEXT,
        typer.Option(
            help="Tokens of prompt and answer together, at most.",
            show_default="as the model's config says",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_tokens: Annotated[
        int, Range(1, CONTEXT.most), typer.Option(help="Tokens of an answer, at most.", rich_help_panel=LIMITS)
    ] = 4096,
    timeout: Annotated[
        float,
        Range(1, WAIT_S.most),
        typer.Option(help="Seconds in which an answer has to be complete.", rich_help_panel=LIMITS),
    ] = 600,
    requests_a_minute: Annotated[
        int, Range(1, 10**6), typer.Option(help="Requests a minute with one token.", rich_help_panel=LIMITS)
    ] = 600,
    at_once: Annotated[
        int, Range(1, 10**6), typer.Option(help="Concurrent requests with one token.", rich_help_panel=LIMITS)
    ] = 64,
    queue: Annotated[
        int,
        Range(1, 10**6),
        typer.Option(help="Answers that may wait for a place; beyond: 503.", rich_help_panel=LIMITS),
    ] = 256,
    patience: Annotated[
        float,
        WAIT_S,
        typer.Option(help="Seconds that requests wait for lost stages before 503.", rich_help_panel=LIMITS),
    ] = 30,
    cache_tokens: Annotated[
        int | None,
        Range(2, 10**9),
        typer.Option(
            help="Tokens in the KV cache of a route of up to 16 answers, on every node.",
            show_default="65,536, or the context if that is more",
            rich_help_panel=LIMITS,
        ),
    ] = None,
) -> None:
    """Serve a model over many nodes, with an HTTP interface for OpenAI's clients.

    Stages are on nodes: processes of this machine, which are started again when they end, or nodes that join from
    other machines. When a node is lost, another one of its stage continues its answers. When none is left, the stage is
    left out, and answers say so. Ctrl-C ends it.

    \b
        skippipe serve run
        skippipe serve model/ --cut 4 --nodes 8 --floor 1/2
        skippipe serve model/ --cut 4 --keys keys/ --cluster cluster.json --host 0.0.0.0 --token-file tokens

    Example: skippipe serve run --port 8000
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if nodes is not None and (cluster or keys):
        raise UserError("--nodes: --cluster and --keys give the number of nodes already: leave it out")
    from skippipe.serving.scheduler import ServingSettings
    from skippipe.transport.addresses import is_loopback
    from skippipe.web import server as web_server
    from skippipe.web.auth import ApiSettings

    web_server.check_installed("prometheus_client")
    settings = ApiSettings(
        tokens=_tokens(token_file),
        loopback=is_loopback(host),
        answer_timeout=timedelta(seconds=timeout),
        max_tokens=max_tokens,
        requests_per_minute=requests_a_minute,
        max_concurrent=at_once,
    )
    gateway = ServingSettings(max_waiting=queue, min_coverage=_floor(floor), wait_timeout=timedelta(seconds=patience))
    import torch

    torch.set_num_threads(1)  # nodes are forked from here
    from skippipe.inference.checkpoint_loader import fingerprint, read_outline
    from skippipe.model.model_spec import check_device
    from skippipe.serving.launcher import ServeApp, ServeConfig
    from skippipe.serving.node import ServingConfig
    from skippipe.serving.routing import ClusterCost, UniformCost, assign_stages

    if keys is None:
        check_device(device)
    outline = read_outline(checkpoint, cut)
    model_config, layers, known = outline.spec.config, outline.layers, _cluster(cluster)
    max_context = context or model_config.max_position_embeddings
    node_config = ServingConfig(
        checkpoint=str(outline.place.resolve()),
        layers=layers,
        stage_of=assign_stages(_names(len(layers), nodes, known, keys), len(layers)),
        vocabulary=model_config.vocab_size,
        fingerprint=fingerprint(outline.place),
        device=device,
        dtype=dtype,
        wire_dtype=wire or dtype,
        cache_tokens=_cache_tokens(cache_tokens, max_context),
        threads=threads,
        heartbeat_s=heartbeat,
    )
    config = ServeConfig(
        name=name or checkpoint.resolve().name,
        context=max_context,
        api=settings,
        gateway=replace(gateway, cache_tokens=node_config.cache_tokens),
        cost=ClusterCost.of(known, outline.spec.shape, layers, node_config.wire_dtype) if known else UniformCost(),
        host=host,
        port=port,
        keys=keys,
        listen=listen if keys else "127.0.0.1:0",
        logs=logs,
    )
    ServeApp(outline, node_config, config).run()


def _cache_tokens(given: int | None, context: int) -> int:
    """Tokens of a route's KV cache."""
    if given is None:
        return max(DEFAULT_CACHE_TOKENS, context)
    if given < context:
        raise UserError(f"--cache-tokens {given}: one answer may need {context:,}; give more, or less --context")
    return given


def _tokens(file: Path | None) -> tuple[str, ...]:
    """Tokens never come from the command line, which every user of the machine can read."""
    given = os.environ.get(TOKEN_VARIABLE, "")
    if file is None:
        return (given,) if given else ()
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        found = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as text: {error}") from None
    if mode & 0o077:
        raise UserError(f"{file}: mode {mode:o} lets others at the tokens; run: chmod 600 {shlex.quote(str(file))}")
    if not found:
        raise UserError(f"{file}: has no token; openssl rand -hex 32 makes one")
    return (*found, given) if given else found


def _floor(text: str) -> Fraction:
    from skippipe.skip_schedule import parse_share

    if text.strip() in ("1", "100%"):
        return Fraction(1)
    return parse_share(text, "--floor")


def _cluster(named: str | None) -> Cluster | None:
    if named is None:
        return None
    from skippipe.planner.problem_spec import cluster_named

    return cluster_named(named)[0]


def _names(stages: int, nodes: int | None, cluster: Cluster | None, keys: Path | None) -> list[str]:
    """Names of the nodes, in the order in which they get stages."""
    if cluster is not None:
        return [node.name for node in cluster.nodes]
    if keys is not None:
        from skippipe.transport.keys import PeerList

        return list(PeerList.load(keys / "peers.json").peers)
    from skippipe.serving.routing import local_node_names

    return local_node_names(stages, nodes)
