"""Subagents side by side on one tree: no edit is lost, and who edits what is no longer there is told so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import Mount

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from scripted import call

from agenttools.deepagents import VfsBackend

pytestmark = pytest.mark.mount

Run = Callable[[Any], dict[str, Any]]


class Parts(BaseChatModel):
    """One model for all: the first of the messages says which part it plays; the parts' first turns start together."""

    parts: dict[str, list[list[dict[str, Any]]]]
    together: Any

    @property
    def _llm_type(self) -> str:
        return "parts"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        part = next(str(m.content) for m in messages if isinstance(m, HumanMessage))
        turn = sum(isinstance(m, AIMessage) for m in messages)
        if part != "go" and turn == 0:
            self.together.wait(20)
        turns = self.parts[part]
        last = next((str(m.content) for m in reversed(messages) if isinstance(m, ToolMessage)), "")
        message = AIMessage(content="", tool_calls=turns[turn]) if turn < len(turns) else AIMessage(content=last)
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(agent: Any) -> dict[str, Any]:
        given = {"messages": [HumanMessage("go")]}
        state = agent.invoke(given) if request.param == "invoke" else asyncio.run(agent.ainvoke(given))
        assert isinstance(state, dict)
        return state

    return run


@pytest.fixture
def backend(mount: Mount) -> Iterator[VfsBackend]:
    backend = VfsBackend(socket=mount.socket)
    yield backend
    backend.delete("/shared")
    backend.close()


def agent_of(backend: VfsBackend, parts: dict[str, list[list[dict[str, Any]]]]) -> Any:
    tasks = [call("task", description=name, subagent_type="general-purpose") for name in parts]
    model = Parts(parts={"go": [tasks], **parts}, together=threading.Barrier(len(parts)))
    return create_deep_agent(model=model, backend=backend)


def said(state: dict[str, Any]) -> list[str]:
    return [str(message.content) for message in state["messages"] if isinstance(message, ToolMessage)]


def edit(old: str, new: str) -> dict[str, Any]:
    return call("edit_file", file_path="/shared", old_string=old, new_string=new)


def test_edits_of_different_lines_are_all_kept(run: Run, backend: VfsBackend, mount: Mount) -> None:
    names = "abcdef"
    backend.write("/shared", "".join(f"{name}{n}\n" for name in names for n in range(6)))
    parts = {name: [[edit(f"{name}{n}\n", f"{name}{n} done\n")] for n in range(6)] for name in names}
    state = run(agent_of(backend, parts))
    assert all("Successfully replaced" in text for text in said(state))
    lines = Path(mount.point, "shared").read_text().splitlines()
    assert lines == [f"{name}{n} done" for name in names for n in range(6)]


def test_a_conflict_is_told(run: Run, backend: VfsBackend, mount: Mount) -> None:
    backend.write("/shared", "one two\n")
    parts = {name: [[edit("two", name)]] for name in ("LEFT", "RIGHT")}
    texts = sorted(said(run(agent_of(backend, parts))))
    content = Path(mount.point, "shared").read_text()
    assert content in ("one LEFT\n", "one RIGHT\n")
    assert "String not found" in texts[0] and "Successfully replaced" in texts[1]


def test_tools_and_a_shell_that_rewrites_the_file(run: Run, backend: VfsBackend, mount: Mount) -> None:
    """A program that appends while tools edit; neither loses anything."""
    backend.write("/shared", "".join(f"t{n}\n" for n in range(20)))
    shell = "for n in $(seq 20); do echo s$n >> shared; done"
    parts = {"tool": [[edit(f"t{n}\n", f"T{n}\n")] for n in range(20)], "shell": [[call("execute", command=shell)]]}
    began = time.monotonic()
    state = run(agent_of(backend, parts))
    assert time.monotonic() - began < 50
    lines = Path(mount.point, "shared").read_text().split()
    assert lines == [f"T{n}" for n in range(20)] + [f"s{n}" for n in range(1, 21)], said(state)
