"""The eight tools as LangChain tools: what a model is told, what it gets back, and an agent that uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from pydantic import ValidationError
from tool_server import serving

from agenttools.client import Client
from agenttools.langchain import vfs_tools
from agenttools.results import ReadResult
from agenttools.schema import TOOLS


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[dict[str, BaseTool]]:
    with serving(tmp_path / "s"), Client(socket=tmp_path / "s") as client:
        yield {tool.name: tool for tool in vfs_tools(client)}


def made(name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "args": args, "id": f"id of {name}", "type": "tool_call"}


def test_what_a_model_is_told(tools: dict[str, BaseTool]) -> None:
    assert list(tools) == [described["name"] for described in TOOLS]
    for described in TOOLS:
        tool = tools[described["name"]]
        wanted = described["parameters"]
        schema = tool.get_input_jsonschema()
        assert tool.description == described["description"]
        assert schema.get("required", []) == wanted["required"]
        assert list(schema["properties"]) == list(wanted["properties"])
        for key, value in schema["properties"].items():
            assert value["description"] == wanted["properties"][key]["description"]
            assert value.get("default") == wanted["properties"][key].get("default")


@pytest.mark.parametrize("concurrent", [False, True])
def test_results(tools: dict[str, BaseTool], concurrent: bool) -> None:
    def use(name: str, **args: Any) -> ToolMessage:
        call = made(name, args)
        message = asyncio.run(tools[name].ainvoke(call)) if concurrent else tools[name].invoke(call)
        assert isinstance(message, ToolMessage) and message.tool_call_id == f"id of {name}"
        return message

    assert use("write", path="/d/f", content="one\ntwo\n").content == "Updated file /d/f"
    page = use("read", path="/d/f", limit=1)
    assert page.content == "@@ lines 1-1 of 2 | next offset 1 @@\none" and page.status == "success"
    assert isinstance(page.artifact, ReadResult) and page.artifact.next_offset == 1
    assert use("edit", path="/d/f", old_string="two", new_string="2").content.startswith("Successfully replaced 1")
    assert use("grep", pattern="2", output_mode="content").content == "/d/f:\n  2: 2"
    assert use("glob", pattern="f").content == "['/d/f']" == use("ls", path="/d").content
    assert use("delete", path="/d").content == "Deleted /d"
    failed = use("delete", path="/d")
    assert (failed.content, failed.status) == ("Error: '/d' not found", "error")
    assert use("execute", command="true").status == "error"  # no mount: this tree is served by the socket alone


def test_wrong_arguments_are_refused(tools: dict[str, BaseTool]) -> None:
    for name, args in (("read", {}), ("edit", {"path": "/f", "old_string": "", "new_string": ""})):
        with pytest.raises(ValidationError):
            tools[name].invoke(args)
    with pytest.raises(ValidationError):
        tools["grep"].invoke({"pattern": "x", "output_mode": "loud"})


def test_the_ids_of_tool_calls_go_with_the_requests(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Noting(Client):
        def call(self, op: str, /, **params: Any) -> Any:
            asked.append(params)
            return super().call(op, **params)

    with serving(tmp_path / "s"), Noting(socket=tmp_path / "s") as client:
        tools = {tool.name: tool for tool in vfs_tools(client)}
        tools["write"].invoke(made("write", {"path": "/f", "content": ""}))
        tools["write"].invoke({"path": "/f", "content": ""})
        for name, args in (
            ("read", {"path": "/f"}),
            ("ls", {}),
            ("glob", {"pattern": "*"}),
            ("grep", {"pattern": "x"}),
        ):
            tools[name].invoke(made(name, args))
    noted = [(params["tool"], params.get("call_id")) for params in asked if "tool" in params]
    assert noted == [
        ("write", "id of write"),
        ("write", None),
        *((name, f"id of {name}") for name in ("read", "ls", "glob", "grep")),
    ]


def test_one_daemon_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile must be"):
        vfs_tools(profile="banana")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="client="):
        vfs_tools(Client(socket=tmp_path / "s"), name="default")


def test_in_an_agent(tools: dict[str, BaseTool]) -> None:
    agents = pytest.importorskip("langchain.agents")
    from scripted import Scripted, answers, call

    turns = [[call("write", path="/f", content="kept")], [call("read", path="/f"), call("read", path="/g")]]
    agent = agents.create_agent(Scripted(turns=turns), tools=list(tools.values()))
    state = agent.invoke({"messages": [("user", "go")]})
    assert [m.content for m in answers(state)] == [
        "Updated file /f",
        "@@ lines 1-1 of 1 @@\nkept",
        "Error: File '/g': file_not_found",
    ]
