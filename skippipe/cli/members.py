"""Commands of the owner of a cluster: keys, invite, members, revoke."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skippipe.cli.options import Json, OutputFolder, one_folder
from skippipe.errors import UserError
from skippipe.json_fields import check_empty, exists
from skippipe.node_names import check_name, check_names
from skippipe.terminal import print_table

ClusterFolder = Annotated[
    Path,
    typer.Argument(
        metavar="CLUSTER",
        help="The folder with coordinator.key and peers.json; 'skippipe keys' or the first 'skippipe invite' makes it.",
    ),
]
DEFAULT_PORT = 5555


def keys(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER|NAMES",
            help="A cluster file, an example or a preset, as for 'skippipe plan'; or the names of nodes, with commas.",
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Where the key files go; or -o FOLDER.")
    ] = None,
    output: OutputFolder = None,
    relays: Annotated[
        str, typer.Option(metavar="NAMES", help="Names of relays ('skippipe relay'), with commas: a key for each too.")
    ] = "",
) -> None:
    """Make a key for the coordinator and one for every node of a cluster.

    Give each node its own file and nothing else; keep coordinator.key and peers.json, and name both in the job
    (transport.key, transport.peers). Before there is a cluster file, names will do: 'skippipe profile' makes it.

    \b
        skippipe keys ann,bob,carol keys/

    Example: skippipe keys cluster.json keys/
    """
    from skippipe.transport.keys import THE_COORDINATOR, KeyFile, KeyPair, PeerList

    names = _node_names(cluster)
    relay_names = _split_names(relays) if relays else []
    nodes = {f"node '{name}'": name for name in names}
    check_names({"the coordinator": THE_COORDINATOR} | nodes | {f"--relays {name}": name for name in relay_names})
    folder = one_folder(folder, output)
    check_empty(folder)
    own = KeyPair.new()
    KeyFile(THE_COORDINATOR, own).save(folder / "coordinator.key")
    peers = {}
    for name in (*names, *relay_names):
        pair = KeyPair.new()
        peers[name] = pair.public
        KeyFile(name, pair, own.public).save(folder / f"{name}.key")
    PeerList(peers, relays=tuple(relay_names)).save(folder / "peers.json")
    print(f"{len(peers)} node keys, coordinator.key and peers.json are in {folder}/")


def _node_names(argument: str) -> list[str]:
    """Names from a cluster, or from a list with commas."""
    from skippipe.planner.problem_spec import cluster_named

    if "," not in argument or exists(Path(argument)):
        return [node.name for node in cluster_named(argument)[0].nodes]
    return _split_names(argument)


def _split_names(argument: str) -> list[str]:
    names = [check_name(name.strip(), f"'{argument}'") for name in argument.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"'{argument}': {len(names)} different names of nodes are needed, with commas between them")
    return names


def invite(
    cluster: ClusterFolder,
    name: Annotated[str, typer.Option(help="Of the node that is invited, as in the cluster file.")],
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long it holds: 30m, 24h, 7d.")] = "24h",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where nodes reach the coordinator; several with commas between them, IPv4 and IPv6. Remembered for "
            "the next invitation.",
            show_default="as the last time; at first this machine's own addresses, port 5555",
        ),
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="It is to be a relay ('skippipe relay'), no node.")] = False,
    as_json: Json = False,
) -> None:
    """Invite a machine: prints one string with which it joins, once.

    Send it to the owner of that machine over a way that you trust: until it is used or expires, whoever has it can
    join in place of the one you meant. On that machine:

    \b
        skippipe node INVITATION

    An invitation for a name that was invited before makes the earlier one void. The coordinator need not run, and one
    that runs knows at once.

    Example: skippipe invite keys/ --name bob --address 203.0.113.7:5555
    """
    from skippipe.transport.invitation import split_addresses
    from skippipe.transport.members import MemberStore, cluster_keys, parse_span, when

    lasting_s = parse_span(expires, "--expires")
    given = split_addresses(address, "--address") if address is not None else ()
    own = cluster_keys(cluster)
    store = MemberStore.of_folder(cluster)
    where = given or store.current().addresses or _own_addresses()
    found = store.invite(name, own.public, lasting_s, where, relay=relay)
    if as_json:
        print(
            json.dumps(
                {
                    "name": name,
                    "invitation": found.to_text(),
                    "expires": when(found.expires_s),
                    "addresses": list(found.addresses),
                }
            )
        )
        return
    print(found.to_text())
    typer.echo(
        f"for '{name}', once, until {when(found.expires_s)}; it joins {', '.join(found.addresses)} with: "
        f"skippipe {'relay' if relay else 'node'} INVITATION",
        err=True,
    )


def list_members(cluster: ClusterFolder, as_json: Json = False) -> None:
    """List who may take part: members, those who were invited, and those whose keys were revoked.

    Compare the key of a new member with what 'skippipe node' has printed on its machine, if you are not sure that the
    invitation has reached nobody else.

    Example: skippipe members keys/
    """
    from skippipe.transport.members import PEERS_FILE, MemberStore, fingerprint, when

    store = MemberStore.of_folder(cluster)
    if not exists(store.path):
        raise UserError(f"{cluster}: has no {PEERS_FILE}; 'skippipe keys' or 'skippipe invite' makes one")
    rows = store.rows()
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    now_s = time.time()
    print_table(
        ("name", "state", "key", "since", "last seen"),
        [
            (
                row.name,
                f"{row.state}, relay" if row.relay else row.state,
                fingerprint(row.public) if row.public else "",
                when(row.since_s) if row.since_s else "",
                _ago(now_s - row.seen_s)
                if row.seen_s
                else (f"until {when(row.expires_s)}" if row.state == "invited" else ""),
            )
            for row in rows
        ],
        left=range(5),
        unwrapped=5,
        file_width=160,
    )


def revoke(
    cluster: ClusterFolder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The member, or the one who is invited.")],
) -> None:
    """Shut a member out for good, or withdraw an invitation.

    A coordinator that runs drops the node at once, as if it were lost, and the other nodes refuse its key. The key
    cannot come back; the name can, with a new invitation.

    Example: skippipe revoke keys/ bob
    """
    from skippipe.transport.members import PEERS_FILE, MemberStore

    store = MemberStore.of_folder(cluster)
    if not exists(store.path):
        raise UserError(f"{cluster}: has no {PEERS_FILE}; nobody is a member")
    member = name in store.load().peers
    store.revoke(name)
    print(f"'{name}' is shut out: its key is void" if member else f"the invitation of '{name}' is void")


def _own_addresses() -> tuple[str, ...]:
    """The addresses that this machine has on its way to the internet, of both kinds."""
    from skippipe.transport.addresses import ANYWHERE, is_loopback, join_address, own_addresses

    with suppress(UserError):
        if found := [each for each in own_addresses(ANYWHERE) if not is_loopback(each)]:
            return tuple(join_address(each, DEFAULT_PORT) for each in found)
    raise UserError("--address: missing, and this machine has no address but its own; say where nodes reach it")


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0, round(seconds))} s ago"
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 60:.0f} min ago"
