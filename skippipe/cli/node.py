"""Commands on a machine that joins: node, doctor."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.cli.options import Json
from skippipe.errors import UserError
from skippipe.json_fields import exists
from skippipe.value_ranges import WAIT_S

if TYPE_CHECKING:
    from skippipe.runtime.doctor import Examined
    from skippipe.runtime.node.interfaces import Roles
    from skippipe.transport.enrolment import Finding
    from skippipe.transport.keys import KeyFile

REMEMBERED = "~/.skippipe/node.key"
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
        help="host:port of the coordinator; several with commas between them, if it may come back elsewhere.",
        show_default="as the invitation said",
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        help="host:port of this machine at which other nodes reach it; a port alone: at the address that this "
        "machine has on the way to the coordinator; 0: any port; none: this machine only calls out."
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(help="host:port at which others reach this node, if it listens elsewhere (behind a router)."),
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
        str | None, typer.Argument(metavar="INVITATION", help="Needed once; the node remembers.", show_default=False)
    ] = None,
    join: Join = None,
    key: KeyOption = None,
    listen: Listen = "0",
    address: AddressOption = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the token folder, if elsewhere than the coordinator.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where this machine keeps the model that is served, if elsewhere than the gateway."),
    ] = None,
    devices: NodeDevices = None,
    patience: Annotated[
        float,
        WAIT_S,
        typer.Option(help="Seconds to wait for the coordinator, before training and whenever it is gone."),
    ] = 900,
) -> None:
    """Join a run, or a gateway that serves, from another machine and work until it is over.

    With an invitation ('skippipe invite', where the coordinator is) it makes a key of its own, has it admitted and
    keeps it; from then on 'skippipe node' alone will do. Before it joins it examines this machine in brief, as
    'skippipe doctor' does.

    \b
        skippipe node --join 10.0.0.1:5555 --key berlin-1.key --listen 5556

    Example: skippipe node
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # a node decides a few times a second: no compiler needed
    from skippipe.runtime.doctor import Examined, check_at_join
    from skippipe.runtime.node.agent import NodeAgent
    from skippipe.runtime.node.interfaces import ALL_DEVICES, JoinConfig
    from skippipe.transport.addresses import listen_address

    mine = _admitted(invitation, join, key, patience)
    where = join or ",".join(mine.addresses)
    if not where:
        raise UserError("--join: missing; say where the coordinator is: host:port")
    if mine.coordinator is None:
        raise UserError(f"{_key_path(key)}: this is the coordinator's key; a node needs its own")
    if devices is not None:
        from skippipe.model.model_spec import parse_devices

        parse_devices(devices)
    agent_config = JoinConfig(
        name=mine.node,
        coordinator=where,
        keys=mine.keys,
        coordinator_public=mine.coordinator,
        listen=listen_address(listen, where.split(",")[0], address),
        address=address,
        data_folder=tokens,
        checkpoint=checkpoint,
        devices=devices or ALL_DEVICES,
        coordinator_timeout=timedelta(seconds=patience),
    )
    machine = Examined(
        _key_path(key).parent, tuple(where.split(",")), mine.keys, mine.coordinator, listen, address, devices
    )
    check_at_join(machine, patience, lambda line: print(line, file=sys.stderr))
    agent = NodeAgent(agent_config, _all_roles())
    print(f"node '{mine.node}' joins {where}", file=sys.stderr)
    reason = agent.run()
    if reason:
        raise UserError(reason)


def _key_path(given: Path | None) -> Path:
    return given if given is not None else Path(REMEMBERED).expanduser()


def _admitted(invitation: str | None, join: str | None, key: Path | None, patience_s: float) -> KeyFile:
    """This node's key file; with an invitation, it is made and admitted if that has not been done."""
    from skippipe.transport.keys import KeyFile, KeyPair

    path = _key_path(key)
    if invitation is None:
        if key is None and not exists(path):
            raise UserError("this machine was not invited yet: give the invitation, or --key and --join")
        return KeyFile.load(path)
    from dataclasses import replace

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
    listen: Listen = "0",
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


def _examined(target: str | None, join: str | None, listen: str, address: str | None, devices: str | None) -> Examined:
    from skippipe.runtime.doctor import Examined
    from skippipe.transport.invitation import Invitation, is_invitation, split_addresses
    from skippipe.transport.keys import KeyFile

    home, given = Path(REMEMBERED).expanduser(), split_addresses(join, "--join") if join else ()
    if target is not None and is_invitation(target):
        invited = Invitation.from_text(target)
        addresses = given or invited.addresses
        return Examined(home.parent, addresses, invited.keys, invited.coordinator, listen, address, devices)
    path = Path(target) if target is not None else home
    if target is not None and not exists(path) and ":" in target:
        return Examined(home.parent, split_addresses(target, "HOST:PORT"), None, "", listen, address, devices)
    if path.is_dir():
        path = path / home.name
    if target is None and not exists(path):
        return Examined(home.parent, given, None, "", listen, address, devices)
    mine = KeyFile.load(path)
    if mine.coordinator is None:
        raise UserError(f"{path}: this is the coordinator's key; a node needs its own")
    addresses = given or mine.addresses
    if not addresses:
        raise UserError("--join: missing; say where the coordinator is: host:port")
    return Examined(path.parent, addresses, mine.keys, mine.coordinator, listen, address, devices)


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
