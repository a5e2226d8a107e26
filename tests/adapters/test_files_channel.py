"""``invoke({"files": ...})``: what the caller gives is in the mount, and what the run changed comes back."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import Mount, World

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from deepagents.backends.utils import create_file_data
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from scripted import Scripted, answers, call

from agenttools.client import Client
from agenttools.deepagents import FilesBridge, TimeTravel, VfsBackend

pytestmark = pytest.mark.mount

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def place(world: World) -> Iterator[Mount]:
    mount = world.mount("files")
    yield mount
    mount.stop()
    shutil.rmtree(world.base / "state/vfsd/files")


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(agent: Any, files: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
        inputs = {"messages": [HumanMessage("go")], **({} if files is None else {"files": files})}
        config = given.pop("config", {"configurable": {"thread_id": "t"}})
        if request.param == "invoke":
            state = agent.invoke(inputs, config)
        else:
            state = asyncio.run(agent.ainvoke(inputs, config))
        assert isinstance(state, dict)
        return state

    return run


def make(place: Mount, *turns: list[dict[str, Any]], travel: bool = False, **options: Any) -> Any:
    backend = VfsBackend(socket=place.socket)
    middleware = [*([TimeTravel(backend)] if travel else []), FilesBridge(backend, **options)]
    return create_deep_agent(
        model=Scripted(turns=[*turns]), backend=backend, middleware=middleware, checkpointer=InMemorySaver()
    )


def texts(state: dict[str, Any]) -> dict[str, str]:
    return {path: data["content"] for path, data in state["files"].items()}


def test_there_and_back(run: Run, place: Mount) -> None:
    job = "cat in/data; echo more >> in/data; printf '\\377' > out; mkdir -p .git/x; echo y > .git/x/y; "
    job += "rm gone; ln -s out l"
    agent = make(place, [call("execute", command=job)], [call("write_file", file_path="/made", content="made")])
    binary = create_file_data(base64.b64encode(b"\xfe\0").decode(), encoding="base64")
    given = {"/in/data": create_file_data("seeded\n"), "/gone": create_file_data(""), "/blob": binary}
    state = run(agent, given)
    assert str(answers(state)[0].content).startswith("seeded\n")
    assert texts(state) == {
        "/in/data": "seeded\nmore\n",
        "/made": "made",
        "/blob": base64.b64encode(b"\xfe\0").decode(),
        "/out": base64.b64encode(b"\xff").decode(),
    }
    assert state["files"]["/out"]["encoding"] == "base64" and state["files"]["/made"]["encoding"] == "utf-8"
    with Client(socket=place.socket) as client:
        assert client.call("checkpoint", action="list", label="files of")["result"]["checkpoints"] == []


def test_what_people_changed_between_runs_is_kept(run: Run, place: Mount) -> None:
    agent = make(place, [], [call("execute", command="cat a b")], [])
    assert texts(run(agent, {"/a": create_file_data("one\n"), "/b": create_file_data("two\n")})) == {
        "/a": "one\n",
        "/b": "two\n",
    }
    subprocess.run(["sh", "-c", "echo by hand > a; rm b; echo > other"], cwd=place.point, check=True, timeout=20)
    state = run(agent, {"/b": create_file_data("anew\n")})
    assert str(answers(state)[0].content).startswith("by hand\nanew\n")
    assert texts(state) == {"/a": "by hand\n", "/b": "anew\n"}


def test_a_file_taken_out_of_the_state_goes(run: Run, place: Mount) -> None:
    agent = make(place, [], [call("execute", command="ls")], [])
    run(agent, {"/a": create_file_data("one"), "/b": create_file_data("two")})
    state = run(agent, {"/a": None})
    assert str(answers(state)[0].content).startswith("b\n") and set(state["files"]) == {"/b"}


def test_what_is_left_out(run: Run, place: Mount, caplog: pytest.LogCaptureFixture) -> None:
    job = "mkdir p q; echo 1 > p/a; echo 2 > q/b; head -c 3000 /dev/zero > p/big; "
    job += "for n in 1 2 3 4 5; do echo > p/c$n; done"
    agent = make(place, [call("execute", command=job)], paths=["/p"], max_bytes=1000, max_files=4)
    assert len(texts(run(agent, {}))) == 3
    assert "left out: /p/big" in caplog.text and "3 changes more than max_files allows" in caplog.text


def test_a_file_that_cannot_be_written_is_told(run: Run, place: Mount) -> None:
    with pytest.raises(OSError, match="relative cannot be put into the tree: invalid_path"):
        run(make(place), {"relative": create_file_data("")})


def test_with_time_travel(run: Run, place: Mount) -> None:
    agent = make(place, [call("execute", command="cat a; echo first > a")], [], [], travel=True)
    assert texts(run(agent, {"/a": create_file_data("seeded\n")})) == {"/a": "first\n"}
    config = {"configurable": {"thread_id": "t"}}
    before = next(s for s in agent.get_state_history(config) if s.next == ("tools",))
    subprocess.run(["sh", "-c", "echo by hand > a; echo > c"], cwd=place.point, check=True, timeout=20)
    state = agent.invoke(None, before.config)
    assert str(answers(state)[0].content).startswith("seeded\n")
    assert texts(state) == {"/a": "first\n"}
