"""Blobs: verified at close, immutable, shared, crash-safe; in a directory and in a bucket behind a bad network."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import http.server
import json
import os
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import SECONDS, World, free_port, wait_until

from vfsd.backends import blob as blob_module
from vfsd.backends.blob import BlobDirectory
from vfsd.backends.remote import ANY, Meta, Source

OWNER = (os.geteuid(), os.getegid())
META = Meta(0o100644, *OWNER, 0, 0, 0, 0)


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_blobs(m: Path, world: World) -> None:
    """What any place of blobs does, through the mount."""
    data = os.urandom(3_000_000)
    name = named(data)
    (m / name).write_bytes(data)
    assert (m / name).read_bytes() == data
    with open(m / name, "rb") as file:
        assert os.pread(file.fileno(), 1000, 1_500_000) == data[1_500_000:1_501_000]
    assert os.stat(m / name).st_mode & 0o7777 == 0o444
    (m / name).write_bytes(data)  # the same again is well
    with pytest.raises(OSError, match="Bad message"), open(m / named(b"other"), "wb") as wrong:
        wrong.write(b"not that")
    wait_until(lambda: os.listdir(m) == [name])
    with pytest.raises(OSError, match="Bad message"), open(m / name, "wb") as again:
        again.write(b"not that")
    wait_until(lambda: (m / name).read_bytes() == data)
    for call in (
        lambda: (m / "name").write_bytes(b""),
        lambda: (m / "dir").mkdir(),
        lambda: os.rename(m / name, m / named(b"x")),
        lambda: os.chmod(m / name, 0o644),
        lambda: os.symlink("x", m / named(b"link")),
        lambda: os.open(m / name, os.O_RDWR),
    ):
        with pytest.raises(OSError) as refused:
            call()
        assert refused.value.errno in (errno.EPERM, errno.EINVAL)
    small = b"two parts"
    fd = os.open(m / named(small), os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"two ")
    with contextlib.suppress(OSError):
        os.close(os.dup(fd))  # it is not right yet, but the last close decides
    os.write(fd, b"parts")
    os.close(fd)
    assert (m / named(small)).read_bytes() == small
    (m / named(small)).unlink()
    assert os.listdir(m) == [name]


@pytest.mark.mount
def test_a_directory(world: World, tmp_path: Path) -> None:
    m = world.mount(f"/blobs/=blob:{tmp_path}/b") / "blobs"
    check_blobs(m, world)
    assert os.listdir(tmp_path / "b" / ".tmp") == []
    there = tmp_path / "b" / named(b"made by another daemon")
    there.write_bytes(b"made by another daemon")
    assert (m / there.name).read_bytes() == b"made by another daemon"  # found by name before the next listing


@pytest.mark.mount
def test_a_refused_close_is_told_of(world: World, tmp_path: Path) -> None:
    m = world.mount(f"/blobs/=blob:{tmp_path}/b")
    name = named(b"other")
    with pytest.raises(OSError, match="Bad message"), open(m / "blobs" / name, "wb") as wrong:
        wrong.write(b"not that")
    wait_until(lambda: os.listdir(m / "blobs") == [])
    told = [json.loads(line) for line in (m / ".vfsd/errors.ndjson").read_text().splitlines()]
    assert {(r["op"], r["path"], r["result"]) for r in told} == {("close", f"/blobs/{name}", "EBADMSG")}
    (log,) = tmp_path.rglob("vfsd.log")
    assert f"'/{name}' is as it was before" in log.read_text()


@pytest.mark.mount
@pytest.mark.filterwarnings("ignore")
def test_deep_agents_offload(world: World, tmp_path: Path) -> None:
    """The upload and download that ``offload_binary_content`` makes, against the mount."""
    pytest.importorskip("deepagents")
    from deepagents.backends import FilesystemBackend

    from agenttools.deepagents import VfsBackend

    m = world.mount(f"/blobs/=blob:{tmp_path}/b")
    for number, backend in enumerate(
        (FilesystemBackend(root_dir=str(m), virtual_mode=True), VfsBackend(socket=world.socket()))
    ):
        data = b"\x89PNG%d" % number + bytes(range(256)) * 50
        path = f"/blobs/{named(data)}"
        for _ in range(2):
            assert backend.upload_files([(path, data)])[0].error is None
        assert backend.download_files([path])[0].content == data
    wrong = VfsBackend(socket=world.socket()).upload_files([(f"/blobs/{named(b'x')}", b"y")])[0]
    assert wrong.error is not None
    assert len(os.listdir(m / "blobs")) == 2


def test_a_crash_leaves_nothing_or_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = BlobDirectory(str(tmp_path / "b"), OWNER)
    remote.open()
    data = b"x" * 100_000
    path = b"/" + named(data).encode()
    for step in ("fsync", "rename"):

        def dies(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(blob_module.os, step, dies)
            with pytest.raises(KeyboardInterrupt):
                remote.put(path, Source.of(data), META, ANY)
        assert os.listdir(tmp_path / "b") == [".tmp"]
    left = tmp_path / "b" / ".tmp" / "left"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    remote.open()
    assert not left.exists()
    remote.put(path, Source.of(data), META, ANY)
    assert remote.get(path).data == data


class Proxy:
    """Between obstore and the server: hands on, or does one of the things networks do."""

    def __init__(self, target: int) -> None:
        self.fault = ""
        self.faults = 0
        self.seen: list[str] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.fault
                proxy.seen.append(f"{self.command} {self.path}")
                if fault:
                    proxy.faults += 1
                if fault == "500" or (fault == "part" and "partNumber=" in self.path):
                    self.send_response(500)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fault == "cut":
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault == "slow":
                    time.sleep(1.5)
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", target, timeout=30)) as ahead:
                    self.hand_on(ahead, body, fault)

            def hand_on(self, ahead: http.client.HTTPConnection, body: bytes, fault: str) -> None:
                ahead.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for key, value in self.headers.items():
                    ahead.putheader(key, value)
                ahead.endheaders(body)
                answer = ahead.getresponse()
                data = answer.read()
                if fault == "bytes" and self.command == "GET" and "list-type" not in self.path:
                    data = bytes(len(data))
                self.send_response(answer.status)
                for key, value in answer.getheaders():
                    if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(key, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *args: Any) -> None:
                """Tests are quiet."""

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                """A connection that was cut."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def bucket(tmp_path: Path, world: World) -> Iterator[Proxy]:
    """An S3 server with a bucket, behind a proxy; the environment of mounts points to it."""
    pytest.importorskip("obstore")
    rclone = subprocess.run(["which", "rclone"], capture_output=True, text=True, check=False).stdout.strip()
    if not rclone:
        pytest.skip("rclone is not installed")
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    port = free_port()
    server = subprocess.Popen(
        [
            rclone,
            "serve",
            "s3",
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            "key,secret",
            "--dir-cache-time",
            "0s",
            str(tmp_path / "s3"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    proxy = Proxy(port)
    world.env |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
    }

    def answers() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            return connection.getresponse().status > 0

    wait_until(answers)
    yield proxy
    world.close()
    proxy.close()
    server.terminate()
    server.wait(SECONDS)


@pytest.mark.mount
def test_a_bucket(world: World, bucket: Proxy, tmp_path: Path) -> None:
    m = world.mount("/blobs/=blob:s3://bucket/some/prefix") / "blobs"
    assert "does not work" not in world.said
    check_blobs(m, world)
    assert len(os.listdir(tmp_path / "s3" / "bucket" / "some" / "prefix")) == 1


@pytest.mark.mount
def test_an_upload_in_parts_that_fails_is_aborted(world: World, bucket: Proxy, tmp_path: Path) -> None:
    m = world.mount("/blobs/=blob:s3://bucket") / "blobs"
    data = os.urandom(1 << 20) * 12
    bucket.fault = "part"
    with pytest.raises(OSError, match="Input/output error"), open(m / named(data), "wb") as file:
        file.write(data)
    assert [line for line in bucket.seen if line.startswith("DELETE ") and "uploadId=" in line]
    wait_until(lambda: not (m / named(data)).exists(), 60)
    bucket.fault = ""
    assert os.listdir(tmp_path / "s3" / "bucket") == []
    (m / named(data)).write_bytes(data)
    assert (tmp_path / "s3" / "bucket" / named(data)).read_bytes() == data


@pytest.mark.mount
def test_a_bucket_with_faults(world: World, bucket: Proxy, tmp_path: Path) -> None:
    m = world.mount("/blobs/=blob:s3://bucket") / "blobs"
    data = os.urandom(5000)
    bucket.fault = "slow"
    (m / named(data)).write_bytes(data)
    assert bucket.faults
    for fault in ("500", "cut"):
        bucket.fault = fault
        other = os.urandom(3000)
        with pytest.raises(OSError, match="Input/output error"), open(m / named(other), "wb") as file:
            file.write(other)
        bucket.fault = ""
        wait_until(lambda other=other: not (m / named(other)).exists(), 60)
        (m / named(other)).write_bytes(other)
        assert (m / named(other)).read_bytes() == other
    for kept in (tmp_path / "state" / "vfsd" / "cache").rglob("*"):
        if kept.is_file():
            kept.unlink()
    big = os.urandom(4_000_000)
    there = tmp_path / "s3" / "bucket" / named(big)
    there.write_bytes(big)
    bucket.fault = "bytes"
    late = named(data)
    with pytest.raises(OSError, match="Input/output error"):
        (m / late).read_bytes()
    bucket.fault = ""
    assert (m / late).read_bytes() == data
    wait_until(lambda: (m / named(big)).read_bytes() == big, 15)
