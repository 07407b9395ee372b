"""A loopback stand-in for the Hugging Face Hub, for the real client: real bytes, a log of requests, faults on demand.

`with Hub(folder) as hub`: a process with hub.environment(home) takes it for the Hub. As there, tokens go to the hub
(127.0.0.1), large files by signed links to and from a store (localhost). All is on the disk before an answer leaves.

A fault strikes requests in whose line ("METHOD /path?query", unquoted, and for a commit its title and paths) `match`
is found: `times` times (1; 0: always), after `after` of them (0), with probability `chance` (1). Kinds:
  status         answers `code` (503), `headers`, `text`; nothing is done
  drop           cuts the connection; nothing is done
  hang           is silent for `seconds` (3600), then goes on or, with `drop`, cuts; nothing is done before
  lost_reply     does it, is silent for `seconds` (0), then answers `code` (504) or, with `drop`, cuts
  stale_resolve  a read by branch sees the commit `back` (1) before the head
  missing, ignored  files whose path `path` (any) finds are not there for a read; are refused by shouldIgnore
  race           before a commit another writer commits `files` ({path: text})
  corrupt        a bit is flipped, in byte `at` (the middle), of what is read, or of what is kept of a PUT
  norange, truncate  a ranged read is answered 200 with the whole file; a body ends in the middle
"""
import base64
import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".npy", ".gz")  # go to the store at any size, as .gitattributes says
TOKENS = {"write": "hf_writewritewritewrite", "read": "hf_readreadreadreadread"}
ROUTES = []  # (methods, pattern, need, function)


class Refused(Exception):
    """(status, text, code that selects the client's exception class = "", more of the body = {})."""


class Hub:
    """Repositories, tokens, quota, faults and the log; `with` starts and stops its two servers.

    All is done under `lock`. With it held, `after_request(hub, record)` is called when a request has been done and
    before its answer leaves, so that it sees every state there is; what it raises is kept in `errors`.
    A repository is named "owner/name" (a model) or "datasets/owner/name".
    """
    quota, chunk, large = 0, 0, 10_000_000  # bytes: of history, of a part of an upload (0 = off); in git at most
    seed, page, ports, after_request, squash_frees, running = 0, 1000, (0, 0), None, True, False

    def __init__(self, folder, faults=(), **options):
        assert options.keys() <= vars(Hub).keys(), options
        vars(self).update(options, folder=Path(folder), blobs=Path(folder) / "blobs")
        self.roles = {token: role for role, token in TOKENS.items()}  # take one out to refuse it
        self.log, self.errors, self.faults, self.lock = [], [], [], threading.Condition()
        self.blobs.mkdir(parents=True, exist_ok=True)
        state = self.folder / "state.json"
        self.repos = json.loads(state.read_text()) if state.exists() else {}
        for fault in faults:
            self.add_fault(**fault)

    def __enter__(self):
        self.running = True
        self.servers = [ThreadingHTTPServer(("127.0.0.1", port), Handler) for port in self.ports]
        self.ports = [server.server_port for server in self.servers]
        self.url, self.store = f"http://127.0.0.1:{self.ports[0]}", f"http://localhost:{self.ports[1]}"
        for server, name in zip(self.servers, ("hub", "store")):
            server.hub, server.name, server.handle_error = self, name, self.note
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        with self.lock:
            self.running = False
            self.lock.notify_all()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def note(self, *_):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client has gone or was cut
            self.errors.append(sys.exc_info()[1])

    def environment(self, home, role="write"):
        """The environment of a process that takes this for the Hub, with its own HF_HOME and a token or none ('')."""
        rest = {key: value for key, value in os.environ.items()
                if not re.match("HF_|HUGGING|TRANSFORMERS_OFFLINE|(https?|all|no)_proxy", key, re.IGNORECASE)}
        return rest | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                       "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost",
                       **({"HF_TOKEN": TOKENS.get(role, role)} if role else {})}

    def add_fault(self, kind, match="", **more):
        """Adds to the plan; the dict that comes back counts in `seen` and `fired`."""
        counts = {"times": 1, "after": 0, "chance": 1.0, "seen": 0, "fired": 0}
        self.faults.append({"kind": kind, "match": match} | counts | more)
        return self.faults[-1]

    def pick(self, record, *kinds):
        """The first fault of these kinds that strikes a request, or {}; a draw depends on the seed and its count."""
        for i, fault in enumerate(self.faults):
            if fault["kind"] in kinds and re.search(fault["match"], record["line"]):
                fault["seen"] += 1
                drawn = random.Random(f"{self.seed} {i} {fault['seen']}").random() < fault["chance"]
                if drawn and fault["seen"] > fault["after"] and fault["fired"] < (fault["times"] or 1e9):
                    fault["fired"] += 1
                    record["fault"] = "+".join(filter(None, [record["fault"], fault["kind"]]))
                    return fault
        return {}

    def done(self, record, status):
        """Closes a record (status 0: cut without an answer), writes it to log.jsonl, shows it to the hook."""
        record["status"] = status
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        self.lock.notify_all()
        if self.after_request:
            self.after_request(self, record)

    def requests(self, match=""):
        """The records in whose line `match` is found, in order of arrival; `status` is None until one is done."""
        return [record for record in list(self.log) if re.search(match, record["line"])]

    def wait_for(self, match, count=1, timeout=60):
        """Waits until `count` such requests have come; whether they have."""
        with self.lock:
            return self.lock.wait_for(lambda: len(self.requests(match)) >= count, timeout)

    def create(self, name, private=True):
        """A new repository with the first commit that each has."""
        with self.lock:
            repo = self.repos[name] = {"private": private, "refs": {}, "commits": {}, "lfs": {}}
            self.land(repo, "main", {".gitattributes": self.entry(b"*.safetensors filter=lfs\n")}, "initial commit")

    def head(self, name, branch="main"):
        return self.repos[name]["refs"][branch]

    def files(self, name, revision="main"):
        """{path: (sha256, bytes)}."""
        repo = self.repos[name]
        tree = repo["commits"][repo["refs"].get(revision, revision)]["tree"]
        return {path: tuple(entry[:2]) for path, entry in tree.items()}

    def tree(self, name, revision="main"):
        """{path: the bytes in the store, whether or not they have the hash under which they lie there}."""
        return {path: (self.blobs / sha256).read_bytes() for path, (sha256, _) in self.files(name, revision).items()}

    def history(self, name, branch="main"):
        """[(commit, title)], newest first."""
        repo = self.repos[name]
        return [(oid, repo["commits"][oid]["title"]) for oid in ancestors(repo, repo["refs"][branch])]

    def commit(self, name, files, title="from elsewhere", branch="main"):
        """Commits {path: bytes, or None to delete} as somebody else would; the commit."""
        with self.lock:
            repo = self.repos[name]
            new = {path: self.entry(content, path.endswith(LARGE))
                   for path, content in files.items() if content is not None}
            old = repo["commits"][repo["refs"][branch]]["tree"]
            return self.land(repo, branch, {path: old[path] for path in old if path not in files} | new, title)

    def entry(self, content, large=False):
        """Keeps bytes; their entry."""
        sha256 = hashlib.sha256(content).hexdigest()
        keep(self.blobs / sha256, content)
        return entry_of(sha256, len(content), None if large else content)

    def land(self, repo, branch, tree, title, message="", squash=False):
        """Puts a commit on a branch. After a squash it stands alone, and what no branch holds is gone."""
        row = {"parent": None if squash else repo["refs"].get(branch), "title": title, "message": message,
               "date": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()), "tree": tree}
        new = hashlib.sha1(json.dumps([row, len(repo["commits"])], sort_keys=True).encode()).hexdigest()
        repo["commits"][new], repo["refs"][branch] = row, new
        held = {oid for head in repo["refs"].values() for oid in ancestors(repo, head)} if squash else {new}
        lfs = {entry[0]: entry[1] for oid in held for entry in repo["commits"][oid]["tree"].values() if entry[2]}
        repo["lfs"] = lfs if squash and self.squash_frees else repo["lfs"] | lfs
        repo["commits"] = {oid: row for oid, row in repo["commits"].items() if oid in held or not squash}
        keep(self.folder / "state.json", json.dumps(self.repos).encode())
        return new


def keep(path, content):
    """Writes a file so that it is whole or not there, whatever ends this process."""
    path.with_name(path.name + ".new").write_bytes(content)
    os.replace(path.with_name(path.name + ".new"), path)


def entry_of(sha256, size, content=None):
    """What a tree has for a file: [sha256, size, whether large, git's name]; git has a pointer to a large one."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    in_git = pointer.encode() if content is None else content
    return [sha256, size, content is None, hashlib.sha1(b"blob %d\0" % len(in_git) + in_git).hexdigest()]


def ancestors(repo, oid):
    while oid:
        yield oid
        oid = repo["commits"][oid]["parent"]


def route(methods, pattern, need="read"):
    """Says what a method of Handler answers, and what a token must allow, or that it is of the "store"."""
    for word, meaning in {"NAME": "(?P<name>[^/]+/[^/]+)", "KIND": "(?P<kind>models/|datasets/|spaces/)",
                          "REV": "(?P<rev>[^/]+)", "SHA": "(?P<sha256>[0-9a-f]{64})"}.items():
        pattern = pattern.replace(word, meaning)
    return lambda function: ROUTES.append((methods, re.compile(pattern), need, function)) or function


class Handler(BaseHTTPRequestHandler):
    """A route gives JSON or (status, bytes, headers); a larger Content-Length than its bytes is a body that is cut."""
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def answer(self):
        """Reads a request, logs it, does it unless a fault forbids, answers; ConnectionError cuts."""
        hub, self.hub, self.url = self.server.hub, self.server.hub, urlsplit(self.path)
        self.query, length = parse_qs(self.url.query), int(self.headers.get("Content-Length") or 0)
        line, self.body = unquote(f"{self.command} {self.path}"), self.rfile.read(length)
        if len(self.body) < length or not hub.running:
            raise ConnectionAbortedError
        if self.command == "POST" and "/commit/" in self.path:
            self.rows = [json.loads(row) for row in self.body.splitlines() if row.strip()]
            line = " ".join([line, self.rows[0]["value"]["summary"], *(row["value"]["path"] for row in self.rows[1:])])
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        self.role = hub.roles.get(token, "bad") if kind else None
        self.record = {"server": self.server.name, "method": self.command, "line": line, "time": time.time(),
                       "path": unquote(self.url.path), "range": self.headers.get("Range"), "token": self.role,
                       "status": None, "fault": ""}
        with hub.lock:
            hub.log.append(self.record)
            hub.lock.notify_all()
            reply = self.fate(hub.pick(self.record, "status", "drop", "hang", "lost_reply"))
        self.send(*reply)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def fate(self, fault):
        """The answer under a fault of the plan, or ConnectionError."""
        hub, kind, text = self.hub, fault.get("kind"), json.dumps({"error": fault.get("text", "as planned")}).encode()
        planned = fault.get("code", 504 if kind == "lost_reply" else 503), text, fault.get("headers", {})
        if kind == "hang":
            hub.lock.wait_for(lambda: not hub.running, fault.get("seconds", 3600))
        is_cut = fault.get("drop", kind == "drop") or not hub.running
        done = self.routed() if kind == "lost_reply" or kind != "status" and not is_cut else planned
        reply = planned if kind == "lost_reply" else done
        hub.done(self.record, 0 if is_cut else reply[0])
        if kind == "lost_reply":
            hub.lock.wait_for(lambda: not hub.running, fault.get("seconds", 0))
        if is_cut or not hub.running:
            raise ConnectionAbortedError
        return reply

    def routed(self):
        try:
            for methods, pattern, need, function in ROUTES:
                found = (need == "store") == (self.server.name == "store") and pattern.fullmatch(self.url.path)
                if found and self.command in methods:
                    words = {name: word and unquote(word) for name, word in found.groupdict().items()}
                    reply = function(self, **self.admitted(need, words))
                    return reply if isinstance(reply, tuple) else (200, json.dumps(reply).encode(), {})
            raise Refused(404, "there is no such route")
        except Refused as refused:
            status, text, code, more = refused.args + ("", {})[len(refused.args) - 2:]
            headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
            return status, json.dumps({"error": text} | more).encode(), headers

    def admitted(self, need, words):
        """The arguments of a route, if the token or link allows it; `repo` stands for kind and name."""
        signature = self.query.get("X-Amz-Signature", ["none"])[0]
        if need == "store" and (self.role or not self.link(self.url.path).endswith(f"={signature}")):
            raise Refused(400 if self.role else 403, "The store wants a right signature and no token")
        if self.role == "bad" or need in ("user", "write") and self.role is None:
            raise Refused(401, "Invalid username or password.")
        if "name" in words:
            self.key = (words.pop("kind") or "").replace("models/", "") + words.pop("name")
            words["repo"] = repo = self.hub.repos.get(self.key)
            if repo is None or repo["private"] and self.role is None:
                raise Refused(404 if self.role else 401, "Repository Not Found", "RepoNotFound")
        if need == "write" and self.role != "write":
            raise Refused(403, "You don't have the rights for this")
        return words

    def send(self, status, body, headers):
        self.send_response_only(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")
        if headers.get("Content-Length", 0) > len(body):
            raise ConnectionAbortedError

    def ranged(self, sha256, headers):
        """The answer with a file, or the range of it that was asked for, under the faults of bodies."""
        size = (self.hub.blobs / sha256).stat().st_size
        found, first, end = re.match(r"bytes=(\d+)-(\d*)", self.record["range"] or ""), 0, size
        kinds = ("corrupt", "truncate", "norange") if found else ("corrupt", "truncate")
        fault = self.hub.pick(self.record, *kinds) if self.command == "GET" and size else {}
        if found and fault.get("kind") != "norange":
            first, end = int(found[1]), min(int(found[2] or end) + 1, end)
            if first >= end:
                raise Refused(416, f"there are only {size} bytes")
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        with open(self.hub.blobs / sha256, "rb") as file:
            content = bytearray(os.pread(file.fileno(), end - first, first))
        if fault.get("kind") == "corrupt" and first <= (at := fault.get("at", (first + end) // 2)) < end:
            content[at - first] ^= 1
        headers |= {"Content-Length": end - first, "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        del content[(end - first) // 2 if fault.get("kind") == "truncate" else end - first:]
        return 206 if "Content-Range" in headers else 200, content, headers

    def at(self, repo, rev, writes=False):
        """(commit, tree) of a branch, a commit or the beginning of one, for a reader under the faults of reads."""
        found = [repo["refs"].get(rev), *(oid for oid in repo["commits"] if oid.startswith(rev) and rev[6:])]
        if not any(found):
            raise Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        line = list(ancestors(repo, found[0] or found[1]))
        stale = found[0] and not writes and self.hub.pick(self.record, "stale_resolve")
        oid = line[min(stale.get("back", 1), len(line) - 1) if stale else 0]
        tree, fault = repo["commits"][oid]["tree"], {} if writes else self.hub.pick(self.record, "missing")
        return oid, {path: tree[path] for path in tree if not (fault and re.search(fault.get("path", ""), path))}

    @route("GET POST", "/api/(whoami-v2|validate-yaml)", "user")
    def whoami(self):
        return {"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": self.role}}}

    @route("GET", "/api/KINDNAME(?:/revision/REV)?")
    def info(self, repo, rev):
        oid, tree = self.at(repo, rev or "main")
        name, blobs = "/".join(self.key.split("/")[-2:]), self.query.get("blobs") == ["true"]
        siblings = [{"rfilename": path} | ({"size": size, "blobId": git, "lfs": large and {
                        "sha256": sha256, "size": size, "pointerSize": 134} or None} if blobs else {})
                    for path, (sha256, size, large, git) in sorted(tree.items())]
        used, wanted = sum(repo["lfs"].values()), self.query.get("expand", [])
        row = {"id": name, "sha": oid, "private": repo["private"], "siblings": siblings, "usedStorage": used}
        return {word: row[word] for word in row if not wanted or word in ["id", *wanted]}

    @route("GET", "/api/KINDNAME/refs")
    def refs(self, repo):
        return {"converts": [], "tags": [], "pullRequests": [], "branches": [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in repo["refs"].items()]}

    @route("GET", "/api/KINDNAME/commits/REV")
    def commits(self, repo, rev):
        return self.paged([{"id": oid, "authors": [{"user": "me"}], **repo["commits"][oid], "tree": None}
                           for oid in ancestors(repo, self.at(repo, rev)[0])])

    def paged(self, rows):
        start, page, headers = int(self.query.get("cursor", ["0"])[0]), self.hub.page, {}
        if start + page < len(rows):
            query = urlencode({**self.query, "cursor": [start + page]}, doseq=True)
            headers["Link"] = f'<{self.hub.url}{self.url.path}?{query}>; rel="next"'
        return 200, json.dumps(rows[start:start + page]).encode(), headers

    @route("POST", "/api/KINDNAME/paths-info/REV(?P<folder>)")
    @route("GET", "/api/KINDNAME/tree/REV(?:/(?P<folder>.+))?")
    def tree(self, repo, rev, folder):
        """The rows of files and folders: of some paths, or of a folder in pages."""
        tree = self.at(repo, rev)[1]
        rows = {path[:i]: {"type": "directory", "path": path[:i], "oid": "0" * 40, "size": 0}
                for path in tree for i, sign in enumerate(path) if sign == "/"}
        for path, (sha256, size, large, git) in tree.items():
            rows[path] = {"type": "file", "path": path, "oid": git, "size": size,
                          "lfs": {"oid": sha256, "size": size, "pointerSize": 134} if large else None}
        if self.command == "POST":
            return [rows[path] for path in parse_qs(self.body.decode())["paths"] if path in rows]
        start, deep = f"{folder}/" if folder else "", self.query.get("recursive", [""])[0].lower() == "true"
        found = [rows[path] for path in sorted(rows)
                 if path.startswith(start) and (deep or "/" not in path[len(start):])]
        if folder and not found:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        return self.paged(found)

    @route("GET HEAD", "/(?P<kind>datasets/|spaces/)?NAME/resolve/REV/(?P<path>.+)")
    @route("GET HEAD", "/api/resolve-cache/(?P<kind>datasets/|spaces/)?NAME/REV/(?P<path>.+)")
    def resolve(self, repo, rev, path):
        """A large file: a redirect to the store; a small one of a public repository: one within the hub."""
        oid, tree = self.at(repo, rev)
        if path not in tree:
            raise Refused(404, "Entry not found", "EntryNotFound")
        sha256, size, large, git = tree[path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{sha256 if large else git}"'}
        if large:
            headers["Location"] = self.link(f"/lfs/{sha256}", file=path)
        elif size and not repo["private"] and not self.path.startswith("/api/"):
            headers["Location"] = f"/api/resolve-cache/{self.key}/{oid}/{quote(path)}?etag={git}"
        else:
            return self.ranged(sha256, headers)
        return 302 if large else 307, b"", {"X-Linked-Size": size, "X-Linked-Etag": headers["ETag"], **headers}

    @route("POST", "/api/repos/create", "write")
    def create(self):
        row = json.loads(self.body)
        key = f"{row.get('type') or 'model'}s/{row.get('organization') or 'me'}/{row['name']}".removeprefix("models/")
        if key in self.hub.repos:
            raise Refused(409, "You already created this repo", "", {"url": f"{self.hub.url}/{key}"})
        self.hub.create(key, bool(row.get("private")) or row.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{key}"}

    @route("POST", "/api/KINDNAME/preupload/REV", "write")
    def preupload(self, repo, rev):
        present, ignored = self.at(repo, rev, writes=True)[1], self.hub.pick(self.record, "ignored")
        rows = json.loads(self.body)["files"]
        for row in rows:
            path, binary = row["path"], b"\0" in base64.b64decode(row["sample"])
            large = row["size"] and (path.endswith(LARGE) or row["size"] > self.hub.large or binary)
            row |= {"uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": bool(ignored and re.search(ignored.get("path", ""), path)),
                    "oid": present[path][0 if present[path][2] else 3] if path in present else None}
        return {"files": rows}

    @route("POST", "/api/KINDNAME/commit/REV", "write")
    def commit(self, repo, rev):
        hub, header = self.hub, self.rows.pop(0)["value"]
        if race := hub.pick(self.record, "race"):
            hub.commit(self.key, {path: text.encode() for path, text in race["files"].items()}, branch=rev)
        head, tree = self.at(repo, rev, writes=True)
        if not head.startswith(header.get("parentCommit") or ""):
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        for row in self.rows:
            self.change(tree, row["key"], row["value"])
        self.check_quota(repo, {entry[0]: entry[1] for entry in tree.values() if entry[2]})
        oid = self.record["commit"] = hub.land(repo, rev, tree, header["summary"], header.get("description", ""))
        return {"commitOid": oid, "commitUrl": f"{hub.url}/{self.key}/commit/{oid}"}

    def check_quota(self, repo, new):
        if self.hub.quota and new.keys() - repo["lfs"].keys() and sum((repo["lfs"] | new).values()) > self.hub.quota:
            raise Refused(403, "Private repository storage limit reached, please upgrade your plan")

    def change(self, tree, kind, value):
        """Does one operation of a commit to a tree."""
        path = value["path"]
        if kind == "file":
            tree[path] = self.hub.entry(base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            if not (self.hub.blobs / value["oid"]).exists():
                raise Refused(400, f"LFS pointer of {path} pointed to a file that does not exist")
            tree[path] = entry_of(value["oid"], (self.hub.blobs / value["oid"]).stat().st_size)
        else:
            gone = [name for name in tree if f"{name}/".startswith(path.rstrip("/") + "/")]
            if not gone:
                raise Refused(404, f"{path} does not exist", "EntryNotFound")
            for name in gone:
                del tree[name]

    @route("POST", "/api/KINDNAME/super-squash/REV", "write")
    def super_squash(self, repo, rev):
        tree, title = self.at(repo, rev, writes=True)[1], json.loads(self.body)["message"]
        return {"commitOid": self.hub.land(repo, rev, tree, title, squash=True)}

    def link(self, path, **query):
        signature = hashlib.sha256(f"the store's secret {path}".encode()).hexdigest()
        return f"{self.hub.store}{path}?{urlencode({**query, 'X-Amz-Signature': signature})}"

    @route("POST", r"/(?P<kind>datasets/|spaces/)?NAME\.git/info/lfs/objects/(?P<step>batch|verify)", "write")
    def lfs(self, repo, step):
        hub, asked = self.hub, json.loads(self.body)
        if step == "verify":
            return {} if (hub.blobs / asked["oid"]).stat().st_size == asked["size"] else (422, b"{}", {})
        new = [row for row in asked["objects"] if not (hub.blobs / row["oid"]).exists()]
        self.check_quota(repo, {row["oid"]: row["size"] for row in new})
        for row in new:
            oid, parts = row["oid"], -(-row["size"] // hub.chunk) if hub.chunk else 1
            upload = {"href": self.link(f"/lfs/{oid}")}
            if parts > 1:
                links = {f"{i:05d}": self.link(f"/part/{oid}.{i}") for i in range(1, parts + 1)}
                upload = {"href": self.link(f"/whole/{oid}"), "header": {"chunk_size": str(hub.chunk), **links}}
            row["actions"] = {"upload": upload, "verify": {"href": hub.url + self.url.path.replace("batch", "verify")}}
        return {"transfer": "multipart" if hub.chunk else "basic", "objects": asked["objects"]}

    @route("PUT", "/lfs/SHA|/part/(?P<part>[0-9a-f]{64}[.][0-9]+)", "store")
    def put(self, sha256, part):
        """Keeps a large file, if it has the hash of its name, or a part of one."""
        found, fault = hashlib.sha256(self.body).hexdigest(), self.hub.pick(self.record, "corrupt")
        if not part and sha256 != found:
            raise Refused(400, "BadDigest: other bytes than the name says")
        body = bytearray(self.body)
        body[fault.get("at", len(body) // 2)] ^= bool(fault)
        keep(self.hub.blobs / (part or sha256), body)
        return 200, b"", {"ETag": f'"{found}"'}

    @route("POST", "/whole/SHA", "store")
    def whole(self, sha256):
        parts = [self.hub.blobs / f"{sha256}.{row['partNumber']}" for row in json.loads(self.body)["parts"]]
        keep(self.hub.blobs / sha256, b"".join(part.read_bytes() for part in parts))
        return {}

    @route("GET HEAD", "/lfs/SHA", "store")
    def get(self, sha256):
        return self.ranged(sha256, {"ETag": f'"{sha256}"'})


def main():
    """--folder DIR --port-file FILE [--faults JSON] [--seed S] [--options JSON]: a process of its own, until killed."""
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    given = lambda name, default: json.loads(words.get(name, default))
    with Hub(words["--folder"], given("--faults", "[]"), seed=given("--seed", "0"), **given("--options", "{}")) as hub:
        keep(Path(words["--port-file"]), json.dumps({"url": hub.url, "ports": hub.ports}).encode())
        threading.Event().wait()


if __name__ == "__main__":
    main()
