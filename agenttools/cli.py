"""The ``agenttools`` command: each tool once, from a shell.

Owns arguments, output for people and programs, and exit codes. Exit codes: 0 done, 1 the tool could not (or grep found
nothing), 2 wrong usage (or grep has nowhere to look), 3 no daemon to ask; execute exits as its command did.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from agenttools import checkpoints, tools
from agenttools.checkpoints import CheckpointResult
from agenttools.client import Client
from agenttools.results import ExecuteResult, GrepResult, LsResult, ReadResult, Result
from agenttools.wire import ignored_variables, one_line

PROFILES = ("open", "tree", "offline")
"""As ``agenttools.confinement`` has them, which few commands need to load."""

_PROFILE = "what the command is kept from (as vfsd.toml says, else: tree)"

OK, FAILED, USAGE, NO_DAEMON = 0, 1, 2, 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return the exit code."""
    # Closed by who called us (>&-): what is said then goes nowhere, and not into the next file that is opened.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parser = _parser()
    args, surplus = parser.parse_known_args(argv)
    if surplus:
        word = next((word for word in surplus if word.startswith("-")), surplus[0])
        wrong = f"there is no option {word!r}" if word.startswith("-") else f"{word!r} is one word too many"
        _say(f"{wrong}: see agenttools {args.tool} --help")
        return USAGE
    for sentence in ignored_variables("XDG_RUNTIME_DIR"):
        _say(sentence)
    try:
        code = _run(parser, args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as exc:
        # Of our own output: what a tool meets is in its result.
        _say(exc.strerror or str(exc))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.tool == "schema":
        from agenttools.schema import TOOLS

        print(json.dumps(TOOLS, indent=2))
        return OK
    if args.tool == "mcp":
        if args.token_file is not None and args.http is None:
            parser.error("mcp: --token-file goes with --http")
        if args.config is not None and args.thread is None:
            parser.error("mcp: --config goes with --thread")
        return _mcp(parser, args)
    try:
        client = Client(socket=args.socket, name=args.name, client="agenttools-cli", timeout=None)
    except ValueError as exc:
        parser.error(str(exc))
    except OSError as exc:
        return _no_daemon(exc)
    with client:
        try:
            _ = client.hello
        except OSError as exc:
            return _no_daemon(exc)
        result = _checkpoint(client, args) if args.tool in ("checkpoint", "undo") else _call(client, args)
    if args.json:
        print(json.dumps({"tool": args.tool, **_plain(result), "text": result.text}))
    elif result.error is not None:
        _say(result.error.removeprefix("Error: "))
    else:
        _show(result, args)
    return _exit_code(result)


def _no_daemon(exc: OSError) -> int:
    _say(exc.strerror or str(exc))
    return NO_DAEMON


def _mcp(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Serve until the client leaves. A daemon is not needed before the first tool call."""
    try:
        from agenttools import mcp
        from agenttools.daemons import ThreadClient

        try:
            address = None if args.http is None else mcp.Address.parse(args.http)
        except ValueError as exc:
            parser.error(f"mcp: --http: {exc}")
        if args.thread is None:
            client = Client(socket=args.socket, name=args.name, client="mcp")
        else:
            client = ThreadClient(args.thread, args.name, args.config, client="mcp")
        with client:
            mcp.run(client, address, args.token_file, args.view, not args.text_only, args.profile)
    except (ImportError, ValueError, OSError) as exc:
        said = f"{exc.filename}: {exc.strerror}" if isinstance(exc, OSError) and exc.filename else exc
        _say(str(said))
        return FAILED
    return OK


def _call(client: Client, args: argparse.Namespace) -> Result:
    match args.tool:
        case "ls":
            return tools.ls(client, args.path, slash=args.slash)
        case "read":
            return tools.read(client, args.path, args.offset, args.limit)
        case "write":
            return tools.write(client, args.path, sys.stdin.buffer.read())
        case "edit":
            return tools.edit(client, args.path, args.old, args.new, args.all)
        case "delete":
            return tools.delete(client, args.path)
        case "glob":
            return tools.glob(client, args.pattern, args.path)
        case "grep":
            return tools.grep(
                client, args.pattern, args.path, args.glob, max_count=args.max_count, output_mode=args.mode
            )
        case _:
            return tools.execute(client, args.command, args.timeout, view=args.view, cwd=args.cwd, profile=args.profile)


def _checkpoint(client: Client, args: argparse.Namespace) -> CheckpointResult:
    match args.action if args.tool == "checkpoint" else "undo":
        case "create":
            return checkpoints.create(client, args.label)
        case "list":
            return checkpoints.all_of(client)
        case "show":
            return checkpoints.show(client, args.ref)
        case "diff":
            return checkpoints.diff(client, args.a, args.b, patch=args.patch)
        case "restore":
            return checkpoints.restore(client, args.ref)
        case "fork":
            return checkpoints.fork(client, args.ref, args.thread)
        case "drop":
            return checkpoints.drop(client, args.refs)
        case _:
            return checkpoints.undo(client)


def _plain(result: Result | CheckpointResult) -> dict[str, Any]:
    """The fields of a result with its named tuples as objects."""
    if isinstance(result, CheckpointResult):
        return {**result.data, "error": result.error}
    fields = asdict(result)
    for key in ("entries", "matches"):
        if fields.get(key) is not None:
            fields[key] = [item._asdict() for item in fields[key]]
    return fields


def _exit_code(result: Result | CheckpointResult) -> int:
    if result.error is not None:
        return FAILED
    if isinstance(result, ExecuteResult):
        return FAILED if result.exit_code is None else result.exit_code
    if isinstance(result, GrepResult) and not result.matches:
        # As grep(1).
        return USAGE if result.missing else FAILED
    return OK


def _show(result: Result | CheckpointResult, args: argparse.Namespace) -> None:
    """Print a result for people: what was asked for to stdout, remarks to stderr."""
    if isinstance(result, CheckpointResult):
        _out(result.text.rstrip("\n") + "\n" if result.text else "")
    elif isinstance(result, ReadResult):
        _show_read(result)
    elif isinstance(result, ExecuteResult):
        _out(result.output)
        for notice in result.notices:
            _remark(notice)
    elif isinstance(result, GrepResult):
        matches = result.matches or []
        if result.missing:
            _say(f"{args.path}: No such file or directory")
        if result.output_mode == "content":
            _out("".join(f"{match.path}:{match.line}:{match.text}\n" for match in matches))
        else:
            counts: dict[str, int] = {}
            for match in matches:
                counts[match.path] = counts.get(match.path, 0) + 1
            lines = counts if result.output_mode == "files_with_matches" else (f"{p}:{n}" for p, n in counts.items())
            _out("".join(f"{line}\n" for line in lines))
        if result.truncated:
            lost = result.reason == "unreadable"
            _remark("some files could not be read" if lost else "there are more matches than these")
    elif isinstance(result, LsResult):
        _out("".join(f"{entry.path}\n" for entry in result.entries or []))
    elif args.tool == "glob":
        _out("".join(f"{match.path}\n" for match in result.matches or []))  # type: ignore[union-attr]
        if result.truncated:  # type: ignore[union-attr]
            _remark("there may be more files than these")
    else:
        _out(result.text + "\n")


def _show_read(result: ReadResult) -> None:
    if result.encoding == "base64":
        sys.stdout.buffer.write(base64.b64decode(result.content))
        return
    _out(result.content)
    if result.next_offset is not None:
        total = "" if result.total_lines is None else f" of {result.total_lines}"
        _remark(f"lines {result.start_line}-{result.end_line}{total}; go on with --offset {result.next_offset}")


def _out(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def _say(sentence: str) -> None:
    print(f"agenttools: {one_line(sentence)}", file=sys.stderr)


def _remark(text: str) -> None:
    sys.stdout.flush()
    print(f"[{one_line(text)}]", file=sys.stderr)


_CHECKPOINT: dict[str, tuple[str, ...]] = {
    "create": ("hold the tree as it is now", "label?"),
    "list": ("all checkpoints, oldest first",),
    "show": ("one checkpoint: when, why, and how much is in it", "ref"),
    "diff": ("what changed since a checkpoint, or between two", "a", "b?"),
    "restore": ("make the tree what it was; how it is now becomes a checkpoint of its own first", "ref"),
    "fork": ("make another thread's tree of a checkpoint", "ref"),
    "drop": ("forget checkpoints, and give back the space only they needed", "refs+"),
}
"""The actions of ``checkpoint``, what they are for, and their operands; with ``?`` one may be left out, with ``+``
there may be more."""


_REF = "an id, its beginning, or a label"
_OPERANDS = {
    "label?": "what to call it",
    "ref": _REF,
    "a": _REF,
    "b?": "another (default: the tree as it is now)",
    "refs+": _REF,
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        from importlib.metadata import version  # here, since it takes longer to import than all of agenttools

        print(f"agenttools {version('vfsd')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="agenttools", description="The file tools of a vfsd mount, from a shell.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--name", help="name of the mount (default: $VFSD_SOCKET, else the mount called default)")
    where.add_argument("--socket", help="socket of the daemon")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    after = _Parser(add_help=False)
    after.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="tool", required=True, metavar="TOOL", parser_class=_Parser)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, description=help_text, parents=[after])

    command = add("ls", "list a directory")
    command.add_argument("path", nargs="?", default="/", help="a directory of the tree (%(default)s)")
    command.add_argument("-F", "--slash", action="store_true", help="end the paths of directories with a slash")
    command = add("read", "print lines of a text file, or a small binary file whole")
    command.add_argument("path", help="absolute, in the tree")
    command.add_argument("--offset", type=int, default=0, help="lines to skip")
    command.add_argument("--limit", type=int, default=tools.READ_LIMIT, help="most lines to print (%(default)s)")
    command = add("write", "make or overwrite a file with what comes on standard input")
    command.add_argument("path", help="absolute, in the tree")
    command = add("edit", "replace a text in a file")
    command.add_argument("path", help="absolute, in the tree")
    command.add_argument("old", help="text that is in the file once")
    command.add_argument("new", help="text to put there")
    command.add_argument("--all", action="store_true", help="replace it everywhere")
    command = add("delete", "remove a file, a link, or a directory with all in it")
    command.add_argument("path", help="absolute, in the tree")
    command = add("glob", "find files by a pattern of their names")
    command.add_argument("pattern", help="such as *.py or **/*.py")
    command.add_argument("path", nargs="?", default="/", help="a directory of the tree (%(default)s)")
    command = add("grep", "find a plain text in files")
    command.add_argument("pattern", help="text to find, as it is")
    command.add_argument("path", nargs="?", default="/", help="a directory of the tree (%(default)s)")
    command.add_argument("--glob", help="only files this pattern matches")
    command.add_argument("--max-count", type=int, default=tools.MAX_MATCHES, help="most lines in all (%(default)s)")
    command.add_argument(
        "--mode",
        choices=["content", "files_with_matches", "count"],
        default="content",
        help="lines, files, or lines counted by file (%(default)s)",
    )
    command = add("execute", "run one shell command in the tree")
    command.add_argument("command", help="the command as one string")
    command.add_argument("--timeout", type=float, help="seconds; 0: no limit (120)")
    command.add_argument("--view", choices=["auto", "root", "mount"], default="auto", help="what / is for the command")
    command.add_argument("--profile", choices=PROFILES, help=_PROFILE)
    command.add_argument("--cwd", default="/", help="directory of the tree to run it in")
    command = add("checkpoint", "hold the tree as it is, compare it, go back to it")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    for action, (text, *operands) in _CHECKPOINT.items():
        command = actions.add_parser(action, help=text, description=text, parents=[after])
        for operand in operands:
            command.add_argument(
                operand.rstrip("?+"), nargs=operand[-1] if operand[-1] in "?+" else None, help=_OPERANDS[operand]
            )
        if action == "diff":
            command.add_argument("-p", "--patch", action="store_true", help="a unified diff of the texts")
        elif action == "fork":
            command.add_argument("--thread", required=True, help="a thread that is not there yet")
        elif action == "create":
            command.set_defaults(label="")
    add("undo", "take back the last execute, and with every_calls = 1 the last tool call, that changed something")
    add("schema", "print the tools' JSON schemas")
    command = add("mcp", "serve the tools to an MCP client, on standard input and output or over HTTP")
    command.add_argument("--http", metavar="[HOST:]PORT", help="serve streamable HTTP on this machine; port 0: any")
    command.add_argument(
        "--token-file", metavar="FILE", help="the bearer token; made if it is not there (else: $AGENTTOOLS_MCP_TOKEN)"
    )
    command.add_argument("--view", choices=["auto", "root", "mount"], default="auto", help="what / is for commands")
    command.add_argument("--profile", choices=PROFILES, help=_PROFILE)
    command.add_argument("--text-only", action="store_true", help="no structured results")
    command.add_argument("--thread", metavar="T", help="the tree of thread T; its daemon is started when there is none")
    command.add_argument("--config", metavar="FILE", help="the vfsd.toml of a daemon that --thread starts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
