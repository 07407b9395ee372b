"""The run on the Hub: the cycle of a push and its faults, two writers, outages, cold starts, commands, secrets."""

import copy
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import hub
from driver import ROOT, is_there, wait_for
from hub_server import TOKENS, Hub
from test_checkpoint import RUN, contents, folder_of, leftovers, milestone, names, save

REPO = "me/run"
A, B = ("a", 0), ("b", 4)  # sessions: b goes on from a's step 4
LIMIT_S = 60  # no test waits for so long
COMMIT, POINT = "POST .*/commit/main step", "POST .*/commit/main point"
SAVED = {"manifest.json", "model.json", "model.safetensors", "optimizer.safetensors", "trainer.json"}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A stand-in that this process and its children take for the Hub."""
    with Hub(tmp_path / "hub") as server:
        environment = server.environment(tmp_path / "home")
        for name in os.environ.keys() - environment.keys():
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub, "NET", {"timeout_s": 20.0, "pause_s": 0.02})
        yield server
    assert not server.errors
    assert not [record for record in server.log if record["server"] == "store" and record["token"]]


class Session:
    """A Pusher and what it says, closed at the end."""

    def __init__(self, out_dir, **more):
        self.events, self.said = [], []
        words = {"private": True, "verify": "sample", "keep": 2, "max_gb": 80, "prune_local": False} | more
        self.pusher = hub.Pusher(REPO, out_dir, RUN, report=self.report, say=self.said.append, **words)

    def report(self, event, **fields):
        self.events.append({"event": event, **fields})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pusher.close()

    def push(self, folder):
        """Offers a checkpoint and waits; whether it is safe."""
        self.pusher.offer(folder)
        return self.pusher.finish(LIMIT_S)

    def named(self, event):
        return [row for row in self.events if row["event"] == event]

    def kinds(self):
        return [row["event"] for row in self.events if row["event"] != "hub_error"]

    def failures(self):
        return [row["kind"] for row in self.named("hub_error")]


def pointed_at(server):
    """The step and session that latest.json on the Hub names; what it names there is whole."""
    tree = server.tree(REPO)
    if "latest.json" not in tree:
        return None
    found = json.loads(tree["latest.json"])
    tree = server.tree(REPO, found["commit"] or "main")
    folder = f"checkpoints/{found['checkpoint']}/"
    assert {path.removeprefix(folder) for path in tree if path.startswith(folder)} == SAVED
    manifest = tree[folder + "manifest.json"]
    assert hub.hashlib.sha256(manifest).hexdigest() == found["manifest_sha256"]
    for entry in json.loads(manifest)["files"]:
        assert hub.hashlib.sha256(tree[folder + entry["name"]]).hexdigest() == entry["sha256"]
    return found["step"], found["nonce"]


def there(server, kind="checkpoints"):
    return sorted({path.split("/")[1] for path in server.files(REPO) if path.startswith(f"{kind}/")})


def pushed(server, out_dir, *steps, lineage=(A,), **more):
    """Pushes checkpoints one after the other, as one session."""
    with Session(out_dir, **more) as session:
        for step in steps:
            assert session.push(save(out_dir, step, lineage=lineage)), session.events
    return session


def big(out_dir, step, megabytes=3):
    """A checkpoint whose weights are too large to be read back whole."""
    files = contents(step, lineage=(A,))
    files["model.safetensors"]["wte.weight"] = torch.arange(megabytes << 18, dtype=torch.float32) + step
    folder = checkpoint.write(out_dir, step, files, RUN)
    checkpoint.point(out_dir, folder, "a")
    return folder


def restored(out_dir, resume="auto", **more):
    """What a cold start says may be gone back behind, and its events."""
    events = []
    report = lambda event, **fields: events.append({"event": event, **fields})
    (over, safe_step), events = hub.restore(REPO, out_dir, resume, report, lambda text: None, **more), events
    assert safe_step == -1 or not over
    return over, events


def found(out_dir):
    """(name, session) of the checkpoint that training would go on from."""
    folder, trainer = checkpoint.find(out_dir, "auto", lambda event, **fields: None, True)
    return folder.name, trainer["lineage"][-1][0]


# -- the cycle

def test_a_push_is_a_commit_a_check_a_pointer_and_its_read_back(server, tmp_path):
    out_dir = tmp_path / "run"
    folder = save(out_dir, 4, lineage=(A,))
    (out_dir / "samples").mkdir()
    for name in ("step_00000004.md", "reel.md", ".reel.md.new"):
        (out_dir / "samples" / name).write_text("# text\n")
    for name in ("metrics.jsonl", "events.jsonl", "windows.jsonl", "machine.jsonl"):
        (out_dir / name).write_text('{"step": 4}\n{"step": 5')
    (out_dir / "config.json").write_text("{}")
    milestone(out_dir, 4)
    with Session(out_dir) as session:
        assert session.pusher.safe_step == -1 and session.push(folder) and session.pusher.safe_step == 4
    assert session.kinds() == ["push", "verify", "pointer"] and not session.failures()
    assert all(row["step"] == 4 and row["seconds"] >= 0 for row in session.events)
    assert session.named("push")[0]["bytes"] == session.named("verify")[0]["bytes"] > 1000
    tree = server.tree(REPO)
    assert tree["metrics.jsonl"] == b'{"step": 4}\n', "a torn line stays here"
    assert {"samples/step_00000004.md", "events.jsonl", "windows.jsonl", "machine.jsonl", "config.json",
            "milestones/step_00000004/model.safetensors"} <= tree.keys()
    assert not [path for path in tree if "reel.md" in path], "the whole reel at each push would fill the repository"
    found = json.loads(tree["latest.json"])
    assert {**found, "commit": ""} == checkpoint.pointer(out_dir)
    assert [title.partition(" of")[0] for _, title in server.history(REPO)] == [
        "point at step_00000004", "step 4", "initial commit"]
    assert found["commit"] == server.history(REPO)[1][0] and pointed_at(server) == (4, "a")
    lines = [record["line"] for record in server.log]
    reads = [i for i, line in enumerate(lines) if f"/resolve/{found['commit']}/checkpoints/" in line]
    point = next(i for i, line in enumerate(lines) if re.search(POINT, line))
    assert len(reads) == 5 and max(reads) < point, "every file is fetched back before the pointer moves"
    assert any("resolve/main/latest.json" in line for line in lines[point:])
    assert server.repos[REPO]["private"] and not leftovers(out_dir)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_large_files_are_read_back_by_ranges(server, tmp_path, verify):
    with Session(tmp_path / "run", verify=verify) as session:
        assert session.push(big(tmp_path / "run", 4))
    size = server.files(REPO)["checkpoints/step_00000004/model.safetensors"][1]
    ranges = [record["range"] for record in server.log if record["server"] == "store" and record["range"]]
    spans = [tuple(map(int, re.findall(r"\d+", found))) for found in ranges]
    if verify == "sample":
        assert len(spans) == 6 and spans.count((0, hub.PIECE - 1)) and spans.count((size - hub.PIECE, size - 1))
        assert all(last - first + 1 == hub.PIECE and last < size for first, last in spans)
    else:
        assert session.named("verify")[0]["bytes"] > size and not spans, "less than a chunk is read whole"


def test_only_what_the_hub_lacks_is_sent(server, tmp_path):
    out_dir = tmp_path / "run"
    save(out_dir, 4)
    milestone(out_dir, 4)
    pushed(server, out_dir, 8)
    pushed(server, out_dir, 12)  # another session, which does not know what the first has sent
    last = server.requests(COMMIT)[-1]["line"]
    assert "step_00000012/model.safetensors" in last and "milestones" not in last


def test_a_checkpoint_that_lies_there_is_not_pushed_again(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    count = len(server.history(REPO))
    with Session(tmp_path / "run") as session:
        assert session.push(folder_of(tmp_path / "run", 4)) and session.pusher.safe_step == 4
    assert not session.events and len(server.history(REPO)) == count


def test_a_story_that_has_grown_follows_its_checkpoint(server, tmp_path):
    """At the end of a session its last evaluation and samples come after the last save."""
    out_dir = tmp_path / "run"
    pushed(server, out_dir, 4)
    count = len(server.log)
    checkpoint.append_line(out_dir / "events.jsonl", {"event": "finish"})
    with Session(out_dir, verify="full") as session:
        assert session.push(folder_of(out_dir, 4))
    assert server.tree(REPO)["events.jsonl"] == b'{"event": "finish"}\n' and pointed_at(server) == (4, "a")
    assert not [record for record in server.log[count:] if record["server"] == "store"], "no tensor is moved again"
    restored(tmp_path / "new")
    assert (tmp_path / "new" / "events.jsonl").exists()


def test_a_file_of_an_older_checkpoint_of_that_step_is_taken_out(server, tmp_path):
    server.create(REPO)
    server.commit(REPO, {"checkpoints/step_00000004/optimizer-1.safetensors": b"old", "README.md": b"mine"})
    pushed(server, tmp_path / "run", 4)
    assert pointed_at(server) == (4, "a") and "README.md" in server.files(REPO)


def test_the_payload_is_of_the_moment_of_the_save(server, tmp_path):
    """A slow push sends what was saved, whatever is pruned, replaced and appended here meanwhile."""
    out_dir = tmp_path / "run"
    folder = save(out_dir, 4, lineage=(A,))
    (out_dir / "metrics.jsonl").write_text('{"step": 4}\n')
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    fault = server.add_fault("hang", "POST .*/preupload/", seconds=1.0)
    with Session(out_dir) as session:
        session.pusher.offer(folder)
        assert server.wait_for("/preupload/")
        shutil.rmtree(folder)
        checkpoint.append_line(out_dir / "metrics.jsonl", {"step": 5})
        assert session.pusher.finish(LIMIT_S) and fault["fired"] == 1
    tree = server.tree(REPO)
    assert {name: tree[f"checkpoints/{folder.name}/{name}"] for name in wanted} == wanted
    assert tree["metrics.jsonl"] == b'{"step": 4}\n' and not leftovers(out_dir)


def test_a_disk_without_links_gets_a_copy(tmp_path, monkeypatch):
    folder = save(tmp_path, 4)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    place, _ = hub.payload_of(tmp_path, folder)
    assert {path.name: path.read_bytes() for path in (place / "checkpoints" / folder.name).iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_payload_that_cannot_be_made_costs_training_nothing(server, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("the disk is full")
    monkeypatch.setattr(shutil, "copytree", full)
    with Session(tmp_path / "run") as session:
        session.pusher.offer(save(tmp_path / "run", 4))
        assert not session.pusher.finish(LIMIT_S)
    assert session.named("hub_error")[0]["cause"] == "the disk is full" and not leftovers(tmp_path / "run")


# -- what is checked there

@pytest.mark.parametrize("fault", [
    {"kind": "ignored", "match": "/preupload/", "path": "optimizer"},
    {"kind": "missing", "match": "GET .*/tree/", "path": "optimizer"},
    {"kind": "corrupt", "match": "PUT /lfs"},
    {"kind": "corrupt", "match": "GET /lfs"},
    {"kind": "truncate", "match": "GET /lfs"},
    {"kind": "missing", "match": "GET .*/resolve/.*/checkpoints", "path": "model.json"},
], ids=["left out", "not listed", "kept wrong", "read wrong", "read short", "gone"])
def test_nothing_is_pointed_at_that_is_not_there_as_sent(server, tmp_path, fault):
    server.add_fault(**fault, times=0)
    pushed_before = server.history(REPO) if REPO in server.repos else []
    with Session(tmp_path / "run") as session:
        session.pusher.offer(save(tmp_path / "run", 4, lineage=(A,)))
        wait_for(lambda: session.failures())
    assert not pushed_before and pointed_at(server) is None and session.pusher.safe_step == -1
    assert set(session.failures()) <= {"damaged", "unreachable", "missing", "killed"}, session.events


def test_bytes_that_stay_wrong_are_given_up_and_the_next_checkpoint_is_pushed(server, tmp_path):
    """The Hub takes the same hash for present: the same bytes cannot be mended by sending them again."""
    server.add_fault("corrupt", "PUT /lfs", times=1)
    out_dir = tmp_path / "run"
    with Session(out_dir) as session:
        assert not session.push(save(out_dir, 4, lineage=(A,)))
        assert session.failures() == ["damaged"] * hub.TRIES and pointed_at(server) is None
        assert session.push(save(out_dir, 8, lineage=(A,)))
    assert pointed_at(server) == (8, "a")


@pytest.mark.parametrize("kind", ["norange", "corrupt", "truncate", "drop", "status"])
def test_one_spoilt_answer_is_asked_for_again(server, tmp_path, kind):
    fault = server.add_fault(kind, "GET /lfs")
    with Session(tmp_path / "run") as session:
        assert session.push(big(tmp_path / "run", 4)) and fault["fired"] == 1
    assert session.kinds() == ["push", "verify", "pointer"] and not session.failures()


def test_a_server_that_ignores_ranges_is_not_believed(server, tmp_path):
    server.add_fault("norange", "GET /lfs", times=0)
    with Session(tmp_path / "run") as session:
        assert not session.push(big(tmp_path / "run", 4))
    assert session.failures() == ["damaged"] * hub.TRIES and pointed_at(server) is None
    assert "206" in session.named("hub_error")[0]["cause"]


# -- commits

@pytest.mark.parametrize("match", [COMMIT, POINT], ids=["payload", "pointer"])
@pytest.mark.parametrize("fault", [{}, {"drop": True}], ids=["504", "cut"])
def test_a_commit_that_landed_without_an_answer_is_found_not_made_again(server, tmp_path, match, fault):
    server.add_fault("lost_reply", match, **fault)
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4, lineage=(A,)))
    assert session.failures() == ["unsure"] and pointed_at(server) == (4, "a")
    assert len(server.history(REPO)) == 3, "one commit of the payload, one of the pointer"


@pytest.mark.parametrize("match", [COMMIT, POINT], ids=["payload", "pointer"])
@pytest.mark.parametrize("kind", ["status", "drop", "race"])
def test_a_commit_that_failed_is_made_on_the_new_head(server, tmp_path, match, kind):
    fault = server.add_fault(kind, match, files={"race.txt": "faster"})
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4, lineage=(A,)))
    assert fault["fired"] == 1 and session.failures() == ["unsure"] and pointed_at(server) == (4, "a")
    assert ("race.txt" in server.files(REPO)) == (kind == "race"), "the other's commit stays"


def test_races_are_lost_a_bounded_number_of_times(server, tmp_path):
    server.add_fault("race", "POST .*/commit/main", times=0, files={"race.txt": "faster"})
    with Session(tmp_path / "run") as session:
        session.pusher.offer(save(tmp_path / "run", 4))
        wait_for(lambda: session.events and "attempt" in session.events[-1])
        assert session.failures() == ["unsure"] * hub.ROUNDS and pointed_at(server) is None


def test_a_pointer_is_read_back_from_the_branch_until_it_is_there(server, tmp_path):
    fault = server.add_fault("stale_resolve", "GET .*/resolve/main/latest.json", times=3)
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4))
        assert session.push(save(tmp_path / "run", 8))
    assert fault["fired"] == 3 and session.pusher.safe_step == 8


def test_a_pause_follows_what_a_busy_hub_asks_for():
    def error(**headers):
        found = hub.HubError("unreachable", "")
        found.response = type("Answer", (), {"headers": headers})
        return found
    assert [hub.pause_after(error(), attempt, 1.0) for attempt in (0, 1, 3, 20)] == [1, 2, 8, 60]
    assert hub.pause_after(error(**{"Retry-After": "7"}), 0, 1.0) == 7
    assert hub.pause_after(error(RateLimit='"api";r=0;t=55'), 0, 1.0) == 55
    assert hub.pause_after(error(**{"Retry-After": "99999"}), 0, 1.0) == 300


# -- two writers

def test_a_session_that_was_overtaken_stops_and_moves_nothing(server, tmp_path):
    """a was frozen at step 8; b took over from step 4 and is at step 8 too."""
    pushed(server, tmp_path / "a", 4)
    save(tmp_path / "b", 4, lineage=(A,))
    pushed(server, tmp_path / "b", 8, lineage=(A, B))
    before = server.history(REPO)
    with Session(tmp_path / "a") as session:
        folder = save(tmp_path / "a", 8, lineage=(A,))
        assert not session.push(folder)
        assert "another session has taken the run over" in session.pusher.overtaken
        session.pusher.offer(save(tmp_path / "a", 12, lineage=(A,)))
        assert not session.pusher.finish(LIMIT_S)
    assert server.history(REPO) == before and pointed_at(server) == (8, "b")
    assert session.failures() == ["overtaken"] and not session.kinds()
    assert checkpoint.verify(folder) and not leftovers(tmp_path / "a")


def test_the_pointer_of_another_run_is_not_moved(server, tmp_path):
    with Session(tmp_path / "other") as session:
        assert session.push(save(tmp_path / "other", 4, run="run-b"))
    with Session(tmp_path / "run") as session:
        assert not session.push(save(tmp_path / "run", 8)) and "holds run run-b" in session.pusher.overtaken
    assert pointed_at(server)[0] == 4


def test_whoever_points_between_a_payload_and_its_pointer_wins(server, tmp_path):
    pushed(server, tmp_path / "a", 4)
    other = json.loads(server.tree(REPO)["latest.json"]) | {
        "nonce": "b", "step": 6, "checkpoint": "step_00000006", "tokens": 6 * 64, "windows": 24}
    server.add_fault("race", POINT, files={"latest.json": json.dumps(other)})
    with Session(tmp_path / "a") as session:
        assert not session.push(save(tmp_path / "a", 8, lineage=(A,))) and session.pusher.overtaken
    assert json.loads(server.tree(REPO)["latest.json"]) == other


def test_a_session_that_froze_before_its_prune_deletes_nothing(server, tmp_path):
    pushed(server, tmp_path / "a", 4, 8)
    server.add_fault("race", "commit/main prune", files={"race.txt": "faster"})
    with Session(tmp_path / "a") as session:
        assert session.push(save(tmp_path / "a", 12, lineage=(A,)))
        assert session.failures() == ["unsure"]
        assert there(server) == ["step_00000004", "step_00000008", "step_00000012"]
        assert session.push(save(tmp_path / "a", 16, lineage=(A,)))
    assert there(server) == ["step_00000012", "step_00000016"]


def test_a_pointer_that_this_session_leaves_on_purpose_is_moved_back(server, tmp_path):
    out_dir = tmp_path / "run"
    pushed(server, out_dir, 4, 8, keep=9)
    over, _ = restored(out_dir, "step_00000004")
    checkpoint.rollback(out_dir, "step_00000004", lambda event, **fields: None)
    with Session(out_dir, over=over) as session:
        assert session.push(folder_of(out_dir, 4)) and pointed_at(server) == (4, "a")
        assert session.push(save(out_dir, 8, lineage=(A, B)))
    assert pointed_at(server) == (8, "b")


@pytest.mark.parametrize("nonce,step,right", [("a", 0, True), ("a", 4, True), ("a", 5, False), ("b", 5, True),
                                              ("b", 9, True), ("b", 10, False), ("c", 4, False)])
def test_a_pointer_precedes_what_has_come_through_it(nonce, step, right):
    trainer = {"run": RUN, "lineage": [list(A), list(B)], "step": 9}
    pointed = {"run": RUN, "nonce": nonce, "step": step}
    assert hub.precedes(pointed, trainer) == right and not hub.precedes(pointed | {"run": "other"}, trainer)


# -- outages and children

def test_an_outage_costs_no_step_and_the_newest_is_pushed_after_it(server, tmp_path):
    outage = server.add_fault("drop", times=0)
    out_dir = tmp_path / "run"
    with Session(out_dir) as session:
        for step in (4, 8, 12):
            session.pusher.offer(save(out_dir, step, lineage=(A,)))
        wait_for(lambda: {"step": 12}.items() <= (session.named("hub_error") or [{}])[-1].items())
        assert session.pusher.safe_step == -1
        server.faults.remove(outage)
        assert session.pusher.finish(LIMIT_S) and session.pusher.safe_step == 12
    assert pointed_at(server) == (12, "a") and there(server) == ["step_00000012"]
    skipped = [row["step"] for row in session.named("push") if row.get("skipped")]
    assert sorted(skipped) == [4, 8] and not leftovers(out_dir)


def test_a_checkpoint_whose_push_did_not_begin_is_skipped_for_a_newer_one(server, tmp_path):
    server.add_fault("hang", COMMIT, seconds=2)
    out_dir = tmp_path / "run"
    with Session(out_dir) as session:
        session.pusher.offer(save(out_dir, 4, lineage=(A,)))
        assert server.wait_for(COMMIT)
        for step in (8, 12):
            session.pusher.offer(save(out_dir, step, lineage=(A,)))
        assert session.pusher.finish(LIMIT_S)
    assert [(row["step"], row.get("skipped", False)) for row in session.named("push")] == [
        (8, True), (4, False), (12, False)]


def test_finish_waits_no_longer_than_it_may(server, tmp_path):
    server.add_fault("hang", COMMIT)
    with Session(tmp_path / "run") as session:
        session.pusher.offer(save(tmp_path / "run", 4))
        assert server.wait_for(COMMIT)
        child, began = session.pusher.child, time.monotonic()
        assert not session.pusher.finish(0.1)
        session.pusher.close()
        assert time.monotonic() - began < LIMIT_S / 2 and not is_there(child.pid)
    assert not leftovers(tmp_path / "run")


def test_a_child_that_dies_is_an_event_and_another_is_started(server, tmp_path):
    server.add_fault("hang", COMMIT)
    with Session(tmp_path / "run") as session:
        session.pusher.offer(save(tmp_path / "run", 4))
        assert server.wait_for(COMMIT)
        os.kill(session.pusher.child.pid, signal.SIGKILL)
        assert session.pusher.finish(LIMIT_S)
    assert session.failures() == ["killed"] and pointed_at(server)[0] == 4


def test_one_child_does_push_after_push_and_ends_with_the_session(server, tmp_path):
    children = []
    with Session(tmp_path / "run") as session:
        for step in (4, 8, 12):
            assert session.push(save(tmp_path / "run", step, lineage=(A,)))
            children.append(session.pusher.child.pid)
    assert len(set(children)) == 1 and not is_there(children[0]) and not session.failures()


def test_after_a_failure_another_child_pushes(server, tmp_path):
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4, lineage=(A,)))
        first = session.pusher.child.pid
        for _ in range(hub.TRIES):  # of the client's first request in one push
            server.add_fault("status", "GET /api/models", status=500)
        assert session.push(save(tmp_path / "run", 8, lineage=(A,)))
        assert session.pusher.child.pid != first and not is_there(first)
    assert session.failures() == ["unreachable"]


def test_a_child_that_died_while_it_waited_costs_the_next_push_nothing(server, tmp_path):
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4, lineage=(A,)))
        os.kill(session.pusher.child.pid, signal.SIGKILL)
        wait_for(lambda: session.pusher.child.poll() is not None)
        assert session.push(save(tmp_path / "run", 8, lineage=(A,)))
        assert session.pusher.kept == [session.pusher.child]
    assert not session.failures()


def answering(code):
    """A process in the place of a child: it reads one job after the other and does what the code says with each."""
    child = subprocess.Popen([sys.executable, "-uc", f"import sys\nfor job in sys.stdin: {code}"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(errors := tempfile.TemporaryFile()))
    child.errors, child.said_before = errors, 0
    return child


def test_why_a_child_ended_is_told_by_what_it_wrote_in_this_job():
    first = "print('a warning', file=sys.stderr); print('{\"result\": \"ok\"}')"
    kept = [answering(f"exec({first!r} if 'one' in job else 'raise SystemExit(job)')")]
    assert hub.work("push", {"repo": REPO, "place": "one"}, kept=kept) == {} and len(kept) == 1
    with pytest.raises(hub.HubError, match="ended by 1: .*\"two\"") as raised:
        hub.work("push", {"repo": REPO, "place": "two"}, kept=kept)
    assert "a warning" not in str(raised.value) and not kept


def test_what_a_library_prints_breaks_no_line_of_a_child(server, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import json\n"
        "loads = json.loads\n"
        "json.loads = lambda *words, **more: print('no newline', end='', flush=True) or loads(*words, **more)\n")
    done = subprocess.run([sys.executable, "hub.py", "work", "look", str(os.getpid())], cwd=ROOT, check=True,
                          input=json.dumps(hub.NET | {"repo": REPO, "private": True}) + "\n", capture_output=True,
                          text=True, timeout=LIMIT_S, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert json.loads(done.stdout)["result"] == "ok" and "no newline" in done.stderr


def test_a_child_is_ended_at_its_deadline(server):
    server.add_fault("hang", "GET /api/models")
    with pytest.raises(hub.HubError, match="was ended at its deadline of 3 s") as raised:
        hub.work("look", {"repo": REPO}, 3)
    assert raised.value.kind == "killed"


def test_a_silent_socket_is_given_up(server, tmp_path, monkeypatch):
    server.add_fault("hang", COMMIT)
    monkeypatch.setattr(hub, "NET", {"timeout_s": 1.0, "pause_s": 0.02})
    with Session(tmp_path / "run") as session:
        assert session.push(save(tmp_path / "run", 4))
    assert session.failures() == ["unsure"]


def test_a_child_ends_with_its_parent_and_takes_no_device(server, tmp_path):
    server.add_fault("hang", "GET /api/models", times=0)
    code = f"import hub; hub.work('look', {{'repo': {REPO!r}}}, started=lambda child: print(child.pid, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert server.wait_for("GET /api/models")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in environment and os.getpgid(pid) == pid != os.getpgid(parent.pid)
        parent.kill()
    wait_for(lambda: not is_there(pid))


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no class of idle processes")
def test_a_push_runs_only_where_a_core_is_idle_and_a_cold_start_as_usual(server, tmp_path):
    def class_of(pid):
        return os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)
    server.add_fault("hang", "GET /api/models", times=0)
    seen = []

    def note(child):
        assert server.wait_for("GET /api/models")
        seen.append(class_of(child.pid))
    with pytest.raises(hub.HubError, match="deadline"):
        hub.work("look", {"repo": REPO}, 5, started=note)
    assert seen == [(os.SCHED_OTHER, 0)]
    with pytest.raises(hub.HubError):  # the payload is empty, so that it ends by itself
        hub.work("push", {"repo": REPO, "place": str(tmp_path)}, started=lambda child: wait_for(
            lambda: class_of(child.pid) == (os.SCHED_IDLE, 19)))


@pytest.mark.parametrize("each_s, rest_s", [(0.04, 0.08), (0.0, 0.0), (9.0, 1.0)])
def test_a_push_rests_twice_as_long_as_it_waited_for_a_core(each_s, rest_s):
    code = f"""if True:
        import hub, signal, time
        asked, slept, inside = [], [], []

        def sleep(seconds):
            assert not inside, "a rest within a rest"
            inside.append(slept.append(round(seconds, 6)))
            for _ in range(50):  # as the other threads go on meanwhile
                hub.digest_of("hub.py", hub.hashlib.sha256())
            inside.clear()
        hub.waited_s = lambda: asked.append(0) or {each_s} * len(asked)
        time.sleep = sleep
        hub.step_aside()
        deadline = time.monotonic() + 30
        while len(slept) < 3 and time.monotonic() < deadline:
            pass
        signal.setitimer(signal.ITIMER_PROF, 0)  # an interpreter that ends has no handlers
        assert set(slept) == {{{rest_s}}} and len(slept) >= 3, slept"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT_S)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not say how long it waited")
def test_the_wait_for_a_core_is_seconds():
    began, before = time.monotonic(), hub.waited_s()
    assert 0 <= hub.waited_s() - before <= time.monotonic() - began


def test_the_trainer_never_loads_the_client_nor_a_child_torch(server, tmp_path):
    code = ("import sys, hub; hub.work('look', {'repo': 'me/run', 'private': True}); "
            "assert not {'huggingface_hub', 'torch'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT_S)
    done = subprocess.run([sys.executable, "-X", "importtime", "hub.py", "work", "look", str(os.getpid())], cwd=ROOT,
                          input=json.dumps(hub.NET | {"repo": REPO}) + "\n", check=True, capture_output=True, text=True,
                          timeout=LIMIT_S)
    assert json.loads(done.stdout)["result"] == "ok" and "huggingface_hub" in done.stderr
    assert not re.search(r"\| +torch\b", done.stderr)


# -- what stays there, and here

def test_checkpoints_beyond_hub_keep_go_and_milestones_stay(server, tmp_path):
    out_dir = tmp_path / "run"
    with Session(out_dir, keep=2) as session:
        for step in (4, 8, 12, 16):
            folder = save(out_dir, step, lineage=(A,))
            milestone(out_dir, step)
            assert session.push(folder)
    assert there(server) == ["step_00000012", "step_00000016"]
    assert len(there(server, "milestones")) == 4
    assert [row["remote"] for row in session.named("prune")] == [["step_00000004"], ["step_00000008"]]


def test_a_payload_that_nothing_points_at_goes_when_the_run_has_passed_it(server, tmp_path):
    pushed(server, tmp_path / "a", 4)
    orphan = save(tmp_path / "dead", 6, lineage=(A, ("dead", 4)))
    other = save(tmp_path / "other", 7, run="run-b")
    for folder in (orphan, other):
        server.commit(REPO, {f"checkpoints/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()})
    pushed(server, tmp_path / "a", 8)
    assert there(server) == ["step_00000004", "step_00000007", "step_00000008"], "another run's is not touched"


def test_here_only_what_is_safe_there_is_deleted_and_the_newest_stays(server, tmp_path):
    out_dir = tmp_path / "run"
    with Session(out_dir, prune_local=True) as session:
        for step in (4, 8):
            assert session.push(save(out_dir, step, lineage=(A,)))
        assert names(out_dir) == ["step_00000008"]
        outage = server.add_fault("drop", times=0)
        for step in (12, 16):
            session.pusher.offer(save(out_dir, step, lineage=(A,)))
        assert names(out_dir) == ["step_00000012", "step_00000016"]
        server.faults.remove(outage)
        assert session.pusher.finish(LIMIT_S)
    assert names(out_dir) == ["step_00000016"]


def test_history_is_squashed_above_hub_max_gb_and_the_pointer_never_hangs(server, tmp_path):
    out_dir, seen = tmp_path / "run", []

    def look(server, record):
        if REPO in server.repos:
            seen.append(pointed_at(server))
    server.after_request = look
    with Session(out_dir, keep=1, max_gb=0.008) as session:
        for step in (4, 8, 12):
            assert session.push(big(out_dir, step)), session.events
    assert len(session.named("squash")) == 1 and pointed_at(server) == (12, "a")
    assert session.named("squash")[0]["bytes_left"] < session.named("squash")[0]["bytes"]
    assert [step for step in dict.fromkeys(seen) if step] == [(4, "a"), (8, "a"), (12, "a")]
    assert restored(tmp_path / "new")[0] is None and found(tmp_path / "new") == ("step_00000012", "a")


def test_a_session_that_takes_over_while_history_is_squashed_is_not_moved_back(server, tmp_path):
    """A squash has no compare-and-swap: what it finds afterwards is looked at before anything is pointed at."""
    pushed(server, tmp_path / "a", 4)
    server.add_fault("hang", "POST .*super-squash", seconds=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with Session(tmp_path / "a", max_gb=1e-9) as frozen:
        frozen.pusher.offer(save(tmp_path / "a", 8, lineage=(A,)))
        assert server.wait_for("POST .*super-squash")
        pushed(server, tmp_path / "b", 12, lineage=(A, B))
        assert not frozen.pusher.finish(LIMIT_S) and frozen.pusher.overtaken
    assert pointed_at(server) == (12, "b")


def test_pushing_stops_with_an_event_where_a_squash_does_not_help(server, tmp_path):
    server.squash_frees = False
    out_dir = tmp_path / "run"
    with Session(out_dir, keep=1, max_gb=0.005) as session:
        assert session.push(big(out_dir, 4))
        for step in (8, 12):
            assert not session.push(big(out_dir, step))
        assert session.failures() == ["full", "full"] and len(session.named("squash")) == 1
    assert pointed_at(server) == (4, "a")


def test_a_refused_quota_is_told_as_such(server, tmp_path):
    server.quota = 1
    with Session(tmp_path / "run") as session:
        assert not session.push(save(tmp_path / "run", 4))
    assert session.failures() == ["full"] and "storage limit" in session.named("hub_error")[0]["cause"]


# -- cold start

def test_a_cold_start_brings_the_run_and_its_story(server, tmp_path):
    out_dir, new = tmp_path / "run", tmp_path / "new"
    save(out_dir, 4, lineage=(A,))
    (out_dir / "samples").mkdir()
    (out_dir / "samples" / "step_00000004.md").write_text("# text\n")
    for name in ("metrics.jsonl", "events.jsonl", "windows.jsonl", "machine.jsonl"):
        (out_dir / name).write_text('{"session": 3, "event": "x"}\n')
    pushed(server, out_dir, 8)
    checkpoint.lock(new).close()
    over, events = restored(new)
    assert over is None and found(new) == ("step_00000008", "a")
    for name in ("metrics.jsonl", "events.jsonl", "windows.jsonl", "machine.jsonl", "samples/step_00000004.md"):
        assert (new / name).read_bytes() == (out_dir / name).read_bytes()
    [pull] = events
    assert pull["event"] == "pull" and {"look_s", "download_s", "verify_s", "bytes"} <= pull.keys()
    assert checkpoint.pointer(new) == checkpoint.pointer(out_dir) and not leftovers(new)
    assert restored(new) == (None, []), "a second start brings nothing"


@pytest.mark.parametrize("exists", [False, True])
def test_no_repository_or_no_pointer_means_a_fresh_run(server, tmp_path, exists):
    if exists:
        server.create(REPO)
        server.commit(REPO, {"README.md": b"mine"})
    assert restored(tmp_path / "run", private=False) == (None, [])
    assert server.repos[REPO]["private"] == exists, "it is made, so that its absence is certain"


def pointer_with(server, **changes):
    server.commit(REPO, {"latest.json": json.dumps(json.loads(server.tree(REPO)["latest.json"]) | changes).encode()})


@pytest.mark.parametrize("fault,message", [
    ({"kind": "drop"}, "start again when it answers"),
    ({"kind": "status", "code": 500, "match": "GET"}, "start again when it answers"),
    ({"kind": "status", "code": 403, "match": "GET .*resolve"}, "token"),
    ({"kind": "missing", "match": "GET .*resolve", "path": "latest.json"}, "is the name right"),
    ({"kind": "corrupt", "match": "GET .*latest.json", "at": 1}, "latest.json: other bytes came than its ETag says"),
    ({"kind": "missing", "match": "GET .*resolve", "path": "trainer.json"}, "no whole checkpoint"),
    ({"kind": "corrupt", "match": "GET /lfs"}, "no whole checkpoint"),
], ids=["unreachable", "500", "refused", "no pointer file", "pointer", "a file is missing", "bytes"])
def test_what_cannot_be_read_is_an_error_never_a_fresh_run(server, tmp_path, fault, message):
    pushed(server, tmp_path / "run", 4)
    server.add_fault(**fault, times=0)
    with pytest.raises((ValueError, hub.HubError), match=message):
        restored(tmp_path / "new")
    assert not list((tmp_path / "new").glob("*"))


def test_a_pointer_that_nobody_wrote_so_is_an_error(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    pointer_with(server, checkpoint="step_00000008")
    with pytest.raises(hub.HubError, match="latest.json on the Hub is damaged"):
        restored(tmp_path / "new")


@pytest.mark.parametrize("role", ["hf_wrongwrongwrongwrong", ""])
@pytest.mark.parametrize("exists", [False, True])
def test_a_refused_token_is_an_error_never_a_fresh_run(server, tmp_path, monkeypatch, role, exists):
    if exists:
        pushed(server, tmp_path / "run", 4)
    monkeypatch.setenv("HF_TOKEN", role)
    with pytest.raises(hub.HubError, match="the token, of HF_TOKEN or of the client's login") as raised:
        restored(tmp_path / "new")
    assert raised.value.kind == "refused"


def test_one_flipped_bit_on_the_way_is_asked_for_again(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    fault = server.add_fault("corrupt", "GET /lfs")
    restored(tmp_path / "new")
    assert fault["fired"] == 1 and found(tmp_path / "new") == ("step_00000004", "a")


def test_a_listing_that_is_short_once_brings_no_older_checkpoint(server, tmp_path):
    pushed(server, tmp_path / "run", 4, 8)
    fault = server.add_fault("missing", "GET .*/tree/", path="optimizer", times=3)
    assert restored(tmp_path / "new")[0] is None
    assert fault["fired"] == 3 and found(tmp_path / "new") == ("step_00000008", "a")


def test_a_damaged_checkpoint_there_is_passed_over_for_the_older_one(server, tmp_path):
    pushed(server, tmp_path / "run", 4, 8)
    newest = server.files(REPO)["checkpoints/step_00000008/model.safetensors"][0]
    (server.blobs / newest).write_bytes(b"damaged")
    over, events = restored(tmp_path / "new")
    assert found(tmp_path / "new") == ("step_00000004", "a") and over["step"] == 8
    assert [row["event"] for row in events][-1] == "pull" and events[0]["checkpoint"] == "step_00000008"
    pushed(server, tmp_path / "new", 12, lineage=(A, B), over=over)
    assert pointed_at(server) == (12, "b")


def test_a_pointer_to_a_squashed_commit_is_followed_at_the_head(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    pointer_with(server, commit="0" * 40)
    restored(tmp_path / "new")
    assert found(tmp_path / "new") == ("step_00000004", "a")


@pytest.mark.parametrize("here,there_,wanted", [
    ((8, (A,)), (4, (A,)), (8, "a")),
    ((4, (A,)), (8, (A,)), (8, "a")),
    ((4, (A,)), (8, (A, B)), (8, "b")),
    ((8, (A, B)), (4, (A,)), (8, "b")),
    ((12, (A,)), (8, (A, B)), (8, "b")),
    ((8, (A,)), (8, (A, B)), (8, "b")),
    ((8, (A, ("c", 4))), (6, (A, B)), (6, "b")),
], ids=["here", "there", "there, another session", "here, another session", "neither", "neither, one step",
        "neither, both gone on"])
def test_lineage_decides_between_here_and_there(server, tmp_path, here, there_, wanted):
    """Where neither descends from the other the Hub's wins; a higher step decides nothing."""
    pushed(server, tmp_path / "there", there_[0], lineage=there_[1])
    folder = save(tmp_path / "here", here[0], lineage=here[1])
    _, events = restored(tmp_path / "here")
    assert found(tmp_path / "here") == (f"step_{wanted[0]:08d}", wanted[1])
    assert [row["instead_of"] for row in events] == [folder.name] * (wanted != (here[0], here[1][-1][0]))
    kept = [path for path in (tmp_path / "here/checkpoints").iterdir() if path.name.startswith(folder.name)]
    assert any(json.loads((path / "trainer.json").read_text())["lineage"][-1][0] == here[1][-1][0] for path in kept)


def test_another_runs_repository_is_refused(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    folder = save(tmp_path / "other", 8, run="run-b")
    with pytest.raises(ValueError, match="holds run run-b, and me/run holds run run-a; set another hub_repo"):
        restored(tmp_path / "other")
    assert names(tmp_path / "other") == [folder.name]


def test_the_hubs_copy_takes_the_place_of_a_damaged_one(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    folder = folder_of(tmp_path / "run", 4)
    (folder / "model.safetensors").unlink()
    restored(tmp_path / "run")
    assert found(tmp_path / "run") == (folder.name, "a")
    assert names(tmp_path / "run") == [folder.name, folder.name + ".aside-1"]


def test_a_step_that_is_there_alone_can_be_gone_back_to(server, tmp_path):
    pushed(server, tmp_path / "run", 4, 8)
    over, _ = restored(tmp_path / "new", "step_00000004")
    assert over["step"] == 8 and names(tmp_path / "new") == ["step_00000004"]
    assert checkpoint.find(tmp_path / "new", "step_00000004", lambda *_, **__: None, True)[1]["step"] == 4
    with pytest.raises(ValueError, match="has no whole step_00000006"):
        restored(tmp_path / "newer", "step_00000006")


def test_one_flipped_bit_of_the_pointer_is_not_believed(server, tmp_path):
    """The bit leaves JSON of the right form: only the hash of the answer tells."""
    pushed(server, tmp_path / "run", 4, 8)
    at = server.tree(REPO)["latest.json"].index(b'"manifest_sha256": "') + 25
    fault = server.add_fault("corrupt", "GET .*latest.json", at=at, times=2)
    restored(tmp_path / "new")
    assert fault["fired"] == 2 and found(tmp_path / "new") == ("step_00000008", "a")


def test_a_squash_that_was_cut_off_is_done_in_the_next_round(server, tmp_path):
    with Session(tmp_path / "run", keep=1, max_gb=0.0075) as session:
        assert session.push(big(tmp_path / "run", 4))
        # the second pointer is the one that is rolled before the squash
        race = server.add_fault("race", POINT, after=1, files={"notes.txt": "another writer"})
        for step in (8, 12):
            assert session.push(big(tmp_path / "run", step)), session.events
    assert "full" not in session.failures() and session.named("squash") and race["fired"]
    assert pointed_at(server) == (12, "a")


@pytest.mark.parametrize("match", ["GET /api/models/me/run$", "GET .*resolve/main/latest.json"])
def test_a_late_answer_brings_no_older_checkpoint(server, tmp_path, monkeypatch, match):
    monkeypatch.setattr(hub, "NET", {"timeout_s": 3.0, "pause_s": 0.02})
    pushed(server, tmp_path / "run", 4, 8)
    fault = server.add_fault("stale_resolve", match, back=2)
    restored(tmp_path / "new")
    assert fault["fired"] == 1 and found(tmp_path / "new") == ("step_00000008", "a")
    server.add_fault("stale_resolve", match, back=2, times=0)
    with pytest.raises(hub.HubError, match="start again when it answers"):
        restored(tmp_path / "newer", private=True)


def test_resume_never_refuses_what_is_there_before_it_is_brought(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    with pytest.raises(ValueError, match="resume='never', but me/run holds step_00000004"):
        restored(tmp_path / "new", "never")
    assert not (tmp_path / "new").exists()


def test_a_session_that_only_reads_brings_and_makes_nothing(server, tmp_path):
    assert restored(tmp_path / "new", writes=False) == (None, []) and not server.repos
    pushed(server, tmp_path / "run", 4)
    assert restored(tmp_path / "new", writes=False) == (None, []) and not (tmp_path / "new").exists()


def test_a_kill_while_it_downloads_leaves_nothing_in_the_way(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    server.add_fault("hang", "GET /lfs")
    code = f"import hub; hub.restore({REPO!r}, 'new', 'auto', print, print)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}) as parent:
        assert server.wait_for("GET /lfs", len(server.requests("GET /lfs")) + 1)
        parent.kill()
    checkpoint.clean(tmp_path / "new")
    restored(tmp_path / "new")
    assert found(tmp_path / "new") == ("step_00000004", "a") and not leftovers(tmp_path / "new")


def test_the_story_of_a_disk_that_was_left_behind_is_set_aside_for_the_runs(server, tmp_path):
    for step, row in ((4, "old"), (8, "old\nnew")):
        folder = save(tmp_path / "run", step, lineage=(A,))
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"rows": row}) + "\n")
        if step == 4:
            shutil.copytree(tmp_path / "run", tmp_path / "left")
        with Session(tmp_path / "run") as session:
            assert session.push(folder)
    restored(tmp_path / "left")
    assert (tmp_path / "left" / "metrics.jsonl").read_text() == (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "left" / "metrics.jsonl.aside-1").read_text()) == {"rows": "old"}


def test_what_this_disk_refuses_is_not_taken_for_an_unreachable_hub():
    assert hub.kind_of(OSError(errno.ENOSPC, "No space left on device")) == "error"
    assert hub.kind_of(ConnectionResetError()) == "unreachable"


def test_a_repository_is_made_at_the_second_try_too(server, tmp_path):
    fault = server.add_fault("status", "POST /api/repos/create", code=503)
    assert restored(tmp_path / "run") == (None, []) and fault["fired"] == 1 and REPO in server.repos


# -- weights by name

def test_weights_are_fetched_by_the_name_of_a_repository(server, tmp_path):
    pushed(server, tmp_path / "run", 4)
    folder = hub.fetch(f"hf:{REPO}", place=tmp_path / "weights")
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]
    checkpoint.check_init(folder, {}, checkpoint.sha256(folder_of(tmp_path / "run", 4) / "model.safetensors"))
    count = len(server.requests("GET /lfs"))
    assert hub.fetch(f"hf:{REPO}", place=tmp_path / "weights") == folder
    assert hub.fetch(f"hf:{REPO}@main", place=tmp_path / "weights") != folder
    assert len(server.requests("GET /lfs")) == count + 1, "a commit that is here is not fetched again"
    with pytest.raises(hub.HubError, match="me/nothing"):
        hub.fetch("hf:me/nothing", place=tmp_path / "weights")


def test_the_newest_milestone_is_fetched_where_nothing_is_pointed_at(server, tmp_path):
    server.create(REPO)
    for step in (4, 8):
        folder = milestone(tmp_path, step)
        server.commit(REPO, {f"milestones/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()})
    wanted = (tmp_path / "milestones" / "step_00000008" / "model.safetensors").read_bytes()
    assert (hub.fetch(f"hf:{REPO}", place=tmp_path / "weights") / "model.safetensors").read_bytes() == wanted


# -- commands

def command(capsys, *words):
    """(exit status, what was printed) of a command."""
    capsys.readouterr()
    status = hub.main([str(word) for word in words])
    return status, "".join(capsys.readouterr())


def test_status_and_verify_tell_what_lies_there(server, tmp_path, capsys):
    milestone(tmp_path / "run", 4)
    pushed(server, tmp_path / "run", 4, 8)
    status, text = command(capsys, "status", REPO)
    assert status == 0 and "step 8 of run run-a" in text and len(text.splitlines()) == 5
    status, text = command(capsys, "verify", REPO, "--full")
    assert status == 0 and text.count(" whole") == 3 and "read with your token" in text


def test_verify_reads_a_public_repository_without_a_token(server, tmp_path, capsys):
    pushed(server, tmp_path / "run", 4, private=False)
    count = len(server.log)
    status, text = command(capsys, "verify", REPO, "--full")
    assert status == 0 and "without a token" in text
    assert not any(record["token"] for record in server.log[count:])


@pytest.mark.parametrize("words,damage", [
    (["--full"], "bytes"), ([], "listing"), ([], "arithmetic"), ([], "fingerprint"), ([], "pointer")])
def test_verify_finds_damage(server, tmp_path, capsys, words, damage):
    out_dir = tmp_path / "run"
    pushed(server, out_dir, 4, 8)
    path = "checkpoints/step_00000004/{}".format
    if damage == "bytes":
        (server.blobs / server.files(REPO)[path("model.safetensors")][0]).write_bytes(b"x" * 200)
    elif damage == "listing":
        server.commit(REPO, {path("model.safetensors"): None})
    elif damage == "pointer":
        pointer_with(server, manifest_sha256="0" * 64)
    else:
        changes = {"tokens": 1} if damage == "arithmetic" else {"data_fingerprint": "another"}
        trainer = json.loads(server.tree(REPO)[path("trainer.json")]) | changes
        content = json.dumps(trainer).encode()
        manifest = json.loads(server.tree(REPO)[path("manifest.json")])
        for entry in manifest["files"]:
            if entry["name"] == "trainer.json":
                entry |= {"bytes": len(content), "sha256": hub.hashlib.sha256(content).hexdigest()}
        server.commit(REPO, {path("trainer.json"): content, path("manifest.json"): json.dumps(manifest).encode()})
    status, text = command(capsys, "verify", REPO, *words)
    assert status == 1 and text.count("damaged") == 1, text


def test_pull_push_and_prune_by_hand(server, tmp_path, capsys):
    out_dir, new = tmp_path / "run", tmp_path / "new"
    for step in (4, 8, 12):
        save(out_dir, step, lineage=(A,))
        status, text = command(capsys, "push", REPO, "--out", out_dir, "--keep", 9)
        assert status == 0 and "is safe on me/run" in text
    assert command(capsys, "pull", REPO, "--out", new)[0] == 0 and found(new) == ("step_00000012", "a")
    assert command(capsys, "prune", REPO, "--keep", 1)[0] == 0 and there(server) == ["step_00000012"]
    assert not leftovers(out_dir)
    checkpoint.rollback(out_dir, "step_00000004", lambda *_, **__: None)
    shutil.rmtree(new)
    status, text = command(capsys, "push", REPO, "--out", out_dir)
    assert status == 1 and "does not descend" in text and pointed_at(server) == (12, "a")


def test_commands_that_cannot_be_done_say_why(server, tmp_path, capsys, monkeypatch):
    assert command(capsys, "status", "nonsense")[0] == 2
    status, text = command(capsys, "verify", "me/nothing")
    assert status == 2 and "me/nothing" in text and "Repository Not Found" in text
    status, text = command(capsys, "push", REPO, "--out", tmp_path)
    assert status == 2 and "has no latest.json" in text
    status, text = command(capsys, "pull", REPO, "--out", tmp_path)
    assert status == 2 and "is the name right" in text
    server.create(REPO)
    status, text = command(capsys, "pull", REPO, "--out", tmp_path)
    assert status == 2 and "has no checkpoint" in text
    status, text = command(capsys, "prune", REPO)
    assert status == 2 and "has no latest.json" in text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, text = command(capsys, "status", REPO)
    assert status == 2 and "HF_HUB_OFFLINE is set" in text
    with pytest.raises(SystemExit):
        hub.main(["status"])


def test_an_error_of_rank_0_reaches_the_others_whole():
    error = copy.deepcopy(hub.HubError("refused", "why"))
    assert (error.kind, str(error)) == ("refused", "why")


# -- secrets

@pytest.mark.parametrize("text,wanted", [
    ("token hf_abcdefghijKLMNOP now", "token hf_*** now"),
    ("Authorization: Bearer eyJhbGciOi.J9-x", "Authorization: Bearer ***"),
    ("PUT https://host/lfs/1?X-Amz-Signature=ab&b=c failed", "PUT https://host/lfs/1?... failed"),
    ("url='https://host/a?sig=%2F' and", "url='https://host/a?...' and"),
    ("at /lfs/1 X-Amz-Credential=abc/123 and Signature=xyz", "at /lfs/1 X-Amz-Credential=*** and Signature=***"),
    ("is it? yes", "is it? yes")])
def test_tokens_and_signed_links_are_cut_out(text, wanted):
    assert hub.masked(text) == wanted


def test_a_token_of_any_form_is_cut_out(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my-own-secret\n")
    assert hub.masked("is my-own-secret known") == "is *** known"


def test_no_secret_is_said_where_an_upload_fails(server, tmp_path, capfd):
    """The client's own words have the signed link in them."""
    out_dir = tmp_path / "run"
    server.add_fault("status", "PUT /lfs", code=403, times=0)
    with Session(out_dir) as session:
        session.pusher.offer(save(out_dir, 4))
        wait_for(lambda: session.failures())
    heard = json.dumps(session.events) + "".join(session.said) + "".join(capfd.readouterr())
    assert "403" in heard and "?..." in heard
    assert "Signature=" not in heard and TOKENS["write"] not in heard
    assert TOKENS["write"] not in "".join(path.read_text("utf-8", "replace") for path in out_dir.rglob("*")
                                          if path.is_file())


def test_the_last_words_of_a_dead_child_are_masked(monkeypatch, tmp_path):
    (tmp_path / "child.py").write_text(
        "import sys; sys.exit('hf_abcdefghijkl at https://a.b/c?X-Amz-Signature=def')")
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(hub.HubError) as raised:
        hub.work("look", {"repo": REPO})
    assert str(raised.value) == "me/run: the child for 'look' ended by 1: hf_*** at https://a.b/c?..."
