"""The tree goes with the conversation: each super-step of the graph records the tree's checkpoint in the graph's state.

    backend = VfsBackend(thread="auto")
    agent = create_deep_agent(model=..., backend=backend, middleware=[TimeTravel(backend)], checkpointer=saver)

A run that goes on from an earlier checkpoint of the graph finds the files as they were then, whatever has changed them
since, and a thread copied from another one gets a fork of its tree. A run that goes on from where the thread is finds
them as they are, with what people changed in the meantime.

Owns the record in the state, and the decision whether the tree is where the state says. The last of the checkpoints
labelled with the thread is where the graph left the tree; its label also has the graph's checkpoint from which the step
began that made it, so that the tasks of one step, and a step that is resumed, leave each other's work alone. Nothing
that decides is kept in this process: another one goes on, also after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentMiddleware, AgentState, PrivateStateAttr
from langchain_core.runnables.config import var_child_runnable_config
from langgraph._internal._constants import CONFIG_KEY_READ, CONFIG_KEY_RUNTIME, CONFIG_KEY_SEND

from agenttools.daemons import ThreadClient, thread_word

if TYPE_CHECKING:
    from agenttools.deepagents.backend import VfsBackend

CHANNEL = "vfs_tree"
"""The field of the graph's state."""

_PLACES = 1000
"""Threads whose present step is remembered, so that its further requests ask nothing."""

_within: ContextVar[bool] = ContextVar("vfsd_within", default=False)
"""Whether a hook of ours is around what is being done, and will record it."""

Tree = dict[str, Any]
"""``id`` of the tree's checkpoint, the ``mount`` and ``thread`` it is of, the ``step`` it was made in, ``time_ns``."""


def later(old: Tree, new: Tree) -> Tree:
    """The record that counts: tasks that run side by side each make one, and the last has what all of them did."""
    if not old or not new:
        return old or new
    return new if (new["step"], new["time_ns"]) >= (old["step"], old["time_ns"]) else old


class TreeState(AgentState[Any]):
    """What ``TimeTravel`` adds to the graph's state; subagents are not given it."""

    vfs_tree: NotRequired[Annotated[Tree, PrivateStateAttr, later]]  # type: ignore[valid-type]


@dataclass(frozen=True, slots=True)
class Place:
    """A task of a graph: its thread, the run, the graph's checkpoint its step began from, the tree's record in that."""

    thread: str
    run: Any
    at: str
    tree: Tree
    send: Callable[[list[tuple[str, Any]]], None]


def place() -> Place | None:
    """Where in a graph with ``TimeTravel`` the caller is; None outside, in subagents, and without a thread."""
    found = (var_child_runnable_config.get() or {}).get("configurable", {})
    read, thread = found.get(CONFIG_KEY_READ), found.get("thread_id")
    if read is None or thread is None:
        return None
    try:
        tree = read(CHANNEL, False)
    except KeyError:
        return None
    level = str(found.get("checkpoint_ns", "")).rpartition("|")[0]
    run = getattr(found.get(CONFIG_KEY_RUNTIME), "control", None)
    return Place(str(thread), run, str(found["checkpoint_map"][level]), tree or {}, found[CONFIG_KEY_SEND])


class TimeTravel(AgentMiddleware[Any, Any, Any]):
    """Keeps the tree of ``backend`` where the graph's state says. Use one for each backend.

    The agent needs a checkpointer, and the backend a daemon for each thread (``thread="auto"``): in a tree that threads
    share, going back takes all of them back, and a copied thread is refused. Raises OSError in the run, before anything
    is done, when the tree cannot be brought where it has to be (its checkpoint was dropped; a file that would change is
    open for writing): better than to go on with other files.
    """

    state_schema = TreeState

    def __init__(self, backend: VfsBackend) -> None:
        super().__init__()
        self._backend = backend
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._at: dict[str, tuple[Any, str]] = {}
        backend.travel = self

    # ------------------------------------------------------------------ the hooks

    def before_agent(self, state: Any, runtime: Any) -> None:
        with self._recorded():
            pass

    async def abefore_agent(self, state: Any, runtime: Any) -> None:
        await asyncio.to_thread(self.before_agent, state, runtime)

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        with self._recorded():
            return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self._arecorded(handler, request)

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        with self._recorded():
            return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self._arecorded(handler, request)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        here = place()
        if here is None:
            yield
            return
        self.bring(here)
        before = _within.set(True)
        try:
            yield
        finally:
            _within.reset(before)
        self.record(here)

    async def _arecorded(self, handler: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        here = place()
        if here is None:
            return await handler(request)
        if not self.is_at(here):
            await asyncio.to_thread(self.bring, here)
        before = _within.set(True)
        try:
            result = await handler(request)
        finally:
            _within.reset(before)
        await asyncio.to_thread(self.record, here)
        return result

    @staticmethod
    def recording() -> bool:
        """Whether what the caller changes will be recorded without its doing."""
        return _within.get()

    # ------------------------------------------------------------------ the tree

    def is_at(self, here: Place) -> bool:
        """Whether the tree was seen to be right for this step of this run: before another it may be taken elsewhere."""
        run, at = self._at.get(here.thread, (None, ""))
        return run is not None and run is here.run and at == here.at

    def bring(self, here: Place) -> None:
        """Have the tree where the state says that it is."""
        if self.is_at(here):
            return
        with self._lock:
            turn = self._turns.setdefault(here.thread, threading.Lock())
        with turn:
            if self.is_at(here):
                return
            if here.tree:
                self._bring(here.thread, here.at, here.tree)
            with self._lock:
                if len(self._at) >= _PLACES:
                    self._at.clear()
                self._at[here.thread] = (here.run, here.at)

    def _bring(self, thread: str, at: str, tree: Tree) -> None:
        client = self._backend.client_of(thread)
        if isinstance(client, ThreadClient) and client.mount != tree["mount"]:
            self._fork(thread, at, tree, client)
            return
        hello = client.hello
        if hello["name"] != tree["mount"]:
            raise OSError(errno.EXDEV, f"{_other(tree)}, and this is the mount {hello['name']!r}")
        marks = _ask(client, "list", label=_label(thread), newest=1)["checkpoints"]
        if marks and (marks[0]["id"] == tree["id"] or marks[0]["label"].split()[2] == at):
            return
        if not marks:
            raise OSError(errno.EXDEV, f"{_other(tree)}, which it shares: a copy needs VfsBackend(thread='auto')")
        self._back(client, tree["id"], thread, at, tree["id"])

    def _back(self, client: Any, ref: str, thread: str, at: str, was: str) -> None:
        # The application's doing, as the operator's is: it may have changed what the rules keep from tools.
        _ask(client, "restore", ref=ref, operator=True)
        _ask(client, "create", label=f"{_label(thread)}{at} was {was}")

    def _fork(self, thread: str, at: str, tree: Tree, client: ThreadClient) -> None:
        """A thread whose state came from another one: its tree is made of that one's, the first time."""
        origin = ThreadClient(tree["thread"], tree["mount"].removesuffix(f"@{tree['thread']}"), self._backend.config)
        try:
            try:
                _ask(origin, "fork", ref=tree["id"], thread=client.thread, name=client.mount)
            finally:
                origin.close()
        except FileExistsError:
            label = _label(thread)
            marks = _ask(client, "list", label=label)["checkpoints"]
            forked = next((m for m in marks if m["label"].endswith(f" was {tree['id']}")), None)
            if forked is None:
                raise OSError(
                    errno.EEXIST, f"{_other(tree)}, and thread {thread!r} has files of its own: copy it to a new thread"
                ) from None
            if marks[-1]["label"].split()[2] != at:
                self._back(client, forked["id"], thread, at, tree["id"])
        else:
            _ask(client, "create", label=f"{_label(thread)}{at} was {tree['id']}")

    def record(self, here: Place) -> None:
        """Put the tree as it is now into the state that the step will leave."""
        client = self._backend.client_of(here.thread)
        made = _ask(client, "create", label=_label(here.thread) + here.at)
        hello = client.hello
        tree = {
            "id": made["id"],
            "mount": hello["name"],
            "thread": hello["thread"],
            "step": here.tree.get("step", 0) + 1,
            "time_ns": made["time_ns"],
        }
        here.send([(CHANNEL, tree)])

    # ------------------------------------------------------------------ for users

    def rewind(self, snapshot: Any) -> str:
        """Bring the files back to what they were at ``snapshot``, one of ``agent.get_state_history(config)``, at once.

        Returns the id of the tree's checkpoint. A run that goes on from the snapshot does this by itself. Raises
        ValueError for a snapshot from before the first step with files; OSError.
        """
        tree = snapshot.values.get(CHANNEL)
        if not tree:
            raise ValueError("this snapshot is from before the first step that recorded the tree")
        found = snapshot.config["configurable"]
        thread = str(found["thread_id"])
        self._back(self._backend.client_of(thread), tree["id"], thread, str(found["checkpoint_id"]), tree["id"])
        return str(tree["id"])

    def prune(self, checkpointer: Any, thread: str) -> int:
        """Drop the tree's checkpoints of which no checkpoint of the graph's ``thread`` knows any more; how many."""
        known: set[Any] = set()
        for found in checkpointer.list({"configurable": {"thread_id": thread}}):
            values = found.checkpoint["channel_values"]
            known |= {(values.get(CHANNEL) or {}).get("id"), (values.get("vfs_files") or {}).get("base")}
        client = self._backend.client_of(thread)
        marks = _ask(client, "list", label=_label(thread))["checkpoints"][:-1]
        marks += _ask(client, "list", label=files_label(thread))["checkpoints"]
        refs = [mark["id"] for mark in marks if mark["id"] not in known and " was " not in mark["label"]]
        if refs:
            _ask(client, "drop", refs=refs)
        return len(refs)


def _label(thread: str) -> str:
    """How the labels begin of the checkpoints that belong to a thread of the graph."""
    return f"langgraph {thread_word(thread)} "


def files_label(thread: str) -> str:
    """The label of the checkpoints that tell ``FilesBridge`` what a run of the thread changed."""
    return f"files of {thread_word(thread)}"


def _other(tree: Tree) -> str:
    return f"the files of this conversation are those of the mount {tree['mount']!r}"


def _ask(client: Any, action: str, **params: Any) -> dict[str, Any]:
    result: dict[str, Any] = client.call("checkpoint", action=action, **params)["result"]
    return result
