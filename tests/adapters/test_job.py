"""A real job from its beginning to its end, by an agent that is told what to do: no network, no model."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import BROKEN, GIT, MENDED, bundle_in
from worlds import World

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from scripted import Scripted, answers, call

from agenttools import checkpoints
from agenttools.daemons import ThreadClient
from agenttools.deepagents import FilesBridge, TimeTravel, VfsBackend

pytestmark = pytest.mark.mount

Run = Callable[..., dict[str, Any]]


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(agent: Any, given: Any, config: dict[str, Any]) -> dict[str, Any]:
        state = agent.invoke(given, config) if request.param == "invoke" else asyncio.run(agent.ainvoke(given, config))
        assert isinstance(state, dict)
        return state

    return run


@pytest.fixture
def backend(world: World) -> Iterator[VfsBackend]:
    backend = VfsBackend("job", thread="auto", view="root")
    yield backend
    backend.delete("/memories/AGENTS.md")
    backend.close()
    for name in world.names():
        if name.startswith("job@"):
            world.vfsd("umount", "--force", name)


@pytest.fixture
def bundle(tmp_path: Path) -> bytes:
    return bundle_in(tmp_path)


def agent_of(backend: VfsBackend, saver: Any, *turns: list[dict[str, Any]]) -> tuple[Any, Scripted]:
    model = Scripted(turns=[*turns])
    middleware = [TimeTravel(backend), FilesBridge(backend)]
    memory = ["/memories/AGENTS.md"]
    return (
        create_deep_agent(model=model, backend=backend, middleware=middleware, memory=memory, checkpointer=saver),
        model,
    )


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}, "recursion_limit": 100}


@pytest.mark.timeout(120)
def test_a_job_from_clone_to_rewind(
    run: Run, backend: VfsBackend, bundle: bytes, request: pytest.FixtureRequest
) -> None:
    one, two = (f"{request.node.callspec.id}-{n}" for n in ("one", "two"))
    saver = InMemorySaver()
    tests = "cd /project && python -B -m unittest"
    mend = call("edit_file", file_path="/project/calc.py", old_string="a - b", new_string="a + b")
    loud = call("execute", command="seq 1000000 | head -c 5000000")
    agent, _ = agent_of(
        backend,
        saver,
        [call("execute", command=f"{GIT} clone -q -b main /all.bundle /project && cd project && git log --format=%s")],
        [call("read_file", file_path="/project/calc.py")],
        [call("execute", command=tests)],
        [mend],
        [call("execute", command=f"{tests} && {GIT} commit -qam mended && git log --format=%s")],
        [loud],
        [call("read_file", file_path=f"/large_tool_results/{loud['id']}", offset=700_000, limit=3)],
        [call("write_file", file_path="/memories/AGENTS.md", content="The calculator subtracted where it should add.")],
    )
    data = {"content": base64.b64encode(bundle).decode(), "encoding": "base64"}
    state = run(agent, {"messages": [HumanMessage("mend it")], "files": {"/all.bundle": data}}, thread(one))
    cloned, read, failed, edited, passed, offloaded, page, noted = (str(m.content) for m in answers(state))
    assert cloned.startswith("first\n"), cloned
    assert BROKEN.rstrip() in read
    assert "FAILED (failures=1)" in failed and "exit code 1" in failed
    assert edited == "Successfully replaced 1 instance(s) of the string in '/project/calc.py'"
    assert "OK" in passed and "mended\nfirst\n" in passed
    assert f"/large_tool_results/{loud['id']}" in offloaded and len(offloaded) < 5000
    assert page.endswith("\n700001\n700002\n700003")
    assert noted == "Updated file /memories/AGENTS.md"
    assert state["files"]["/project/calc.py"]["content"] == MENDED
    size = backend.client_of(one).call("stat", path=f"/large_tool_results/{loud['id']}".encode())["attr"]["size"]
    assert size == 5_000_000

    # Another thread has files of its own, and the memory.
    second, model = agent_of(backend, saver, [call("execute", command="ls / && cat /memories/AGENTS.md")])
    state = run(second, {"messages": [HumanMessage("what do you know?")]}, thread(two))
    assert "The calculator subtracted" in model.prompt
    listed = str(answers(state)[0].content)
    assert "project" not in listed and "The calculator subtracted" in listed

    # Back to right before the fault was mended: all files as they were then.
    with ThreadClient(one, "job") as client:
        point = Path(client.hello["mountpoint"].decode())
        moment = next(
            s for s in agent.get_state_history(thread(one)) if s.next == ("tools",) and mend in calls_of(s.values)
        )
        tree = backend.travel.rewind(moment) if backend.travel else ""
        assert checkpoints.diff(client, tree).said == "Nothing changed."
    assert (point / "project/calc.py").read_text() == BROKEN
    assert not (point / "large_tool_results").exists()
    log = subprocess.run(
        ["git", "log", "--format=%s"], cwd=point / "project", capture_output=True, text=True, timeout=20
    )
    assert log.stdout == "first\n", log.stderr
    state = run(agent, None, {**thread(one), **moment.config})
    assert (point / "project/calc.py").read_text() == MENDED
    assert (point / "memories/AGENTS.md").read_text() == "The calculator subtracted where it should add."


def calls_of(values: dict[str, Any]) -> list[Any]:
    return list(getattr(values["messages"][-1], "tool_calls", []))
