"""A million broken inputs for everything that reads bytes from the network: none may do more than be refused.

python -m benchmarks.fuzz [--frames 1000000] [--seed 0] [--processes 1] [--only NUMBER]

Whatever comes in either gives a message or raises what its reader says it raises (Malformed, Forged or UserError, with
a reason that is short and can be printed); and reading takes no more memory than a small multiple of what came in.
A case follows from the seed and its number alone, so `--only` shows one that failed once more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
import zmq
from zmq.utils import z85

from skippipe.codecs import CODECS, Buffer, EncodedTensor, decode
from skippipe.errors import UserError
from skippipe.runtime import message_json
from skippipe.transport.addresses import Context
from skippipe.transport.aead import KEY_BYTES, Forged, Sealer
from skippipe.transport.fast_path import (
    LENGTH,
    PATH_DOMAIN,
    PIECE_BYTES,
    FastPathMessage,
    FastPathReceiver,
    FastPathVerb,
    between,
)
from skippipe.transport.message import (
    HEADER,
    HEADERS,
    LARGEST_NS,
    MOST_DIMS,
    Header,
    Limits,
    Malformed,
    Message,
    MessageKind,
    Stamp,
    from_frames,
    to_frames,
)
from skippipe.transport.zap_auth import ZAP_DOMAIN, ZapAuth

LIMITS = Limits(payload_bytes=2**28, json_bytes=2**17)
LONGEST_REASON = 1000  # characters
SPARE_BYTES, TIMES = 2**23, 64  # what reading may take: so much, and so many times what came in
GROWTH_BYTES = 2**26  # over a whole run

ODD_BYTES = (0, 1, 0x7F, 0x80, 0xFF)
ODD_NUMBERS = sorted({2**bits - less for bits in (1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64) for less in (0, 1)})
WITH_FACTORS = (2, 130, 128)
ODD_SHAPES = [  # the largest there is, products that are 0 or 4 modulo 2³² or 2⁶⁴, and none
    [2**32 - 1] * 4,
    *([2**16, 2**16, 0, 0], [2**31, 2**31, 4, 1], [2**30, 1, 1, 1], [2**28 + 1, 2**4, 0, 0]),
    *([0, 1, 1, 1], [1, 0, 0, 0]),
]
ODD_JSON = [
    *("null", "true", "-1", "0.5", '""', "[]", "{}", "[[]]", '[["nan"]]', "[[null]]", "[{}]", '"nan"'),
    *("NaN", "-Infinity", "1e308", "1e309", "-1e999", "1e-400"),
    *("9007199254740993", "9" * 400, "9" * 4300, "9" * 4301, "1" + "0" * 3000 + ".5", "1" + "0" * 300 + "e9"),
    *('"\\ud800"', '"\\u0000\\u001b[2J"', '"' + "x" * 3000 + '"', '"' + "\\t" * 2000 + '"', '"\ufeff"', '"\\'),
    *("[" * depth + "]" * depth for depth in (10, 15, 16, 17, 500)),
    *('{"":' * depth + "0" + "}" * depth for depth in (10, 17, 300)),
    *("[" * 5000, '{"a":' * 5000, "[" + "{}," * 3000 + "{}]", "[" + "1," * 5000 + "1]", '{"a":0,"a":1}'),
]
ODD_NAMES = ['"say"', '""', '"\\ud800"', '"' + "n" * 2000 + '"', '"\\u001b[2J"']

# Good ones


def some_header(rng: random.Random, kind: type[Header]) -> Header:
    return kind(*(rng.choice((0, 1, rng.randrange(most), most)) for most in kind.bounds().values()))


def good_message(rng: random.Random) -> list[bytes]:
    """A tensor or nothing."""
    body = None
    if rng.random() < 0.9:
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randrange(5)))
        if rng.random() < 0.1:  # large enough for codecs with factors
            shape = WITH_FACTORS
        dtype = rng.choice(tuple(CODECS))
        body = EncodedTensor(dtype, shape, rng.randbytes(CODECS[dtype].tensor_bytes(shape)))
    kind = rng.choice([each for each in MessageKind if each is not MessageKind.CONTROL])
    message = Message(some_header(rng, HEADERS[kind]), body, rng.randrange(LARGEST_NS))
    header, payload = to_frames(message, rng.randrange(LARGEST_NS))
    return [header, bytes(payload)]


def good_value(rng: random.Random, hint: Any) -> Any:
    """Any value of a type, as JSON has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return good_value(rng, rng.choice(inner))
    if origin is Literal:
        return rng.choice(inner)
    if is_dataclass(hint):
        return {name: good_value(rng, each) for name, each in get_type_hints(hint).items()}
    if origin in (list, tuple):
        return [good_value(rng, inner[0]) for _ in range(rng.randrange(4))]
    if origin is dict:
        return {f"key{at}": good_value(rng, inner[1]) for at in range(rng.randrange(3))}
    simple = {
        str: lambda: rng.choice(("", "127.0.0.1:5555", "Zürich", "\ud800\x1b[2J")),
        int: lambda: rng.choice((0, 1, 7, 2**53)),
        bool: lambda: rng.random() < 0.5,
        float: lambda: rng.choice((0.0, -1.5, 1e300, "nan", "inf")),
        type(None): lambda: None,
    }
    return simple.get(hint, lambda: rng.choice((None, 0, "text", [1.5, "a"], {"a": [0]})))()


def good_control(rng: random.Random) -> dict[str, Any]:
    """Of any kind that there is, whatever the kinds are by now."""
    say = rng.choice(list(message_json.MESSAGE_TYPES))
    return {"say": say} | {name: good_value(rng, hint) for name, hint in HINTS[say].items()}


HINTS = {
    say: dict(zip(kind.__struct_encode_fields__, map(get_type_hints(kind).get, kind.__struct_fields__), strict=True))
    for say, kind in message_json.MESSAGE_TYPES.items()
}


def good_verb(rng: random.Random) -> bytes:
    return FastPathMessage(
        rng.choice(list(FastPathVerb)), rng.randbytes(16), rng.randint(1, 65535), rng.randbytes(32)
    ).to_bytes()


# Bad ones


def spoiled(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Damaged in one way or another, perhaps with a part of another one."""
    at = rng.randrange(len(data) + 1)
    way = rng.randrange(8)
    if way < 4 and data:
        at %= len(data)
        byte = data[at] ^ 1 << rng.randrange(8) if way < 2 else rng.choice(ODD_BYTES)
        return data[:at] + bytes([byte]) + data[at + 1 :]
    if way == 4:
        return data[:at]
    if way == 5:
        return data + rng.randbytes(rng.choice((1, 2, 4, 64)))
    if way == 6:
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def edited(rng: random.Random, header: bytes) -> bytes:
    """Still a header, but with odd values in some of its fields."""
    found = bytearray(header)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.choice(PLACES)
        found[at : at + size] = (rng.choice(ODD_NUMBERS) % 256**size).to_bytes(size, "little")
    if rng.random() < 0.3:
        found[7] = rng.randrange(MOST_DIMS + 2)
        found[-4 * MOST_DIMS :] = struct.pack(f"<{MOST_DIMS}I", *rng.choice(ODD_SHAPES))
    if rng.random() < 0.1:
        found[:4] = rng.choice((b"SKPL", b"SKIP", bytes(4)))
    return bytes(found)


PLACES = [
    *((at, 1) for at in range(4, 8)),  # version, kind, body, dims
    *((at, 4) for at in range(8, 32, 4)),  # the numbers of the kind
    *((at, 8) for at in (8, 16, 32, 40)),  # wide ones among them; the times
    *((at, 4) for at in range(48, 64, 4)),  # the shape
]
"""Where the fields of a header are, and their bytes."""
assert HEADER.size == 64


def in_pieces(rng: random.Random, payload: bytes) -> list[bytes]:
    if rng.random() < 0.7:
        return [payload]
    cuts = sorted(rng.randrange(len(payload) + 1) for _ in range(rng.randint(1, 4)))
    return [payload[start:end] for start, end in zip([0, *cuts], [*cuts, len(payload)], strict=True)]


def bad_message(rng: random.Random) -> list[bytes]:
    header, payload = good_message(rng)
    way = rng.randrange(10)
    if way < 5:
        header = edited(rng, header)
    elif way < 7:
        header = spoiled(rng, header, good_message(rng)[0])
    elif way < 9:
        payload = spoiled(rng, payload, good_message(rng)[1])
    frames = [header, *in_pieces(rng, payload)]
    if rng.random() < 0.03:
        rng.shuffle(frames)
        frames = frames[: rng.randrange(len(frames) + 1)]
    return frames


def odd_json(rng: random.Random, value: Any) -> str:
    """The value as JSON, with something odd in one place of it."""
    place = value
    while isinstance(place, (dict, list)) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key: Any = rng.choice(keys)
        if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.6:
            break
        place = place[key]
    if not isinstance(place, (dict, list)) or not place:
        return rng.choice(ODD_JSON)
    way = rng.randrange(5)
    odd = rng.choice(ODD_JSON)
    if way < 3:
        place[key] = "@odd@"
    elif way == 3 and isinstance(place, dict):
        del place[key]
    elif isinstance(place, dict):
        place["@name@"] = place.pop(key) if rng.random() < 0.5 else 0
        odd = rng.choice(ODD_NAMES)
    text = json.dumps(value, separators=(",", ":"))
    return text.replace('"@odd@"', odd).replace('"@name@"', odd)


def bad_control(rng: random.Random) -> list[bytes]:
    """A sound header, and JSON that is mostly not."""
    text = json.dumps(good_control(rng)).encode()
    way = rng.randrange(10)
    if way < 6:
        text = odd_json(rng, good_control(rng)).encode(errors="surrogatepass")
    elif way < 9:
        text = spoiled(rng, text, json.dumps(good_control(rng)).encode())
    header, _ = to_frames(Message(some_header(rng, Stamp), {}))
    return [header, *in_pieces(rng, text)]


def bad_verb(rng: random.Random) -> list[bytes]:
    verb = good_verb(rng)
    return [spoiled(rng, verb, good_verb(rng)) if rng.random() < 0.9 else verb]


class Seeded(Sealer):
    """With a key that can be had again."""

    def __init__(self, key: bytes, between: bytes) -> None:
        self.key = key
        super(Sealer, self).__init__(key, between)


PATH_ID = bytes(range(16))


def bad_path(rng: random.Random) -> list[bytes]:
    """The key, then frames of one or two messages: sealed by a hostile peer, or damaged on their way."""
    key = rng.randbytes(KEY_BYTES)
    sealer = Seeded(key, between(PATH_ID, "a", "b"))
    frames = []
    for _ in range(rng.randint(1, 2)):
        header, payload, *_ = [*(bad_message if rng.random() < 0.5 else good_message)(rng), b"", b""]
        size = len(payload) if rng.random() < 0.7 else rng.choice((*ODD_NUMBERS, LIMITS.payload_bytes, PIECE_BYTES + 1))
        opening = header + LENGTH.pack(size % 2**64)
        frames.append(sealer.seal(opening))
        if payload:
            frames.append(sealer.seal(payload, opening if rng.random() < 0.9 else header))
    if rng.random() < 0.5:
        at = rng.randrange(len(frames))
        frames[at] = spoiled(rng, frames[at], frames[0])
    if rng.random() < 0.1:
        rng.shuffle(frames)
    return [key, *frames]


CURVE_KEY = bytes(range(100, 132))
PASSWORD = bytes(range(200, 232))
REQUESTS = {
    z85.encode(CURVE_KEY): [b"1.0", b"1", ZAP_DOMAIN, b"127.0.0.1", b"", b"CURVE", CURVE_KEY],
    PATH_ID.hex().encode(): [
        b"1.0",
        b"2",
        PATH_DOMAIN,
        b"::1",
        b"",
        b"PLAIN",
        PATH_ID.hex().encode(),
        PASSWORD.hex().encode(),
    ],
}
AUTH = ZapAuth()


def bad_request(rng: random.Random) -> list[bytes]:
    request = list(rng.choice(list(REQUESTS.values())))
    for _ in range(rng.randint(0, 2)):
        at, way = rng.randrange(len(request)), rng.randrange(6)
        if way < 3:
            request[at] = spoiled(rng, request[at], rng.choice(request))
        elif way == 3:
            request[at] = rng.choice((b"", b"1.0", b"CURVE", b"PLAIN", b"NULL", ZAP_DOMAIN, PATH_DOMAIN, CURVE_KEY))
        elif way == 4:
            request.insert(at, rng.choice(request))
        else:
            request = request[:at] or [b""]
    return request


# What reads them: True if it was taken


def read_message(frames: list[bytes]) -> bool:
    views: list[Buffer] = [memoryview(frame) for frame in frames]
    message, due_ns = from_frames(views, LIMITS)
    header, payload = to_frames(message, due_ns)
    assert header == frames[0], "the header says something that the message does not"
    if isinstance(message.body, EncodedTensor):
        assert bytes(payload) == b"".join(frames[1:]), "other bytes than those that came"
        tensor = decode(message.body)
        assert tuple(tensor.shape) == message.body.shape and tensor.dtype == torch.float32
    return True


def read_control(frames: list[bytes]) -> bool:
    message, _ = from_frames(frames, LIMITS)
    said = message_json.to_json(message_json.from_json(message.body))
    json.dumps(said, allow_nan=False)  # what a node has heard it can say
    return True


def read_verb(frames: list[bytes]) -> bool:
    return bool(FastPathMessage.from_bytes(frames[0]))


class Replayed:
    """A socket with these frames in it, as far as a fast path needs one."""

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._frames = [zmq.Frame(frame) for frame in frames]

    def socket(self, _: int) -> Replayed:
        return self

    def setsockopt(self, *_: Any) -> None:
        pass

    def bind(self, _: str) -> None:
        pass

    def getsockopt_string(self, _: int) -> str:
        return "tcp://127.0.0.1:1"

    def recv(self, *_: Any, **__: Any) -> zmq.Frame:
        if not self._frames:
            raise zmq.Again
        return self._frames.pop(0)


def read_path(frames: list[bytes]) -> bool:
    path = FastPathReceiver(cast(Context, Replayed(frames[1:])), "127.0.0.1", PATH_ID, LIMITS.payload_bytes, 16)
    path.open(frames[0], "a", "b")
    taken = [read_message([bytes(frame) for frame in found]) for found in path.messages()]
    return bool(taken)


def read_request(frames: list[bytes]) -> bool:
    AUTH.allow("a", z85.encode(CURVE_KEY).decode())
    AUTH.expect(PATH_ID, PASSWORD)  # for one connection only
    version, _, status, _, user, _ = AUTH.answer(frames)
    assert version == b"1.0"
    if status != b"200":
        assert status == b"400" and not user
        return False
    good = REQUESTS[user]
    assert frames[5:] == good[5:] and frames[2] == good[2], "let in without a proof"
    return True


@dataclass(frozen=True)
class Reader:
    make: Callable[[random.Random], list[bytes]]
    read: Callable[[list[bytes]], bool]
    refusals: tuple[type[Exception], ...]
    share: int
    """Of all cases, in percent."""


READERS = {
    "messages": Reader(bad_message, read_message, (Malformed,), 50),
    "control": Reader(bad_control, read_control, (Malformed, UserError), 25),
    "verbs": Reader(bad_verb, read_verb, (Malformed,), 5),
    "fast-paths": Reader(bad_path, read_path, (Malformed, Forged), 12),
    "zap": Reader(bad_request, read_request, (), 8),
}
TURNS = [name for name, reader in READERS.items() for _ in range(reader.share)]


@dataclass
class Tally:
    counts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """For each reader: what it took, and what it refused."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Number, reader and what happened."""
    grown_bytes: int = 0
    """By the peak of resident memory."""


def case(seed: int, number: int) -> tuple[str, list[bytes]]:
    rng = random.Random(seed << 64 | number)
    name = rng.choice(TURNS)
    return name, READERS[name].make(rng)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(name: str, frames: list[bytes]) -> bool:
    """Was it taken? Whatever is raised here is a failure."""
    reader = READERS[name]
    try:
        return reader.read(frames)
    except reader.refusals as error:
        reason = str(error)
        assert reason.encode() and len(reason) <= LONGEST_REASON, f"a reason of {len(reason)} characters"
        return False


def fuzz(seed: int, numbers: Iterable[int]) -> Tally:
    read_message(good_message(random.Random(0)))  # what is allocated once and kept does not count, as kernels are
    for dtype, codec in CODECS.items():
        decode(EncodedTensor(dtype, WITH_FACTORS, bytes(codec.tensor_bytes(WITH_FACTORS))))
    tally = Tally()
    began = before = peak_bytes()
    for number in numbers:
        name, frames = case(seed, number)
        came, before = sum(len(frame) for frame in frames), peak_bytes()
        try:
            taken = attempt(name, frames)
            grown = peak_bytes() - before
            assert grown <= SPARE_BYTES + TIMES * came, f"{grown} bytes taken for {came} that came"
        except Exception:
            tally.failures.append((number, name, traceback.format_exc()))
        else:
            tally.counts[name, taken] += 1
    tally.grown_bytes = peak_bytes() - began
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone and show it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        name, frames = case(options.seed, options.only)
        print(name, *frames, sep="\n")
        print("taken" if attempt(name, frames) else "refused")
        return
    began = time.perf_counter()
    parts = [(options.seed, range(at, options.frames, options.processes)) for at in range(options.processes)]
    if options.processes == 1:
        tallies = [fuzz(*parts[0])]
    else:
        with multiprocessing.get_context("fork").Pool(options.processes) as pool:
            tallies = pool.starmap(fuzz, parts)
    took_s = time.perf_counter() - began

    counts = sum((tally.counts for tally in tallies), Counter[tuple[str, bool]]())
    failures = sorted(failure for tally in tallies for failure in tally.failures)
    grown_bytes = max(tally.grown_bytes for tally in tallies)
    print(f"{'':12}{'taken':>10}{'refused':>10}{'failed':>10}")
    for name in READERS:
        failed = sum(failure[1] == name for failure in failures)
        print(f"{name:12}{counts[name, True]:10,}{counts[name, False]:10,}{failed:10,}")
    print(f"{'all':12}{sum(n for (_, taken), n in counts.items() if taken):10,}", end="")
    print(f"{sum(n for (_, taken), n in counts.items() if not taken):10,}{len(failures):10,}")
    print(f"{options.frames:,} in {took_s:.0f} s, seed {options.seed}; memory grew by {grown_bytes / 2**20:.1f} MiB")
    for number, name, what in failures[:10]:
        print(f"\n{name}: python {sys.argv[0]} --seed {options.seed} --only {number}\n{what}")
    if failures or grown_bytes > GROWTH_BYTES:
        sys.exit(1)


if __name__ == "__main__":
    main()
