"""What the LangChain run that calls says of itself: its thread, and the tool call it is carrying out.

Owns the look into LangChain's context. Both are read where the call is made, in whichever thread or task that is.
"""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

_MOST = 10_000
"""Calls remembered at once: a cancelled one is never reported as ended."""

_MOST_GIVEN = 256
"""Of so many what they were given is remembered too, which may be large."""


class _Calls(BaseCallbackHandler):
    """Notes which tool call a tool's run is for: the run's context has the run's id, and nothing of the call."""

    run_inline = True
    ignore_llm = ignore_chain = ignore_retriever = ignore_chat_model = ignore_custom_event = ignore_retry = True

    def __init__(self) -> None:
        self.of: OrderedDict[UUID, tuple[str, str]] = OrderedDict()
        self.given: OrderedDict[UUID, dict[str, Any]] = OrderedDict()

    def on_tool_start(self, serialized: dict[str, Any], input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        call_id = kwargs.get("tool_call_id")
        if isinstance(call_id, str):
            self.of[run_id] = call_id, str((serialized or {}).get("name", ""))
            self.given[run_id] = kwargs.get("inputs") or {}
            if len(self.of) > _MOST:
                self.of.popitem(last=False)
            if len(self.given) > _MOST_GIVEN:
                self.given.popitem(last=False)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._forget(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._forget(run_id)

    def _forget(self, run_id: UUID) -> None:
        self.of.pop(run_id, None)
        self.given.pop(run_id, None)


_calls = _Calls()
register_configure_hook(ContextVar("vfsd_tool_calls", default=_calls), inheritable=False)


def thread_id() -> str | None:
    """The ``thread_id`` the graph runs with, or None outside of a run and in one that has none."""
    config = var_child_runnable_config.get() or {}
    found = config.get("configurable", {}).get("thread_id")
    return None if found is None else str(found)


def inside() -> bool:
    """Whether a graph runs us, so that there is somebody to interrupt."""
    return "__pregel_scratchpad" in (var_child_runnable_config.get() or {}).get("configurable", {})


def call_id() -> str | None:
    """The id of the tool call under way, or None when it is not a tool that asks."""
    return _call()[0]


def tool_name() -> str:
    """The name of the tool under way, empty when it is not a tool that asks."""
    return _call()[1]


def tool_arguments() -> dict[str, Any]:
    """What the model gave the tool under way, empty when it is not a tool that asks."""
    run_id = _run_id()
    return {} if run_id is None else dict(_calls.given.get(run_id, {}))


def _call() -> tuple[str | None, str]:
    run_id = _run_id()
    return (None, "") if run_id is None else _calls.of.get(run_id, (None, ""))


def _run_id() -> UUID | None:
    callbacks = (var_child_runnable_config.get() or {}).get("callbacks")
    return getattr(callbacks, "parent_run_id", None)
