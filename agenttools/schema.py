"""The eight tools described for a model: name, description and JSON schema of the arguments.

Owns the words a model reads before it calls. The argument names are those of the functions in ``agenttools.tools``.
"""

from __future__ import annotations

from typing import Any

from agenttools.tools import MAX_MATCHES, READ_LIMIT

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def _count(description: str, default: int, minimum: int) -> dict[str, Any]:
    return {"type": "integer", "description": description, "default": default, "minimum": minimum}


def _tool(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "$schema": _DIALECT,
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        "ls",
        "Show what is directly in a directory: the full path of every file and directory there, hidden ones too.",
        [],
        path=_text("The directory, from the root of the tree.", default="/"),
    ),
    _tool(
        "read",
        "Get lines of a text file. A first line `@@ lines A-B of T | next offset N @@` says which lines follow and, "
        "when the file goes on, the offset to continue with; it is not part of the file, everything below it is, "
        "letter for letter. Long files come in pages. Read a file before you edit it.",
        ["path"],
        path=_text("The file, from the root of the tree, such as /src/main.py."),
        offset=_count("How many lines to skip from the start.", 0, 0),
        limit=_count("The most lines to return.", READ_LIMIT, 1),
    ),
    _tool(
        "write",
        "Put a whole file in place: it is made, with the directories it needs, or its old content is replaced. "
        "To change a part of a file use edit.",
        ["path", "content"],
        path=_text("The file, from the root of the tree."),
        content=_text("All the text the file shall have."),
    ),
    _tool(
        "edit",
        "Change part of a text file: old_string, copied from what read shows, becomes new_string. It has to be in the "
        "file exactly once, so take in enough of the lines around it, or set replace_all. The rest of the file, "
        "its line endings and its mode stay as they are.",
        ["path", "old_string", "new_string"],
        path=_text("The file, from the root of the tree."),
        old_string=_text("The text to look for, with its spaces and line breaks.", minLength=1),
        new_string=_text("The text to put there; empty to take the old text out."),
        replace_all={
            "type": "boolean",
            "description": "Change every place where old_string is found.",
            "default": False,
        },
    ),
    _tool(
        "delete",
        "Remove a file, or a directory with everything in it, for good. Of a symbolic link only the link goes.",
        ["path"],
        path=_text("What to remove, from the root of the tree."),
    ),
    _tool(
        "glob",
        "Find files by name. A pattern without a slash, such as `*.py`, is compared with file names at every depth; "
        "one with a slash, such as `src/**/*.ts` or `/*.md`, with the path below the start directory. `**` stands for "
        "any directories, `?` for one character, `[a-z]` and `[!a-z]` for a choice of one, `{a,b}` for alternatives. "
        "Names that begin with a dot are found when the pattern says the dot.",
        ["pattern"],
        pattern=_text("The pattern.", minLength=1),
        path=_text("The directory to start from.", default="/"),
    ),
    _tool(
        "grep",
        "Find a piece of text in files: plain text, with upper and lower case told apart, not a regular expression, "
        "and within one line. Hidden and git-ignored files are searched too; `.git` and binary files are not.",
        ["pattern"],
        pattern=_text("The text to look for."),
        path=_text("The directory, or the one file, to search.", default="/"),
        glob=_text("Search only files this pattern matches; the same rules as for the glob tool."),
        output_mode=_text(
            "What to show: the files that have it, their matching lines with numbers, or how many lines each has.",
            enum=["files_with_matches", "content", "count"],
            default="files_with_matches",
        ),
        max_count=_count("The most matching lines, over all files.", MAX_MATCHES, 1),
    ),
    _tool(
        "execute",
        "Run a shell command with /bin/sh in the root directory of the same tree the other tools see. What it prints "
        "to stdout and stderr comes back together with its exit code; very long output is cut and kept whole in a file "
        "that is then named. There is no terminal and no input. Processes left in the background go on.",
        ["command"],
        command=_text("The command line, as one would type it into a shell.", minLength=1),
        timeout={
            "type": "number",
            "description": "Seconds after which everything it started is ended; 0 for no limit. 120 when left out.",
            "minimum": 0,
        },
    ),
)
