"""The wire format: whole messages or WireError, whatever the bytes and however they are cut."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttools import wire
from agenttools.wire import Decoder, Encoder, WireError


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def encoded(message: dict[str, Any]) -> bytes:
    return b"".join(Encoder().encode(message))


def decode(data: bytes, **options: Any) -> list[dict[str, Any]]:
    decoder = Decoder(**options)
    decoder.receive(data)
    return list(taken(decoder))


def taken(decoder: Decoder) -> Iterator[dict[str, Any]]:
    while (message := decoder.next()) is not None:
        yield message


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=8,
)
messages = st.dictionaries(st.text(max_size=8), values, max_size=6)


@given(st.lists(messages, max_size=4), st.data())
@settings(max_examples=50)
@pytest.mark.slow
def test_what_is_sent_is_received_however_it_is_cut(sent: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(encoded(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = Decoder(requests=True)
    received: list[dict[str, Any]] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.receive(stream[start:end])
        received += taken(decoder)
    assert received == sent
    assert decoder.pending == 0
    decoder.end()


@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
@settings(max_examples=400)
def test_fuzz_any_bytes_decode_or_raise_wire_error(chunks: list[bytes], requests: bool) -> None:
    decoder = Decoder(requests=requests, max_frame=4096)
    try:
        for chunk in chunks:
            decoder.receive(chunk)
            for message in taken(decoder):
                assert type(message) is dict
            assert decoder.pending <= 4096 + 4
    except WireError as exc:
        assert str(exc)


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=600)
def test_fuzz_any_body_decodes_or_raises_wire_error(body: bytes, requests: bool) -> None:
    try:
        decode(frame(body), requests=requests)
    except WireError as exc:
        assert str(exc)


@given(messages, st.data())
@pytest.mark.slow
def test_fuzz_a_flipped_byte_decodes_or_raises_wire_error(message: dict[str, Any], data: st.DataObject) -> None:
    stream = bytearray(encoded(message))
    stream[data.draw(st.integers(4, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(stream), requests=True)
    except WireError as exc:
        assert str(exc)


@pytest.mark.parametrize("size", [wire.MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_huge_length_is_refused_before_anything_is_kept_for_it(size: int) -> None:
    decoder = Decoder()
    decoder.receive(struct.pack(">I", size))
    with pytest.raises(WireError, match=str(size)):
        decoder.next()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\x01",
        b"\x80\x80",
        b"\x81\x01\x02",
        b"\x81\xa1\xff\x01",
        b"\x81\xa1a",
        b"\x81\xa1a\xc7\x0c\xff" + bytes(12),
        b"\x81\xa1a\xd4\x05\x00\x00",
    ],
    ids=["empty", "never-used", "list", "int", "two-messages", "int-key", "bad-utf8", "cut", "timestamp", "extension"],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame(body), requests=True)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x81\xa1a" + b"\xdd\x00\x00\x0f\xff" * 30_000, id="nested list headers"),
        pytest.param(b"\x81\xa1a" + b"\xdd\xff\xff\xff\xff" * 1000, id="lists longer than the frame"),
        pytest.param(b"\x81\xa1a" + (b"\xdc\x0f\xff" + b"\x90" * 4095) * 16, id="many empty lists"),
        pytest.param(b"\x81\xa1a\xdc\x0f\xff" + (b"\xdc\x0f\xff" + b"\x80" * 4095) * 250, id="many empty maps"),
        pytest.param(b"\xdf\x00\x0f\xff\xff" + b"\xa1a\x01" * 0xFFFFF, id="large map"),
        pytest.param(b"\x81\xa1a" + b"\x91" * 100_000, id="deep"),
    ],
)
def test_a_request_cannot_unpack_to_much_more_than_its_own_size(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame(body), requests=True)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_half_a_frame_waits_and_its_end_is_an_error() -> None:
    stream = encoded({"id": 1, "op": "stat"})
    decoder = Decoder()
    for i in range(len(stream) - 1):
        decoder.receive(stream[i : i + 1])
        assert decoder.next() is None
    with pytest.raises(WireError, match="middle of a frame"):
        decoder.end()
    decoder.receive(stream[-1:])
    assert decoder.next() == {"id": 1, "op": "stat"}


def test_a_receiver_that_takes_nothing_cannot_grow_the_decoder() -> None:
    decoder = Decoder(max_frame=1000)
    with pytest.raises(WireError, match="taken"):
        for _ in range(100):
            decoder.receive(bytes(100))


def test_missing_tells_how_much_of_a_frame_is_to_come() -> None:
    stream = encoded({"id": 1, "data": bytes(1000)})
    decoder = Decoder()
    assert decoder.missing == 0
    decoder.receive(stream[:10])
    assert decoder.missing == len(stream) - 10
    decoder.receive(stream[10:])
    assert decoder.missing == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [0, 100, 20_000, 1 << 20])
def test_contents_of_any_size_and_kind_arrive(kind: Any, size: int) -> None:
    data = os.urandom(size)
    assert decode(encoded({"id": 7, "ok": True, "data": kind(data)})) == [{"id": 7, "ok": True, "data": data}]


def test_large_contents_are_not_copied() -> None:
    data = bytes(1 << 20)
    assert Encoder().encode({"id": 1, "data": data})[1] is data


def test_large_contents_beside_many_fields() -> None:
    message = {f"k{i}": i for i in range(20)} | {"data": bytes(50_000)}
    assert decode(encoded(message)) == [message]


@pytest.mark.parametrize("message", [{"data": bytes(wire.MAX_FRAME)}, {"other": bytes(wire.MAX_FRAME)}])
def test_what_does_not_fit_a_frame_is_refused_by_the_sender(message: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="pieces"):
        Encoder().encode(message)


def filled(packed: wire.Packed, values: list[Any]) -> wire.Packed:
    """With all the values, taken piece by piece."""
    left = list(values)
    while left:
        packed.take(left, 1700)
    return packed


def sent(message: dict[str, Any]) -> Any:
    """What arrives of it."""
    decoder = Decoder()
    for part in Encoder().encode(message):
        decoder.receive(bytes(part))
    return decoder.next()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 3000, 70_000])
def test_a_list_packed_in_pieces_arrives_as_the_list(count: int) -> None:
    values = [[b"%d" % i, i] for i in range(count)]
    packed = filled(wire.Packed(), values)
    assert sent({"id": 7, "matches": packed, "truncated": False}) == {"id": 7, "matches": values, "truncated": False}


@pytest.mark.parametrize("count", [0, 1, 16, 3000])
def test_such_a_list_may_be_in_a_map(count: int) -> None:
    values = [{"kind": "added", "path": b"%d" % i} for i in range(count)]
    packed = filled(wire.PackedMap({"a": "x", "total": count}, "changes"), values)
    assert sent({"id": 7, "result": packed, "ok": True}) == {
        "id": 7,
        "result": {"a": "x", "total": count, "changes": values},
        "ok": True,
    }


def test_an_encoder_works_on_after_a_refusal() -> None:
    encoder = Encoder()
    with pytest.raises((TypeError, OverflowError)):
        encoder.encode({"id": 1, "bad": object()})
    assert decode(b"".join(encoder.encode({"id": 2}))) == [{"id": 2}]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EEXIST, FileExistsError),
        (errno.EISDIR, IsADirectoryError),
        (errno.ENOTDIR, NotADirectoryError),
        (errno.EACCES, PermissionError),
        (errno.ESTALE, OSError),
    ],
)
def test_an_error_arrives_as_its_own_class(number: int, kind: type[OSError]) -> None:
    sent = wire.error_reply(9, OSError(number, os.strerror(number), b"/a\xff"))
    assert sent["id"] == 9
    error = wire.error_of(msgpack.unpackb(msgpack.packb(sent)))
    assert type(error) is kind
    assert (error.errno, error.strerror, error.filename) == (number, os.strerror(number), "/a\udcff")


def test_an_error_without_errno_is_eio() -> None:
    error = wire.error_of(wire.error_reply(1, OSError("no disk")))
    assert (error.errno, error.strerror) == (errno.EIO, "no disk")


@given(st.dictionaries(st.sampled_from(["errno", "message", "path", "ok"]), values))
def test_fuzz_any_error_reply_is_some_oserror(reply: dict[str, Any]) -> None:
    assert wire.error_of(reply).errno


def test_runtime_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert wire.default_socket("a") == str(tmp_path / "xdg/vfsd/a.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert wire.info_file() == "/run/vfsd/default.json"
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert wire.runtime_dir() == str(tmp_path / "vfsd-4321")


def test_a_runtime_dir_is_made_private_and_one_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Path(wire.make_runtime_dir()).stat().st_mode & 0o777 == 0o700
    (tmp_path / "vfsd").chmod(0o777)
    with pytest.raises(PermissionError):
        wire.make_runtime_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_mount_name_is_one_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        wire.default_socket(name)
