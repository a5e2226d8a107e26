"""The rules in force on a mount: what each operation needs, judged by every path its inodes have.

Called at the head of both funnels of ``vfs``, so that shell, tools and containers meet the same rules. Owns which paths
and which of read and write an operation concerns, and the memory of verdicts. Must not know doors or configuration.

Invariants: a file is judged by all its known links, the strictest verdict counts; a link or a rename is a write to both
paths, gives nobody a path that may be read where the old one may not, and takes nothing out of a directory from under a
rule; a verdict is forgotten when a path may have changed. An operation without a path (of an unlinked file) is allowed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import CoroutineType
from typing import Any, NamedTuple

import trio

from vfsd.approvals import Approvals, Refused, Want
from vfsd.core.changes import NoDentry
from vfsd.core.plans import RENAME_EXCHANGE
from vfsd.core.policy import ALLOW, DENY, INTERRUPT, READ, WRITE, Policy, Rule
from vfsd.core.types import DAEMON, NODE_BITS, Attr, Caller
from vfsd.feed import Commit
from vfsd.hooks import Hooks, Quota
from vfsd.limits import growth, mutation_of
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

PAST = b"/.checkpoints/"
"""Below it, after the checkpoint's name, a path is judged as what it is in the tree, too."""

TREE_MAX = 20_000
"""Entries below a directory that are judged one by one before it is renamed; with more, a doubt counts as a no."""

_CACHED = 1 << 16
_PIECE = 200

_READ_DENY, _READ_ASK, _WRITE_DENY, _WRITE_ASK, _HIDDEN = 2, 1, 8, 4, 16
_READS, _WRITES = _READ_DENY | _READ_ASK, _WRITE_DENY | _WRITE_ASK

Waits = Coroutine[Any, Any, None] | None
Judge = Callable[[str, Caller, int, tuple[Any, ...]], Waits]


class Denied(PermissionError):
    """EACCES with the sentence that names the rule; ``rule`` is its text. ``approval``: a person's yes would do."""

    approval = False

    def __init__(self, sentence: str, path: bytes, rule: str) -> None:
        super().__init__(errno.EACCES, sentence, os.fsdecode(path))
        self.rule = rule


class Layer(NamedTuple):
    """The rules of one ``owner`` (the configuration, a client); ``hide``: listings leave out what may not be read.

    ``waits``: what they want approved waits for it; else it is refused, and may come again with a yes.
    """

    policy: Policy
    hide: bool = False
    waits: bool = True


class Guard:
    """The rules of ``vfs``. Several layers hold together: of their verdicts the strictest counts."""

    def __init__(self, vfs: Vfs, approvals: Approvals) -> None:
        self._vfs = vfs
        self._volumes = vfs.table.volumes
        self.approvals = approvals
        self.layers: dict[str, Layer] = {}
        self.hooks = Hooks()
        self.quotas: dict[int, Quota] = {}
        self.hiding = False
        self._brief: set[Rule] = set()
        self._paths: dict[bytes, int] = {}
        self._inos: dict[int, int] = {}
        self._directories: dict[int, bytes] = {}
        self._quiet: dict[int, bool] = {}
        self._among: dict[bytes, list[Layer]] = {}
        self._judges = self._table()
        vfs.feed.subscribe(self._committed, shell=False)

    def install(self, layers: dict[str, Layer], hooks: Hooks, quotas: dict[int, Quota]) -> None:
        """From now on these hold, for whatever is asked next; a reply to who asked for it waits for the kernel."""
        self._vfs.feed.publish(0, DAEMON, "rules", ())
        self.layers, self.hooks, self.quotas = layers, hooks, quotas
        policies = [layer.policy for layer in layers.values() if layer.policy.rules]
        self.hiding = any(one.hide and one.policy.concerns(READ, DENY) for one in layers.values())
        asks = any(policy.concerns(operation, INTERRUPT) for policy in policies for operation in (READ, WRITE))
        self._vfs.waits = asks or bool(hooks)
        self._vfs.guard = self if policies or hooks or quotas else None
        self._brief = {rule for one in layers.values() if not one.waits for rule in one.policy.rules}
        self.approvals.forget()
        self._forget()
        self._vfs.rules_changed()

    # -- verdicts of paths and inodes

    def _forget(self) -> None:
        self._paths.clear()
        self._among.clear()
        self.moved()

    def moved(self, *, directories: bool = True) -> None:
        """Paths may have changed, those of directories too."""
        self._inos.clear()
        if directories:
            self._directories.clear()
            self._quiet.clear()

    def _committed(self, commit: Commit) -> None:
        """What a restore or a store's news changes does not pass the funnels."""
        told = commit.caller.door == "daemon" or commit.op in ("restore", "rename", "link")
        if told or any(type(change) is NoDentry for change in commit.changes):
            self.moved()

    def of_path(self, path: bytes) -> int:
        """The verdicts of a path as bits."""
        bits = self._paths.get(path)
        if bits is None:
            bits = 0
            for layer in self._layers_in(path.rpartition(b"/")[0]):
                read, write = layer.policy.judge(READ, path), layer.policy.judge(WRITE, path)
                bits = _strictest(bits, read | write << 2 | (_HIDDEN if layer.hide and read == DENY else 0))
            if path.startswith(PAST):
                inside = path[len(PAST) :].partition(b"/")[2]
                bits = _strictest(bits, self.of_path(b"/" + inside))
            if len(self._paths) >= _CACHED:
                self._paths.clear()
            self._paths[path] = bits
        return bits

    def _layers_in(self, directory: bytes) -> list[Layer]:
        """The layers with what of their rules can match an entry of the directory."""
        found = self._among.get(directory)
        if found is None:
            layers = [layer._replace(policy=layer.policy.among(directory)) for layer in self.layers.values()]
            found = [layer for layer in layers if layer.policy.rules]
            if len(self._among) >= _CACHED:
                self._among.clear()
            self._among[directory] = found
        return found

    def _is_quiet(self, directory: int) -> bool:
        """Whether no rule says anything of any entry of a directory."""
        quiet = self._quiet.get(directory)
        if quiet is None:
            path = self._directory(directory)
            quiet = path is not None and not path.startswith(PAST) and not self._layers_in(path)
            if self._keeps(directory):
                self._quiet[directory] = quiet
        return quiet

    def _directory(self, ino: int) -> bytes | None:
        """The path of a directory, which has only one; None for one that was removed."""
        path = self._directories.get(ino)
        if path is None:
            path = self._vfs.path_of(ino)
            if path is not None and self._keeps(ino):
                self._directories[ino] = path
        return path

    def _keeps(self, ino: int) -> bool:
        """Whether paths in the ino's volume change only through us."""
        if len(self._inos) >= _CACHED or len(self._directories) >= _CACHED:
            self.moved()
        return isinstance(self._volumes[ino >> NODE_BITS], TreeVolume)

    def path_in(self, parent: int, name: bytes) -> bytes | None:
        """The path of an entry, there or not; None when the directory was removed."""
        above = self._directory(parent)
        return None if above is None else above + name if above == b"/" else above + b"/" + name

    def paths_of(self, ino: int) -> list[bytes]:
        """Every known path of an inode; none for what was unlinked or is no more."""
        if ino == self._vfs.root_ino:
            return [b"/"]
        if not hasattr(self._volumes[ino >> NODE_BITS], "links_of"):
            path = self._vfs.path_of(ino)
            return [] if path is None else [path]
        found = (self.path_in(parent, name) for parent, name in self.links_of(ino))
        return [path for path in found if path is not None]

    def links_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every known (directory, name) that leads to an inode."""
        at = self._vfs.table.mounted_at.get(ino)
        if at is not None:
            return [at]
        try:
            return list(self._volumes[ino >> NODE_BITS].links_of(ino))
        except (OSError, AttributeError):
            return []

    def is_directory(self, ino: int) -> bool:
        """False also for what is no more."""
        try:
            return stat.S_ISDIR(self._volumes[ino >> NODE_BITS].getattr(ino).mode)
        except OSError:
            return False

    def of_ino(self, ino: int) -> int:
        """The strictest verdicts of an inode's paths."""
        bits = self._inos.get(ino)
        if bits is None:
            bits = 0
            links = self.links_of(ino)
            if not links or not all(self._is_quiet(parent) for parent, _ in links):
                for path in self.paths_of(ino):
                    bits = _strictest(bits, self.of_path(path))
            if self._keeps(ino):
                self._inos[ino] = bits
        return bits

    def may_read(self, ino: int) -> bool:
        """For searches: whether the inode may be read without asking anybody."""
        return not self.of_ino(ino) & _READS

    def shown(self, parent: int, entries: Iterable[Any]) -> Iterator[Any]:
        """Those of a directory's entries (their names come first) that are not hidden."""
        for entry in entries:
            path = self.path_in(parent, entry[0])
            if path is None or not self.of_path(path) & _HIDDEN:
                yield entry

    # -- deciding

    def _rule(self, operation: str, path: bytes, verdict: int) -> Rule:
        """The rule that gave the verdict."""
        paths = [path]
        if path.startswith(PAST):
            paths.append(b"/" + path[len(PAST) :].partition(b"/")[2])
        for one in paths:
            for layer in self.layers.values():
                if layer.policy.judge(operation, one) == verdict:
                    rule = layer.policy.decider(operation, one)
                    assert rule is not None
                    return rule
        raise AssertionError("no rule gave this verdict")

    def _settle(self, op: str, caller: Caller, wants: Iterable[tuple[str, bytes]], ask: bool = True) -> Waits:
        """Raise Denied, or return what has to be awaited before the operation, None for nothing."""
        asking: list[Want] = []
        rule: Rule | None = None
        for operation, path in wants:
            bits = self.of_path(path)
            verdict = bits & 3 if operation == READ else bits >> 2 & 3
            if verdict & DENY:
                raise _denied(operation, path, self._rule(operation, path, DENY))
            if verdict & INTERRUPT and ask and not self.approvals.granted(caller, operation, path):
                asking.append((operation, path, False))
                rule = rule or self._rule(operation, path, INTERRUPT)
        return self._ask(op, caller, tuple(asking), rule) if rule is not None else None

    async def _ask(self, op: str, caller: Caller, wants: tuple[Want, ...], rule: Rule) -> None:
        if caller.approved is False or rule in self._brief:
            refusal = _denied(wants[0][0], wants[0][1], rule, "a person has to approve it")
            refusal.approval = True
            raise refusal
        try:
            await self.approvals.ask(op, wants, str(rule), caller)
        except Refused as exc:
            raise _denied(wants[0][0], wants[0][1], rule, str(exc)) from None

    # -- what the funnels call

    def observing(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """Before an operation that changes nothing. Raises Denied; what it returns is to be awaited first."""
        judge = self._judges.get(op)
        return None if judge is None else judge(op, caller, ino, args)

    def mutating(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """Before an operation that changes something; EDQUOT too."""
        judge = self._judges.get(op)
        waits = None if judge is None else judge(op, caller, ino, args)
        if self.quotas:
            quota = self.quotas.get(ino >> NODE_BITS)
            if quota is not None:
                try:
                    quota.check(*growth(self._vfs, op, ino, args))
                except OSError:
                    if waits is not None:
                        waits.close()
                    raise
        return self._hooked(waits, op, caller, ino, args) if self.hooks else waits

    async def _hooked(self, waits: Waits, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> None:
        if waits is not None:
            await waits
        mutation = mutation_of(op, caller, args, self._subjects(op, ino, args))
        refused = await self.hooks.check(mutation)
        if refused is not None:
            hook, reason = refused
            path = os.fsencode(mutation.paths[0]) if mutation.paths else b""
            raise Denied(f"{op} of {os.fsdecode(path)} refused by {hook}: {reason}", path, hook)

    def _subjects(self, op: str, ino: int, args: tuple[Any, ...]) -> list[bytes]:
        """All paths a change concerns."""
        if op in _BY_NAME or op in ("create", "rename"):
            named = [self.path_in(ino, args[0])] + ([self.path_in(args[1], args[2])] if op == "rename" else [])
            return [path for path in named if path is not None]
        paths = self.paths_of(args[2] if op == "copy_range" else ino)
        new = self.path_in(args[0], args[1]) if op == "link" else None
        return paths if new is None else [*paths, new]

    def _table(self) -> dict[str, Judge]:
        table: dict[str, Judge] = dict.fromkeys(_BY_NAME, self._named)
        for op in ("readlink", "listxattr", "opendir", "children"):
            table[op] = self._reads
        for op in ("setxattr", "removexattr", "replace"):
            table[op] = self._writes
        for op in ("write", "fallocate"):
            table[op] = self._writes_opened
        for op in ("seek", "readdir"):
            table[op] = self._reads_opened
        table |= {"read": self._read, "getxattr": self._getxattr, "open": self._open, "create": self._create}
        table |= {"setattr": self._setattr, "copy_range": self._copy, "link": self._link, "rename": self._rename}
        return table

    def _reads(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        if not self.of_ino(ino) & _READS:
            return None
        # What the kernel reads by inode, and tools by path, is asked for; a search that meets it passes by.
        return self._settle(op, caller, [(READ, path) for path in self.paths_of(ino)])

    def _reads_opened(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """Asked for when it was opened."""
        if self.of_ino(ino) & _READ_DENY:
            self._settle(op, caller, [(READ, path) for path in self.paths_of(ino)], False)
        return None

    def _read(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        by_inode = caller.door == "rpc" and not args[0]
        return (self._reads if by_inode else self._reads_opened)(op, caller, ino, args)

    def _getxattr(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        # The kernel itself asks for others (security.capability at a write), which nobody stores here.
        return self._reads(op, caller, ino, args) if args[0].startswith((b"user.", b"trusted.")) else None

    def _writes(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        if not self.of_ino(ino) & _WRITES:
            return None
        return self._settle(op, caller, [(WRITE, path) for path in self.paths_of(ino)])

    def _writes_opened(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        if self.of_ino(ino) & _WRITE_DENY:
            self._settle(op, caller, [(WRITE, path) for path in self.paths_of(ino)], False)
        return None

    def _setattr(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        return (self._writes_opened if args[2] else self._writes)(op, caller, ino, args)

    def _copy(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        self._reads_opened(op, caller, ino, args)
        return self._writes_opened(op, caller, args[2], args)

    def _open(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        flags: int = args[0]
        access = flags & os.O_ACCMODE
        mask = _READS if access != os.O_WRONLY else 0
        if access != os.O_RDONLY or flags & os.O_TRUNC:
            mask |= _WRITES
        if not self.of_ino(ino) & mask:
            return None
        operations = [one for one, bits in ((READ, _READS), (WRITE, _WRITES)) if mask & bits]
        return self._settle(op, caller, [(one, path) for path in self.paths_of(ino) for one in operations])

    def _named(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """A write to the entry that is made or removed."""
        if self._is_quiet(ino):
            return None
        path = self.path_in(ino, args[0])
        if path is None or not self.of_path(path) & _WRITES:
            return None
        return self._settle(op, caller, [(WRITE, path)])

    def _create(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        found = self._vfs.peek(ino, args[0])
        if found is not None:
            return self._open(op, caller, found.ino, (args[2],))
        return self._named(op, caller, ino, args)

    # -- names that move

    def _link(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        new = self.path_in(args[0], args[1])
        if new is None:
            return None
        wants = [want for old in self.paths_of(ino) for want in ((WRITE, old), *self._unread(old, new))]
        return self._settle(op, caller, [*wants, (WRITE, new)])

    def _unread(self, old: bytes, new: bytes) -> list[tuple[str, bytes]]:
        """What may not be read gets no path by which it might."""
        before, after = self.of_path(old) & _READS, self.of_path(new) & _READS
        if before <= after:
            return []
        if before & _READ_DENY:
            rule = self._rule(READ, old, DENY)
            raise _denied(READ, old, rule, f"it would be readable as {os.fsdecode(new)}")
        return [(READ, old)]

    def _rename(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        name, new_parent, new_name, flags = args[:4]
        source = self._vfs.peek(ino, name)
        if self._is_quiet(ino) and self._is_quiet(new_parent) and not flags & RENAME_EXCHANGE:
            if source is not None and not stat.S_ISDIR(source.mode):
                return None
        old, new = self.path_in(ino, name), self.path_in(new_parent, new_name)
        if old is None or new is None:
            return None
        moves = [(source, old, new)]
        if flags & RENAME_EXCHANGE:
            moves.append((self._vfs.peek(new_parent, new_name), new, old))
        wants = [(WRITE, old), (WRITE, new), *(want for _, a, b in moves for want in self._unread(a, b))]
        waits = self._settle(op, caller, wants)
        trees = [(attr.ino, a, b) for attr, a, b in moves if attr is not None and stat.S_ISDIR(attr.mode)]
        trees = [tree for tree in trees if self._concerned_below(*tree[1:])]
        return self._rename_trees(waits, op, caller, trees) if trees else waits

    def _concerned_below(self, old: bytes, new: bytes) -> bool:
        return any(
            layer.policy.below(operation, path, verdict)
            for layer in self.layers.values()
            for operation in (READ, WRITE)
            for verdict in (DENY, INTERRUPT)
            for path in (old, new)
        )

    async def _rename_trees(self, waits: Waits, op: str, caller: Caller, trees: list[tuple[int, bytes, bytes]]) -> None:
        if waits is not None:
            await waits
        while True:
            asking: dict[Want, Rule] = {}
            for tree in trees:
                await self._judge_tree(*tree, caller, asking)
            if not asking:
                return
            # And then again from the start: it may have changed while somebody thought about it.
            await self._ask(op, caller, tuple(asking), next(iter(asking.values())))

    async def _judge_tree(self, top: int, old: bytes, new: bytes, caller: Caller, asking: dict[Want, Rule]) -> None:
        """All that is below a directory which gets another path, as one moment has it."""
        feed = self._vfs.feed
        for _ in range(3):
            seq, left = feed.seq, TREE_MAX
            todo = [(top, old, new)]
            while todo:
                ino, before, after = todo.pop()
                for name, child in await self.everything_in(ino):
                    pair = before + b"/" + name, after + b"/" + name
                    self._judge_move(*pair, caller, asking)
                    left -= 1
                    if child.ino in self._vfs.table.mounted_at:
                        left = 0
                    elif stat.S_ISDIR(child.mode):
                        todo.append((child.ino, *pair))
                    if left <= 0:
                        raise self._too_much(old, new)
                    if left % _PIECE == 0:
                        await trio.lowlevel.checkpoint()
            if feed.seq == seq:
                return
        raise self._too_much(old, new)

    def _judge_move(self, old: bytes, new: bytes, caller: Caller, asking: dict[Want, Rule]) -> None:
        for operation, path in ((WRITE, old), (WRITE, new), *self._unread(old, new)):
            bits = self.of_path(path)
            if operation == WRITE and bits & _WRITE_DENY:
                raise _denied(WRITE, path, self._rule(WRITE, path, DENY))
            asks = bits & (_WRITE_ASK if operation == WRITE else _READ_ASK)
            if asks and not self.approvals.granted(caller, operation, path):
                asking[operation, path, False] = self._rule(operation, path, INTERRUPT)

    def _too_much(self, old: bytes, new: bytes) -> Denied:
        """Not judged one by one: a rule that could match below is taken to."""
        for verdict in (DENY, INTERRUPT):
            for path in (old, new):
                for layer in self.layers.values():
                    rule = layer.policy.below(WRITE, path, verdict) or layer.policy.below(READ, path, verdict)
                    if rule is not None:
                        return _denied(WRITE, path, rule, "it could match below")
        raise AssertionError("nothing matches below")

    async def everything_in(self, ino: int) -> list[tuple[bytes, Attr]]:
        """All entries of a directory, routes and what listings hide too."""
        entries = self._volumes[ino >> NODE_BITS].children(ino)
        if type(entries) is CoroutineType:
            entries = await entries
        laid = self._vfs.table.overlays.get(ino, {})
        return [*entries, *((name, self._volumes[one.ino >> NODE_BITS].getattr(one.ino)) for name, one in laid.items())]

    async def deleting(self, parent: int, name: bytes, caller: Caller) -> None:
        """Before a directory goes with all in it: refused as a whole where a rule could match below."""
        path = self.path_in(parent, name)
        if path is None:
            return
        for verdict in (DENY, INTERRUPT):
            for layer in self.layers.values():
                rule = layer.policy.below(WRITE, path, verdict)
                if rule is None:
                    continue
                if verdict == DENY:
                    raise _denied(WRITE, path, rule, "it could match below")
                if not self.approvals.granted(caller, WRITE, path):
                    await self._ask("delete", caller, ((WRITE, path, True),), rule)


_BY_NAME = ("mknod", "mkdir", "symlink", "create_file", "unlink", "rmdir")


def _strictest(a: int, b: int) -> int:
    return max(a & 3, b & 3) | max(a & 12, b & 12) | (a | b) & _HIDDEN


def _denied(operation: str, path: bytes, rule: Rule, why: str = "") -> Denied:
    """The sentence begins as that of Deep Agents' tools."""
    sentence = f"permission denied for {operation} on {os.fsdecode(path)}: rule [{rule}]"
    return Denied(f"{sentence}: {why}" if why else sentence, path, str(rule))


assert (ALLOW, INTERRUPT, DENY) == (0, _READ_ASK, _READ_DENY)
