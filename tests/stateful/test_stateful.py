"""Random sessions: volumes without a kernel against the dumb model, mounts against a host directory by system calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio
from drivers import HostDriver, RpcDriver, VfsDriver
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from local_volume import needs_root
from machine import Machine, Ops
from makers import close_vfs, done, open_vfs, squeeze
from model import Model
from trees import MOUNTED, Mounts

from vfsd import residency
from vfsd.check import check_volume
from vfsd.core.types import Caller, SetAttr

EXAMPLES = int(os.environ.get("VFSD_EXAMPLES", "25"))
"""Sessions a volume; set it higher for a soak."""
ROOT = Caller(0, 0, 0, "rpc")
"""The model is of what root may do."""

SHRINK = (Phase.shrink,) if os.environ.get("VFSD_SHRINK") else ()
"""Shrinking a failed session takes minutes: more than a test may hang before it counts as hung."""

QUIET = settings(
    phases=(Phase.reuse, Phase.generate, *SHRINK),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


class Unmounted(Machine):
    """The inode API over one volume; a state volume is closed, killed and folded on the way."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        # A state volume syncs at each fold: not on a disk.
        memory = "/dev/shm" if self.kind == "state" and os.access("/dev/shm", os.W_OK) else None
        self.place = Path(tempfile.mkdtemp(prefix="vfsd-stateful-", dir=memory))
        self.reference = Model()
        self.vfs = open_vfs({"/": (self.kind, self.place / "volume")})
        self.subject = Ops(VfsDriver(self.vfs, caller=ROOT))
        done(self.vfs.setattr(1, SetAttr(perm=0o755), ROOT))
        self.closed: list[Any] = []

    def alive(self, pair: Any) -> bool:
        return not any(pair is other for other in self.closed)

    def forget(self, pair: Any) -> None:
        self.closed.append(pair)

    def teardown(self) -> None:
        close_vfs(self.vfs)
        if self.kind == "state":
            assert check_volume(self.place / "volume") == []
        shutil.rmtree(self.place)


class State(Unmounted):
    kind = "state"

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0

    def alive(self, pair: Any) -> bool:
        return super().alive(pair) and pair[1] in self.subject.fs._open

    @rule(kill=st.booleans())
    def start_again(self, kill: bool) -> None:
        volume = self.vfs.table.volumes[0]
        if kill:
            backend = volume.backend
            backend._journal.close()
            backend._db.close()
            os.close(backend._data.fd)
            os.close(backend._lock)
            volume.backend.close = lambda: None
        close_vfs(self.vfs)
        self.vfs = open_vfs({"/": ("state", self.place / "volume")})
        driver = VfsDriver(self.vfs, caller=ROOT)
        driver._next = self.subject.fs._next
        self.subject = Ops(driver)

    @rule(fold=st.booleans())
    def settle(self, fold: bool) -> None:
        volume = self.vfs.table.volumes[0]
        trio.run(volume.maintain if fold else volume.syncfs)

    @invariant()
    def the_accounts_are_right(self) -> None:
        counters = self.vfs.counters()
        assert counters["open"] == len(self.subject.fs._open)


class Evicting(State):
    """Next to nothing stays in memory, and directories come in entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.page, residency.PAGE = residency.PAGE, 1
        self.count = 0

    def both(self, name: str, *args: Any) -> tuple[Any, Any] | None:
        found = super().both(name, *args)
        self.count += 1
        squeeze(self.vfs.table.volumes[0], fold=self.count % 3 == 0)
        return found

    def teardown(self) -> None:
        residency.PAGE = self.page
        super().teardown()


class Memory(Unmounted):
    kind = "memory"


class Local(Unmounted):
    kind = "local"


@pytest.mark.timeout(60 + 2 * EXAMPLES)
@pytest.mark.parametrize("machine", [State, Evicting, Memory, pytest.param(Local, marks=needs_root)])
def test_a_volume_and_the_model(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(QUIET, max_examples=EXAMPLES, stateful_step_count=30))


@pytest.mark.mount
@pytest.mark.timeout(60 + 2 * EXAMPLES)
@pytest.mark.parametrize("name", MOUNTED)
def test_a_mount_and_a_host_directory(name: str, mounts: Mounts, tmp_path: Path) -> None:
    """Each step goes through the shell's door or the tools', as it comes; the shell's is the one looked through."""
    numbers = iter(range(1 << 30))
    with contextlib.ExitStack() as stack:
        daemon, path = stack.enter_context(mounts.directory(name))
        os.chmod(f"{daemon.point}{path}", 0o755)

        class Mounted(Machine):
            punches = "pyfuse3" not in name

            def __init__(self) -> None:
                super().__init__()
                number = next(numbers)
                (tmp_path / str(number)).mkdir(mode=0o755)
                inside = f"{path}/{number}"
                os.mkdir(f"{daemon.point}{inside}", 0o755)
                self.reference = Ops(HostDriver(tmp_path / str(number)))
                self.shell = Ops(HostDriver(f"{daemon.point}{inside}"))
                self.tool = Ops(RpcDriver(daemon.client, inside))
                self.subject = self.shell
                self.held: list[Any] = []

            @rule(by_tool=st.booleans())
            def change_door(self, by_tool: bool) -> None:
                self.subject = self.tool if by_tool else self.shell

            def watch(self) -> Any:
                return self.shell

            def both(self, op: str, *args: Any) -> tuple[Any, Any] | None:
                if op == "hold":
                    self.subject = self.shell  # handles are the shell's
                found = super().both(op, *args)
                if op == "hold" and found is not None:
                    self.held.append(found)
                return found

            def teardown(self) -> None:
                for pair in self.held:
                    for fh in pair:
                        os.close(fh)

            def forget(self, pair: Any) -> None:
                self.held.remove(pair)

        run_state_machine_as_test(Mounted, settings=settings(QUIET, max_examples=EXAMPLES // 4, stateful_step_count=25))
