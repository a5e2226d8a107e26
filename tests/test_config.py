"""vfsd.toml and ``--route``: what is accepted, what each mistake says and on which line, where state lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vfsd import config
from vfsd.config import Config, ConfigError, RouteSpec, complete, load, parse_route

EXAMPLE = """\
name = "work"
thread = "t1"
engine = "native"
read_only = true
allow_other = false
log_level = "debug"
[routes."/"]
kind = "state"                 # durable
[routes."/workspace/"]
kind = "local"
location = "project"
[routes."/scratch"]
kind = "memory"
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "vfsd.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_all_keys(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, EXAMPLE))
    assert loaded == Config(
        name="work",
        thread="t1",
        engine="native",
        read_only=True,
        allow_other=False,
        log_level="debug",
        routes=(
            RouteSpec("/", "state", None),
            RouteSpec("/workspace/", "local", tmp_path / "project"),
            RouteSpec("/scratch/", "memory", None),
        ),
        source=tmp_path / "vfsd.toml",
    )
    assert complete(loaded).routes[0].location == tmp_path / "state/vfsd/work/threads/t1/root"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("# one\nname\n", 2, "Expected '=' after a key"),
        ('name = "a"\nthread = [\n', 3, "Invalid value"),
        ('name = "a"\n\ncolour = "red"\n', 3, "unknown key 'colour'"),
        ('[routes."/"]\nkind = "state"\n# so\nsize = 3\n', 4, "unknown key 'size' in route '/'"),
        ('name = "a"\n[route."/"]\nkind = "state"\n', 2, "unknown key 'route'"),
        ("[mount]\nx = 1\n", 1, "unknown key 'mount'"),
        ("[checkpoints]\nkeep = 3\nevery = 1\n", 3, "unknown key 'every' in [checkpoints] (known: every_calls"),
        ("[checkpoints]\nkeep = 0\n", 2, "keep must be at least 1"),
        ("[checkpoints]\n\nevery_calls = -1\n", 3, "every_calls must be at least 0"),
        ("[checkpoints]\nevery_calls = true\n", 2, "every_calls must be a number"),
        ("[checkpoints]\nevery_execute = 1\n", 2, "every_execute must be true or false"),
        ("checkpoints = 3\n", 1, "checkpoints must be a table: [checkpoints]"),
        ('x.y = 1\nname = "a"\n', 1, "unknown key 'x'"),
        ('names = """\na\n"""\n', 1, "unknown key 'names'"),
        ('# one\nthread = [\n "a",\n]\n', 2, "thread must be a string"),
        ('read_only = "yes"\n', 1, "read_only must be true or false"),
        ('thread = "a/b"\n', 1, "thread 'a/b'"),
        ('name = ""\n', 1, "name ''"),
        ('engine = "fast"\n', 1, "engine 'fast' is unknown: use auto, native, pyfuse3"),
        ('log_level = "loud"\n', 1, "log_level 'loud'"),
        ('routes = "all"\n', 1, "routes must be tables"),
        ('[routes]\n"/" = "state"\n', 2, "unknown key '/' in [routes]"),
        ('[routes."/"]\nkind = 3\n', 2, "kind must be a string"),
        ('[routes."/"]\n', 1, "route '/' has no kind"),
        ('\n[routes."/"]\nkind = "disk"\n', 2, "kind 'disk' is unknown"),
        ('[routes."/m/"]\nkind = "store"\nnamespace = "x"\n', 3, "namespace must be a list of strings"),
        ('[routes."/m/"]\nkind = "store"\nset = "x"\n', 3, "set must be a table of strings"),
        ('[routes."/m/"]\nkind = "blob"\nnamespace = ["x"]\n', 1, "only a store has a namespace"),
        ('[routes."/m/"]\nkind = "backend"\n', 1, "kind 'backend' needs a factory"),
        ('[routes."/m/"]\nkind = "local"\n', 1, "needs a location"),
        ('[routes."/m/"]\nkind = "memory"\nlocation = "/x"\n', 1, "has no location"),
        ('[routes."m"]\nkind = "memory"\n', 1, "absolute path"),
        ('[routes."/a/../b"]\nkind = "memory"\n', 1, "without '.' and '..'"),
        ('[routes."/a"]\nkind = "memory"\n[routes."/a/"]\nkind = "memory"\n', 3, "route '/a/' is there twice"),
        ('[execute]\nprofile = "closed"\n', 2, "profile 'closed' is unknown: use open, tree, offline"),
        ("[execute]\nshell = 1\n", 2, "unknown key 'shell' in [execute] (known: profile"),
        ("[execute.limits]\nmemory = 0\n", 2, "memory must be a number of bytes above 0"),
        ('[execute.limits]\nprocesses = "1K"\n', 2, "processes must be a number above 0"),
        ("[execute.limits]\n\nram = 3\n", 3, "unknown key 'ram' in [execute.limits] (known: memory"),
        ('[execute]\nprofile = "open"\n[execute.limits]\nmemory = 9\n', 3, "limits need a profile that confines"),
        ("[execute.env]\nA = 1\n", 2, "the variable A must be a string"),
        ('[execute.env]\n"A-B" = "x"\n', 2, "'A-B' is not the name of a variable"),
        ('[execute]\npass_env = "A"\n', 2, "pass_env must be a list of names"),
        ("execute = 1\n", 1, "execute must be a table"),
        (b'name = "a"\nthread = "\xff"\n', 2, "not UTF-8"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str | bytes, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_not_toml_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vfsd\.toml:2: "):
        load(write(tmp_path, 'name = "a"\nthread =\n'))


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="larger than"):
        load(write(tmp_path, b"#" * (config.MAX_CONFIG + 1)))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("/=state", RouteSpec("/", "state", None)),
        ("/work=local:/srv/x", RouteSpec("/work/", "local", Path("/srv/x"))),
        ("//a//b/=memory", RouteSpec("/a/b/", "memory", None)),
        ("/w/=local:rel/../x", RouteSpec("/w/", "local", Path("/here/x"))),
        ("/w/=local:/a:b=c", RouteSpec("/w/", "local", Path("/a:b=c"))),
    ],
)
def test_route_option(text: str, spec: RouteSpec) -> None:
    assert parse_route(text, Path("/here")) == spec


def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert parse_route("/w/=local:~nobody/p", tmp_path).location == tmp_path / "~nobody/p"
    monkeypatch.delenv("XDG_STATE_HOME")
    with pytest.raises(ConfigError, match="there is no home directory: set HOME, or XDG_STATE_HOME"):
        config.state_home()


def test_route_option_expands_home(tmp_path: Path) -> None:
    assert parse_route("/w/=local:~/p").location == tmp_path / "home" / "p"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/work",
        "work=state",
        "/w=",
        "/w=local",
        "/w=disk:/x",
        "/../x=state",
        "/.vfsd=memory",
        "/.checkpoints/x=state",
        "/w=local:/x\0y",
        "/w=store:sqlite:/x\0y",
        f"/{'n' * 256}=memory",
    ],
)
def test_route_option_mistakes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_route(text)


STORES = "sqlite:PATH, postgresql://USER@HOST/DATABASE, memory: or factory:MODULE:FUNCTION"


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("store:mongodb://me:secret@x", f"a store has no scheme 'mongodb': use {STORES}"),
        ("store:redis://127.0.0.1:1", f"a store has no scheme 'redis': use {STORES}"),
        ("store:s.db", f"'s.db' has no scheme: use {STORES}"),
        ("store:sqlite:", f"'sqlite:' names no place: use {STORES}"),
        ("store:factory:module", f"'factory:module' names no place: use {STORES}"),
        ("blob:gs://bucket", "a blob has no scheme 'gs': use a directory or s3://BUCKET/PREFIX"),
        ("blob:s3:///prefix", "'s3:///prefix' names no place: use a directory or s3://BUCKET/PREFIX"),
        ("backend:factory:module", "'factory:module' names no place: use factory:MODULE:FUNCTION"),
        ("backend:module:make", "a backend has no scheme 'module': use factory:MODULE:FUNCTION"),
    ],
)
def test_a_place_that_is_none(tmp_path: Path, place: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_route(f"/r/={place}")
    assert str(caught.value) == f"route /r/: {why}"
    kind, _, location = place.partition(":")
    path = write(tmp_path, f'[routes."/r/"]\nkind = "{kind}"\nlocation = "{location}"\n')
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:1: route /r/: {why}"


def test_defaults(tmp_path: Path) -> None:
    whole = complete(Config())
    home = tmp_path / "state/vfsd"
    assert whole.routes == (
        RouteSpec("/", "state", home / "default/threads/default/root"),
        RouteSpec("/blobs/", "blob", home / "blobs"),
        RouteSpec("/memories/", "store", None, f"sqlite:{home}/memories.db", ("filesystem",)),
    )


def test_store_routes(tmp_path: Path) -> None:
    text = """
[routes."/"]
kind = "state"
[routes."/memories/"]
kind = "store"
location = "sqlite:m.db"
namespace = ["{user}", "filesystem"]
set = { user = "bob", team = "x" }
[routes."/hub/"]
kind = "backend"
factory = "hubs:make"
"""
    whole = complete(load(write(tmp_path, text)), values={"user": "alice"})
    store = next(route for route in whole.routes if route.kind == "store")
    assert store.uri == f"sqlite:{tmp_path}/m.db"
    assert store.namespace == ("{user}", "filesystem")
    assert dict(store.values) == {"user": "alice", "team": "x"}
    hub = next(route for route in whole.routes if route.kind == "backend")
    assert (hub.uri, hub.home) == ("factory:hubs:make", tmp_path)
    given = parse_route("/m/=store:postgresql://u@/db?host=/run#alice/files")
    assert (given.uri, given.namespace) == ("postgresql://u@/db?host=/run", ("alice", "files"))


def test_execute(tmp_path: Path) -> None:
    file = tmp_path / "vfsd.toml"
    file.write_text(
        '[execute]\nprofile = "offline"\npass_env = ["HTTPS_PROXY"]\n[execute.limits]\nmemory = "2G"\nprocesses = 100\n'
        '[execute.env]\nCI = "1"\n'
    )
    assert load(file).execute.told() == {
        "profile": "offline",
        "limits": {"memory": 2 << 30, "processes": 100},
        "env": {"CI": "1"},
        "pass_env": ["HTTPS_PROXY"],
    }


def test_relative_state_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert config.state_home() == tmp_path / "home/.local/state/vfsd"


def test_command_line_wins(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, EXAMPLE))
    whole = complete(loaded, [parse_route("/scratch/=state")], name="other", read_only=None, log_level="error")
    assert (whole.name, whole.thread, whole.read_only, whole.log_level) == ("other", "t1", True, "error")
    assert [(r.prefix, r.kind) for r in whole.routes] == [
        ("/", "state"),
        ("/scratch/", "state"),
        ("/workspace/", "local"),
    ]
    assert whole.routes[1].location == tmp_path / "state/vfsd/other/threads/t1/routes/scratch"


def test_state_routes_never_share_a_directory() -> None:
    whole = complete(Config(), [parse_route("/root/=state"), parse_route("/a/b/=state"), parse_route("/a-b/=state")])
    places = [route.location for route in whole.routes]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "routes",
    [
        ["/a/=state:/x/y", "/b/=state:/x/y"],
        ["/a/=state:/x/y", "/b/=state:/x/y/z"],
        ["/a/=local:/x", "/b/=state:/x/y"],
        ["/a/=memory", "/a=memory"],
    ],
)
def test_routes_that_collide(routes: list[str]) -> None:
    with pytest.raises(ConfigError):
        complete(Config(), [parse_route(text) for text in routes])


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "x" * 65, "a b", "a\0b"])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(ConfigError):
        complete(Config(), name=name)
