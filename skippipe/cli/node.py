"""Commands on a machine that joins: node, relay, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.cli.options import Json, Number, parse_number
from skippipe.errors import UserError
from skippipe.json_fields import exists
from skippipe.value_ranges import WAIT_S, Range

if TYPE_CHECKING:
    from skippipe.runtime.doctor import Examined
    from skippipe.runtime.node.interfaces import Roles
    from skippipe.transport.enrolment import Finding
    from skippipe.transport.keys import KeyFile

REMEMBERED = "~/.skippipe/node.key"
RELAY_KEY = "~/.skippipe/relay.key"
RELAY_PORT = "5560"
MAX_STREAMS, MAX_NODE_STREAMS, MAX_IDLE_S = 4096, 512, 600  # of a relay
ANY_PORT = "0"
ADMITTED_S = 900.0  # for a coordinator to be there that admits a relay
RATE_MB = Range(1e-6, 10**9)
STREAMS = Range(1, 2**16)
IDLE_S = Range(1, 10**6)
MARKS = {"ok": "ok     ", "warning": "warning", "wrong": "wrong  "}

KeyOption = Annotated[
    Path | None,
    typer.Option(
        help="This node's key file: made by 'skippipe keys', or here with an invitation.", show_default=REMEMBERED
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        help="host:port of the coordinator; several with commas between them, IPv4 and IPv6, or if it may come back "
        "elsewhere.",
        show_default="as the invitation said",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        help="host:port of this machine at which other nodes reach it, several with commas; a port alone: at the "
        "addresses that this machine has on the way to the coordinator, IPv4 and IPv6; 0: any port; none: this machine "
        "only calls out.",
        show_default=ANY_PORT,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        help="host:port at which others reach this node, if it listens elsewhere (a router); several with commas."
    ),
]
NodeDevices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "--device",
        help="cuda:N or cuda:N-M, GPUs that work side by side as one node; cpu, or cpu:K for K workers; cuda for all "
        "GPUs, instead of the job's.",
        show_default="all GPUs if the job is for GPUs",
    ),
]


def node(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITATION",
            help="Needed once; the node keeps its key, the address and the options that are given with it.",
            show_default=False,
        ),
    ] = None,
    join: Join = None,
    key: KeyOption = None,
    listen: Listen = None,
    address: AddressOption = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the token folder, if elsewhere than the coordinator.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where this machine keeps the model that is served, if elsewhere than the gateway."),
    ] = None,
    devices: NodeDevices = None,
    coordinator_timeout: Annotated[
        float,
        WAIT_S,
        typer.Option(help="Seconds to wait for the coordinator, before training and whenever it is gone."),
    ] = 900,
) -> None:
    """Join a run, or a gateway that serves, from another machine and work until it is over.

    With an invitation ('skippipe invite', where the coordinator is) it makes a key of its own, has it admitted and
    keeps it, with the other options but --coordinator-timeout; from then on 'skippipe node' alone will do. Before it
    joins it examines this machine in brief, as 'skippipe doctor' does.

    \b
        skippipe node --join 10.0.0.1:5555 --key berlin-1.key --listen 5556

    Example: skippipe node
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # a node decides a few times a second: no compiler needed
    from skippipe.checkpoint.locate import built_in
    from skippipe.runtime.doctor import Examined, check_at_join
    from skippipe.runtime.node.agent import NodeAgent
    from skippipe.runtime.node.interfaces import ALL_DEVICES, JoinConfig
    from skippipe.transport.addresses import listen_address

    if devices is not None:
        from skippipe.model.model_spec import parse_devices

        parse_devices(devices)
    folders = {"tokens": tokens, "checkpoint": built_in(checkpoint) if checkpoint else None}
    given = {"join": join, "listen": listen, "address": address, "devices": devices} | {
        name: None if path is None else str(path.absolute()) for name, path in folders.items()
    }
    mine = _admitted(invitation, join, _key_path(key), coordinator_timeout)
    chosen = _with_remembered(mine, _key_path(key), invitation, given)
    where = chosen.get("join", ",".join(mine.addresses))
    coordinator = _coordinator(mine, _key_path(key), where)
    here = chosen.get("listen", ANY_PORT), chosen.get("address"), chosen.get("devices")
    agent_config = JoinConfig(
        name=mine.node,
        coordinator=where,
        keys=mine.keys,
        coordinator_public=coordinator,
        listen=listen_address(here[0], where, here[1]),
        address=here[1],
        data_folder=Path(chosen["tokens"]) if "tokens" in chosen else None,
        checkpoint=Path(chosen["checkpoint"]) if "checkpoint" in chosen else None,
        devices=here[2] or ALL_DEVICES,
        coordinator_timeout=timedelta(seconds=coordinator_timeout),
    )
    machine = Examined(_key_path(key).parent, tuple(where.split(",")), mine.keys, coordinator, *here)
    check_at_join(machine, coordinator_timeout, lambda line: print(line, file=sys.stderr))
    agent = NodeAgent(agent_config, _all_roles())
    print(f"node '{mine.node}' joins {where}", file=sys.stderr)
    reason = agent.run()
    if reason:
        raise UserError(reason)


def _key_path(given: Path | None) -> Path:
    return given if given is not None else Path(REMEMBERED).expanduser()


def relay(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITATION",
            help="Needed once; the relay keeps its key, the address and the options that are given with it.",
            show_default=False,
        ),
    ] = None,
    join: Join = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="This relay's key file: made by 'skippipe keys', or here with an invitation.", show_default=RELAY_KEY
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="host:port of this machine at which nodes dial; a port alone: at all its addresses. It must be open.",
            show_default=RELAY_PORT,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="host:port at which nodes reach this relay; several with commas between them, IPv4 and IPv6.",
            show_default="the address that this machine has on the way to the coordinator",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        RATE_MB,
        typer.Option(metavar="MB/S", help="Megabytes a second of all nodes together.", show_default="no limit"),
    ] = None,
    node_rate: Annotated[
        float | None,
        RATE_MB,
        typer.Option(metavar="MB/S", help="Megabytes a second that one node may send.", show_default="no limit"),
    ] = None,
    streams: Annotated[
        int | None,
        STREAMS,
        typer.Option(
            help="Streams at one time of all nodes together; two nodes need up to six.", show_default=str(MAX_STREAMS)
        ),
    ] = None,
    node_streams: Annotated[
        int | None,
        STREAMS,
        typer.Option(help="Streams at one time of one node.", show_default=str(MAX_NODE_STREAMS)),
    ] = None,
    idle: Annotated[
        float | None,
        IDLE_S,
        typer.Option(
            metavar="SECONDS",
            help="A stream that carries nothing for that long is closed.",
            show_default=str(MAX_IDLE_S),
        ),
    ] = None,
) -> None:
    """Join nodes that can both only call out: a relay on a machine that can be reached.

    Both nodes dial it, and it forwards what they send to each other. It cannot read that: keys and encryption are the
    nodes' own, end to end. Invite it where the coordinator is, with 'skippipe invite CLUSTER --name hub --relay'. It
    serves one run after another, until Ctrl-C, and needs one open port, little memory and no GPU. It keeps the options
    that are given with the invitation: from then on 'skippipe relay' alone will do. The plan may count on what it
    carries: 'skippipe cluster --relay'.

    \b
        skippipe relay INVITATION --address hub.example.org:5560 --rate 100

    Example: skippipe relay
    """
    import resource

    from skippipe.runtime.relay import RelayAgent
    from skippipe.transport.addresses import join_address, own_address, split_address
    from skippipe.transport.invitation import split_addresses
    from skippipe.transport.relay import Relay, RelayLimits

    path = key if key is not None else Path(RELAY_KEY).expanduser()
    mine = _admitted(invitation, join, path, ADMITTED_S)
    numbers = {"rate": rate, "node_rate": node_rate, "streams": streams, "node_streams": node_streams, "idle": idle}
    given = {"join": join, "listen": listen, "address": address} | {
        name: None if value is None else str(value) for name, value in numbers.items()
    }
    chosen = _with_remembered(mine, path, invitation, given)
    where = chosen.get("join", ",".join(mine.addresses))
    coordinator = _coordinator(mine, path, where, "relay")

    def number(kind: type[Number], name: str, within: Range, default: Number) -> Number:
        """One that was given is checked already; the file may have been edited."""
        return parse_number(kind, chosen[name], within, f"{path}: options.{name}") if name in chosen else default

    limits = RelayLimits(
        1e6 * number(float, "rate", RATE_MB, inf),
        1e6 * number(float, "node_rate", RATE_MB, inf),
        number(int, "streams", STREAMS, MAX_STREAMS),
        number(int, "node_streams", STREAMS, MAX_NODE_STREAMS),
        number(float, "idle", IDLE_S, MAX_IDLE_S),
    )
    listen, address = chosen.get("listen", RELAY_PORT), chosen.get("address")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files a stream
    everywhere = "[::]" if _has_ipv6() else "0.0.0.0"
    opened = Relay(f"{everywhere}:{listen}" if listen.isascii() and listen.isdigit() else listen, limits)
    host, port = split_address(opened.address)
    if address is not None:
        split_addresses(address, "--address")
    elif host in ("0.0.0.0", "::", "*"):
        address = join_address(own_address(split_address(where.split(",")[0])[0]), port)
    else:
        address = opened.address
    agent = RelayAgent(mine.node, mine.keys, where, coordinator, opened, address)
    print(f"relay '{mine.node}' at {address}, for the coordinator at {where}; Ctrl-C ends it", file=sys.stderr)
    agent.run(tell=lambda line: print(line, file=sys.stderr, flush=True))


def _with_remembered(
    mine: KeyFile, path: Path, invitation: str | None, options: Mapping[str, str | None]
) -> dict[str, str]:
    """Options that are given, and else those that were given with the invitation: they are kept with the key."""
    given = {name: value for name, value in options.items() if value is not None}
    if invitation is None:
        return {**mine.options, **given}
    if mine.options != given:
        replace(mine, options=given).save(path)
    return given


def _coordinator(mine: KeyFile, path: Path, where: Collection[str], what: str = "node") -> str:
    """The coordinator's public key; UserError if the file holds its own key, or nothing says where it is."""
    if mine.coordinator is None:
        raise UserError(f"{path}: this is the coordinator's key; a {what} needs its own")
    if not where:
        raise UserError("--join: missing; say where the coordinator is: host:port")
    return mine.coordinator


def _has_ipv6() -> bool:
    import socket

    return socket.has_dualstack_ipv6()


def _admitted(invitation: str | None, join: str | None, path: Path, patience_s: float) -> KeyFile:
    """The key file of this node or relay; with an invitation, it is made and admitted if that has not been done."""
    from skippipe.transport.keys import KeyFile, KeyPair

    if invitation is None:
        if path in (Path(REMEMBERED).expanduser(), Path(RELAY_KEY).expanduser()) and not exists(path):
            raise UserError("this machine was not invited yet: give the invitation, or --key and --join")
        return KeyFile.load(path)
    from skippipe import __version__
    from skippipe.transport.enrolment import enrol
    from skippipe.transport.invitation import Invitation, split_addresses
    from skippipe.transport.members import NotAdmitted, fingerprint

    invited = Invitation.from_text(invitation)
    if join is not None:
        invited = replace(invited, addresses=split_addresses(join, "--join"))
    mine = KeyFile.load(path) if exists(path) else None
    if mine is not None and (mine.node, mine.coordinator) != (invited.name, invited.coordinator):
        raise UserError(
            f"{path}: is the key of node '{mine.node}'; to be '{invited.name}' as well, name another file with --key"
        )
    admit = partial(
        enrol,
        invited,
        version=__version__,
        patience_s=patience_s,
        waiting=lambda why: print(f"waiting for the coordinator: {why}", file=sys.stderr),
    )
    if mine is not None:
        with suppress(NotAdmitted):  # its key was revoked, then a new one may be admitted
            admit(mine.keys.public)
            return mine
    new = KeyFile(invited.name, KeyPair.new(), invited.coordinator, invited.addresses)
    new.save(path)  # before it is admitted: what is admitted must not be lost
    try:
        new = replace(new, addresses=admit(new.keys.public))
    except NotAdmitted:
        mine.save(path) if mine is not None else path.unlink(missing_ok=True)
        raise
    new.save(path)
    print(f"admitted as '{new.node}' with the key {fingerprint(new.keys.public)}…, kept in {path}", file=sys.stderr)
    return new


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITATION|FOLDER|HOST:PORT",
            help="What to examine this machine for: an invitation, which is not used up by this; the folder or file of "
            "a node's key; or the address of a coordinator.",
            show_default=REMEMBERED,
        ),
    ] = None,
    listen: Listen = None,
    address: AddressOption = None,
    join: Join = None,
    devices: NodeDevices = None,
    as_json: Json = False,
) -> None:
    """Examine this machine before it joins, or when it cannot: a line for each finding, with what to do.

    Software, device, memory, disk; whether the coordinator answers and knows the key, whether the clocks agree, whether
    it can connect to this machine, whether large packets get through, and how fast. Exit code 1 if something is wrong.

    Example: skippipe doctor --listen 5556
    """
    from skippipe.runtime.doctor import examine

    machine = _examined(target, join, listen, address, devices)
    findings = examine(machine)
    wrong = any(each.level == "wrong" for each in findings)
    if as_json:
        import msgspec

        print(json.dumps({"well": not wrong, "findings": msgspec.to_builtins(findings)}))
    else:
        _print_findings(findings)
    if wrong:
        raise SystemExit(1)


def _print_findings(findings: list[Finding]) -> None:
    for each in findings:
        print(f"{MARKS[each.level]}  {each.check}: {each.text}")


def _examined(
    target: str | None, join: str | None, listen: str | None, address: str | None, devices: str | None
) -> Examined:
    from skippipe.runtime.doctor import Examined
    from skippipe.transport.invitation import Invitation, is_invitation, split_addresses
    from skippipe.transport.keys import KeyFile

    home, given = Path(REMEMBERED).expanduser(), split_addresses(join, "--join") if join else ()
    here = listen or ANY_PORT, address, devices
    if target is not None and is_invitation(target):
        invited = Invitation.from_text(target)
        return Examined(home.parent, given or invited.addresses, invited.keys, invited.coordinator, *here)
    path = Path(target) if target is not None else home
    if target is not None and not exists(path) and ":" in target:
        return Examined(home.parent, split_addresses(target, "HOST:PORT"), None, "", *here)
    if path.is_dir():
        path = path / home.name
    if target is None and not exists(path):
        return Examined(home.parent, given, None, "", *here)
    mine = KeyFile.load(path)
    kept = mine.options
    addresses = given or (split_addresses(kept["join"], "options.join") if "join" in kept else mine.addresses)
    coordinator = _coordinator(mine, path, addresses)
    here = listen or kept.get("listen", ANY_PORT), address or kept.get("address"), devices or kept.get("devices")
    return Examined(path.parent, addresses, mine.keys, coordinator, *here)


def _all_roles() -> Roles:
    """Roles that a coordinator may assign, imported when it does: no node waits for what another role needs."""
    from skippipe.runtime.node.interfaces import PROFILING, SERVING, TRAINING

    modules = {
        TRAINING: "skippipe.runtime.train_role",
        SERVING: "skippipe.serving.node",
        PROFILING: "skippipe.profiling.node",
    }

    def build(kind: str, *given: Any) -> Any:
        return import_module(modules[kind]).ROLES[kind](*given)

    return {kind: partial(build, kind) for kind in modules}
