"""Prometheus metrics of a mount: what ``status`` knows anyway, made into metrics when somebody asks for them.

Owns their names (docs/operations.md) and the little HTTP that a scrape is. Must not know where the numbers come from.
Nothing is counted for it: the snapshot is taken on the loop, which is quick, and written out on a thread.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import trio

from vfsd.config import ConfigError
from vfsd.doors.rpc import listen
from vfsd.metricsconfig import MetricsPolicy

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
SECONDS = 5.0
"""For a client to ask and to take its answer."""

CLIENTS_MAX = 16
_HEAD_MAX = 8192

Snapshot = Mapping[str, Any]
"""The reply to ``status``, with all spans of the operations."""

_EDGES = range(2, 25, 2)
"""Spans at whose end a histogram has a bucket: 4 us, 16 us, ... 16.8 s."""


class Metrics:
    """Serves ``snapshot()`` as metrics. ConfigError where prometheus-client is missing or the place can't be had."""

    def __init__(self, policy: MetricsPolicy, snapshot: Callable[[], Snapshot]) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError("[metrics] needs the package prometheus-client: pip install 'vfsd[metrics]'") from None
        self._client = prometheus_client
        self._snapshot = snapshot
        self._path = policy.socket
        try:
            if policy.socket is not None:
                policy.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._socket = listen(str(policy.socket))
            else:
                self._socket = socket.create_server((HOST, policy.port or 0))
                self._socket.setblocking(False)
        except OSError as exc:
            place = policy.socket or f"port {policy.port} of {HOST}"
            # That of a port names it once more.
            why = exc.strerror if policy.socket is not None else os.strerror(exc.errno or errno.EIO)
            raise ConfigError(f"[metrics]: {place}: {why}") from None

    @property
    def address(self) -> str:
        """Where to scrape: a URL, or the socket's path."""
        return str(self._path) if self._path else f"http://{HOST}:{self._socket.getsockname()[1]}/metrics"

    async def serve(self) -> None:
        """Answer until cancelled; then the socket is gone."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        try:
            async with trio.open_nursery() as nursery:
                limit = trio.Semaphore(CLIENTS_MAX)
                while True:
                    await limit.acquire()
                    try:
                        nursery.start_soon(self._client_of, await listener.accept(), limit)
                    except OSError as exc:
                        limit.release()
                        log.error("cannot accept a client of the metrics: %s", exc)
                        await trio.sleep(0.1)
        finally:
            self.close()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _client_of(self, stream: trio.SocketStream, limit: trio.Semaphore) -> None:
        try:
            with trio.move_on_after(SECONDS):
                async with stream:
                    await self._answer(stream)
        except (trio.BrokenResourceError, OSError):
            pass
        except Exception:
            log.exception("metrics")
        finally:
            limit.release()

    async def _answer(self, stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await stream.receive_some(4096)
            if not piece or len(head) > _HEAD_MAX:
                return
            head += piece
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, kind, body = "404 Not Found", "text/plain", b"the metrics are at /metrics\n"
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"only GET\n"
        elif path == b"/metrics":
            status, kind = "200 OK", self._client.CONTENT_TYPE_LATEST
            body = await trio.to_thread.run_sync(self._written, self._snapshot())
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
        answer = "\r\n".join([*lines, "", ""]).encode()
        await stream.send_all(answer if method == b"HEAD" else answer + body)

    def _written(self, snapshot: Snapshot) -> bytes:
        registry = self._client.CollectorRegistry(auto_describe=False)
        registry.register(_Collected(families(snapshot)))
        self._client.ProcessCollector(registry=registry)
        return self._client.generate_latest(registry)


class _Collected:
    """A collector of what was collected."""

    def __init__(self, found: Iterable[Any]) -> None:
        self._found = found

    def collect(self) -> Iterable[Any]:
        return self._found


def families(s: Snapshot) -> Iterator[Any]:
    """The metrics of a snapshot."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    counters, kernel = s["counters"], s["kernel"]
    words = {key: str(s[key]) for key in ("version", "name", "thread", "engine")}
    yield InfoMetricFamily("vfsd", "What this mount is.", words)
    single = (
        (GaugeMetricFamily, "start_time_seconds", "When it was mounted, since the epoch.", s["started"]),
        (CounterMetricFamily, "commits", "Changes, by either door.", counters["seq"]),
        (GaugeMetricFamily, "kernel_inodes", "Inodes the kernel knows.", kernel["inodes"]),
        (
            CounterMetricFamily,
            "kernel_notifications",
            "Orders to the kernel to forget.",
            kernel.get("notified", 0),
        ),
        (GaugeMetricFamily, "feed_behind", "Changes the kernel is still to be told of.", kernel.get("behind", 0)),
        (GaugeMetricFamily, "feed_late", "Inodes it did not forget in time, served uncached.", kernel.get("late", 0)),
        (GaugeMetricFamily, "rpc_connections", "Clients of the tools' socket.", s["connections"]),
        (GaugeMetricFamily, "rpc_upload_bytes", "Bytes of unfinished uploads.", s["uploading"]),
        (GaugeMetricFamily, "rules", "Rules in force, of the configuration and of clients.", s["rules"]),
        (GaugeMetricFamily, "approvals_waiting", "Operations that wait for a yes.", s["approvals"]),
    )
    for kind, name, text, value in single:
        yield kind(f"vfsd_{name}", text, value)
    if "audit_seq" in counters:
        yield CounterMetricFamily("vfsd_audit_lines", "Lines of the audit log, ever.", counters["audit_seq"])
        yield GaugeMetricFamily("vfsd_audit_bytes", "Bytes of it that are kept.", counters["audit_bytes"])
        yield CounterMetricFamily("vfsd_audit_lost", "Lines that could not be written.", counters["audit_lost"])
    yield from _of_routes(s["routes"])
    yield from _of_operations(s["operations"])


_ROUTE = {
    "open": ("open_handles", "Open files and directories."),
    "nodes": ("volume_nodes", "Files, directories and links in it."),
    "bytes": ("volume_bytes", "Bytes of disk that its contents take."),
    "resident": ("resident_inodes", "Inodes held in memory."),
    "inodes": ("resident_inodes", "Inodes held in memory."),
    "journal_bytes": ("journal_bytes", "Bytes of journal not yet in the database."),
}
"""Counters of a volume as gauges of its route."""


def _of_routes(routes: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    labels = ["route", "kind"]
    up = GaugeMetricFamily("vfsd_route_up", "Whether a route works: 0 when its remote does not answer.", labels=labels)
    found = {name: GaugeMetricFamily(f"vfsd_{name}", text, labels=labels) for name, text in _ROUTE.values()}
    for route in routes:
        here = [route["prefix"], route["kind"]]
        up.add_metric(here, 0 if "problem" in route else 1)
        for key, value in route["counters"].items():
            if key in _ROUTE:
                found[_ROUTE[key][0]].add_metric(here, value)
    yield from (up, *found.values())


def _of_operations(doors: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    total = CounterMetricFamily(
        "vfsd_operations", "Operations by their result.", labels=["door", "operation", "result"]
    )
    times = HistogramMetricFamily(
        "vfsd_operation_seconds", "How long they took, until answered.", labels=["door", "operation"]
    )
    for door, operations in doors.items():
        for operation, row in operations.items():
            failed = row["errors"]
            total.add_metric([door, operation, "ok"], row["count"] - sum(failed.values()))
            for name, count in failed.items():
                total.add_metric([door, operation, name], count)
            spans = row["spans"]
            buckets = [(repr(2**edge / 1e6), sum(spans[: edge + 1])) for edge in _EDGES]
            times.add_metric([door, operation], [*buckets, ("+Inf", row["count"])], row["seconds"])
    yield from (total, times)
