"""The command `serve`: a model over many nodes, behind HTTP."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import time
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skippipe import __version__
from skippipe.cli.options import (
    Checkpoint,
    Cut,
    Devices,
    Dtype,
    Keys,
    check_paths,
    nodes_option,
    option,
    part_option,
    work_option,
)
from skippipe.codecs import CodecId
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.value_ranges import CONTEXT, HEARTBEAT_S, NODES, PORT, THREADS, WAIT_S, Range

if TYPE_CHECKING:
    from skippipe.cluster import Cluster

TOKEN_VARIABLE = "SKIPPIPE_API_TOKEN"
DEFAULT_CACHE_TOKENS = 2**16
GRACE_S = 5.0  # a node of this machine that ends is back in less
SERVER, LIMITS = "Server", "Limits"
PORT_TAKEN = "name a free one with --port, or --port 0 for any"


def serve(
    checkpoint: Checkpoint,
    host: Annotated[
        str, option(SERVER, "Address of the HTTP server; other than loopback: with a token only.")
    ] = "127.0.0.1",
    port: Annotated[int, PORT, option(SERVER, "Port of the HTTP server; 0: any.")] = 8000,
    token_file: Annotated[
        Path | None,
        option(
            SERVER,
            f"A file with bearer tokens, one a line; any of them admits requests. Or one in {TOKEN_VARIABLE}.",
            "none: every request from this machine is admitted",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        NODES,
        nodes_option(
            "Number of processes on this machine, which get the stages in turn.",
            "two for every stage; one, if there are more than 8 stages",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        nodes_option("A cluster file: its nodes get stages in their order, and answers take the fastest route."),
    ] = None,
    keys: Keys = None,
    listen: Annotated[str | None, nodes_option("host:port where nodes join, with --keys.", "[::]:5555")] = None,
    heartbeat: Annotated[
        float, HEARTBEAT_S, nodes_option("Seconds without a heartbeat after which a node is declared dead.")
    ] = TIMEOUT_S,
    device: Devices = "cpu",
    dtype: Dtype = "fp32",
    wire: Annotated[CodecId | None, work_option("Codec of hidden states between nodes.", "like --dtype")] = None,
    threads: Annotated[int, THREADS, work_option("Threads of a node.")] = 1,
    logs: Annotated[Path | None, nodes_option("Folder for the logs of nodes on this machine.", "not kept")] = None,
    cut: Cut = None,
    min_coverage: Annotated[
        str,
        part_option(
            "Share of the stages (1/2, 50%) below which nothing is answered (503).", "0: stage 0 alone will do"
        ),
    ] = "0",
    name: Annotated[str | None, option(SERVER, "The model's name, to clients.", "the folder's")] = None,
    context: Annotated[
        int | None,
        CONTEXT,
        option(LIMITS, "Tokens of prompt and answer together, at most.", "as the model's config says"),
    ] = None,
    max_tokens: Annotated[int, Range(1, CONTEXT.most), option(LIMITS, "Tokens of an answer, at most.")] = 4096,
    timeout: Annotated[
        float, Range(1, WAIT_S.most), option(LIMITS, "Seconds in which an answer has to be complete.")
    ] = 600,
    requests_a_minute: Annotated[int, Range(1, 10**6), option(LIMITS, "Requests a minute with one token.")] = 600,
    max_concurrent: Annotated[int, Range(1, 10**6), option(LIMITS, "Concurrent requests with one token.")] = 64,
    queue: Annotated[int, Range(1, 10**6), option(LIMITS, "Answers that may wait for a place; beyond: 503.")] = 256,
    wait_timeout: Annotated[
        float, WAIT_S, option(LIMITS, "Seconds that requests wait for lost stages before 503.")
    ] = 30,
    grace: Annotated[
        float,
        Range(0, WAIT_S.most),
        option(LIMITS, "Seconds for which a lost stage is waited for before answers go on without it."),
    ] = GRACE_S,
    cache_tokens: Annotated[
        int | None,
        Range(2, 10**9),
        option(
            LIMITS,
            "Tokens in the KV cache of a route of up to 16 answers, on every node.",
            "65,536, or the context if that is more",
        ),
    ] = None,
    access_log: Annotated[
        bool,
        option(SERVER, "A line on stderr for every request that was answered.", None, "--access-log/--no-access-log"),
    ] = True,
) -> None:
    """Serve a model over many nodes, with an HTTP interface for OpenAI's clients.

    Stages are on nodes: processes of this machine, which are started again when they end, or nodes that join from
    other machines. When a node is lost, another one of its stage continues its answers. When none is left, the stage is
    left out, and answers say so. Ctrl-C ends it.

    \b
        skippipe serve run
        skippipe serve model/ --cut 4 --nodes 8 --min-coverage 1/2
        skippipe serve model/ --cut 4 --keys keys/ --cluster cluster.json --host 0.0.0.0 --token-file tokens

    Example: skippipe serve run --port 8000
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if nodes is not None and (cluster or keys):
        raise UserError("--nodes: --cluster and --keys give the number of nodes already: leave it out")
    if listen is not None and keys is None:
        raise UserError("--listen: is for nodes that join, and needs --keys; without it they are started here")
    if logs is not None and keys is not None:
        raise UserError("--logs: is for nodes of this machine, and with --keys they join from others: leave one out")
    check_paths(checkpoint)
    from skippipe import web
    from skippipe.planner.problem_spec import cluster_named
    from skippipe.serving.scheduler import ServingSettings
    from skippipe.transport.addresses import is_loopback, listening_socket

    web.check_installed("prometheus_client")
    tokens = _tokens(token_file)
    if not tokens and not is_loopback(host):
        raise UserError(
            f"--host {host}: others can reach that address: put a token into a file and name it with --token-file, or "
            f"into {TOKEN_VARIABLE}; or listen on 127.0.0.1"
        )
    settings = web.ApiSettings(
        tokens=tokens,
        loopback=is_loopback(host),
        answer_timeout=timedelta(seconds=timeout),
        max_tokens=max_tokens,
        requests_per_minute=requests_a_minute,
        max_concurrent=max_concurrent,
    )
    gateway = ServingSettings(
        max_waiting=queue,
        min_coverage=_coverage(min_coverage),
        wait_timeout=timedelta(seconds=wait_timeout),
        grace=timedelta(seconds=grace),
    )
    known = cluster_named(cluster)[0] if cluster else None
    names = _names(known, keys)
    listening_socket(host, port, hint=PORT_TAKEN).close()  # a port that is taken is an error before torch is imported
    print(f"skippipe {__version__} starts to serve {checkpoint}", file=sys.stderr, flush=True)  # torch takes a while
    import torch

    torch.set_num_threads(1)  # nodes are forked from here
    from skippipe.inference.checkpoint_loader import context_of, fingerprint, read_outline
    from skippipe.model.model_spec import parse_devices
    from skippipe.serving.launcher import ServeApp, ServeConfig
    from skippipe.serving.node import ServingConfig
    from skippipe.serving.routing import ClusterCost, UniformCost, assign_stages, local_node_names

    if keys is None:
        parse_devices(device)
    outline = read_outline(checkpoint, cut)
    model_config, layers = outline.spec.config, outline.layers
    max_context = context_of(model_config, context)
    node_config = ServingConfig(
        checkpoint=str(outline.place.resolve()),
        layers=layers,
        stage_of=assign_stages(local_node_names(len(layers), nodes) if names is None else names, len(layers)),
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
        listen=(listen or "[::]:5555") if keys else "127.0.0.1:0",
        logs=logs,
        access_log=access_log,
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


def _coverage(text: str) -> Fraction:
    from skippipe.skip_schedule import parse_share

    if text.strip() in ("1", "100%"):
        return Fraction(1)
    return parse_share(text, "--min-coverage")


def _names(cluster: Cluster | None, keys: Path | None) -> list[str] | None:
    """Names of the nodes, in the order in which they get stages, as far as files have them; None: no file has."""
    if cluster is not None:
        return [node.name for node in cluster.nodes]
    if keys is None:
        return None
    from skippipe.transport.keys import PeerList

    return PeerList.load(keys / "peers.json").expected(time.time())
