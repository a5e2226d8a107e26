"""``thread=``: each LangGraph thread has a daemon of its own, started when it is first needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import World

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from scripted import Scripted, answers, call

from agenttools.daemons import mount_name, thread_word
from agenttools.deepagents import VfsBackend

pytestmark = pytest.mark.mount


@pytest.fixture
def make(world: World) -> Iterator[Callable[..., VfsBackend]]:
    """Backends with threads; their daemons are gone after the test."""
    made: list[VfsBackend] = []

    def make(thread: str = "auto", **options: Any) -> VfsBackend:
        made.append(VfsBackend(thread=thread, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    for name in world.names():
        if "@" in name:
            world.vfsd("umount", "--force", name)


def test_words() -> None:
    assert mount_name("t1") == "default@t1" and mount_name("t1", "work") == "work@t1"
    uuid = "1f2c8d5e-6d49-4b61-9d1e-0f5a6a1f9a55"
    for thread in (uuid, "", "a/b", "..", "-x", "é", "x" * 33, "a b", "\udcff"):
        assert len(thread_word(thread)) == 32 and thread_word(thread).isalnum()
    assert thread_word("a/b") != thread_word("a_b")


def test_auto(make: Callable[..., VfsBackend], world: World) -> None:
    backend = make()
    turns = [[call("write_file", file_path="/mine", content="of one")], [], [call("read_file", file_path="/mine")], []]
    agent = create_deep_agent(model=Scripted(turns=turns), backend=backend, checkpointer=InMemorySaver())

    def invoke(thread: str) -> str:
        state = agent.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": thread}})
        return str(answers(state)[-1].content)

    assert invoke("one") == "Updated file /mine"
    assert world.names() == {"default@one"}
    assert "file_not_found" in invoke("two")
    assert world.names() == {"default@one", "default@two"}
    agent = create_deep_agent(model=Scripted(turns=[[call("execute", command="cat /mine; pwd")]]), backend=backend)
    state = asyncio.run(agent.ainvoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "one"}}))
    assert str(answers(state)[-1].content).startswith("of one/\n")


def test_auto_outside_of_a_run(make: Callable[..., VfsBackend]) -> None:
    backend = make()
    assert "thread_id of a LangGraph run" in str(backend.ls("/").error)
    assert "thread_id of a LangGraph run" in backend.execute("true").output


def test_named_and_started_at_once_by_many(make: Callable[..., VfsBackend], world: World) -> None:
    one, other = make("many", name="shared"), make("many", name="shared")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: (one, other)[n % 2].write(f"/{n}", str(n)).error, range(8)))
    assert results == [None] * 8
    assert world.names() == {"shared@many"}
    assert len(other.ls("/").entries or []) >= 8


def test_the_loop_goes_on_while_daemons_start(make: Callable[..., VfsBackend], world: World) -> None:
    """Also one daemon wanted by many, by a thread, and by a call that is cancelled meanwhile."""
    backends = [make(f"loop{n % 2}") for n in range(6)]

    async def main() -> int:
        before, ticks = threading.active_count(), 0
        loop = asyncio.get_running_loop()

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        cancelled = asyncio.create_task(make("loop0").als("/"))
        other = loop.run_in_executor(None, make("loop0").ls, "/")
        calls = [asyncio.create_task(b.awrite(f"/{n}", str(n))) for n, b in enumerate(backends)]
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert threading.active_count() <= before + 4  # the executor's one, and one for each process that is waited for
        assert [result.error for result in await asyncio.gather(*calls)] == [None] * 6
        assert (await other).error is None
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 20
    assert world.names() == {"default@loop0", "default@loop1"}
    entries = backends[0].ls("/").entries or []
    assert {entry["path"] for entry in entries} >= {"/0", "/2", "/4"}


def test_what_keeps_it_from_starting_is_told_to_tasks(make: Callable[..., VfsBackend], tmp_path: Path) -> None:
    (tmp_path / "vfsd.toml").write_text('color = "red"\n')
    backend = make("wrong", config=tmp_path / "vfsd.toml")

    async def main() -> list[str]:
        return [str(result.error) for result in await asyncio.gather(*(backend.als("/") for _ in range(3)))]

    assert all("did not start" in error and "unknown key 'color'" in error for error in asyncio.run(main()))


def test_started_by_two_processes(make: Callable[..., VfsBackend], world: World) -> None:
    code = "from agenttools.deepagents import VfsBackend; import sys; "
    code += "print(VfsBackend(thread='race').write(sys.argv[1], '').error)"
    running = [
        subprocess.Popen([sys.executable, "-c", code, f"/{n}"], stdout=subprocess.PIPE, text=True) for n in range(3)
    ]
    assert [process.communicate(timeout=50)[0].strip() for process in running] == ["None"] * 3
    assert len(make("race").ls("/").entries or []) >= 3


def test_a_killed_daemon_is_started_again_and_nothing_is_lost(make: Callable[..., VfsBackend], world: World) -> None:
    backend = make("phoenix")
    assert backend.write("/kept", "still here").error is None
    pid = int(next(Path(world.base / "run/vfsd").glob("*phoenix.lock")).read_text())
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)
    assert backend.read("/kept").file_data == {"content": "still here", "encoding": "utf-8"}
    assert backend.execute("cat /kept").output == "still here"


def test_config(make: Callable[..., VfsBackend], tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "vfsd.toml").write_text('[routes."/work/"]\nkind = "local"\nlocation = "host"\n')
    assert make("configured", config=tmp_path / "vfsd.toml").write("/work/f", "on the host").error is None
    assert (tmp_path / "host/f").read_text() == "on the host"


def test_what_keeps_it_from_starting_is_told(make: Callable[..., VfsBackend], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "vfsd.toml").write_text('color = "red"\n')
    error = str(make("wrong", config=tmp_path / "vfsd.toml").ls("/").error)
    assert "did not start" in error and "unknown key 'color'" in error
    monkeypatch.setattr("agenttools.daemons._vfsd", lambda: None)
    assert "pip install vfsd" in str(make("nothing").write("/f", "").error)
