"""Checkpoint folders to and from a Hugging Face Hub repository, which is laid out as the folder of a run.

python hub.py status owner/name                      # what lies there and what is pointed at
python hub.py verify owner/name [--full]             # each checkpoint against its manifest; --full hashes every byte
python hub.py pull owner/name --out OUT_DIR          # the newest checkpoint, where OUT_DIR does not go on from it
python hub.py push owner/name --out OUT_DIR          # the checkpoint that OUT_DIR/latest.json names
python hub.py prune owner/name --keep 2              # older checkpoints; milestones stay

The cycle of a push: one commit -> its listing against the manifest -> bytes fetched back -> the pointer (latest.json)
by compare-and-swap -> the pointer read back -> only then what is older is deleted. The pointer decides: a session
whose checkpoint does not descend from the one pointed at has been overtaken and pushes nothing more.

The client of the Hub runs in child processes alone (`python hub.py work ...`), killed at a job's deadline or with the
parent; one that has pushed waits for the next push, since loading the client costs more than that. Jobs and what a
child says of them are lines of JSON; it loads no torch. The token comes from HF_TOKEN or the client's login; `masked`
keeps it and signed links out of all that is said.
"""

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEP = re.compile("step_([0-9]{8}|[1-9][0-9]{8,})")
STORY = (  # of a run, up to a checkpoint; and samples/. Energy is counted on from the last line of machine.jsonl
    "metrics.jsonl", "events.jsonl", "windows.jsonl", "machine.jsonl", "config.json")
WEIGHTS = ("model.safetensors", "model.json", "tokenizer.json", "manifest.json")
POINTER = {"format": int, "run": str, "step": int, "tokens": int, "windows": int, "checkpoint": str,
           "manifest_sha256": str, "commit": str, "nonce": str}
PIECE, SMALL, CHUNK = 1 << 18, 1 << 20, 16 << 20  # bytes: of a sampled range, read whole, read at once
SAMPLES = 4  # random ranges of a large file that are fetched back after each push, beside its head and tail
ROUNDS = 5  # of a cycle in one child: a commit that may have landed is looked for, another writer's is built on
TRIES = 3  # of one request that the network or the Hub's load has spoilt
NET = {"timeout_s": 90.0, "pause_s": 1.0}  # silence of a socket (the Hub itself cuts a commit at 60 s); first pause
SLOWEST = 1e6  # bytes a second below which a child is taken to hang
GRACE_S = 600  # of a child beside its bytes
RETRY_S = 300.0  # the longest pause between attempts of a push
AFTER_SIGNAL_S = 18.0  # after a signal: when a push is given up
BURST_S, RESTS = 0.005, 2  # of work, after which the process that pushes rests twice as long as it waited for a core
FIRST_GUESS = 20e6  # bytes a second that a push is taken to send before one has been seen
ADVICE = {
    "refused": "; the token, of HF_TOKEN or of the client's login, must be one that may write there",
    "missing": "; is the name right, and may the token see it?",
    "unreachable": "; nothing is started without a look at the Hub: start again when it answers, or set hub_repo=''",
    "killed": "; nothing is started without a look at the Hub: start again when it answers, or set hub_repo=''"}


class HubError(OSError):
    """Work with the Hub that failed; kind: refused, missing, damaged, unreachable, overtaken, full, killed, unsure or
    error."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind

    def __reduce__(self):  # rank 0 tells the others
        return HubError, (self.kind, str(self))


def masked(text):
    """A text without tokens and without what follows the question mark of an address."""
    for secret in map(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")):
        if secret and secret.strip():
            text = text.replace(secret.strip(), "***")
    text = re.sub(r"(\bhf_)[A-Za-z0-9]{8,}|((?i:bearer)\s+)[\w.-]{6,}", r"\1\2***", text)
    text = re.sub(r"(https?://[^\s?\"'<>]*)\?[^\s\"'<>]*", r"\1?...", text)
    return re.sub(r"(?i)\b(x-amz-[\w-]+|signature|policy|key-pair-id|token)=[^\s&\"'<>]+", r"\1=***", text)


def precedes(pointed, trainer):
    """Whether a pointer names a checkpoint, or one that its training has come through, by the latter's trainer.json."""
    nonces = [nonce for nonce, _ in trainer["lineage"]]
    if pointed["run"] != trainer["run"] or pointed["nonce"] not in nonces:
        return False
    later = trainer["lineage"][nonces.index(pointed["nonce"]) + 1:]
    return pointed["step"] <= (later[0][1] if later else trainer["step"])


def check_repo(repo):
    """Raises ValueError where a repository's name, the client or its mode cannot do."""
    import importlib.util

    if not re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", repo):
        raise ValueError(f"{repo!r} is not a repository of the Hub; write owner/name")
    if not importlib.util.find_spec("huggingface_hub"):
        raise ValueError("the Hub needs a package that is not installed: pip install 'huggingface_hub>=1.31,<3'")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ValueError(f"{name} is set, so {repo} cannot be reached; unset it, or set hub_repo=''")


# -- in a child: the client's calls

class Hub:
    """A repository and the few calls that are made to it, every read by commit and strict about what comes."""

    def __init__(self, repo, timeout_s, pause_s, token=None):
        from huggingface_hub import HfApi, set_client_factory
        from huggingface_hub.utils._http import default_client_factory

        def client():
            made = default_client_factory()
            made.timeout = type(made.timeout)(timeout_s, connect=min(10, timeout_s))  # its own is to wait for ever
            return made
        set_client_factory(client)
        self.api, self.repo, self.token = HfApi(token=token), repo, token
        self.timeout_s, self.pause_s = timeout_s, pause_s

    def patiently(self, call, *arguments):
        """Make a call again, TRIES times in all, where the network, the Hub's load or a flipped bit has spoilt it."""
        for attempt in range(TRIES):
            try:
                return call(*arguments)
            except Exception as error:  # client, HTTP library and sockets each have their own; kind_of sorts them
                if attempt == TRIES - 1 or kind_of(error) not in ("unreachable", "damaged"):
                    raise
                time.sleep(pause_after(error, attempt, self.pause_s))

    def head(self, private=None):
        """The newest commit; with `private` the repository is made, private or not, where there is none."""
        from huggingface_hub.errors import RepositoryNotFoundError

        newest = lambda: self.api.repo_info(self.repo, timeout=self.timeout_s).sha
        try:
            return self.patiently(newest)
        except RepositoryNotFoundError:  # the Hub says so too of one that this token may not see; then making it fails
            if private is None:
                raise
        self.patiently(lambda: self.api.create_repo(self.repo, private=private, exist_ok=True))
        return self.patiently(newest)

    def files(self, revision):
        """{path: what the Hub says of the file} of a commit."""
        return self.patiently(lambda: {entry.path: entry for entry in self.api.list_repo_tree(
            self.repo, recursive=True, revision=revision) if hasattr(entry, "size")})

    def used(self):
        """Bytes that the whole history holds."""
        return self.patiently(lambda: self.api.repo_info(
            self.repo, timeout=self.timeout_s, expand=["usedStorage"]).used_storage or 0)

    def read(self, path, revision, first=0, last=None, size=None):
        """Bytes first..last of a file of `size` bytes, or the whole of it. Raises: HubError where others come."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        ranged = size is not None and (first, last) != (0, size - 1)
        headers = build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}  # or a range counts packed bytes
        headers |= {"Range": f"bytes={first}-{last}"} if ranged else {}
        with get_session().stream("GET", hf_hub_url(self.repo, path, revision=revision), headers=headers) as answer:
            if answer.status_code >= 400:
                answer.read()
                hf_raise_for_status(answer)
            found = answer.status_code, answer.headers.get("Content-Range")
            wanted = (206, f"bytes {first}-{last}/{size}") if ranged else (200, None)
            if found != wanted:
                raise HubError("damaged", f"{path}: the answer is {found}, wanted {wanted}")
            content = bytearray()
            for block in answer.iter_raw():
                content += block
                if size is not None and len(content) > last - first + 1:
                    break
        if size is not None and len(content) != last - first + 1:
            raise HubError("damaged", f"{path}: {len(content)} bytes or more came of {last - first + 1}")
        tag = re.search('"([0-9a-f]{40})"', answer.headers.get("ETag", ""))  # git's name of a file that is not large
        if tag and not ranged and tag[1] != hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest():
            raise HubError("damaged", f"{path}: other bytes came than its ETag says")
        return bytes(content)

    def json(self, path, revision):
        """A small file of JSON. Raises: HubError where it is none."""
        try:
            return json.loads(self.patiently(self.read, path, revision))
        except ValueError as error:
            raise HubError("damaged", f"{path}: {error}") from error

    def pointer(self, revision):
        """What latest.json of a commit says, None where the commit has none. Raises: HubError where it is damaged."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return self.patiently(lambda: pointer_of(self.read("latest.json", revision)))
        except EntryNotFoundError:
            if "latest.json" in self.files(revision):
                raise
        return None

    def commit(self, operations, message, parent):
        """One commit on top of `parent`; its name. Raises: HubError 'unsure' where it may have landed all the same."""
        try:
            return self.api.create_commit(self.repo, operations, commit_message=message, parent_commit=parent).oid
        except Exception as error:  # an answer, or none, proves nothing: the caller looks at the head
            if (kind := kind_of(error)) in ("refused", "full"):
                raise
            unsure = HubError("unsure", f"{kind}: {text_of(error)}")
            unsure.response = response_of(error)
            raise unsure from error


def response_of(error):
    """The HTTP answer behind an exception, or None; a failed upload of a large file has it in its cause."""
    while error is not None and getattr(error, "response", None) is None:
        error = error.__cause__
    return getattr(error, "response", None)


def kind_of(error):
    """The kind of HubError that an exception is."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, HubError):
        return error.kind
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return "error"  # of this disk
    status = getattr(response_of(error), "status_code", 0)
    if status in (402, 403, 413, 507) and re.search("storage|quota", getattr(error, "server_message", "") or ""):
        return "full"
    if status in (401, 403):
        return "refused"
    if status in (404, 410) or isinstance(error, (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError)):
        return "missing"
    transport = isinstance(error, OSError) or type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore")
    return "unreachable" if status in (408, 429) or status >= 500 or not status and (
        transport or isinstance(error, RuntimeError)) else "error"


def text_of(error):
    """What an exception says, on one line."""
    cause = f": {error.__cause__}" if isinstance(error, RuntimeError) and error.__cause__ else ""  # an upload's
    return masked(" ".join(f"{error}{cause}".split())[:900] or type(error).__name__)


def pause_after(error, attempt, pause_s):
    """Seconds to wait after a failure: twice as long each time, and as long as a busy Hub asks for, within bounds."""
    headers = getattr(response_of(error), "headers", {})
    asked = re.search(r"\d+", headers.get("Retry-After", "")) or re.search(r"(?<=t=)\d+", headers.get("RateLimit", ""))
    return max(min(pause_s * 2 ** attempt, 60), min(int(asked[0]), 300) if asked else 0)


def pointer_of(content):
    """The pointer in the bytes of a latest.json. Raises: HubError where none could have been written so."""
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not (isinstance(found, dict) and all(type(found.get(key)) is kind for key, kind in POINTER.items())
            and found["format"] == 1 and found["checkpoint"] == f"step_{found['step']:08d}"
            and re.fullmatch("[0-9a-f]{64}", found["manifest_sha256"])
            and re.fullmatch("([0-9a-f]{40})?", found["commit"])):
        raise HubError("damaged", f"latest.json on the Hub is damaged: {content[:200]!r}")
    return found


def is_same(entry, path, sha256=None):
    """Whether a file is, by size and hash, the one that the Hub lists (None: it lists none)."""
    if entry is None or entry.size != os.path.getsize(path):
        return False
    if entry.lfs:
        return entry.lfs.sha256 == (sha256 or digest_of(path, hashlib.sha256()))
    return entry.blob_id == digest_of(path, hashlib.sha1(b"blob %d\0" % entry.size))


def digest_of(path, found):
    with open(path, "rb") as file:
        while block := file.read(SMALL):
            found.update(block)
    return found.hexdigest()


def spans_of(size, full):
    """The ranges [(first, last), ...] of a file to read: all of it, or of a large one head, tail and some between."""
    if full or size <= SMALL:
        return [(first, min(first + CHUNK, size) - 1) for first in range(0, size, CHUNK)]
    firsts = [0, size - PIECE, *(random.SystemRandom().randrange(size - PIECE) for _ in range(SAMPLES))]
    return [(first, first + PIECE - 1) for first in firsts]


def each(function, rows):
    """function(*row) of each row, four at a time; the results in order."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda row: function(*row), rows))


def emit(**said):
    """Tell the parent one thing."""
    said = {key: masked(value) if isinstance(value, str) else round(value, 3) if isinstance(value, float) else value
            for key, value in said.items()}
    sys.__stdout__.write(json.dumps(said) + "\n")
    sys.__stdout__.flush()


def folders_of(files, kind="checkpoints"):
    """The names of checkpoint folders among paths, newest first."""
    found = {path.split("/")[1] for path in files if re.fullmatch(f"{kind}/{STEP.pattern}/[^/]+", path)}
    return sorted(found, key=lambda name: int(name[5:]), reverse=True)


# -- in a child: one push

def push(hub, job):
    """The whole cycle for the checkpoint in a payload folder; safe to do again after it was cut anywhere."""
    from huggingface_hub import CommitOperationAdd

    place = Path(job["place"])
    adds = {str(path.relative_to(place)): CommitOperationAdd(str(path.relative_to(place)), str(path))
            for path in sorted(place.rglob("*")) if path.is_file()}
    ours, trainer = describe(place, adds)
    for attempt in range(ROUNDS):
        try:
            return cycle(hub, job, ours, trainer, adds)
        except HubError as error:
            if error.kind != "unsure" or attempt == ROUNDS - 1:
                raise
            emit(event="hub_error", cause=str(error), kind="unsure")
            time.sleep(pause_after(error, attempt, hub.pause_s))


def describe(place, adds):
    """(the pointer to the checkpoint in a payload but for its commit, its trainer.json). Raises: HubError."""
    folder = next(place.glob("checkpoints/step_*"))
    manifest, trainer = (json.loads((folder / name).read_text()) for name in ("manifest.json", "trainer.json"))
    for entry in manifest["files"]:
        found = adds[f"checkpoints/{folder.name}/{entry['name']}"].upload_info.sha256.hex()
        if found != entry["sha256"]:
            raise HubError("damaged", f"{folder.name}: {entry['name']} on this disk is not what its manifest says")
    return {"format": 1, **{key: trainer[key] for key in ("run", "step", "tokens", "windows")},
            "checkpoint": folder.name, "manifest_sha256": digest_of(folder / "manifest.json", hashlib.sha256()),
            "commit": "", "nonce": trainer["lineage"][-1][0]}, trainer


def cycle(hub, job, ours, trainer, adds):
    """One round of a push. Raises: HubError, 'unsure' where a look at the head must decide what has happened."""
    head = hub.head(job["private"])
    pointed = hub.pointer(head)
    known = job["over"] and pointed and pointed["run"] == ours["run"] and bare(pointed) == bare(job["over"])
    if pointed and not precedes(pointed, trainer) and not known:
        raise HubError("overtaken", overtaken_text(hub.repo, pointed, ours))
    there = hub.files(head)
    todo = {path: add for path, add in adds.items()
            if not is_same(there.get(path), add.path_or_fileobj, add.upload_info.sha256.hex())}
    if todo or not pointed or bare(pointed) != ours:
        head = store(hub, job, head, pointed, ours, trainer, adds, todo, there)
    else:
        read_back(hub, pointed, head, trainer)
    try:
        prune(hub, head, trainer, job["keep"])
    except Exception as error:  # the push is through, and the next one prunes again
        emit(event="hub_error", kind=kind_of(error), cause=f"older checkpoints stay for now: {text_of(error)}")
    return {"commit": head}


def bare(pointed):
    """A pointer without the commit that it names, which a squash changes."""
    return pointed | {"commit": ""}


def overtaken_text(repo, pointed, ours):
    if pointed["run"] != ours["run"]:
        return f"{repo} holds run {pointed['run']}, and this is run {ours['run']}; set another hub_repo"
    return (f"{repo} points at step {pointed['step']:,} of session {pointed['nonce']}, and step {ours['step']:,} of "
            f"session {ours['nonce']} does not descend from it: another session has taken the run over, and this one "
            "stops. Its checkpoints in out_dir are whole; a new start goes on from the Hub's")


def store(hub, job, head, pointed, ours, trainer, adds, todo, there):
    """Commit what the Hub lacks, check it there, point at it; returns the pointer's commit."""
    began, size = time.monotonic(), sum(add.upload_info.size for add in todo.values())
    head = make_room(hub, job, head, pointed, size)
    hub.api.preupload_lfs_files(hub.repo, additions=list(todo.values()), free_memory=False)
    folder = f"checkpoints/{ours['checkpoint']}/"
    operations = [*todo.values(), *deletions(path for path in there if path.startswith(folder) and path not in adds)]
    title = f"step {ours['step']} of run {ours['run']}, session {ours['nonce']}"
    oid = hub.commit(operations, title, head) if operations else head
    emit(event="push", checkpoint=ours["checkpoint"], commit=oid, bytes=size, seconds=time.monotonic() - began)

    began, listed = time.monotonic(), hub.files(oid)
    if wrong := [path for path, add in adds.items() if not is_same(
            listed.get(path), add.path_or_fileobj, add.upload_info.sha256.hex())]:
        raise HubError("damaged", f"{hub.repo} at {oid[:8]} does not list what was sent: {', '.join(wrong[:8])}")
    is_verified = pointed and bare(pointed) == ours  # then it is only the run's story that has grown
    checked = [path for path in adds if path in todo or path.startswith(folder) and not is_verified]

    def compare(path, first, last):
        found = hub.read(path, oid, first, last, adds[path].upload_info.size)
        with open(adds[path].path_or_fileobj, "rb") as file:
            file.seek(first)
            if file.read(last - first + 1) != found:
                raise HubError("damaged", f"{path} at {oid[:8]}: bytes {first}-{last} are not those that were sent")
        return len(found)
    read = each(lambda *row: hub.patiently(compare, *row), [
        (path, *span) for path in checked for span in spans_of(adds[path].upload_info.size, job["verify"] == "full")])
    emit(event="verify", checkpoint=ours["checkpoint"], bytes=sum(read), ranges=len(read),
         seconds=time.monotonic() - began)

    began = time.monotonic()
    rolled = roll(hub, ours | {"commit": oid}, oid, trainer)
    emit(event="pointer", checkpoint=ours["checkpoint"], commit=rolled, seconds=time.monotonic() - began)
    return rolled


def deletions(paths):
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(path, is_folder=path.endswith("/")) for path in paths]


def roll(hub, pointed, parent, trainer=None):
    """Commit a pointer on top of `parent`, and read it back; returns its commit."""
    from huggingface_hub import CommitOperationAdd

    content = (json.dumps(pointed, indent=1) + "\n").encode()
    oid = hub.commit([CommitOperationAdd("latest.json", content)], f"point at {pointed['checkpoint']}", parent)
    read_back(hub, pointed, oid, trainer)
    return oid


def read_back(hub, pointed, oid, trainer):
    """See that a commit and the branch both have this pointer. Raises: HubError 'unsure' where they do not in time, or
    where the branch has one that training has not come through: that is no late answer but another session's."""
    deadline = time.monotonic() + hub.timeout_s
    for revision in (oid, "main"):
        while (found := hub.pointer(revision)) != pointed:
            if time.monotonic() > deadline or trainer and found and not precedes(found, trainer):
                raise HubError("unsure", f"latest.json at {revision[:8]} says {found}, wanted {pointed}")
            time.sleep(min(hub.pause_s, 1))


def make_room(hub, job, head, pointed, size):
    """Squash history where `size` bytes more would be over hub_max_gb; returns the head. Raises: HubError 'full'."""
    used, limit, began = hub.used(), job["max_gb"] * 1e9, time.monotonic()
    if not limit or used + size <= limit:
        return head
    if job["may_squash"]:
        if pointed:  # a squash ends every commit: the pointer must not name one meanwhile
            check_at_head(hub, head, pointed)
            roll(hub, pointed | {"commit": ""}, head)
        hub.api.super_squash_history(hub.repo, branch="main")
        job["may_squash"] = False
        head = hub.head()
        if found := hub.pointer(head):  # of whatever session: the commit that it names has ended
            head = roll(hub, found | {"commit": head}, head)
        if pointed and bare(found) != bare(pointed):  # no compare-and-swap holds over a squash
            raise HubError("unsure", f"latest.json after a squash says {found}, wanted {pointed}")
        before, used = used, hub.used()
        emit(event="squash", bytes=before, bytes_left=used, seconds=time.monotonic() - began)
    if used + size > limit:
        raise HubError("full", f"{hub.repo} holds {used / 1e9:.3f} GB and {size / 1e9:.3f} GB more would be over "
                       f"hub_max_gb {job['max_gb']}; nothing is pushed until it is less, or hub_max_gb is raised")
    return head


def check_at_head(hub, head, pointed):
    """Raises HubError 'full' where the pointed checkpoint is in its commit alone, so that a squash would lose it."""
    files, folder = hub.files(head), f"checkpoints/{pointed['checkpoint']}/"
    content = hub.patiently(hub.read, folder + "manifest.json", head) if folder + "manifest.json" in files else b""
    if hashlib.sha256(content).hexdigest() != pointed["manifest_sha256"] or any(
            problems(json.loads(content), files, folder)):
        raise HubError("full", f"{hub.repo} is over hub_max_gb and cannot be squashed: {folder} was written over")


def problems(manifest, files, folder):
    """What differs between a manifest and the listing of its folder, as texts."""
    listed = {path[len(folder):]: entry for path, entry in files.items() if path.startswith(folder)}
    for entry in manifest["files"]:
        found = listed.pop(entry["name"], None)
        if found is None or found.size != entry["bytes"] or found.lfs and found.lfs.sha256 != entry["sha256"]:
            yield f"{entry['name']} is " + ("not there" if found is None else "not what manifest.json says")
    yield from (f"{name} is not in manifest.json" for name in listed if name != "manifest.json")


def prune(hub, head, trainer, keep):
    """Delete older checkpoints of this run but the `keep` - 1 newest that training has come through, in one commit.

    One that it has not come through was never pointed at, or is of a line that was left: no session goes on from it.
    The commit is refused where anybody has written since `head`."""
    from huggingface_hub.errors import EntryNotFoundError

    began, kept, gone = time.monotonic(), 0, []
    for name in folders_of(hub.files(head)):
        if int(name[5:]) >= trainer["step"]:
            continue
        try:
            record = hub.json(f"checkpoints/{name}/trainer.json", head)
            is_ours, before = record["run"] == trainer["run"], record | {"nonce": record["lineage"][-1][0]}
        except (HubError, EntryNotFoundError, LookupError, TypeError):  # not a checkpoint that this can judge
            continue
        if is_ours and precedes(before, trainer) and kept < max(keep, 1) - 1:
            kept += 1
        elif is_ours:
            gone.append(name)
    if gone:
        hub.commit(deletions(f"checkpoints/{name}/" for name in gone), f"prune {', '.join(gone)}", head)
        emit(event="prune", remote=gone, seconds=time.monotonic() - began)
    return gone


# -- in a child: reading

def look(hub, job):
    """What a repository holds at a revision, the head if none is given: its pointer, checkpoints and milestones. It is
    made where there is none and `private` says how."""
    deadline = time.monotonic() + hub.timeout_s
    while True:
        head = job.get("revision") or hub.head(job.get("private"))
        pointed = hub.pointer(head)
        if job.get("revision") or pointed == (latest := hub.pointer("main")):
            break
        if time.monotonic() > deadline:  # a late answer must not make a session go on from an older checkpoint
            raise HubError("unreachable", f"latest.json at the head {head[:8]} says {pointed}, at main {latest}")
        time.sleep(min(hub.pause_s, 1))
    files = hub.files(head)
    return {"head": head, "pointer": pointed, "checkpoints": folders_of(files),
            "milestones": folders_of(files, "milestones")}


def download(hub, job):
    """Bring the files that `wants` matches from a commit into a folder, each with the hash of the listing."""
    place, files = Path(job["place"]), hub.files(job["revision"])
    wanted = [path for path in files if re.fullmatch(job["wants"], path)]
    if strange := [path for path in wanted if not re.fullmatch(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", path)]:
        raise HubError("damaged", f"{hub.repo} has a file named {strange[0]!r}")

    def bring(path, first, last):
        content = hub.patiently(hub.read, path, job["revision"], first, last, files[path].size)
        with open(place / path, "r+b") as file:
            file.seek(first)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    left = wanted
    for _ in range(TRIES):
        for path in left:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(b"")
        each(bring, [(path, *span) for path in left for span in spans_of(files[path].size, True)])
        left = [path for path in left if not is_same(files[path], place / path)]
        if not left:
            return {"bytes": sum(files[path].size for path in wanted)}
    raise HubError("damaged", f"{hub.repo}: {left[0]} has other bytes than its hash says, {TRIES} times over")


def survey(hub, job):
    """A row for each checkpoint and milestone: what it holds and what is wrong with it."""
    head = hub.head()
    pointed, files, segments, rows = hub.pointer(head), hub.files(head), {}, []
    names = [f"{kind}/{name}/" for kind in ("milestones", "checkpoints") for name in reversed(folders_of(files, kind))]
    lacking = f"checkpoints/{pointed['checkpoint']}/" if pointed else ""
    for folder in names + [lacking] * (lacking not in ("", *names)):
        row = {"name": folder.rstrip("/"), "run": "", "pointed": folder == lacking, "state": "listed",
               "bytes": sum(entry.size for path, entry in files.items() if path.startswith(folder))}
        rows.append(row)
        if job["read"]:
            try:
                row["run"] = inspect(hub, head, files, folder, row["pointed"] and pointed, segments, job["full"])
                row["state"] = "whole"
            except Exception as error:  # whatever is wrong with one must not hide the others
                if kind_of(error) in ("unreachable", "refused"):
                    raise
                row["state"] = f"damaged: {text_of(error)}"
    return {"head": head, "pointer": pointed, "used": hub.used(), "rows": rows}


def inspect(hub, head, files, folder, pointed, segments, full):
    """Check one folder on the Hub, a pointed one in the commit that the pointer names; returns its run."""
    def want(right, problem):
        if not right:
            raise HubError("damaged", problem)

    if pointed and pointed["commit"]:
        head, files = pointed["commit"], hub.files(pointed["commit"])
    content = hub.patiently(hub.read, folder + "manifest.json", head)
    manifest = json.loads(content)
    for problem in problems(manifest, files, folder):
        want(False, problem)
    want(not pointed or hashlib.sha256(content).hexdigest() == pointed["manifest_sha256"],
         "manifest.json is not the one that latest.json names")
    want(folder.endswith(f"/step_{manifest['step']:08d}/"), f"manifest.json is of step {manifest['step']}")
    for entry in manifest["files"]:
        if full or not files[folder + entry["name"]].lfs:
            found = hashlib.sha256()
            for span in spans_of(entry["bytes"], True):
                found.update(hub.patiently(hub.read, folder + entry["name"], head, *span, entry["bytes"]))
            want(found.hexdigest() == entry["sha256"], f"{entry['name']} has other bytes than manifest.json says")
    if folder.startswith("checkpoints/"):
        trainer = hub.json(folder + "trainer.json", head)
        step, settings = trainer["step"], trainer["settings"]
        want((trainer["run"], step) == (manifest["run"], manifest["step"]), "trainer.json is of another run or step")
        want(trainer["windows"] * settings["block_size"] == trainer["tokens"] == step * settings["batch_tokens"],
             f"trainer.json: {trainer['tokens']} tokens, {trainer['windows']} windows at step {step}")
        key = json.dumps([trainer["run"], trainer.get("segments", [[0, []]])[-1][1]])
        found = segments.setdefault(key, trainer.get("data_fingerprint"))
        want(found == trainer.get("data_fingerprint"), "trainer.json has another data fingerprint than the others")
    return manifest["run"]


def prune_now(hub, job):
    """Prune by hand, from the pointed checkpoint."""
    head = hub.head()
    pointed = hub.pointer(head)
    if not pointed:
        raise HubError("missing", f"{hub.repo} has no latest.json, so nothing in it is known to be older")
    trainer = hub.json(f"checkpoints/{pointed['checkpoint']}/trainer.json", pointed["commit"] or head)
    return {"pruned": prune(hub, head, trainer, job["keep"])}


ACTIONS = {"push": push, "look": look, "download": download, "survey": survey, "prune": prune_now}


def step_aside():
    """Training comes first: let this process run only where a core has nothing else to do, and not all of that: even so
    steps on two busy cores get longer by about what it takes. With a core of its own it goes on at full speed."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):  # at nice 19 alone a push still made steps 6 % longer on two busy cores
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        waited = waited_s()

        def rest(*_):
            nonlocal waited
            with contextlib.suppress(OSError):  # an error here would be one of whatever the push is at
                time.sleep(min(RESTS * max(waited_s() - waited, 0), 1))
                waited = waited_s()
            signal.setitimer(signal.ITIMER_PROF, BURST_S)  # only now: a rest is not interrupted by the next one
        signal.signal(signal.SIGPROF, rest)
        signal.setitimer(signal.ITIMER_PROF, BURST_S)


def waited_s():
    """Seconds in which the main thread was ready to run and no core was free. Raises: OSError where none can say."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def serve(action, parent):
    """The life of a child: the jobs of one kind that its parent gives it, told in lines of JSON; the exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    if os.getppid() != int(parent):
        return 1
    if action == "push":
        step_aside()
    from huggingface_hub import close_session

    sys.stdout = sys.stderr  # what a library prints must not break a line to the parent
    for line in sys.stdin:
        job = json.loads(line)
        try:
            hub = Hub(job["repo"], job["timeout_s"], job["pause_s"], job.get("token"))
            emit(result="ok", **ACTIONS[action](hub, job))
        except Exception as error:  # each failure reaches the parent as one line
            text = text_of(error)
            emit(result="error", kind=kind_of(error), text=f"{job['repo']}: " * (job["repo"] not in text) + text)
        close_session()  # no connection is kept from push to push
    signal.setitimer(signal.ITIMER_PROF, 0)  # an interpreter that ends has no handlers
    return 0


# -- children

def start_child(action):
    """A process that does jobs of one kind until its input ends."""
    defaults = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    errors = tempfile.TemporaryFile()
    child = subprocess.Popen(
        [sys.executable, __file__, "work", action, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=errors, env=defaults | os.environ | {"CUDA_VISIBLE_DEVICES": ""}, process_group=0)
    child.errors, child.said_before = errors, 0
    return child


def end_child(child):
    """Kill a process and wait for it; returns the last errors that it wrote since its job began, on one line."""
    child.kill()
    with contextlib.suppress(OSError), child:  # a job that it did not read
        pass
    with child.errors as errors:
        errors.seek(max(child.said_before, errors.seek(0, os.SEEK_END) - 1000))
        return masked(" ".join(errors.read().decode("utf-8", "replace").split()))


def work(action, job, deadline_s=GRACE_S, tell=lambda **said: None, started=lambda process: None,
         stopped=lambda: False, kept=None):
    """Let a child do one thing with the Hub; returns its result, and gives tell(event=..., ...) what it says before.

    kept: a list with the child that waits for such a job, if there is one; one that has done this waits there after it.
    Raises: HubError with what it answered, or 'killed' where it ended, or was ended at its deadline or because of
    stopped(), without an answer.
    """
    result, over, ended_for = {}, threading.Event(), []
    deadline = time.monotonic() + deadline_s
    while kept and kept[-1].poll() is not None:
        end_child(kept.pop())
    child = kept.pop() if kept else start_child(action)
    child.said_before = os.fstat(child.errors.fileno()).st_size

    def watch():
        while not over.wait(0.2):
            if time.monotonic() > deadline or stopped():
                ended_for.append("at a signal" if stopped() else f"at its deadline of {deadline_s:.0f} s")
                child.kill()
                return
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its last words say why
            child.stdin.write(json.dumps(NET | job).encode() + b"\n")
            child.stdin.flush()
        started(child)
        while not result and (line := child.stdout.readline()):
            said = json.loads(line) if line.startswith(b"{") and line.endswith(b"}\n") else {}  # a kill tears
            if "result" in said:
                result = said
            elif said:
                tell(**said)
    finally:
        over.set()
        watcher.join()
        if is_kept := kept is not None and result.get("result") == "ok" and not ended_for:
            kept.append(child)
        last_words = "" if is_kept else end_child(child)
    if not result:
        why = f"was ended {ended_for[0]}" if ended_for else f"ended by {child.returncode}"
        why += f": {last_words}" * bool(last_words)
        raise HubError("killed", f"{job['repo']}: the child for {action!r} {why}")
    if result.pop("result") != "ok":
        raise HubError(result["kind"], result["text"])
    return result


def link(source, target):
    """A second name for a file, or a copy where the disk has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def payload_of(out_dir, folder, pushed=()):
    """A folder with all that a push sends, which no prune and no line written later can touch; (it, its milestones).

    Raises: OSError."""
    import checkpoint

    out_dir, milestones = Path(out_dir), {}
    place = out_dir / f".tmp-push-{os.urandom(4).hex()}"
    for path in out_dir.glob("milestones/step_*"):
        if STEP.fullmatch(path.name) and (path / "manifest.json").exists():
            milestones[path] = path.name, checkpoint.sha256(path / "manifest.json")
    new = [path for path, key in milestones.items() if key not in pushed]
    try:
        for source in (folder, *new):
            shutil.copytree(source, place / source.parent.name / source.name, copy_function=link)
        for name in STORY:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(out_dir / name, place / name)
                if name.endswith(".jsonl"):
                    checkpoint.mend(place / name)
        if (out_dir / "samples").is_dir():
            left_out = shutil.ignore_patterns(".*", "reel.md")  # each push would carry the whole reel; it is made anew
            shutil.copytree(out_dir / "samples", place / "samples", copy_function=shutil.copyfile, ignore=left_out)
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return place, {milestones[path] for path in new}


class Pusher:
    """The pushes of rank 0: a thread that lets a child send the newest checkpoint, and a new one where that fails;
    training waits for none of it, and an outage costs no step.

    over: the pointer on the Hub that this session goes back behind on purpose, as `restore` returned it.
    patience_s: how long the end of a session waits for the last push. interrupt.at: when a signal came; AFTER_SIGNAL_S
    later nothing is waited for.
    safe_step: the newest step that is pointed at there, -1 for none known. overtaken: '' or why this session must stop.
    """

    def __init__(self, repo, out_dir, run, private, verify, keep, max_gb, prune_local, report, say, over=None,
                 safe_step=-1, patience_s=600.0, interrupt=None):
        self.out_dir, self.run, self.prune_local, self.report, self.say = Path(out_dir), run, prune_local, report, say
        self.patience_s, self.until, self.seconds = patience_s, None, 0.0  # seconds: that the last push took
        self.signal_at = lambda: interrupt.at if interrupt else math.inf
        self.job = {"repo": repo, "private": private, "verify": verify, "keep": keep, "max_gb": max_gb, "over": over}
        self.turn = threading.Condition()
        self.waiting = self.busy = self.child = None  # payloads as (step, place, milestones); the newest child
        self.kept = []  # a child that waits for the next push
        self.closed, self.hurry, self.yields, self.may_squash, self.pushed = False, False, False, True, set()
        self.offered, self.safe_step, self.overtaken = -1, safe_step, ""
        self.thread = threading.Thread(target=self._work, name="hub", daemon=True)
        self.thread.start()

    def offer(self, folder):
        """Take up a checkpoint that is pointed at here; one that still waits is skipped. Never raises, never waits."""
        step = int(Path(folder).name[5:])
        self.offered = step
        if self.overtaken or self.closed:
            return
        try:
            payload = step, *payload_of(self.out_dir, Path(folder), self.pushed)
        except OSError as error:
            self._failed(step, error)
            return
        with self.turn:
            older, self.waiting = self.waiting, payload
            self.turn.notify_all()
        self._drop(older)
        self._prune_local()

    def finish(self, seconds):
        """Wait up to `seconds` for what is still to be pushed; whether the last checkpoint is safe on the Hub."""
        with self.turn:
            self.hurry = True
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.overtaken or not (self.waiting or self.busy), seconds)
            self.hurry = False
        self._prune_local()
        return self.safe_step >= self.offered

    def settle(self, session_ends=math.inf):
        """Call until it is True: then nothing is left to be pushed, or the time for it is over."""
        now = time.monotonic()
        self.until = self.until or now + self.patience_s
        until = min(self.until, session_ends, self.signal_at() + AFTER_SIGNAL_S)
        self.finish(max(0.0, min(2.0, until - now)))
        with self.turn:
            if not (self.waiting or self.busy) or self.overtaken:
                return True
        if time.monotonic() < until:
            return False
        cause = "the time for the last push is over"
        newest = f"step {self.safe_step:,}" if self.safe_step >= 0 else "none"
        self.report("hub_error", step=self.offered, kind="killed", cause=cause, attempt=0)
        self.say(f"hub    {cause}; {newest} is the newest that is safe there")
        return True

    def exit_s(self, size):
        """Seconds to keep for the pushes at the end of a session, of checkpoints of so many bytes."""
        return min(2 * (self.seconds or 10 + size / FIRST_GUESS), self.patience_s)

    def give_way(self):
        """Give back the disk space of payloads: one that waits is skipped, the one at work may end its attempt within
        the time that is kept for a push at the end. Returns whether there was one."""
        with self.turn:
            older, self.waiting, self.yields = self.waiting, None, True
            held = older or self.busy
            self.turn.notify_all()
        self._drop(older)
        until = time.monotonic() + self.patience_s
        with self.turn:
            while self.busy:
                if self.child and (self.closed or self.signal_at() < math.inf or time.monotonic() > until):
                    self.child.kill()
                self.turn.wait(1)
            self.yields = False
        return bool(held)

    def close(self):
        """End the child and the thread, whatever they do, and remove the payloads."""
        with self.turn:
            self.closed = True
            self.turn.notify_all()
            if self.child:
                self.child.kill()
        self.thread.join(60)
        while self.kept:
            end_child(self.kept.pop())
        self._drop(self.waiting)

    def _work(self):
        while payload := self._take():
            step, place, milestones = payload
            try:
                self._push(step, place, milestones)
            except Exception as error:  # whatever it is, the next checkpoint is to be tried
                self._failed(step, error)
            shutil.rmtree(place, ignore_errors=True)
            with self.turn:
                self.busy = None
                self.turn.notify_all()

    def _take(self):
        with self.turn:
            self.turn.wait_for(lambda: self.waiting or self.closed)
            if self.closed or self.overtaken:
                return None
            self.busy, self.waiting = self.waiting, None
            return self.busy

    def _push(self, step, place, milestones):
        """Try until it is through, a newer checkpoint waits or the session ends, at growing intervals."""
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        attempt = 0
        while not self.closed:
            began = time.monotonic()
            job = self.job | {"place": str(place), "may_squash": self.may_squash}
            try:
                work("push", job, GRACE_S + 2 * size / SLOWEST, lambda **said: self._tell(step, **said), self._hold,
                     kept=self.kept)
            except OSError as error:  # a HubError, or no child could be started
                attempt += 1
                if self.closed or not self._goes_on(step, error, attempt):
                    return
                continue
            self.pushed |= milestones
            self.safe_step, self.may_squash, self.seconds = step, True, time.monotonic() - began
            self.say(f"hub    step {step:,} is safe on {job['repo']}: {size / 1e9:.3f} GB in {self.seconds:.1f} s")
            return

    def _goes_on(self, step, error, attempt):
        """Whether the same payload is tried again after a failure; waits until it is time."""
        kind = self._failed(step, error, attempt)
        if kind == "overtaken":
            with self.turn:
                self.overtaken = str(error)
                self.turn.notify_all()
        if kind in ("overtaken", "full") or kind == "damaged" and attempt >= TRIES:
            return False
        pause_s = min(NET["pause_s"] * 2 ** min(attempt, 20), RETRY_S)
        with self.turn:
            in_time = not self.hurry
            self.turn.wait_for(lambda: self.waiting or self.closed or self.yields or in_time and self.hurry,
                               pause_s if in_time else min(pause_s, 5))
            superseded = bool(self.waiting or self.yields)
        if superseded:
            self.report("push", step=step, skipped=True)
        return not superseded

    def _tell(self, step, event, **fields):
        if event == "squash":
            self.may_squash = False
        self.report(event, step=step, **fields)

    def _failed(self, step, error, attempt=0):
        kind, cause = getattr(error, "kind", "error"), masked(str(error))
        self.report("hub_error", step=step, kind=kind, cause=cause, attempt=attempt)
        self.say(f"hub    step {step:,} is not on the Hub yet ({kind}): {cause[:300]}")
        return kind

    def _hold(self, child):
        with self.turn:
            self.child = child
            if self.closed:
                child.kill()

    def _drop(self, payload):
        if payload:
            shutil.rmtree(payload[1], ignore_errors=True)
            self.report("push", step=payload[0], skipped=True)

    def _prune_local(self):
        """Delete checkpoints here that are older than a safe one; the newest and those not yet safe stay."""
        import checkpoint

        if not self.prune_local or self.safe_step < 0:
            return
        with contextlib.suppress(OSError, ValueError):  # what cannot be deleted now is after the next one
            kept = [path for path in self.out_dir.glob("checkpoints/step_*")
                    if STEP.fullmatch(path.name) and self.safe_step < int(path.name[5:]) < self.offered]
            checkpoint.prune(self.out_dir, self.run, 1 + len(kept), self.report)


# -- cold start

def restore(repo, out_dir, resume, report, say, private=True, writes=True, stopped=lambda: False):
    """Bring the run in out_dir up to what the Hub holds, before checkpoint.find looks there.

    Where the local checkpoint descends from the pointed one nothing is brought. Else the Hub's is: by resume='step_...'
    the named one, if it is not here. report(event, **fields) is called once the run's story (events.jsonl) is in place.
    Where stopped() becomes true it ends, and out_dir is as it was. Returns what a Pusher of this session needs to know:
    the pointer that it may go back behind, mostly None; and the step that is safe on the Hub, -1 for none.
    Raises: ValueError, HubError where the Hub cannot be read or holds another run, or nothing that is whole.
    """
    check_repo(repo)
    told, began = [], time.monotonic()
    try:
        found = work("look", {"repo": repo, "private": private if writes else None}, stopped=stopped)
        pointed = found["pointer"]
        if not pointed:
            say(f"hub    {repo} has no latest.json, so nothing to go on from" + "".join(
                f"; it holds {name}, which nothing points at" for name in found["checkpoints"][:1]))
            return None, -1
        say(f"hub    {repo} points at step {pointed['step']:,} of run {pointed['run']}")
        if resume == "never":
            raise ValueError(f"resume='never', but {repo} holds {pointed['checkpoint']} of run {pointed['run']}; "
                             "resume='auto' goes on with it, another hub_repo starts anew")
        if not writes:
            _compare_only(repo, out_dir, pointed, say)
            return None, -1
        seconds = {"look_s": time.monotonic() - began}
        return _bring(repo, Path(out_dir), resume, found, seconds, lambda event, **fields: told.append((event, fields)),
                      say, stopped)
    except HubError as error:
        if stopped():
            return None, -1
        if error.kind == "missing" and not writes:
            say(f"hub    nothing can be read yet: {error}")
            return None, -1
        raise HubError(error.kind, f"{error}{ADVICE.get(error.kind, '')}") from error
    finally:
        for event, fields in told:
            report(event, **fields)


def _compare_only(repo, out_dir, pointed, say):
    """What a session that writes nothing, eval_only or dry_run, can say of the Hub's run and this disk's."""
    import checkpoint

    here = checkpoint.pointer(out_dir)
    if here and here["run"] != pointed["run"]:
        raise ValueError(f"{out_dir} holds run {here['run']}, and {repo} holds run {pointed['run']}; set another "
                         "hub_repo or another out_dir")
    if not here:
        say(f"hub    a session that trains would bring {pointed['checkpoint']} first; this one has {out_dir} alone")


def _bring(repo, out_dir, resume, found, seconds, note, say, stopped):
    import checkpoint

    pointed, named = found["pointer"], resume if resume.startswith("step_") else ""
    local = _local(out_dir, pointed["run"], note)
    if local and local[1]["run"] != pointed["run"]:
        raise ValueError(f"{out_dir} holds run {local[1]['run']}, and {repo} holds run {pointed['run']}; set another "
                         "hub_repo or another out_dir")
    if named and (out_dir / "checkpoints" / named).is_dir():
        return pointed, -1
    if local and not named and precedes(pointed, local[1]):
        return None, pointed["step"]
    older = [name for name in found["checkpoints"] if int(name[5:]) < pointed["step"]]
    sources = [(named, found["head"], None)] if named else [
        *[(pointed["checkpoint"], commit, pointed["manifest_sha256"])
          for commit in [*dict.fromkeys((pointed["commit"] or found["head"], found["head"]))] * 2],  # a spoilt answer
        *[(name, found["head"], None) for name in older]]
    causes = []
    for name, commit, digest in sources:
        if digest is None and not named and local and local[1]["step"] >= int(name[5:]):
            break
        try:
            _pull(repo, out_dir, name, commit, pointed["run"], digest, not named, seconds, local, note, say, stopped)
            return (None, pointed["step"]) if digest else (pointed, -1)
        except (checkpoint.Damaged, HubError) as error:
            if getattr(error, "kind", "damaged") not in ("damaged", "missing"):
                raise
            causes.append(f"{name} at {commit[:8]}: {error}")
            note("damaged", checkpoint=name, cause=causes[-1], hub=repo)
    if local and not named:
        say(f"hub    nothing newer on {repo} is whole: {local[0].name} of {out_dir} goes on")
        return pointed, -1
    raise ValueError("\n  ".join([
        f"{repo} has no whole {named or 'checkpoint'}, and a run does not start over one that was begun; it lists "
        f"{', '.join(found['checkpoints']) or 'none'}", *causes]))


def _local(out_dir, run, note):
    """The newest valid checkpoint here as (folder, trainer.json), or None; damaged ones of the Hub's run are not in
    the way. Raises: ValueError where what lies here is of another run alone."""
    import checkpoint

    try:
        return checkpoint.newest(out_dir, note)
    except ValueError:
        runs = set()
        for path in out_dir.glob("checkpoints/step_*/trainer.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                runs.add(json.loads(path.read_text())["run"])
        if runs and run not in runs:
            raise
    return None


def _pull(repo, out_dir, name, commit, run, digest, point, seconds, local, note, say, stopped):
    """Download, verify and put in place one checkpoint, after the run's story, which takes the place of one here."""
    import checkpoint

    place, story = out_dir / f".tmp-pull-{os.urandom(4).hex()}", [
        part for part in (*STORY, "samples") if point or not (out_dir / part).exists()]
    wants = "|".join([f"checkpoints/{name}/[^/]+", *[re.escape(part) + "(/[^/]+)?" for part in story]])
    place.mkdir(parents=True)
    try:
        clock = time.monotonic()
        brought = work("download", {"repo": repo, "revision": commit, "wants": wants, "place": str(place)}, 86400,
                       stopped=stopped)
        seconds["download_s"] = seconds.get("download_s", 0) + time.monotonic() - clock
        clock = time.monotonic()
        folder, target = place / "checkpoints" / name, out_dir / "checkpoints" / name
        if not folder.is_dir():
            raise HubError("missing", f"{repo} has no {name} at {commit[:8]}")
        trainer = checkpoint.verify(folder, run, digest)[1]
        seconds["verify_s"] = seconds.get("verify_s", 0) + time.monotonic() - clock
        for part in story:
            if (place / part).exists():
                if (out_dir / part).exists():  # of a session that did not get so far, or of another line
                    checkpoint._set_aside(out_dir / part, "aside")
                os.rename(place / part, out_dir / part)
        target.parent.mkdir(exist_ok=True)
        if os.path.lexists(target):
            checkpoint._set_aside(target, "aside")
        os.rename(folder, target)
        checkpoint._fsync(target.parent)
        if point:
            checkpoint.point(out_dir, target, trainer["lineage"][-1][0])
        note("pull", checkpoint=name, commit=commit, bytes=brought["bytes"], hub=repo,
             instead_of=local[0].name if local else "", **{key: round(value, 3) for key, value in seconds.items()})
        say(f"hub    {name} is here: {brought['bytes'] / 1e9:.3f} GB, "
            + ", ".join(f"{key[:-2]} {value:.1f} s" for key, value in seconds.items()))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def fetch(source, stopped=lambda: False, place=""):
    """The folder with the weights that 'hf:owner/name[@revision]' names: one below `place` (by default the user's
    cache) with those of the pointed checkpoint, the newest milestone or an export, checked by hash.

    Raises: ValueError, HubError.
    """
    import checkpoint

    place = place or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "longhaul")
    repo, _, revision = source.removeprefix("hf:").partition("@")
    check_repo(repo)
    found = work("look", {"repo": repo, "revision": revision}, stopped=stopped)
    pointed, milestones = found["pointer"], found["milestones"]
    inside = (f"checkpoints/{pointed['checkpoint']}/" if pointed else
              f"milestones/{milestones[0]}/" if milestones else "")
    target = Path(place) / f"{repo}@{found['head']}".replace("/", "--")
    if target.is_dir() and re.search("@[0-9a-f]{40}$", target.name):
        return target
    temporary = target.with_name(f".tmp-{os.urandom(4).hex()}")
    temporary.mkdir(parents=True)
    try:
        work("download", {"repo": repo, "revision": found["head"], "place": str(temporary),
                          "wants": f"{inside}({'|'.join(WEIGHTS)})"}, 86400, stopped=stopped)
        folder = temporary / inside
        if not (folder / "model.safetensors").exists():
            raise HubError("missing", f"{source} has no {inside}model.safetensors")
        if (manifest := folder / "manifest.json").exists():
            for entry in json.loads(manifest.read_text())["files"]:
                if entry["name"] in WEIGHTS and checkpoint.sha256(folder / entry["name"]) != entry["sha256"]:
                    raise ValueError(f"{source}: {entry['name']} is not what its manifest says")
            manifest.unlink()  # it lists the optimizer too
        shutil.rmtree(target, ignore_errors=True)
        os.rename(folder, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


# -- commands

def main(words=None):
    """Run one command; returns the exit status: 0, 1 where something is damaged or not done, 2 for an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("status", "verify", "pull", "push", "prune"):
        commands.add_parser(command).add_argument("repo", metavar="owner/name")
    commands.choices["verify"].add_argument("--full", action="store_true", help="hash every byte")
    for command in ("pull", "push"):
        commands.choices[command].add_argument("--out", metavar="OUT_DIR", required=True, type=Path)
    commands.choices["push"].add_argument("--public", action="store_true", help="of a repository that is made")
    commands.choices["push"].add_argument("--full", action="store_true", help="read every byte back")
    for command in ("push", "prune"):
        commands.choices[command].add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    asked = parser.parse_args(words)
    try:
        check_repo(asked.repo)
        return COMMANDS[asked.command](asked)
    except (ValueError, OSError) as error:
        print(f"hub.py: {masked(str(error))}", file=sys.stderr)
        return 1 if getattr(error, "kind", "") in ("damaged", "overtaken", "full") else 2


def tell(event, **fields):
    print(event, json.dumps(fields), flush=True)


def show(asked):
    """status, verify: a table of what lies there."""
    job = {"repo": asked.repo, "read": asked.command == "verify", "full": getattr(asked, "full", False)}
    try:
        found = work("survey", job | {"token": False}, 86400)  # as anybody reads it
        how = "read without a token"
    except HubError as error:
        if error.kind not in ("missing", "refused"):
            raise
        found, how = work("survey", job, 86400), "read with your token"
    pointed = found["pointer"]
    print(f"{asked.repo} at {found['head'][:8]}, {how}, {found['used'] / 1e9:.3f} GB stored; latest.json: " + (
        f"step {pointed['step']:,} of run {pointed['run']}, {pointed['tokens']:,} tokens" if pointed else "none"))
    print(f"{'checkpoint':36} {'run':16} {'bytes':>15} pointed state")
    for row in found["rows"]:
        print(f"{row['name']:36} {row['run'] or '-':16} {row['bytes']:15,} {'yes' if row['pointed'] else '-':7} "
              f"{row['state']}")
    return int(any(row["state"].startswith("damaged") for row in found["rows"]))


def pull_now(asked):
    import checkpoint

    with checkpoint.lock(asked.out):
        restore(asked.repo, asked.out, "auto", tell, print, None)
        found = checkpoint.newest(asked.out, tell)
    if not found:
        raise ValueError(f"{asked.repo} has no checkpoint, and neither has {asked.out}")
    print(f"{asked.out} stands at {found[0].name} of run {found[1]['run']}")
    return 0


def push_now(asked):
    import checkpoint

    if not (pointed := checkpoint.pointer(asked.out)):
        raise ValueError(f"{asked.out} has no latest.json, so there is nothing to push")
    with checkpoint.lock(asked.out):
        folder = asked.out / "checkpoints" / pointed["checkpoint"]
        checkpoint.verify(folder, pointed["run"], pointed["manifest_sha256"])
        place, _ = payload_of(asked.out, folder)
        try:
            work("push", {"repo": asked.repo, "private": not asked.public, "keep": asked.keep, "max_gb": 0,
                          "verify": "full" if asked.full else "sample", "over": None, "may_squash": False,
                          "place": str(place)}, 86400, tell)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{folder.name} is safe on {asked.repo}")
    return 0


def prune_there(asked):
    gone = work("prune", {"repo": asked.repo, "keep": asked.keep}, 86400, tell)["pruned"]
    print(f"{len(gone)} checkpoints are deleted from {asked.repo}; `super_squash_history` gives their space back")
    return 0


COMMANDS = {"status": show, "verify": show, "pull": pull_now, "push": push_now, "prune": prune_there}


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1:2] == ["work"] else main())
