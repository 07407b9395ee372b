"""The stand-in for the Hub against the real client; and Client, the client in a process, for other tests."""

import hashlib
import json
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hub_server
from hub_server import TOKENS, Handler, Hub, Refused, route

pytest.importorskip("huggingface_hub")

LOOP = """
import json, sys
from huggingface_hub import CommitOperationAdd as Add, CommitOperationDelete as Delete, HfApi, hf_hub_download, \\
    get_hf_file_metadata, get_session, hf_hub_url, set_client_factory, snapshot_download
from huggingface_hub.utils import build_hf_headers

def get(path, *span, repo="me/run", revision="main"):
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    headers |= {"Range": "bytes=%d-%d" % span} if span else {}
    answer = get_session().get(hf_hub_url(repo, path, revision=revision), headers=headers, timeout=30)
    return answer.status_code, answer.headers.get("content-range"), answer.content.decode("latin-1")

names = dict(globals(), api=HfApi())
out, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    try:
        names["result"] = None
        exec(json.loads(line), names)
        answer = {"result": names["result"]}
    except Exception as error:  # whatever the client raises is the answer
        chain = [error, error.__cause__, error.__context__]
        codes = [part.response.status_code for part in chain if getattr(part, "response", None) is not None]
        answer = {"error": type(error).__name__, "code": (codes + [None])[0], "text": str(error)}
    print(json.dumps(answer, default=str), file=out, flush=True)
"""


class ClientError(Exception):
    """What the client raised: `name` of the class, `code` of the answer."""

    def __init__(self, answer):
        super().__init__(f"{answer['error']}: {answer['text']}")
        self.name, self.code = answer["error"], answer["code"]


class Client:
    """The real client in a process of its own; a call runs code in it and gives its `result`. `home` keeps its log."""

    def __init__(self, hub, home, role="write", **environment):
        Path(home).mkdir(parents=True, exist_ok=True)
        self.log = Path(home) / "client.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                bufsize=0, env={**hub.environment(home, role), **environment})

    def __call__(self, code, timeout=120):
        self.start(code)
        return self.finish(timeout)

    def start(self, code):
        self.process.stdin.write(json.dumps(code).encode() + b"\n")

    def finish(self, timeout=120):
        answer, deadline = b"", time.monotonic() + timeout
        while not answer.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the client is silent: {self.log.read_text()}")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError(f"the client has ended: {self.log.read_text()}")
            answer += piece
        answer = json.loads(answer)
        if "error" in answer:
            raise ClientError(answer)
        return answer["result"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A hub and a client for all tests; its sleeps between tries are cut short."""
    home = tmp_path_factory.mktemp("home")
    with Hub(tmp_path_factory.mktemp("hub")) as hub, Client(hub, home) as client:
        client("""
import types, huggingface_hub.utils._http as http
http.time = types.SimpleNamespace(**{**vars(http.time), "sleep": lambda seconds: None})""")
        yield hub, client


@pytest.fixture
def hub(pair):
    """The hub as new: no repository but an empty me/run, no fault, nothing in the log."""
    hub = pair[0]
    hub.faults, hub.repos, hub.log, hub.errors = [], {}, [], []
    hub.quota, hub.chunk, hub.page, hub.after_request, hub.squash_frees = 0, 0, 1000, None, True
    hub.roles = {token: role for role, token in TOKENS.items()}
    for blob in hub.blobs.iterdir():
        blob.unlink()
    hub.create("me/run")
    yield hub
    if hub.errors:
        raise hub.errors[0]
    assert not [record for record in hub.log if record["server"] == "store" and record["token"]]


@pytest.fixture
def client(pair):
    return pair[1]


def refused(client, code):
    with pytest.raises(ClientError) as caught:
        client(code)
    return caught.value.name, caught.value.code


WEIGHTS = bytes(range(256)) * 40
PUSH = """
ops = [Add("checkpoints/step_1/model.safetensors", bytes(range(256)) * 40),
       Add("checkpoints/step_1/trainer.json", b"{}"), Add("latest.json", b'{"step": 1}')]
result = api.create_commit("me/run", ops, commit_message="step 1").oid
"""
FILES = {"checkpoints/step_1/model.safetensors": WEIGHTS, "checkpoints/step_1/trainer.json": b"{}",
         "latest.json": b'{"step": 1}'}


def content_of(hub, revision="main"):
    return {path: content for path, content in hub.tree("me/run", revision).items() if path != ".gitattributes"}


# -- the calls of the client

def test_a_cycle_of_the_real_client(hub, client, tmp_path):
    assert client("result = api.whoami()['name']") == "me"
    assert client("result = api.create_repo('me/run', private=True, exist_ok=True).repo_id") == "me/run"
    assert client("result = api.create_repo('me/new', private=True).repo_id") == "me/new"
    first = hub.head("me/run")
    oid = client(PUSH)
    assert hub.head("me/run") == oid != first and content_of(hub) == FILES
    assert client("result = api.repo_info('me/run').sha") == oid
    rows = client("result = [(row.path, row.size, row.lfs and row.lfs.sha256, row.blob_id) for row in "
                  "api.get_paths_info('me/run', ['nowhere', *[op.path_in_repo for op in ops]], revision='main')]")
    assert sorted(row[0] for row in rows) == sorted(FILES)
    assert rows[0][1:3] == [len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()]
    assert rows[1][2:] == [None, hashlib.sha1(b"blob 2\0{}").hexdigest()]
    name = "checkpoints/step_1/model.safetensors"
    assert client(f"result = get('{name}', 100, 199, revision='{oid}')") == [
        206, f"bytes 100-199/{len(WEIGHTS)}", WEIGHTS[100:200].decode("latin-1")]
    assert client("result = get('latest.json')")[2] == '{"step": 1}'
    assert client(f"meta = get_hf_file_metadata(hf_hub_url('me/run', '{name}'))\n"
                  "result = [meta.commit_hash, meta.etag, meta.size]") == [oid, rows[0][2], len(WEIGHTS)]
    folder = client(f"result = snapshot_download('me/run', revision='{oid}', allow_patterns=['checkpoints/*'], "
                    f"local_dir={str(tmp_path / 'copy')!r})")
    assert (Path(folder) / name).read_bytes() == WEIGHTS and not (Path(folder) / "latest.json").exists()
    assert [record["range"] for record in hub.requests(f"GET .*resolve/.*{name}")][0] == "bytes=100-199"
    assert client("result = api.model_info('me/run', expand=['usedStorage']).used_storage") == len(WEIGHTS)
    assert client("result = [(row.commit_id, row.title) for row in api.list_repo_commits('me/run')]") == [
        [oid, "step 1"], [first, "initial commit"]] == [list(row) for row in hub.history("me/run")]
    assert client("result = [row.target_commit for row in api.list_repo_refs('me/run').branches]") == [oid]
    again = client("result = api.create_commit('me/run', [Delete('checkpoints/step_1/', is_folder=True), "
                   "Delete('latest.json'), Add('a/b.txt', b'b')], commit_message='less').oid")
    assert content_of(hub, again) == {"a/b.txt": b"b"} and content_of(hub, oid) == FILES
    assert len(hub.requests("POST .*/commit/")) == 2


def test_trees_come_in_pages(hub, client):
    hub.page = 3
    hub.commit("me/run", {f"samples/step_{i}.md": b"%d" % i for i in range(8)})
    files = client("result = api.list_repo_files('me/run')")
    assert files == [".gitattributes", *(f"samples/step_{i}.md" for i in range(8))]
    assert len(hub.requests("GET .*/tree/")) == 4
    assert client("result = [row.path for row in api.list_repo_tree('me/run')]") == [".gitattributes", "samples"]
    assert len(client("result = [row.path for row in api.list_repo_tree('me/run', 'samples')]")) == 8
    assert len(client("result = [row.title for row in api.list_repo_commits('me/run')]")) == 2


def test_a_large_file_goes_in_parts(hub, client):
    hub.chunk = 3000
    client(PUSH)
    assert content_of(hub) == FILES
    assert len(hub.requests("PUT /part/")) == 4 and len(hub.requests("POST /whole/")) == 1
    assert len(hub.requests("/verify")) == 1


def test_a_public_repository_is_read_without_a_token(hub, client, tmp_path):
    hub.create("me/open", private=False)
    hub.commit("me/open", {"latest.json": b"{}", "a.bin": WEIGHTS})
    with Client(hub, tmp_path, role="") as anyone:
        assert anyone("result = get('latest.json', repo='me/open')") == [200, None, "{}"]
        assert anyone("result = open(hf_hub_download('me/open', 'a.bin'), 'rb').read() == bytes(range(256)) * 40")
        assert anyone("result = open(hf_hub_download('me/open', 'latest.json')).read()") == "{}"
        assert refused(anyone, "api.repo_info('me/run')")[1] == 401
        assert refused(anyone, "api.create_commit('me/open', [Add('a', b'a')], commit_message='a')")[1] == 401
    assert hub.requests("GET /api/resolve-cache/me/open")


def test_a_revision_is_a_branch_or_a_commit_or_the_beginning_of_one(hub, client):
    oid = client(PUSH)
    for name in (oid, oid[:8], "main"):
        assert client(f"result = api.repo_info('me/run', revision='{name}').sha") == oid
    for name in (oid[:3], "other", "0" * 40):
        assert refused(client, f"api.repo_info('me/run', revision='{name}')") == ("RevisionNotFoundError", 404)
    assert refused(client, "api.repo_info('me/none')") == ("RepositoryNotFoundError", 404)
    assert refused(client, "api.create_commit('me/run', [Delete('none')], commit_message='d')")[1] == 404


def test_datasets_have_names_of_their_own(hub, client):
    client("api.create_repo('me/run', repo_type='dataset')\n"
           "api.create_commit('me/run', [Add('a.bin', b'abc')], commit_message='a', repo_type='dataset')")
    assert hub.tree("datasets/me/run")["a.bin"] == b"abc" and content_of(hub) == {}
    assert client("result = open(hf_hub_download('me/run', 'a.bin', repo_type='dataset')).read()") == "abc"


def test_a_squash_frees_storage_and_old_commits_are_gone(hub, client):
    old = client(PUSH)
    client("api.create_commit('me/run', [Delete('checkpoints/', is_folder=True)], commit_message='less')")
    assert client("result = api.model_info('me/run', expand=['usedStorage']).used_storage") == len(WEIGHTS)
    client("api.super_squash_history('me/run')")
    assert client("result = api.model_info('me/run', expand=['usedStorage']).used_storage") == 0
    assert content_of(hub) == {"latest.json": b'{"step": 1}'} and len(hub.history("me/run")) == 1
    assert refused(client, f"api.repo_info('me/run', revision='{old}')") == ("RevisionNotFoundError", 404)


# -- writers, tokens, quota

def test_of_eight_writers_with_one_parent_one_lands(hub, client):
    client("""
from concurrent.futures import ThreadPoolExecutor
head = api.repo_info("me/run").sha
def write(i):
    try:
        return api.create_commit("me/run", [Add("a", b"%d" % i)], commit_message=f"{i}", parent_commit=head).oid
    except Exception as error:  # refused, with a status to count
        return error.response.status_code
with ThreadPoolExecutor(8) as pool:
    answers = list(pool.map(write, range(8)))
""")
    answers = client("result = answers")
    assert answers.count(412) == 7 and hub.head("me/run") in answers and len(hub.history("me/run")) == 2


def test_another_writer_comes_between(hub, client):
    hub.add_fault("race", "/commit/main mine", files={"theirs.txt": "theirs"})
    code = ("api.create_commit('me/run', [Add('mine.txt', b'mine')], commit_message='mine', "
            "parent_commit=api.repo_info('me/run').sha)")
    assert refused(client, code) == ("HfHubHTTPError", 412)
    assert content_of(hub) == {"theirs.txt": b"theirs"}
    client(code)
    assert content_of(hub) == {"theirs.txt": b"theirs", "mine.txt": b"mine"}


def test_tokens_have_roles_and_may_be_taken_back(hub, client, tmp_path):
    with Client(hub, tmp_path, role="read") as reader:
        assert reader("result = api.repo_info('me/run').sha") == hub.head("me/run")
        assert refused(reader, PUSH)[1] == 403
        assert refused(reader, "api.create_repo('me/new')")[1] == 403
    hub.roles.clear()
    assert refused(client, "api.repo_info('me/run')")[1] == 401
    assert refused(client, "api.whoami()")[1] == 401
    assert content_of(hub) == {}


def test_the_quota_refuses_more_bytes_and_nothing_else(hub, client):
    hub.quota = 2 * len(WEIGHTS) - 1
    client(PUSH)
    assert refused(client, "api.create_commit('me/run', [Add('b.bin', bytes(10240))], commit_message='b')")[1] == 403
    client("api.create_commit('me/run', [Add('latest.json', b'new')], commit_message='small')")
    assert content_of(hub) == FILES | {"latest.json": b"new"}


# -- faults

def test_a_status_strikes_so_often_so_late_and_where_it_is_said(hub, client):
    fault = hub.add_fault("status", "GET /api/models/me/run$", code=429, headers={"Retry-After": "1"}, after=1, times=2)
    code = "result = api.repo_info('me/run').sha"
    client(code)
    assert [refused(client, code)[1] for _ in range(2)] == [429, 429]
    client(code)
    client("result = api.list_repo_files('me/run')")
    assert (fault["seen"], fault["fired"]) == (4, 2)
    assert [record["fault"] for record in hub.requests("GET /api/models/me/run$")] == ["", "status", "status", ""]


def test_a_chance_is_the_same_for_the_same_seed(tmp_path):
    def draws(seed):
        hub = Hub(tmp_path, [{"kind": "drop", "chance": 0.5, "times": 0}], seed=seed)
        return [bool(hub.pick({"line": "GET /", "fault": ""}, "drop")) for _ in range(64)]
    assert draws(1) == draws(1) != draws(2) and 16 < sum(draws(1)) < 48


def test_a_dropped_upload_is_tried_again_by_the_client(hub, client):
    hub.add_fault("drop", "PUT /lfs/")
    hub.add_fault("status", "PUT /lfs/", code=500)
    client(PUSH)
    assert [(record["status"], record["fault"]) for record in hub.requests("PUT")] == [
        (0, "drop"), (500, "status"), (200, "")]
    assert content_of(hub) == FILES


@pytest.mark.parametrize("drop", [False, True])
def test_a_commit_may_land_though_its_answer_is_lost(hub, client, drop):
    hub.add_fault("lost_reply", "/commit/", drop=drop)
    name, code = refused(client, PUSH)
    assert code == (None if drop else 504) and name == ("RemoteProtocolError" if drop else "HfHubHTTPError")
    assert content_of(hub) == FILES and len(hub.history("me/run")) == 2


def test_a_refused_commit_has_not_landed_and_needs_no_second_upload(hub, client):
    hub.add_fault("status", "/commit/")
    assert refused(client, PUSH)[1] == 503 and content_of(hub) == {}
    client("api.create_commit('me/run', ops, commit_message='again')")
    assert content_of(hub) == FILES and len(hub.requests("PUT")) == 1


def test_what_hangs_goes_on_later_or_is_cut(hub, client):
    slow = "result = get_session().get(hf_hub_url('me/run', '.gitattributes'), headers=build_hf_headers(), timeout={})"
    hub.add_fault("hang", "/resolve/", seconds=0.2)
    client(slow.format(30) + ".status_code")
    hub.add_fault("hang", "/resolve/")
    assert refused(client, slow.format(0.2))[0] == "ReadTimeout"
    hub.add_fault("hang", "/resolve/", seconds=0.01, drop=True)
    assert refused(client, slow.format(30))[0] == "RemoteProtocolError"
    statuses = [record["status"] for record in hub.requests("GET .*/resolve/")]
    assert statuses == [200, None, 0], "the second hangs on"


def test_a_hanging_request_holds_nobody_else_and_a_killed_client_has_done_nothing(hub, client, tmp_path):
    hub.add_fault("hang", "/commit/main")
    with Client(hub, tmp_path) as other:
        other.start(PUSH)
        assert hub.wait_for("POST .*/commit/main step 1 checkpoints/step_1/model.safetensors")
        assert client("result = api.repo_info('me/run').sha") == hub.head("me/run")
    assert content_of(hub) == {}


def test_a_stale_read_is_of_a_branch_and_of_the_commit_before(hub, client):
    old = hub.commit("me/run", {"latest.json": b"old"})
    new = hub.commit("me/run", {"latest.json": b"new"})
    hub.add_fault("stale_resolve", "GET .*/resolve/")
    assert client(f"result = get('latest.json', revision='{new}')")[2] == "new"
    assert [client("result = get('latest.json')")[2] for _ in range(2)] == ["old", "new"]
    hub.add_fault("stale_resolve", "GET /api/models/me/run$")
    assert [client("result = api.repo_info('me/run').sha") for _ in range(2)] == [old, new]


def test_missing_and_ignored_files(hub, client):
    client(PUSH)
    for match in ("/tree/", "/paths-info/", "/resolve/"):
        hub.add_fault("missing", match, path="trainer")
    assert "checkpoints/step_1/trainer.json" not in client("result = api.list_repo_files('me/run')")
    assert client("result = api.get_paths_info('me/run', ['checkpoints/step_1/trainer.json'])") == []
    assert client("result = get('checkpoints/step_1/trainer.json')")[0] == 404
    assert client("result = get('checkpoints/step_1/trainer.json')")[0] == 200
    hub.add_fault("ignored", "/preupload/", path="^b")
    client("api.create_commit('me/run', [Add('b.txt', b'b'), Add('c.txt', b'c')], commit_message='bc')")
    assert content_of(hub) == FILES | {"c.txt": b"c"}


@pytest.mark.parametrize("name", ["a.bin", "a.json"])  # by the store, by the hub
def test_ranges_and_the_faults_of_bodies(hub, client, name):
    hub.commit("me/run", {name: WEIGHTS})
    where = "GET /lfs/.*a.bin" if name == "a.bin" else "GET .*/resolve/.*a.json"
    text = WEIGHTS.decode("latin-1")
    read = f"result = get('{name}', 1000, 1999)"
    assert client(read) == [206, "bytes 1000-1999/10240", text[1000:2000]]
    assert client(f"result = get('{name}', 10000, 99999)") == [206, "bytes 10000-10239/10240", text[10000:]]
    assert client(f"result = get('{name}', 20000, 29999)")[0] == 416
    hub.add_fault("norange", where)
    assert client(read) == [200, None, text]
    hub.add_fault("corrupt", where)
    wrong = client(read)[2]
    assert [i for i in range(1000) if wrong[i] != text[1000 + i]] == [500]
    hub.add_fault("corrupt", where, at=1003)
    assert client(read)[2][:5] == text[1000:1003] + chr(WEIGHTS[1003] ^ 1) + text[1004]
    hub.add_fault("truncate", where)
    assert refused(client, read)[0] == "RemoteProtocolError"
    assert client(read)[2] == text[1000:2000] and content_of(hub) == {name: WEIGHTS}


def test_the_store_keeps_wrong_bytes_only_by_a_fault(hub, client):
    hub.add_fault("corrupt", "PUT /lfs/")
    client(PUSH)
    stored = content_of(hub)["checkpoints/step_1/model.safetensors"]
    assert stored != WEIGHTS and len(stored) == len(WEIGHTS)
    link = hub.requests("PUT /lfs/")[0]["line"].removeprefix("PUT ")
    put = f"result = get_session().put('{hub.store}{link}', content=b'other').status_code"
    assert client(put) == 400
    assert client(put.replace("Signature=", "Signature=0")) == 403
    assert content_of(hub)["checkpoints/step_1/model.safetensors"] == stored


# -- the log, the hook, and going on

def test_the_hook_sees_every_state(hub, client):
    seen = []
    hub.after_request = lambda hub, record: seen.append((record["line"], record["status"], len(hub.history("me/run"))))
    hub.add_fault("lost_reply", "/commit/", drop=True)
    refused(client, PUSH)
    client("api.create_commit('me/run', [Add('b', b'b')], commit_message='b')")
    assert [(status, commits) for line, status, commits in seen if "/commit/" in line] == [(0, 2), (200, 3)]
    assert seen[0][2] == 1 and len(seen) == len(hub.log)
    rows = [json.loads(line) for line in (hub.folder / "log.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows[-len(seen):]] == [line for line, _, _ in seen]
    assert rows[-1]["commit"] == hub.head("me/run") and rows[-1]["token"] == "write"


def test_what_the_hook_raises_is_kept(hub, client):
    hub.after_request = lambda hub, record: 1 / 0
    refused(client, "api.whoami()")
    assert isinstance(hub.errors.pop(), ZeroDivisionError) and not hub.errors


def test_a_hub_goes_on_from_its_folder(tmp_path):
    with Hub(tmp_path / "hub") as hub:
        hub.create("me/run")
        with Client(hub, tmp_path / "home") as client:
            client(PUSH)
            history = hub.history("me/run")
            with pytest.raises(OSError), Hub(tmp_path / "other", ports=hub.ports):
                pass
            hub.__exit__()
            names = [refused(client, "api.repo_info('me/run')")[0] for _ in range(2)]
            assert names == ["RemoteProtocolError", "ConnectError"]  # on the old connection, on a new one
            with Hub(tmp_path / "hub", ports=hub.ports) as again:
                assert client("result = api.repo_info('me/run').sha") == history[0][0]
                assert again.history("me/run") == history and content_of(again) == FILES


def test_a_hub_of_its_own_process_may_be_killed_and_started_again(tmp_path):
    hub, ports, heads = Hub(tmp_path / "hub"), [0, 0], []
    hub.create("me/run")
    for i in range(2):
        words = {"--folder": tmp_path / "hub", "--port-file": tmp_path / f"ports{i}", "--seed": "3",
                 "--faults": json.dumps([{"kind": "status", "match": "/commit/", "code": 500}]),
                 "--options": json.dumps({"ports": ports, "page": 2})}
        process = subprocess.Popen([sys.executable, hub_server.__file__, *map(str, sum(words.items(), ()))])
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / f"ports{i}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            row = json.loads((tmp_path / f"ports{i}").read_text())
            hub.url, ports = row["url"], row["ports"]
            with Client(hub, tmp_path / f"home{i}") as client:
                push = PUSH.replace("ops, ", f"[*ops, Add('n', b'{i}')], ")
                assert refused(client, push)[1] == 500
                heads.append(client(push))
        finally:
            process.kill()
            process.wait()
    with Hub(tmp_path / "hub") as last:
        assert [oid for oid, _ in last.history("me/run")[:2]] == heads[::-1]
        assert content_of(last) == FILES | {"n": b"1"}
    assert len((tmp_path / "hub" / "log.jsonl").read_text().splitlines()) > 10


# -- xet: hf_xet itself keeps it in a folder; the stand-in makes blobs of what the shards there name

@route("GET", "/api/KINDNAME/xet-(?:read|write)-token/REV")
def xet_token(request, repo, rev):
    if not (request.hub.folder / "xet").exists():
        raise Refused(404, "there is no xet here")
    row = {"casUrl": f"local://{request.hub.folder}/xet", "accessToken": "xet", "exp": int(time.time()) + 3600}
    names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
    return 200, json.dumps(row).encode(), dict(zip(names, row.values()))


def xet_files(folder):
    """{sha256: (xet's hash, bytes)} of the shards below a folder."""
    def hash_at(data, at):
        return "".join(f"{part:016x}" for part in struct.unpack_from("<4Q", data, at))
    found = {}
    for shard in folder.rglob("*.mdb"):
        data, at = shard.read_bytes(), 48
        while data[at:at + 32].strip(b"\xff"):
            name, (flags, count) = hash_at(data, at), struct.unpack_from("<II", data, at + 32)
            size = sum(struct.unpack_from("<I", data, at + 48 * i + 36)[0] for i in range(1, count + 1))
            at += 48 * (1 + count + count * (flags >> 31))
            if flags >> 30 & 1:
                found[hash_at(data, at)] = name, size
                at += 48
    return found


def test_an_upload_by_xet(tmp_path, monkeypatch):
    hf_xet = pytest.importorskip("hf_xet")
    if not hasattr(hf_xet, "XetSession"):
        pytest.skip("another hf_xet")
    plain = Handler.change

    def change(self, tree, kind, value):
        blob, xet = self.hub.blobs / value.get("oid", "none"), self.hub.folder / "xet"
        if kind == "lfsFile" and not blob.exists():
            name, size = xet_files(xet)[value["oid"]]
            with hf_xet.XetSession().new_file_download_group(endpoint=f"local://{xet}", token="xet",
                                                             token_expiry_unix_secs=int(time.time()) + 3600) as group:
                group.start_download_file(hf_xet.XetFileInfo(name, size), str(blob))
        plain(self, tree, kind, value)

    monkeypatch.setattr(Handler, "change", change)
    with Hub(tmp_path / "hub") as hub, Client(hub, tmp_path / "home", HF_HUB_DISABLE_XET="0") as client:
        hub.create("me/run")
        with pytest.raises(ClientError):
            client(PUSH)
        (hub.folder / "xet").mkdir()
        client(PUSH)
        assert content_of(hub) == FILES and not hub.errors
        assert hub.requests("xet-write-token") and not hub.requests("/lfs/")
        assert client("path = hf_hub_download('me/run', ops[0].path_in_repo)\n"
                      "result = open(path, 'rb').read() == bytes(range(256)) * 40")
