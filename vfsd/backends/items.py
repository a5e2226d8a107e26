"""Files as items of a LangGraph store, exactly as Deep Agents' StoreBackend writes and reads them; and what it can't.

An item: key = path, value = ``{"content": str, "encoding": "utf-8" | "base64", "created_at": ISO, "modified_at": ISO}``
(deepagents 0.7, backends/store.py). The rest of a file's attributes is a record under the same key in a namespace that
begins with ``!vfsd``. A StoreBackend can't come across it: its namespaces may not hold a ``!``, and a store searches
whole components. Pure: knows no store.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vfsd.backends.remote import Meta, RemoteError, check_path

SIDE = "!vfsd"
"""First component of the namespace with the records."""

_COMPONENT = re.compile(r"[A-Za-z0-9\-_.@+:~]+")
_HOLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ODD = re.compile("[\udc80-\udcff\uf780-\uf7ff]")
_PRIVATE = re.compile("[\uf780-\uf7ff]")
_SHIFTED = {byte: chr(0xF700 + byte) for byte in range(0x80, 0x100)}
DEFAULT_FILE = stat.S_IFREG | 0o644
Value = dict[str, Any]


def namespace(template: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The namespace a template makes: ``{name}`` is replaced by a value.

    Raises RemoteError unless each component is what StoreBackend allows and LangGraph can store.
    """
    if not template:
        raise RemoteError("the namespace is empty: give it components, such as ['filesystem']")
    made: list[str] = []
    for part in template:
        for name in _HOLE.findall(part):
            if name not in values:
                raise RemoteError(
                    f"the namespace needs a value for {{{name}}}: give it with set, or --set {name}=VALUE"
                )
        text = _HOLE.sub(lambda hole: values[hole[1]], part)
        if not _COMPONENT.fullmatch(text):
            raise RemoteError(
                f"namespace component {text!r} is not allowed: use letters, digits and any of - _ @ + : ~"
            )
        if "." in text:
            raise RemoteError(f"namespace component {text!r} has a '.', which LangGraph's stores refuse")
        made.append(text)
    if made[0] == "langgraph":
        raise RemoteError("a namespace can't begin with 'langgraph': LangGraph keeps that for itself")
    return tuple(made)


def key_of(path: bytes) -> str:
    """The key of a path. Bytes that are not UTF-8, which a key can't hold, are characters U+F780 to U+F7FF in it."""
    check_path(path)
    text = path.decode("utf-8", "surrogateescape")
    if text.isascii() or not _ODD.search(text):
        return text
    # One of these characters in a name stands for itself by its three bytes.
    return _ODD.sub(lambda found: "".join(map(_SHIFTED.__getitem__, os.fsencode(found[0]))), text)


def path_of(key: object) -> bytes | None:
    """The path of a key, None when no file can be called that."""
    if not isinstance(key, str):
        return None
    try:
        path = _PRIVATE.sub(lambda found: chr(ord(found[0]) - 0xF700 + 0xDC00), key).encode("utf-8", "surrogateescape")
        if key_of(path) != key:
            return None
    except (UnicodeEncodeError, OSError):
        return None
    return path


def iso(ns: int) -> str:
    """A time as StoreBackend writes it: ISO 8601 with microseconds, UTC."""
    seconds, rest = divmod(ns, 1_000_000_000)
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        seconds=seconds, microseconds=rest // 1000
    )
    return moment.isoformat()


def ns_of(text: object) -> int | None:
    """Nanoseconds of an ISO 8601 time or a datetime; None when it is neither."""
    if isinstance(text, str):
        try:
            text = datetime.datetime.fromisoformat(text)
        except ValueError:
            return None
    if not isinstance(text, datetime.datetime):
        return None
    if text.tzinfo is None:
        text = text.replace(tzinfo=datetime.UTC)
    delta = text - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (delta.days * 86400 + delta.seconds) * 1_000_000_000 + delta.microseconds * 1000


def content_of(value: object) -> bytes:
    """The bytes of an item's value, lists of lines of old versions too; RemoteError when it is not a file."""
    if not isinstance(value, Mapping):
        raise RemoteError("its value is not an object")
    content = value.get("content")
    if isinstance(content, list) and all(isinstance(line, str) for line in content):
        content = "\n".join(content)
    if not isinstance(content, str):
        raise RemoteError("it has no content")
    if value.get("encoding", "utf-8") == "base64":
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise RemoteError("its content is not base64") from None
    # A surrogate can come out of JSON; whoever reads the file shall still get bytes.
    return content.encode("utf-8", "surrogatepass")


def value_of(data: bytes, mtime_ns: int, created_at: str | None) -> Value:
    """The item for a content. Text with a NUL is kept as base64, because PostgreSQL's jsonb can't hold one."""
    modified = iso(mtime_ns)
    try:
        if b"\0" in data:
            raise ValueError
        content, encoding = data.decode(), "utf-8"
    except ValueError:
        content, encoding = base64.standard_b64encode(data).decode("ascii"), "base64"
    return {
        "content": content,
        "encoding": encoding,
        "created_at": created_at or modified,
        "modified_at": modified,
    }


def needs_record(meta: Meta, owner: tuple[int, int]) -> bool:
    """Whether an item alone would lose some of the attributes (the access time apart)."""
    return (
        meta.mode != DEFAULT_FILE
        or (meta.uid, meta.gid) != owner
        or meta.mtime_ns % 1000 != 0
        or meta.ctime_ns != meta.mtime_ns
        or bool(meta.xattrs)
        or bool(meta.link)
    )


def record_of(meta: Meta, modified: str | None = None) -> Value:
    """The record of the attributes; bytes as latin-1 text, which JSON can hold.

    ``modified``: the modified_at of the item that it is about.
    """
    record: Value = {
        "mode": meta.mode, "uid": meta.uid, "gid": meta.gid,
        "atime": str(meta.atime_ns), "mtime": str(meta.mtime_ns), "ctime": str(meta.ctime_ns),
    }  # fmt: skip
    if meta.rdev:
        record["rdev"] = meta.rdev
    if meta.target is not None:
        record["target"] = _text(meta.target)
    if meta.xattrs:
        record["xattrs"] = {_text(name): _text(value) for name, value in meta.xattrs}
    if meta.link:
        record["link"] = meta.link
    if stat.S_ISREG(meta.mode):
        record["for"] = modified
    return record


def meta_of(record: object) -> Meta:
    """The attributes of a record; RemoteError when it is none."""
    if not isinstance(record, Mapping):
        raise RemoteError("its value is not an object")
    try:
        return Meta(
            int(record["mode"]), int(record["uid"]), int(record["gid"]), int(record.get("rdev", 0)),
            int(record["atime"]), int(record["mtime"]), int(record["ctime"]),
            _bytes(record["target"]) if "target" in record else None,
            tuple(sorted((_bytes(n), _bytes(v)) for n, v in record.get("xattrs", {}).items())),
            str(record.get("link", "")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as exc:
        raise RemoteError(f"not a record of attributes ({exc!r})") from None


def joined(value: Value, record: object, owner: tuple[int, int], updated_at: object) -> Meta:
    """The attributes of an item with its record, or without (None).

    An item that was rewritten since the record was made has its own modification time; mode, links and extended
    attributes stay.
    """
    modified = value.get("modified_at")
    mtime = ns_of(modified)
    if mtime is None:
        mtime = ns_of(updated_at) or 0
    if record is None:
        return Meta(DEFAULT_FILE, *owner, 0, mtime, mtime, mtime)
    meta = meta_of(record)
    if not stat.S_ISREG(meta.mode):
        meta = meta._replace(mode=DEFAULT_FILE, target=None)
    assert isinstance(record, Mapping)
    if record.get("for") != modified:
        meta = meta._replace(mtime_ns=mtime, ctime_ns=max(mtime, meta.ctime_ns))
    return meta


def texts_of(value: Mapping[str, Any]) -> Iterator[bytes]:
    """All that an item says, whoever's it is: its value as JSON text, and what of it is encoded, decoded."""
    yield json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    if value.get("encoding") == "base64":
        with contextlib.suppress(RemoteError):
            yield content_of(value)


def _text(data: bytes) -> str:
    # jsonb refuses U+0000; one above it is free in latin-1 text.
    return data.decode("latin-1").replace("\0", "\u0100")


def _bytes(text: str) -> bytes:
    return text.replace("\u0100", "\0").encode("latin-1")
