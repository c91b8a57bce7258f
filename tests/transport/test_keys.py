"""Keys and the lists of peers on disk; frames of fast paths are sealed with keys that are renewed."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.transport import aead
from skippipe.transport.aead import TAG_BYTES, Forged, Opener, Sealer
from skippipe.transport.fast_path import PATH_DOMAIN, FastPathMessage, FastPathVerb
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.message import (
    Malformed,
)
from skippipe.transport.zap_auth import ZapAuth

# Keys


def test_key_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "n0.json"
    file = KeyFile("n0", KeyPair.new(), KeyPair.new().public)
    file.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyFile.load(path) == file
    assert [entry.name for entry in path.parent.iterdir()] == ["n0.json"]
    assert file.keys.secret not in repr(file)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"mode 640 lets others at the secret key; run: chmod 600 .*n0\.json$"):
        KeyFile.load(path)
    file.save(path)
    assert KeyFile.load(path) == file


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "skippipe-plan"}, "a 'skippipe-key' file is needed here"),
        ({"public": "short"}, "public: a key has 40 characters"),
        ({"public": KeyPair.new().public}, "not the public half"),
        ({"coordinator": "é" * 40}, "coordinator: a key has 40 characters"),
        ({"extra": 1}, "extra: unknown field"),
        ({"version": 3, "addresses": [], "options": {"listen": 5}}, "options: expected texts only"),
    ],
)
def test_bad_key_file_is_named_with_its_fix(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "key.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(KeyFile("n0", KeyPair.new()).to_json() | change))
    with pytest.raises(UserError) as caught:
        KeyFile.load(path)
    assert complaint in str(caught.value) and str(caught.value).startswith(str(path))


def test_peer_list(tmp_path: Path) -> None:
    path, public = tmp_path / "peers.json", KeyPair.new().public
    peers = PeerList({"n0": public, "n1": KeyPair.new().public})
    peers.save(path)
    assert PeerList.load(path) == peers
    path.write_text(json.dumps(peers.to_json() | {"peers": {"n0": public, "n1": public}}))
    with pytest.raises(UserError, match=r"peers\.n1: the key is already that of 'n0'"):
        PeerList.load(path)


# Sealing


@given(st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=9)), min_size=1), st.data())
def test_only_the_next_frame_opens(plains: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    sealer = Sealer(b"a to b")
    frames = [sealer.seal(plain, bound) for plain, bound in plains]
    opener = Opener(sealer.key, b"a to b")
    last = data.draw(st.integers(0, len(plains) - 1))
    for frame, (plain, bound) in zip(frames[:last], plains, strict=False):
        into = bytearray(len(plain))
        opener.open_into(frame, into, bound)
        assert into == plain
    plain, bound = plains[last]
    good, at = frames[last], data.draw(st.integers(0, len(frames[last]) - 1))
    flipped = good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
    bad = data.draw(st.sampled_from([(flipped, bound), (good, bound + b"x"), (good[:-1], bound), (good + b"x", bound)]))
    others = [(frame, bound) for index, frame in enumerate(frames) if index != last]
    frame, bound = data.draw(st.sampled_from([bad, *others]))
    with pytest.raises(Forged):
        opener.open_into(frame, bytearray(max(0, len(frame) - TAG_BYTES)), bound)


def test_names_are_sealed_in() -> None:
    sealer = Sealer(b"a to b")
    with pytest.raises(Forged, match="did not seal"):
        Opener(sealer.key, b"c to b").open_into(sealer.seal(b"x"), bytearray(1))


def test_keys_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aead, "RENEWED_AFTER", 3)
    sealer = Sealer(b"")
    frames, into = [sealer.seal(bytes([number])) for number in range(10)], bytearray(1)
    opener = Opener(sealer.key, b"")
    for number, frame in enumerate(frames):
        opener.open_into(frame, into)
        assert into == bytes([number])
    monkeypatch.setattr(aead, "RENEWED_AFTER", 100)
    opener = Opener(sealer.key, b"")
    for frame in frames[:3]:
        opener.open_into(frame, into)
    with pytest.raises(Forged):
        opener.open_into(frames[3], into)


def test_questions_about_strangers_always_get_an_answer() -> None:
    admission, name, password = ZapAuth(), bytes(16), bytes(32)
    admission.expect(name, password)
    question = [b"1.0", b"7", PATH_DOMAIN, b"", b"", b"PLAIN", name.hex().encode(), password.hex().encode()]
    for bad in (*(question[:end] for end in range(8)), [*question, b""]):
        assert admission.answer(bad) == [b"1.0", (*bad, b"", b"")[1], b"400", b"not on the list", b"", b""]
    assert admission.refused == 9
    assert admission.answer(question)[2] == b"200" and admission.answer(question)[2] == b"400"  # lets in once


def test_messages_about_fast_paths() -> None:
    offer = FastPathMessage(FastPathVerb.OFFER, secrets.token_bytes(16), 5555, secrets.token_bytes(32))
    assert FastPathMessage.from_bytes(offer.to_bytes()) == offer
    for bad in (
        offer.to_bytes()[:-1],
        FastPathMessage(FastPathVerb.OFFER, bytes(16)).to_bytes(),
        b"SKPL\x09" + offer.to_bytes()[5:],
    ):
        with pytest.raises(Malformed, match="fast path"):
            FastPathMessage.from_bytes(bad)
