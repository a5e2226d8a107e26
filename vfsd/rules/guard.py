"""The rules in force on a mount: what each operation needs, judged by every path its inodes have.

Called at the head of both funnels of ``vfs``, so that shell, tools and containers meet the same rules. Owns which paths
and which of read and write an operation concerns. Must not know doors or configuration.

Invariants: a file is judged by all its known links, the strictest verdict counts; a link or a rename is a write to both
paths, gives nobody a path that may be read where the old one may not, and takes nothing out of a directory from under a
rule. An unlinked file is judged by its last path if that may not be read; what else has no path is allowed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import CoroutineType
from typing import Any

import trio

from vfsd.audit.line import called
from vfsd.core.plans import RENAME_EXCHANGE
from vfsd.core.policy import DENY, INTERRUPT, READ, WRITE, Rule
from vfsd.core.types import DAEMON, NODE_BITS, NODE_MASK, Attr, Caller
from vfsd.rules.approvals import Approvals, Refused, Want
from vfsd.rules.hooks import Hooks, Quota
from vfsd.rules.limits import growth, mutation_of
from vfsd.rules.verdicts import READ_ASK, READ_DENY, READS, WRITE_ASK, WRITE_DENY, WRITES, Layer, Verdicts
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

TREE_MAX = 20_000
"""Entries below a directory that are judged one by one before it is renamed; with more, a doubt counts as a no."""

_PIECE = 200

Waits = Coroutine[Any, Any, None] | None
Judge = Callable[[str, Caller, int, tuple[Any, ...]], Waits]


class Denied(PermissionError):
    """EACCES with the sentence that names the rule; ``rule`` is its text. ``approval``: a person's yes would do."""

    approval = False

    def __init__(self, sentence: str, path: bytes, rule: str) -> None:
        super().__init__(errno.EACCES, sentence, os.fsdecode(path))
        self.rule = rule


class Guard(Verdicts):
    """The rules of ``vfs``. Several layers hold together: of their verdicts the strictest counts."""

    def __init__(self, vfs: Vfs, approvals: Approvals) -> None:
        super().__init__(vfs)
        self.approvals = approvals
        self.hooks = Hooks()
        self.quotas: dict[int, Quota] = {}
        self.hiding = False
        self._brief: set[Rule] = set()
        self.moving: dict[int, bool] = {}
        """Changes under way after which remembered verdicts of inodes are void, those of directories too where True.

        By the id of their arguments."""
        self.judges = self._table()
        """Asked before operations that change nothing: raise Denied, or return what is to be awaited first, or None."""

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
        self.forget()
        self._vfs.rules_changed()

    # -- deciding

    def _settle(
        self, op: str, args: tuple[Any, ...], caller: Caller, wants: Iterable[tuple[str, bytes]], ask: bool = True
    ) -> Waits:
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
        return self._ask(called(op, args).decode(), caller, tuple(asking), rule) if rule is not None else None

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

    def mutating(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """Before an operation that changes something, instead of its judge; EDQUOT too."""
        judge = self.judges.get(op)
        waits = None if judge is None else judge(op, caller, ino, args)
        if self.hooks:
            waits = self._hooked(waits, op, caller, ino, args)
        quota = self.quotas.get(ino >> NODE_BITS) if self.quotas else None
        if quota is None:
            return waits
        if waits is not None:
            return self._counted(waits, quota, op, ino, args)
        quota.check(*growth(self._vfs, op, ino, args))
        return None

    async def _counted(self, waits: Waits, quota: Quota, op: str, ino: int, args: tuple[Any, ...]) -> None:
        """What was waited for first: meanwhile others took of what there is."""
        assert waits is not None
        await waits
        quota.check(*growth(self._vfs, op, ino, args))

    def settled(self, args: tuple[Any, ...]) -> None:
        """After a change that may have been ``moving`` something, whatever has become of it."""
        directories = self.moving.pop(id(args), None)
        if directories is not None:
            self.moved(directories=directories)

    async def _hooked(self, waits: Waits, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> None:
        if waits is not None:
            await waits
        mutation = mutation_of(op, caller, args, self._subjects(op, ino, args))
        refused = await self.hooks.check(mutation)
        if refused is not None:
            hook, reason = refused
            path = os.fsencode(mutation.paths[0]) if mutation.paths else b""
            raise Denied(f"{called(op, args).decode()} of {os.fsdecode(path)} refused by {hook}: {reason}", path, hook)

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
        if not self.of_ino(ino) & READS:
            return None
        # What the kernel reads by inode, and tools by path, is asked for; a search that meets it passes by.
        return self._settle(op, args, caller, [(READ, path) for path in self.paths_of(ino)])

    def _reads_opened(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """Asked for when it was opened."""
        if self.of_ino(ino) & READ_DENY:
            self._settle(op, args, caller, [(READ, path) for path in self.paths_of(ino)], False)
        return None

    def _read(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        by_inode = not args[0] and (caller.door == "rpc" or self._never_asked(caller))
        return (self._reads if by_inode else self._reads_opened)(op, caller, ino, args)

    def _never_asked(self, caller: Caller) -> bool:
        """Whether nobody was asked when what is read or written now was opened."""
        return caller.door == "fuse" and not self._vfs.opens_heard

    def _getxattr(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        # The kernel itself asks for others (security.capability at a write), which nobody stores here.
        return self._reads(op, caller, ino, args) if args[0].startswith((b"user.", b"trusted.")) else None

    def _writes(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        if not self.of_ino(ino) & WRITES:
            return None
        return self._settle(op, args, caller, [(WRITE, path) for path in self.paths_of(ino)])

    def _writes_opened(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        if self._never_asked(caller):
            return self._writes(op, caller, ino, args)
        if self.of_ino(ino) & WRITE_DENY:
            self._settle(op, args, caller, [(WRITE, path) for path in self.paths_of(ino)], False)
        return None

    def _setattr(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        return (self._writes_opened if args[2] else self._writes)(op, caller, ino, args)

    def _copy(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        self._reads_opened(op, caller, ino, args)
        return self._writes_opened(op, caller, args[2], args)

    def _open(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        flags: int = args[0]
        access = flags & os.O_ACCMODE
        mask = READS if access != os.O_WRONLY else 0
        if access != os.O_RDONLY or flags & os.O_TRUNC:
            mask |= WRITES
        if not self.of_ino(ino) & mask:
            return None
        operations = [one for one, bits in ((READ, READS), (WRITE, WRITES)) if mask & bits]
        return self._settle(op, args, caller, [(one, path) for path in self.paths_of(ino) for one in operations])

    def _named(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        """A write to the entry that is made or removed."""
        mute = self._is_mute(ino, args[0])
        if op == "unlink" and (not mute or self._last):
            self.moving[id(args)] = False
        if mute:
            return None
        path = self.path_in(ino, args[0])
        if path is None:
            return None
        if op == "unlink":
            self.leaves(ino, args[0], path)
        return self._settle(op, args, caller, [(WRITE, path)]) if self.of_path(path) & WRITES else None

    def _create(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        found = self._entry(ino, args[0])
        if found is not None:
            return self._open(op, caller, found.ino, (args[2],))
        return self._named(op, caller, ino, args)

    def _entry(self, parent: int, name: bytes) -> Attr | None:
        """The entry as far as is known without waiting."""
        volume = self._volumes[parent >> NODE_BITS]
        directory = volume.tree.nodes.get(parent & NODE_MASK) if isinstance(volume, TreeVolume) else None
        if directory is not None and (children := directory.children) is not None:
            found: Attr | None = children.get(name)
            if found is not None or children.complete:
                return found
        return self._vfs.peek(parent, name)

    # -- names that move

    def _link(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        self.moving[id(args)] = False
        new = self.path_in(args[0], args[1])
        if new is None:
            return None
        wants = [want for old in self.paths_of(ino) for want in ((WRITE, old), *self._unread(old, new))]
        return self._settle(op, args, caller, [*wants, (WRITE, new)])

    def _unread(self, old: bytes, new: bytes) -> list[tuple[str, bytes]]:
        """What may not be read gets no path by which it might."""
        before, after = self.of_path(old) & READS, self.of_path(new) & READS
        if before <= after:
            return []
        if before & READ_DENY:
            rule = self._rule(READ, old, DENY)
            raise _denied(READ, old, rule, f"it would be readable as {os.fsdecode(new)}")
        return [(READ, old)]

    def _rename(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...]) -> Waits:
        name, new_parent, new_name, flags = args[:4]
        source = self._entry(ino, name)
        plain = source is not None and not stat.S_ISDIR(source.mode) and not flags & RENAME_EXCHANGE
        inline = self._volumes[ino >> NODE_BITS].inline
        mute = plain and self._is_mute(ino, name) and self._is_mute(new_parent, new_name)
        if not mute or not inline or self._last:
            self.moving[id(args)] = not plain or not inline
        if mute:
            return None
        old, new = self.path_in(ino, name), self.path_in(new_parent, new_name)
        if old is None or new is None:
            return None
        moves = [(source, old, new)]
        if flags & RENAME_EXCHANGE:
            moves.append((self._vfs.peek(new_parent, new_name), new, old))
        else:
            self.leaves(new_parent, new_name, new)
        wants = [(WRITE, old), (WRITE, new), *(want for _, a, b in moves for want in self._unread(a, b))]
        waits = self._settle(op, args, caller, wants)
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
            if operation == WRITE and bits & WRITE_DENY:
                raise _denied(WRITE, path, self._rule(WRITE, path, DENY))
            asks = bits & (WRITE_ASK if operation == WRITE else READ_ASK)
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

    def restoring(self, changes: Sequence[Mapping[str, Any]], names: Sequence[frozenset[bytes]]) -> None:
        """Before the tree is made what it was for somebody who has to keep the rules; a yes is the operator's to give.

        ``changes`` as ``vfsd.past.difference`` has them, ``names`` all paths that each file has and had. A directory
        that is renamed takes all in it along.
        """
        for path in (path for known in dict.fromkeys(names) for path in sorted(known)):
            if self.of_path(path) & WRITES:
                verdict = DENY if self.of_path(path) & WRITE_DENY else INTERRUPT
                raise _denied(WRITE, path, self._rule(WRITE, path, verdict), _GO_BACK)
        for change, known in zip(changes, names, strict=True):
            # Without a name, or with another, it might be read.
            reads = {path: self.of_path(path) & READS for path in sorted(known)}
            if change["kind"] in ("deleted", "renamed") or len(set(reads.values())) > 1:
                for path, bits in reads.items():
                    if bits:
                        verdict = DENY if bits & READ_DENY else INTERRUPT
                        raise _denied(READ, path, self._rule(READ, path, verdict), _GO_BACK)
            if change["type"] == "directory" and change["kind"] == "renamed":
                for path in (change["path"], change["old_path"]):
                    for layer in self.layers.values():
                        for verdict in (DENY, INTERRUPT):
                            rule = layer.policy.below(WRITE, path, verdict)
                            if rule is not None:
                                raise _denied(WRITE, path, rule, _GO_BACK)

    def shows(self, names: Iterable[bytes]) -> bool:
        """Whether a file that has these paths may be read without asking anybody."""
        return not any(self.of_path(path) & READS for path in names)


_GO_BACK = "going back would change it, which only the operator may do: vfsd checkpoint restore, vfsd undo"
_BY_NAME = ("mknod", "mkdir", "symlink", "create_file", "unlink", "rmdir")


def _denied(operation: str, path: bytes, rule: Rule, why: str = "") -> Denied:
    """The sentence begins as that of Deep Agents' tools."""
    sentence = f"permission denied for {operation} on {os.fsdecode(path)}: rule [{rule}]"
    return Denied(f"{sentence}: {why}" if why else sentence, path, str(rule))
