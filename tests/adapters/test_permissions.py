"""Deep Agents' permissions on a tree: the daemon enforces them for tools and shell alike, with execute on."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import Mount, World

pytest.importorskip("deepagents")

import deepagents
from deepagents import FilesystemPermission
from deepagents.backends import CompositeBackend, StateBackend
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from scripted import Scripted, answers, call

from agenttools.client import Client
from agenttools.deepagents import VfsBackend, create_deep_agent

pytestmark = pytest.mark.mount

RULES = [
    FilesystemPermission(operations=["read", "write"], paths=["/secrets/**"], mode="deny"),
    FilesystemPermission(operations=["write"], paths=["/policies/**"], mode="deny"),
    FilesystemPermission(operations=["write"], paths=["/ask/**"], mode="interrupt"),
    FilesystemPermission(operations=["read"], paths=["/private/**"], mode="interrupt"),
]
THREAD = {"configurable": {"thread_id": "t"}}


@pytest.fixture
def place(world: World) -> Iterator[Mount]:
    mount = world.mount("ruled", "--route", "/=memory")
    with Client(socket=mount.socket) as client:
        for name in ("secrets", "policies", "ask", "private", "open"):
            client.call("write", path=f"/{name}/f".encode(), data=f"in {name}\n".encode())
    yield mount
    mount.stop()


def agent_with(place: Mount, *turns: list[dict[str, Any]], **options: Any) -> Any:
    backend = VfsBackend(socket=place.socket, permissions=RULES)
    saver = InMemorySaver()
    return deepagents.create_deep_agent(model=Scripted(turns=[*turns]), backend=backend, checkpointer=saver, **options)


Run = Callable[..., dict[str, Any]]


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(agent: Any, given: Any = None) -> dict[str, Any]:
        given = {"messages": [HumanMessage("go")]} if given is None else given
        state = agent.invoke(given, THREAD) if request.param == "invoke" else asyncio.run(agent.ainvoke(given, THREAD))
        assert isinstance(state, dict)
        return state

    return run


def content(place: Mount, path: str) -> str:
    return Path(place.point + path).read_text()


def test_tools_and_commands_are_denied_alike(run: Run, place: Mount) -> None:
    agent = agent_with(
        place,
        [
            call("read_file", file_path="/secrets/f"),
            call("write_file", file_path="/policies/f", content="mine"),
        ],
        [
            call("edit_file", file_path="/policies/f", old_string="in", new_string="out"),
            call("delete", file_path="/policies"),
            call("grep", pattern="in ", path="/"),
            call("execute", command="cat secrets/f"),
            call("execute", command="echo mine > policies/f"),
            call("execute", command="echo fine > open/f && cat open/f policies/f"),
        ],
    )
    read, write, edit, delete, grep, cat, echo, fine = (str(m.content) for m in answers(run(agent)))
    assert "permission denied for read on /secrets/f: rule [deny read,write /secrets/**" in read
    for said in (write, edit):
        assert "permission denied for write on /policies/f: rule [deny write /policies/**" in said
    assert "permission denied for write on /policies: rule [deny write /policies/**" in delete
    assert "/secrets" not in grep and "/private" not in grep and "/open/f" in grep
    assert "Permission denied" in cat and "permission denied for read on /secrets/f: rule [deny read,write" in cat
    assert "permission denied for write on /policies/f: rule [deny write" in echo and "exit code 2" in echo
    assert fine.startswith("fine\nin policies\n")
    assert content(place, "/policies/f") == "in policies\n"


def test_a_link_leads_to_what_it_leads_to(run: Run, place: Mount) -> None:
    os.symlink("../secrets/f", place.point + "/open/link")
    agent = agent_with(place, [call("read_file", file_path="/open/link")])
    assert "permission denied for read on /secrets/f" in str(answers(run(agent))[0].content)


def test_an_interrupt_asks_a_person(run: Run, place: Mount) -> None:
    agent = agent_with(
        place,
        [call("write_file", file_path="/ask/f", content="changed")],
        [call("edit_file", file_path="/ask/f", old_string="changed", new_string="edited")],
        [call("read_file", file_path="/private/f")],
    )
    state = run(agent)
    (question,) = state["__interrupt__"]
    (action,) = question.value["action_requests"]
    assert action["name"] == "write_file" and action["args"] == {"file_path": "/ask/f", "content": "changed"}
    assert action["description"].startswith("permission denied for write on /ask/f: rule [interrupt write /ask/**")
    assert question.value["review_configs"][0]["allowed_decisions"] == ["approve", "reject"]
    assert content(place, "/ask/f") == "in ask\n"
    state = run(agent, Command(resume={"decisions": [{"type": "approve"}]}))
    assert content(place, "/ask/f") == "changed"
    (action,) = state["__interrupt__"][0].value["action_requests"]
    shown = {"file_path": "/ask/f", "old_string": "changed", "new_string": "edited"}
    assert action["name"] == "edit_file" and shown.items() <= action["args"].items()
    state = run(agent, Command(resume={"decisions": [{"type": "reject", "message": "not this"}]}))
    assert content(place, "/ask/f") == "changed"
    assert "a person has to approve it: rejected: not this" in str(answers(state)[-1].content)
    state = run(agent, Command(resume={"type": "approve"}))
    assert str(answers(state)[-1].content).endswith("in private")


def test_several_calls_of_one_message_ask_each(run: Run, place: Mount) -> None:
    turn = [call("write_file", file_path=f"/ask/{n}", content=n) for n in "ab"]
    agent = agent_with(place, [*turn, call("write_file", file_path="/open/c", content="c")])
    questions = run(agent)["__interrupt__"]
    assert len(questions) == 2
    paths = {q.value["action_requests"][0]["args"]["file_path"]: q.id for q in questions}
    decisions = {paths["/ask/a"]: {"type": "approve"}, paths["/ask/b"]: {"type": "reject"}}
    run(agent, Command(resume=decisions))
    assert content(place, "/ask/a") == "a" and content(place, "/open/c") == "c"
    assert not os.path.exists(place.point + "/ask/b")


def test_a_command_is_denied_what_a_tool_would_ask_for(run: Run, place: Mount) -> None:
    agent = agent_with(place, [call("execute", command="echo mine > ask/f")])
    began = time.monotonic()
    state = run(agent)
    assert "__interrupt__" not in state and time.monotonic() - began < 20
    said = str(answers(state)[0].content)
    assert "rule [interrupt write /ask/**" in said and "a person has to approve it" in said
    assert content(place, "/ask/f") == "in ask\n"


def test_subagents_are_asked_for_too(run: Run, place: Mount) -> None:
    agent = agent_with(
        place,
        [call("task", description="write", subagent_type="general-purpose")],
        [call("write_file", file_path="/ask/f", content="changed"), call("read_file", file_path="/secrets/f")],
    )
    assert len(run(agent)["__interrupt__"]) == 1
    run(agent, Command(resume={"decisions": [{"type": "approve"}]}))
    assert content(place, "/ask/f") == "changed"


def test_rules_of_the_configuration_ask_as_well(run: Run, world: World, tmp_path: Path) -> None:
    (tmp_path / "vfsd.toml").write_text(
        '[routes."/"]\nkind = "memory"\n[[rules]]\noperations = ["write"]\npaths = ["/ask/**"]\nmode = "interrupt"\n'
    )
    mount = world.mount("configured", "--config", str(tmp_path / "vfsd.toml"))
    try:
        agent = deepagents.create_deep_agent(
            model=Scripted(turns=[[call("write_file", file_path="/ask/f", content="x")]]),
            backend=VfsBackend(socket=mount.socket),
            checkpointer=InMemorySaver(),
        )
        assert len(run(agent)["__interrupt__"]) == 1
        run(agent, Command(resume={"decisions": [{"type": "approve"}]}))
        assert content(mount, "/ask/f") == "x"
    finally:
        mount.stop()


def test_outside_of_a_graph_it_is_an_error(place: Mount) -> None:
    backend = VfsBackend(socket=place.socket, permissions=RULES)
    for one in (backend, pickle.loads(pickle.dumps(backend))):
        assert "a person has to approve it" in str(one.write("/ask/f", "x").error)
        assert "rule [deny write" in str(one.write("/policies/f", "x").error)
        assert one.download_files(["/secrets/f"])[0].error == "permission_denied"
        one.close()


def test_a_daemon_started_anew_has_the_rules_before_anything_is_done(world: World) -> None:
    backend = VfsBackend(thread="ruled", permissions=RULES)
    try:
        assert backend.write("/policies/f", "x").error is not None
        pid = backend.client_of("").call("status")["pid"]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while "rule [deny write" not in (error := str(backend.write("/policies/f", "x").error)):
            # While the killed one ends, a request may still reach its socket.
            assert "broke before" in error and time.monotonic() < deadline, error
        assert "file_not_found" in str(backend.read("/policies/f").error)
    finally:
        backend.close()
        world.vfsd("umount", "--force", "default@ruled")


def test_create_deep_agent_takes_the_rules(run: Run, place: Mount) -> None:
    backend = VfsBackend(socket=place.socket)
    with pytest.raises(NotImplementedError):  # what the one of Deep Agents does with a backend that executes
        deepagents.create_deep_agent(model=Scripted(turns=[]), backend=backend, permissions=RULES)
    turn = [call("write_file", file_path="/policies/f", content="x"), call("execute", command="echo > policies/f")]
    agent = create_deep_agent(
        model=Scripted(turns=[turn]), backend=backend, permissions=RULES, checkpointer=InMemorySaver()
    )
    for message in answers(run(agent)):
        assert "rule [deny write /policies/**" in str(message.content)
    with pytest.raises(ValueError, match="other permissions already"):
        create_deep_agent(model=Scripted(turns=[]), backend=backend, permissions=RULES[:1])
    sub = {"name": "s", "description": "d", "system_prompt": "p", "permissions": RULES}
    with pytest.raises(ValueError, match="permissions of its own"):
        create_deep_agent(model=Scripted(turns=[]), backend=backend, subagents=[sub])


def test_create_deep_agent_with_routes(place: Mount) -> None:
    def make(*rules: FilesystemPermission) -> VfsBackend:
        backend = VfsBackend(socket=place.socket)
        composite = CompositeBackend(default=backend, routes={"/mem/": StateBackend()})
        create_deep_agent(model=Scripted(turns=[]), backend=composite, permissions=list(rules))
        return backend

    def rule(*paths: str) -> FilesystemPermission:
        return FilesystemPermission(operations=["write"], paths=list(paths), mode="deny")

    backend = make(rule("/mem/**"), rule("/policies/**"))
    assert "rule [deny" in str(backend.write("/policies/f", "x").error)
    for paths in (("/mem/**", "/policies/**"), ("/**",), ("/m*/x",)):
        with pytest.raises(ValueError, match="make a rule for each"):
            make(rule(*paths))


def test_rules_that_are_in_force_are_not_installed_again(place: Mount) -> None:
    with Client(socket=place.socket) as client:
        one = {"operations": ["write"], "paths": ["/none/**"], "mode": "deny"}
        assert client.call("rules_set", owner="o", rules=[one])["warnings"] != []
        assert client.call("rules_set", owner="o", rules=[one])["warnings"] == []
        assert client.call("rules_set", owner="o", rules=[one], waits=False)["warnings"] != []
        assert len(client.call("rules")["layers"]) == 2


def test_malformed_rules_are_refused_and_nothing_goes_on(place: Mount) -> None:
    odd = FilesystemPermission(operations=["write"], paths=["/x/**"], mode="deny")
    odd.mode = "odd"  # type: ignore[assignment]
    backend = VfsBackend(socket=place.socket, permissions=[odd])
    assert "mode 'odd' is unknown" in str(backend.write("/open/f", "x").error)
    assert content(place, "/open/f") == "in open\n"
