"""The tree goes back, and apart, with the conversation: ``TimeTravel`` on each of LangGraph's savers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import World

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from scripted import Scripted, answers, call

from agenttools.client import Client
from agenttools.daemons import ThreadClient
from agenttools.deepagents import TimeTravel, VfsBackend

pytestmark = pytest.mark.mount

SAVERS = ("memory", "sqlite", "postgres")
HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A PostgreSQL server that listens on a socket in its own directory."""
    pytest.importorskip("langgraph.checkpoint.postgres")
    if not HOMES:
        pytest.skip("PostgreSQL is not installed: scripts/setup.sh")
    # Not under pytest's directory: a socket's path is short, and user postgres must get there.
    home = Path(f"/tmp/vfsd-travel-{os.getpid()}")
    home.mkdir(mode=0o755)
    user: list[str] = []
    if os.geteuid() == 0:
        account = pwd.getpwnam("postgres")
        os.chown(home, account.pw_uid, account.pw_gid)
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]

    def run(program: str, *args: str) -> None:
        command = [*user, str(HOMES[-1].with_name(program)), "-D", str(home / "data"), *args]
        subprocess.run(command, cwd=home, check=True, timeout=60, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    try:
        run("initdb", "-U", "postgres", "-A", "trust", "-N")
        run("pg_ctl", "-o", f"-k {home} -c listen_addresses='' -c fsync=off", "-l", str(home / "log"), "-w", "start")
        yield f"postgresql://postgres@/postgres?host={home}"
        run("pg_ctl", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def opened(kind: str, place: str) -> Iterator[Any]:
    if kind == "memory":
        yield InMemorySaver()
    elif kind == "sqlite":
        sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
        with sqlite.SqliteSaver.from_conn_string(place) as saver:
            yield saver
    else:
        from langgraph.checkpoint.postgres import PostgresSaver

        with PostgresSaver.from_conn_string(place) as saver:
            saver.setup()
            for thread in ("t1", "t2"):
                saver.delete_thread(thread)
            yield saver


@pytest.fixture(params=SAVERS)
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    place = request.getfixturevalue("postgres") if request.param == "postgres" else str(tmp_path / "saved.db")
    with opened(request.param, place) as saver:
        yield saver


@pytest.fixture
def backend(world: World) -> Iterator[VfsBackend]:
    backend = VfsBackend(thread="auto")
    yield backend
    backend.close()
    for name in world.names():
        if "@" in name:
            world.vfsd("umount", "--force", name)
    shutil.rmtree(world.base / "state/vfsd", ignore_errors=True)


def config(thread: str = "t1") -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def files(thread: str = "t1") -> dict[str, str]:
    """The files of a thread's tree, as its shell sees them."""
    with Client(name=f"default@{thread}") as client:
        point = Path(os.fsdecode(client.hello["mountpoint"]))
    found = (
        path
        for path in point.rglob("*")
        if path.is_file() and "large_tool_results" not in str(path) and point / "memories" not in path.parents
    )
    return {f"/{path.relative_to(point)}": path.read_text() for path in found}


def shell(script: str, thread: str = "t1") -> None:
    """What somebody does in the mount, behind everybody's back."""
    with ThreadClient(thread) as client:
        point = os.fsdecode(client.hello["mountpoint"])
    subprocess.run(["sh", "-ec", script], cwd=point, check=True, timeout=20)


Make = Callable[..., Any]


@pytest.fixture
def make(backend: VfsBackend) -> Make:
    def make(saver: Any, *turns: list[dict[str, Any]], **options: Any) -> Any:
        options.setdefault("middleware", [TimeTravel(backend)])
        return create_deep_agent(model=Scripted(turns=[*turns]), backend=backend, checkpointer=saver, **options)

    return make


def go(text: str = "go") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def write(path: str, content: str) -> dict[str, Any]:
    return call("write_file", file_path=path, content=content)


def at(agent: Any, thread: str = "t1", **wanted: Any) -> Any:
    """The newest of the thread's snapshots whose next step is ``next`` and that has ``seen`` so many messages."""
    for snapshot in agent.get_state_history(config(thread)):
        seen = len(snapshot.values.get("messages", []))
        if wanted.get("next", snapshot.next) == snapshot.next and wanted.get("seen", seen) == seen:
            return snapshot
    raise AssertionError(wanted)


def test_files_go_back_with_the_conversation(make: Make, saver: Any) -> None:
    agent = make(
        saver,
        [write("/a", "one")],
        [call("execute", command="echo two > a; mkdir d; echo new > d/n"), write("/b", "b")],
        [],
        [call("execute", command="cat a b; rm -r d")],
        [],
    )
    agent.invoke(go(), config())
    assert files() == {"/a": "two\n", "/b": "b", "/d/n": "new\n"}
    shell("echo by hand > c; rm -r d; echo more >> a")
    # Where the thread is, what people did is kept; the step whose tools are about to run has the files of before it.
    agent.invoke(None, at(agent, next=("tools", "tools")).config)
    assert answers(agent.get_state(config()).values)[-1].content.startswith("two\n")
    assert files() == {"/a": "two\n", "/b": "b"}
    history = [s for s in agent.get_state_history(config()) if s.next == ("model",)]
    first = history[-1]
    agent.invoke(None, first.config)
    assert files() == {}


def test_people_work_on_between_the_turns(make: Make, saver: Any) -> None:
    agent = make(saver, [write("/a", "one")], [], [call("execute", command="cat a c")], [])
    agent.invoke(go(), config())
    shell("echo hand > c; echo changed > a")
    state = agent.invoke(go("and?"), config())
    assert str(answers(state)[-1].content).startswith("changed\nhand\n")
    assert files() == {"/a": "changed\n", "/c": "hand\n"}


def test_the_end_of_a_run_can_be_gone_back_to(make: Make) -> None:
    saver = InMemorySaver()
    agent = make(saver, [write("/a", "one")], [], [write("/a", "two")], [], [call("execute", command="cat a")], [])
    agent.invoke(go(), config())
    end = agent.get_state(config()).config
    agent.invoke(go("more"), config())
    shell("echo three > a")
    state = agent.invoke(go("look"), end)
    assert str(answers(state)[-1].content).startswith("one\n")


def test_forks_in_one_thread(make: Make, saver: Any) -> None:
    agent = make(saver, [write("/a", "one")], [write("/b", "left")], [], [write("/b", "right")], [])
    agent.invoke(go(), config())
    left = agent.get_state(config())
    fork = agent.update_state(at(agent, seen=3).config, {"messages": [HumanMessage("rather")]})
    agent.invoke(None, fork)
    assert files() == {"/a": "one", "/b": "right"}
    right = agent.get_state(config())
    travel = TimeTravel(VfsBackend(thread="auto"))
    travel.rewind(left)
    assert files() == {"/a": "one", "/b": "left"}
    travel.rewind(right)
    assert files() == {"/a": "one", "/b": "right"}


def test_a_copied_thread_gets_a_forked_tree(make: Make, saver: Any, world: World) -> None:
    agent = make(
        saver, [write("/a", "one")], [], [call("execute", command="cat a; echo mine > b")], [], [write("/c", "c")], []
    )
    agent.invoke(go(), config())
    moment = agent.get_state(config())
    shell("echo later > a")
    copy = agent.update_state(config("t2"), moment.values, as_node="model")
    state = agent.invoke(go("in the copy"), config("t2"))
    assert str(answers(state)[-1].content).startswith("one\n")
    assert files("t2") == {"/a": "one", "/b": "mine\n"}
    assert files("t1") == {"/a": "later\n"}
    # The copy's own beginning is a moment of its own tree.
    agent.invoke(go("again"), copy)
    assert files("t2") == {"/a": "one", "/c": "c"}
    assert files("t1") == {"/a": "later\n"}


def test_a_copy_into_a_thread_with_files_is_refused(make: Make) -> None:
    agent = make(InMemorySaver(), [write("/a", "one")], [], [write("/b", "two")], [], [write("/c", "no")], [])
    agent.invoke(go(), config())
    agent.invoke(go(), config("t2"))
    agent.update_state(config("t3"), agent.get_state(config()).values, as_node="model")
    shell("echo mine > own", "t3")
    with pytest.raises(FileExistsError, match="copy it to a new thread"):
        agent.invoke(go(), config("t3"))
    assert files("t3") == {"/own": "mine\n"}


@contextlib.asynccontextmanager
async def aopened(kind: str, place: str) -> AsyncIterator[Any]:
    if kind == "memory":
        yield InMemorySaver()
    elif kind == "sqlite":
        sqlite = pytest.importorskip("langgraph.checkpoint.sqlite.aio")
        async with sqlite.AsyncSqliteSaver.from_conn_string(place) as saver:
            yield saver
    else:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        async with AsyncPostgresSaver.from_conn_string(place) as saver:
            await saver.setup()
            await saver.adelete_thread("t1")
            yield saver


@pytest.mark.parametrize("kind", SAVERS)
def test_in_asyncio(make: Make, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = request.getfixturevalue("postgres") if kind == "postgres" else str(tmp_path / "saved.db")

    async def run() -> None:
        async with aopened(kind, place) as saver:
            await job(make(saver, [write("/a", "one")], [call("execute", command="echo two > a")], [], [], []))

    async def job(agent: Any) -> None:
        await agent.ainvoke(go(), config())
        assert files() == {"/a": "two\n"}
        snapshots = [s async for s in agent.aget_state_history(config()) if s.next == ("tools",)]
        await agent.ainvoke(None, {**snapshots[0].config})
        assert files() == {"/a": "two\n"}
        await agent.ainvoke(None, next(s for s in snapshots if len(s.values["messages"]) == 2).config)

    asyncio.run(run())
    assert files() == {"/a": "one"}


def test_another_process_goes_on(make: Make, backend: VfsBackend) -> None:
    saver = InMemorySaver()
    agent = make(saver, [write("/a", "one")], [])
    agent.invoke(go(), config())
    shell("echo hand > b")
    other = VfsBackend(thread="auto")
    again = make(saver, [call("execute", command="cat a b")], [], middleware=[TimeTravel(other)])
    state = again.invoke(go(), config())
    assert str(answers(state)[-1].content).startswith("onehand\n")
    other.close()


def test_what_deep_agents_puts_in_the_tree_after_a_tool_is_in_the_record(make: Make) -> None:
    @tool
    def shout() -> str:
        """Be loud."""
        return "loud\n" * 50_000

    made = call("shout")
    reads = call("read_file", file_path=f"/large_tool_results/{made['id']}")
    agent = make(InMemorySaver(), [made], [], [reads], [], tools=[shout])
    agent.invoke(go(), config())
    shell("rm -r large_tool_results")
    state = agent.invoke(None, at(agent, next=("model",), seen=3).config)
    assert "loud" in str(answers(state)[-1].content)


def test_a_step_that_failed_half_way_goes_on_from_where_it_was(make: Make) -> None:
    broken = [True]

    @tool
    def breaks() -> str:
        """Fails the first time."""
        with ThreadClient("t1") as client:
            client.call("write", path=b"/half", data=b"done")
        if broken.pop():
            broken.append(False)
            raise RuntimeError("down")
        return "up"

    agent = make(InMemorySaver(), [write("/a", "one")], [write("/b", "b"), call("breaks")], [], tools=[breaks])
    with pytest.raises(RuntimeError, match="down"):
        agent.invoke(go(), config())
    state = agent.invoke(None, config())
    assert {str(m.content) for m in answers(state)} >= {"Updated file /b", "up"}
    assert files() == {"/a": "one", "/b": "b", "/half": "done"}


def test_interrupts_and_time_travel(make: Make) -> None:
    agent = make(InMemorySaver(), [write("/a", "one")], [write("/a", "two")], [], [], interrupt_on={"write_file": True})
    approve = Command(resume={"decisions": [{"type": "approve"}]})
    agent.invoke(go(), config())
    agent.invoke(approve, config())
    assert files() == {"/a": "one"}
    before = agent.get_state(config())
    agent.invoke(approve, config())
    assert files() == {"/a": "two"}
    shell("echo other > a; echo new > b")
    # LangGraph keeps the answer that was given there.
    agent.invoke(approve, before.config)
    assert files() == {"/a": "two"}


def test_a_run_that_is_resumed_finds_its_files_although_others_travelled(make: Make) -> None:
    saver = InMemorySaver()
    turns = [write("/a", "one")], [write("/a", "two")], [call("execute", command="cat a")], []
    agent = make(saver, *turns, interrupt_on={"execute": True})
    agent.invoke(go(), config())
    other = TimeTravel(VfsBackend(thread="auto"))
    other.rewind(at(agent, next=("model",), seen=3))
    assert files() == {"/a": "one"}
    state = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config())
    assert str(answers(state)[-1].content).startswith("two\n")


def test_a_checkpoint_that_is_gone_stops_the_run(make: Make, world: World) -> None:
    agent = make(InMemorySaver(), [write("/a", "one")], [write("/a", "two")], [], [])
    agent.invoke(go(), config())
    snapshot = at(agent, next=("model",), seen=3)
    with ThreadClient("t1") as client:
        client.call("checkpoint", action="drop", refs=[snapshot.values["vfs_tree"]["id"]])
    with pytest.raises(FileNotFoundError, match="no checkpoint is called"):
        agent.invoke(None, snapshot.config)
    assert files() == {"/a": "two"}


def test_what_a_step_costs(make: Make, backend: VfsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.client_of("t1").call("status")
    asked: list[str] = []
    plain = Client.call

    def noted(self: Client, op: str, /, **params: Any) -> Any:
        asked.append(params["action"] if op == "checkpoint" else op)
        return plain(self, op, **params)

    monkeypatch.setattr(Client, "call", noted)
    many = [call("read_file", file_path=f"/{n}") for n in range(5)]
    agent = make(InMemorySaver(), [write("/a", "one")], many, [])
    agent.invoke(go(), config())
    # Six steps: the beginning, three of the model, two of tools. All but the first look once, each task records once.
    assert asked.count("create") == 1 + 3 + 1 + 5 and asked.count("list") == 5 and asked.count("restore") == 0


def test_prune(make: Make, backend: VfsBackend) -> None:
    saver = InMemorySaver()
    agent = make(saver, [write("/a", "one")], [], [write("/a", "two")], [])
    agent.invoke(go(), config())
    assert backend.travel is not None
    assert backend.travel.prune(saver, "t1") == 0
    saver.delete_thread("t1")
    assert backend.travel.prune(saver, "t1") == 3


def test_without_a_thread_nothing_is_recorded(world: World) -> None:
    mount = world.mount("alone")
    try:
        backend = VfsBackend(socket=mount.socket)
        agent = create_deep_agent(
            model=Scripted(turns=[[write("/a", "one")]]), backend=backend, middleware=[TimeTravel(backend)]
        )
        agent.invoke(go())
        with Client(socket=mount.socket) as client:
            assert client.call("checkpoint", action="list", label="langgraph")["result"]["checkpoints"] == []
        backend.close()
    finally:
        mount.stop()
