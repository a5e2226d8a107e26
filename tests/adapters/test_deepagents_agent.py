"""A scripted agent of ``create_deep_agent`` on a mount: what reaches the model, and what is in the tree afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import Mount

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from deepagents.backends import CompositeBackend, FilesystemBackend
from langchain_core.messages import HumanMessage
from scripted import Scripted, answers, call

from agenttools.client import Client
from agenttools.deepagents import VfsBackend

pytestmark = pytest.mark.mount

Run = Callable[..., dict[str, Any]]

PROFILES: dict[str, Any] = {"root": None, "mount": "open"}
"""The view of the mount has no namespaces to confine a command in."""


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(agent)`` in both ways."""

    def invoke(agent: Any, text: str = "go", **config: Any) -> dict[str, Any]:
        given = {"messages": [HumanMessage(text)]}, {"configurable": config, "recursion_limit": 100}
        result = agent.invoke(*given) if request.param == "invoke" else asyncio.run(agent.ainvoke(*given))
        assert isinstance(result, dict)
        return result

    return invoke


@pytest.fixture(params=["root", "mount"])
def backend(request: pytest.FixtureRequest, mount: Mount) -> Iterator[VfsBackend]:
    backend = VfsBackend(socket=mount.socket, view=request.param, profile=PROFILES[request.param])
    yield backend
    backend.delete("/project")
    backend.close()


def test_a_job(run: Run, backend: VfsBackend, mount: Mount) -> None:
    place = f"{mount.point}/project" if "view='mount'" in repr(backend) else "/project"
    model = Scripted(
        turns=[
            [call("write_file", file_path="/project/add.py", content="def add(a, b):\n    return a - b\n")],
            [call("read_file", file_path="/project/add.py")],
            [call("execute", command=f"cd {place} && python -c 'import add; assert add.add(1, 2) == 3'")],
            [call("edit_file", file_path="/project/add.py", old_string="a - b", new_string="(a + b)")],
            [call("execute", command=f"cd {place} && python -c 'import add; print(add.add(1, 2))'")],
            [call("ls", path="/project"), call("glob", pattern="*.py", path="/project")],
            [call("grep", pattern="return", path="/project", output_mode="content")],
            [call("delete", file_path="/project/add.py")],
        ]
    )
    texts = [str(message.content) for message in answers(run(create_deep_agent(model=model, backend=backend)))]
    assert texts[0] == "Updated file /project/add.py"
    assert texts[1] == "@@ lines 1-2 of 2 @@\ndef add(a, b):\n    return a - b"
    assert "AssertionError" in texts[2] and texts[2].endswith("[Command failed with exit code 1]")
    assert texts[3] == "Successfully replaced 1 instance(s) of the string in '/project/add.py'"
    assert texts[4].startswith("3\n") and texts[4].endswith("[Command succeeded with exit code 0]")
    assert texts[5] == "['/project/__pycache__', '/project/add.py']"
    assert texts[6] == "['/project/add.py']"
    assert texts[7].startswith("/project/add.py:\n  2:     return (a + b)")
    assert texts[8] == "Deleted /project/add.py"
    assert not Path(f"{mount.point}/project/add.py").exists()


def test_the_tools_and_the_prompt(run: Run, backend: VfsBackend) -> None:
    """The shell's paths are the tools' paths, so that no prompt has to tell them apart."""
    model = Scripted(turns=[])
    run(create_deep_agent(model=model, backend=backend))
    assert {"ls", "read_file", "write_file", "edit_file", "delete", "glob", "grep", "execute"} <= set(model.tools)
    assert "Shell paths vs. virtual paths" not in model.prompt


def test_a_composite_has_that_prompt(run: Run, backend: VfsBackend, tmp_path: Path) -> None:
    """What the test above looks for is there where it has to be."""
    model = Scripted(turns=[])
    routes = {"/disk/": FilesystemBackend(tmp_path, virtual_mode=True)}
    run(create_deep_agent(model=model, backend=CompositeBackend(default=backend, routes=routes)))
    assert "Shell paths vs. virtual paths" in model.prompt


def test_large_output_is_captured(run: Run, backend: VfsBackend) -> None:
    made = call("execute", command="i=0; while [ $i -lt 52428 ]; do i=$((i+1)); done; seq 1000000 | head -c 5000000")
    model = Scripted(turns=[[made], [call("read_file", file_path=f"/large_tool_results/{made['id']}", offset=500_000)]])
    captured, page = answers(run(create_deep_agent(model=model, backend=backend)))
    assert f"/large_tool_results/{made['id']}" in captured.content and len(str(captured.content)) < 3000
    assert captured.artifact["exit_code"] == 0
    assert captured.artifact.get("output_file") in (None, f"/large_tool_results/{made['id']}")
    assert str(page.content).startswith("@@ lines 500001-500100") and "\n500001\n" in str(page.content)
    assert backend.download_files([f"/large_tool_results/{made['id']}"])[0].content is not None


def test_large_results_of_other_tools_are_put_in_the_tree(run: Run, backend: VfsBackend) -> None:
    from langchain_core.tools import tool

    @tool
    def shout() -> str:
        """Be loud."""
        return "loud\n" * 50_000

    made = call("shout")
    model = Scripted(turns=[[made]])
    (message,) = answers(run(create_deep_agent(model=model, backend=backend, tools=[shout])))
    assert f"/large_tool_results/{made['id']}" in str(message.content)
    assert backend.download_files([f"/large_tool_results/{made['id']}"])[0].content == b"loud\n" * 50_000


def test_many_calls_of_one_message(run: Run, backend: VfsBackend) -> None:
    turn = [call("write_file", file_path=f"/project/{n}", content=str(n)) for n in range(12)]
    turn += [call("execute", command=f"echo {n}") for n in range(4)]
    messages = answers(run(create_deep_agent(model=Scripted(turns=[turn]), backend=backend)))
    assert [m.content for m in messages[:12]] == [f"Updated file /project/{n}" for n in range(12)]
    assert [str(m.content)[0] for m in messages[12:]] == list("0123")


def test_failures_are_told_to_the_model_and_end_nothing(run: Run, tmp_path: Path) -> None:
    backend = VfsBackend(socket=tmp_path / "none.sock")
    turn = [
        call("ls", path="/"),
        call("read_file", file_path="/f"),
        call("write_file", file_path="/f", content=""),
        call("edit_file", file_path="/g", old_string="a", new_string="b"),
        call("delete", file_path="/h"),
        call("glob", pattern="*"),
        call("grep", pattern="x"),
        call("execute", command="true"),
    ]
    for message in answers(run(create_deep_agent(model=Scripted(turns=[turn]), backend=backend))):
        assert "no daemon on" in str(message.content)


def test_memory_and_skills(run: Run, backend: VfsBackend) -> None:
    skill = b"---\nname: knots\ndescription: How to tie a bowline.\n---\nLeft over right.\n"
    backend.upload_files([("/memory/AGENTS.md", b"The user's boat is called Argo."), ("/skills/knots/SKILL.md", skill)])
    model = Scripted(turns=[])
    run(create_deep_agent(model=model, backend=backend, memory=["/memory/AGENTS.md"], skills=["/skills/"]))
    assert "Argo" in model.prompt and "bowline" in model.prompt
    absent = Scripted(turns=[])
    run(create_deep_agent(model=absent, backend=backend, memory=["/none/AGENTS.md"]))


def test_subagents_share_the_tree(run: Run, backend: VfsBackend) -> None:
    task = call("task", description="write", subagent_type="general-purpose")
    model = Scripted(
        turns=[
            [task],
            [call("write_file", file_path="/project/sub", content="from below")],
            [],
            [call("read_file", file_path="/project/sub")],
        ]
    )
    last = answers(run(create_deep_agent(model=model, backend=backend)))[-1]
    assert "from below" in str(last.content)


def test_the_ids_of_tool_calls_go_with_the_requests(run: Run, backend: VfsBackend, monkeypatch: Any) -> None:
    asked: list[tuple[str, Any, Any]] = []

    def note(op: str, params: dict[str, Any]) -> None:
        if "tool" in params:
            asked.append((op, params["tool"], params.get("call_id")))

    plain, concurrent = Client.call, Client.acall

    def noted(self: Client, op: str, /, **params: Any) -> Any:
        note(op, params)
        return plain(self, op, **params)

    async def anoted(self: Client, op: str, /, **params: Any) -> Any:
        note(op, params)
        return await concurrent(self, op, **params)

    monkeypatch.setattr(Client, "call", noted)
    monkeypatch.setattr(Client, "acall", anoted)
    turn = [
        call("write_file", file_path="/project/a", content="x"),
        call("write_file", file_path="/project/b", content="x"),
    ]
    after = [
        call("edit_file", file_path="/project/a", old_string="x", new_string="y"),
        call("delete", file_path="/project/b"),
    ]
    looks = [
        call("read_file", file_path="/project/a"),
        call("ls", path="/project"),
        call("glob", pattern="*", path="/project"),
        call("grep", pattern="x", path="/project"),
    ]
    run(create_deep_agent(model=Scripted(turns=[turn, after, looks]), backend=backend))
    assert sorted(asked[:2]) == sorted([("write", "write", turn[0]["id"]), ("write", "write", turn[1]["id"])])
    assert sorted(asked[2:4]) == sorted([("edit", "edit", after[0]["id"]), ("delete", "delete", after[1]["id"])])
    assert {(op, call_id) for op, _, call_id in asked[4:]} >= {
        (op, look["id"]) for op, look in zip(("read", "list", "glob", "grep"), looks, strict=True)
    }
    backend.write("/project/by hand", "")
    assert asked[-1] == ("write", "write", None)
