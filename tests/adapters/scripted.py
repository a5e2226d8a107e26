"""A chat model that says what a test tells it to, and remembers what it was told."""

from __future__ import annotations

import itertools
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

_numbers = itertools.count()


def call(name: str, **args: Any) -> dict[str, Any]:
    """A tool call with an id of its own."""
    return {"name": name, "args": args, "id": f"call-{next(_numbers)}", "type": "tool_call"}


class Scripted(BaseChatModel):
    """Makes the calls of ``turns``, one list of them a turn, then says "done"."""

    turns: list[list[dict[str, Any]]]
    seen: list[list[BaseMessage]] = Field(default_factory=list)
    tools: list[str] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        self.tools[:] = [getattr(tool, "name", "") for tool in tools]
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.seen.append(messages)
        calls = self.turns.pop(0) if self.turns else []
        message = AIMessage(content="" if calls else "done", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])

    @property
    def prompt(self) -> str:
        """The first system message."""
        return str(self.seen[0][0].content)


def answers(state: dict[str, Any]) -> list[ToolMessage]:
    """What the tools said, in order."""
    return [message for message in state["messages"] if isinstance(message, ToolMessage)]
