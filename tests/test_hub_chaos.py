"""The bench of the Hub: its reader finds every kind of violation, its comparison a single bit; a sample is clean."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from driver import ROOT, session, words_of
from hub_server import Hub

spec = importlib.util.spec_from_file_location("hub_chaos", ROOT / "bench" / "hub_chaos.py")
hub_chaos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub_chaos)
REPO = hub_chaos.REPO
FOLDER = "checkpoints/step_00000006/"


# -- the reader

def sha256_of(content):
    return hashlib.sha256(content).hexdigest()


def checkpoint_of(step, lineage, run="one"):
    """The files of a small checkpoint, whose weights depend on nothing but the step."""
    folder, settings = f"checkpoints/step_{step:08d}/", {"batch_tokens": 128, "block_size": 16}
    trainer = {"run": run, "lineage": lineage, "step": step, "tokens": 128 * step, "windows": 8 * step,
               "settings": settings}
    files = {"model.safetensors": b"model %d" % step * 9, "optimizer.safetensors": b"optimizer %d" % step * 9,
             "model.json": b"{}", "trainer.json": json.dumps(trainer).encode()}
    rows = [{"name": name, "bytes": len(content), "sha256": sha256_of(content)} for name, content in files.items()]
    files["manifest.json"] = json.dumps({"format": 1, "run": run, "step": step, "files": rows}).encode()
    return {folder + name: content for name, content in files.items()}


def pointer_to(files, commit):
    """What latest.json says of a checkpoint."""
    [path] = [path for path in files if path.endswith("trainer.json")]
    trainer, manifest = json.loads(files[path]), files[path.replace("trainer", "manifest")]
    return {"format": 1, "commit": commit, "checkpoint": path.split("/")[1], "manifest_sha256": sha256_of(manifest),
            "nonce": trainer["lineage"][-1][0],
            **{name: trainer[name] for name in ("run", "step", "tokens", "windows")}}


def point(hub, pointed):
    return hub.commit(REPO, {"latest.json": json.dumps(pointed).encode()}, "point")


def push(hub, files):
    """A commit with a checkpoint and one that points at it; the pointer."""
    pointed = pointer_to(files, hub.commit(REPO, files))
    point(hub, pointed)
    return pointed


@pytest.fixture
def hub(tmp_path):
    """A stand-in, without its servers, that has had two good pushes of one session, and a reader that has seen them."""
    hub = Hub(tmp_path / "hub")
    hub.create(REPO)
    hub.reader = hub_chaos.new_reader()
    for step in (3, 6):
        hub.pointed = push(hub, checkpoint_of(step, [["a", 0]]))
        assert told(hub) == []
    assert (hub.reader.looks, hub.reader.moves) == (2, 1)
    return hub


def told(hub):
    """What the reader finds wrong now."""
    hub.reader.violations.clear()
    hub_chaos.look(hub.reader, hub, {"line": "a request"})
    return hub.reader.violations[:]


def test_what_a_cycle_does_is_no_violation(hub):
    """A repository without a pointer, one writer after the other, a prune, and a squash with the pointer free of it."""
    hub.commit(REPO, {path: None for path in checkpoint_of(3, [])}, "prune")
    assert not told(hub)
    hub.commit(REPO, checkpoint_of(9, [["b", 0]]) | {"notes.txt": b"another writer"})
    assert not told(hub)
    point(hub, hub.pointed | {"commit": ""})
    assert not told(hub)
    repo = hub.repos[REPO]
    squashed = hub.land(repo, "main", repo["commits"][hub.head(REPO)]["tree"], "squash", squash=True)
    assert not told(hub)
    point(hub, hub.pointed | {"commit": squashed})
    assert not told(hub) and hub.reader.moves == 1
    push(hub, checkpoint_of(12, [["a", 0], ["c", 9]]))
    assert not told(hub) and hub.reader.moves == 2


def test_no_repository_and_no_pointer_are_no_violation(tmp_path):
    hub = Hub(tmp_path)
    hub.reader = hub_chaos.new_reader()
    assert not told(hub)
    hub.create(REPO)
    assert not told(hub) and hub.reader.looks == 0


def test_a_pointer_that_is_gone_is_told(hub):
    hub.commit(REPO, {"latest.json": None})
    assert "latest.json is gone" in told(hub)[0]


@pytest.mark.parametrize("change, problem", [
    ({"commit": "0" * 40}, "commit 0{40} is not there"), ({"manifest_sha256": "0" * 64}, "not the one pointed at"),
    ({"checkpoint": "step_00000003"}, "it says"), ({"step": 3}, "it says"), ({"format": 2}, "it says"),
    ({"step": 9, "checkpoint": "step_00000009"}, "manifest.json is not there"), ({"nonce": "b"}, "another nonce"),
    ({"tokens": 1}, "another tokens than"), ({"windows": 1, "run": "two"}, "another run and windows than")])
def test_a_pointer_that_does_not_fit_its_checkpoint_is_told(hub, change, problem):
    point(hub, hub.pointed | change)
    assert re.search(problem, told(hub)[0])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"format": 1}'])
def test_a_pointer_that_is_none_is_told(hub, content):
    hub.commit(REPO, {"latest.json": content})
    assert told(hub)


@pytest.mark.parametrize("name", ["manifest.json", *hub_chaos.PARTS])
@pytest.mark.parametrize("change", [None, b"other bytes"])
def test_a_file_that_is_gone_or_another_is_told_in_the_commit_that_counts(hub, name, change):
    """In another commit it is no violation: the pointer names one, until a squash has ended it."""
    changed = hub.commit(REPO, {FOLDER + name: change})
    assert not told(hub)
    for commit in (changed, ""):
        point(hub, hub.pointed | {"commit": commit})
        assert told(hub), commit


def test_a_file_too_many_is_told(hub):
    point(hub, hub.pointed | {"commit": hub.commit(REPO, {FOLDER + "more.json": b"{}"})})
    assert "more.json" in told(hub)[0]


def test_a_manifest_that_lists_no_optimizer_is_told(hub):
    files = checkpoint_of(9, [["a", 0]])
    del files["checkpoints/step_00000009/optimizer.safetensors"]
    path = "checkpoints/step_00000009/manifest.json"
    manifest = json.loads(files[path])
    manifest["files"] = [row for row in manifest["files"] if row["name"] != "optimizer.safetensors"]
    push(hub, files | {path: json.dumps(manifest).encode()})
    assert "are there" in told(hub)[0]


def blob_of(hub, name):
    return hub.blobs / hub.files(REPO)[FOLDER + name][0]


@pytest.mark.parametrize("name", hub_chaos.PARTS)
def test_a_bit_in_the_store_is_told_though_the_file_was_read_before(hub, name):
    """In place or under the same name; with the bit turned back all is well."""
    path = blob_of(hub, name)
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes(flipped)
    assert name in told(hub)[0]
    path.write_bytes(data)
    assert not told(hub)
    path.with_name("new").write_bytes(flipped)
    os.replace(path.with_name("new"), path)
    assert name in told(hub)[0]


def test_a_file_is_read_once_as_long_as_it_is_the_same(hub, monkeypatch):
    read, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), real(path))[1])
    assert not told(hub) and blob_of(hub, "model.safetensors") not in read
    os.utime(blob_of(hub, "model.safetensors"), ns=(0, 0))
    assert not told(hub) and blob_of(hub, "model.safetensors") in read


@pytest.mark.parametrize("field, value", [("tokens", 1), ("windows", 1), ("step", 5)])
def test_an_arithmetic_that_does_not_hold_is_told(hub, field, value):
    pointed = {"run": "one", "step": 6, "tokens": 768, "windows": 48, "nonce": "a"}
    trainer = pointed | {"lineage": [["a", 0]], "settings": {"batch_tokens": 128, "block_size": 16}}
    hub_chaos.check_cursor(pointed, trainer)
    with pytest.raises(ValueError, match="another"):
        hub_chaos.check_cursor(pointed | {field: value}, trainer)
    with pytest.raises(ValueError, match="tokens and"):
        hub_chaos.check_cursor(pointed | {field: value}, trainer | {field: value})


@pytest.mark.parametrize("step, lineage, run", [
    (3, [["a", 0]], "one"), (9, [["a", 0]], "two"), (9, [["b", 0]], "one"), (9, [["a", 0], ["b", 3]], "one"),
    (9, [["b", 6]], "one")])
def test_a_pointer_that_goes_back_or_leaves_the_line_is_told(hub, step, lineage, run):
    push(hub, checkpoint_of(step, lineage, run))
    assert "was pointed at, and now" in told(hub)[0]


@pytest.mark.parametrize("step, lineage", [(6, [["a", 0], ["b", 6]]), (9, [["z", 0], ["a", 0], ["b", 6], ["c", 6]])])
def test_a_pointer_that_goes_on_in_the_line_is_right(hub, step, lineage):
    push(hub, checkpoint_of(step, lineage))
    assert not told(hub)


def test_the_reader_shares_no_code_with_what_it_judges():
    source = (ROOT / "bench" / "hub_chaos.py").read_text()
    assert not re.search(r"^\s*(import|from) (hub|checkpoint|train)\b", source, re.MULTILINE)
    assert not re.search(r"^\s*(import|from) (hub|checkpoint|train)\b", (ROOT / "tests/hub_server.py").read_text(),
                         re.MULTILINE)


# -- where a session is, and the strike

def test_the_stages_of_a_session():
    name = "/api/models/me/run"
    lines = [
        ("GET /api/agent-harnesses", "start"), (f"GET {name}", "start"), ("GET /me/run/resolve/0/latest.json", "start"),
        (f"GET {name}/tree/0?recursive=True", "start"), ("GET /me/run/resolve/0/checkpoints/a/b", "download"),
        ("GET /lfs/0", "download"), (f"GET {name}", "push"), (f"GET {name}/tree/0", "push"),
        (f"POST {name}/preupload/main", "upload"), ("POST /me/run.git/info/lfs/objects/batch", "upload"),
        ("PUT /lfs/0", "upload"), (f"POST {name}/commit/main step 3 of run 1 a b", "commit"),
        (f"GET {name}/tree/1", "verify"), ("GET /lfs/0", "verify"), (f"POST {name}/preupload/main", "pointer"),
        (f"POST {name}/commit/main point at step_00000003 latest.json", "pointer"),
        ("GET /me/run/resolve/main/latest.json", "pointer"), ("GET /me/run/resolve/2/c/d/trainer.json", "prune"),
        (f"POST {name}/commit/main prune step_00000003 a", "prune"), (f"GET {name}?expand=usedStorage", "push"),
        (f"POST {name}/super-squash/main", "squash")]
    stage = "start"
    for line, wanted in lines:
        stage = hub_chaos.stage_after(stage, line)
        assert stage == wanted, line


@pytest.mark.parametrize("delay", [0, 0.1])
def test_a_session_is_struck_before_the_answer_to_the_request_that_was_drawn(delay):
    plan = {"aim": "upload", "request": 2, "delay": delay, "kind": "kill"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                          env={**os.environ, "HUB_CHAOS_SESSION": "mine"}) as process:
        watch = hub_chaos.new_watch("HUB_CHAOS_SESSION=mine", plan)
        for line in ("PUT /lfs/0", "GET /me/run/resolve/main/latest.json"):
            hub_chaos.follow(watch, {"line": line})
            assert process.poll() is None
        hub_chaos.follow(watch, {"line": "PUT /lfs/1"})
        assert watch.is_there.is_set() and watch.reached == (delay == 0)
        assert hub_chaos.send("HUB_CHAOS_SESSION=another", signal.SIGKILL) == 0
        if delay:
            assert process.poll() is None and hub_chaos.send("HUB_CHAOS_SESSION=mine", signal.SIGKILL) == 1
        assert process.wait() == -signal.SIGKILL


def test_a_plan_is_a_function_of_the_seed():
    plans = [hub_chaos.plans_of(seed, 24) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2] and len(plans[0]) == 24
    kinds = Counter(plan["kind"] for plan in plans[0])
    assert kinds.keys() == hub_chaos.KINDS.keys() - {"takeover"} and kinds["kill"] >= 12
    assert {plan["aim"] for plan in plans[0] if plan["kind"] == "kill"} == set(hub_chaos.AIMS)
    assert {plan["ranks"] for plan in plans[0]} == {1, 2} and not plans[0][-1]["faults"]
    drawn = {kind for seed in range(9) for plan in hub_chaos.plans_of(seed, 24) for kind, _, _ in plan["faults"]}
    assert drawn == {kind for variants in hub_chaos.FAULTS for kind, _, _ in variants}
    for count in range(3, 30):
        assert [plan["kind"] for plan in hub_chaos.plans_of(1, count)][count - 1:] == ["last"]


# -- what a session must not do

@pytest.fixture
def ended(tmp_path):
    """A session that has ended well, from a pointer at step 6; its events can be changed."""
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "status.json").write_text('{"state": "stopped", "reason": "steps", "step": 9, "max_steps": 12}')
    (tmp_path / "log").write_text("resume step_00000006\n")
    ended = SimpleNamespace(out_dir=out_dir, log=tmp_path / "log", began=100.0, phase="", process=SimpleNamespace(
        returncode=0), pointed={"checkpoint": "step_00000006"})
    write_events(ended, (1, "init", ""), (101, "start", ""), (102, "resume", "step_00000006"))
    return ended


def write_events(ended, *rows):
    (ended.out_dir / "events.jsonl").write_text("".join(
        json.dumps({"time": time, "event": event, "checkpoint": name}) + "\n" for time, event, name in rows))


def problems(ended, kind="stop", **fired):
    return list(hub_chaos.problems_of({"kind": kind}, ended, hub_chaos.ending_of(ended),
                                      hub_chaos.own(ended, "events"), Counter(fired)))


def test_a_session_that_ends_well_is_no_problem(ended):
    assert not problems(ended)
    assert problems(ended, "last") == ["it ended as 'stopped' (0)"]


def test_a_session_that_begins_anew_is_a_problem(ended):
    write_events(ended, (101, "start", ""), (102, "init", ""))
    assert problems(ended) == ["it began anew, though step_00000006 was pointed at"]
    ended.pointed = None
    assert not problems(ended)


def test_a_session_that_goes_on_from_another_checkpoint_is_a_problem_but_under_a_stale_branch(ended):
    write_events(ended, (101, "start", ""), (102, "resume", "step_00000003"))
    assert "went on from step_00000003" in problems(ended)[0] and not problems(ended, stale_resolve=1)


def test_a_session_that_was_overtaken_must_have_been_shown_a_stale_branch_or_frozen(ended):
    (ended.out_dir / "status.json").write_text('{"state": "failed", "reason": "hub"}')
    ended.process.returncode = 1
    assert problems(ended) == ["it ended as 'overtaken' (1)"]
    assert not problems(ended, stale_resolve=1) and not problems(ended, "freeze")
    ended.process.returncode = 0
    assert problems(ended, "freeze") == ["it ended as 'broke' (0)"]


def test_a_refused_session_has_started_nothing_and_has_said_why(ended):
    (ended.out_dir / "status.json").unlink()
    ended.process.returncode = 2
    assert problems(ended, drop=1) == ["it ended as 'broke' (2)"]
    write_events(ended, (1, "init", ""), (1, "start", ""), (101, "damaged", ""))
    assert problems(ended, drop=1) == ["it ended as 'broke' (2)"]
    ended.log.write_text("train.py: me/run: 503 Server Error\n")
    assert not problems(ended, drop=1)
    assert problems(ended, drop=0) == ["it was refused without a fault"]


def test_flipped_bits_are_turned_back(tmp_path):
    hub, data = Hub(tmp_path), b"0123456789"
    path = hub.blobs / sha256_of(data)
    path.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    flipped = {path.name}
    hub_chaos.heal(hub, flipped)
    assert path.read_bytes() == data and not flipped


# -- what is equal

@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    """A run of 12 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    code, text = session(words_of(folder, data))
    assert code == 0, text
    return folder


@pytest.fixture
def bench(run, tmp_path):
    """A bench at its end: the Hub holds the last checkpoint of the last disk, which is a copy of the run."""
    copy, hub = Path(shutil.copytree(run, tmp_path / "copy")), Hub(tmp_path / "hub")
    hub.create(REPO)
    hub.commit(REPO, {str(path.relative_to(copy)): path.read_bytes() for path in copy.glob("checkpoints/*12/*")})
    return SimpleNamespace(copy=copy, hub=hub, horizon=12, hash="", reader=SimpleNamespace(pointed={"step": 12}))


def differences(bench, run, other=None):
    return hub_chaos.compare(bench, bench.copy, (run, other or run))


def change_row(path, step, **fields):
    """Changes the rows of a step in a jsonl file; without fields they go."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | fields if row["step"] == step else row for row in rows if fields or row["step"] != step]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_equal_to_itself(bench, run):
    assert differences(bench, run) == [] and re.fullmatch("[0-9a-f]{12}", bench.hash)


@pytest.mark.parametrize("name, step, fields, told", [
    ("metrics", 7, {}, ["metrics of step 7"]), ("metrics", 7, {"loss": 1.0}, ["metrics of step 7"]),
    ("metrics", 1, {"grad_norm": 1.0}, ["metrics of step 1"]), ("windows", 2, {"windows": []}, ["windows of step 2"]),
    ("events", 12, {"val_loss": 1.0}, ["evaluation at the horizon"])])
def test_a_changed_or_missing_row_is_a_difference(bench, run, name, step, fields, told):
    change_row(bench.copy / f"{name}.jsonl", step, **fields)
    assert differences(bench, run) == told


def test_a_single_bit_of_the_last_checkpoint_is_a_difference_here_and_on_the_hub(bench, run):
    path = bench.copy / "checkpoints" / "step_00000012" / "optimizer.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    told = differences(bench, run)
    assert len(told) == 2 and told[0].startswith("tensors optimizer.safetensors ")
    assert told[1] == "the Hub's checkpoints/step_00000012/optimizer.safetensors"


def test_references_that_differ_and_a_pointer_elsewhere_are_differences(bench, run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    change_row(other / "metrics.jsonl", 3, loss=1.0)
    bench.reader.pointed = {"step": 8}
    assert differences(bench, run, other) == ["1 and 2 undisturbed ranks: metrics of step 3",
                                              "the Hub's pointer is not at the horizon"]


def test_a_folder_on_a_disk_is_whole_or_not(bench):
    folder = bench.copy / "checkpoints" / "step_00000012"
    assert hub_chaos.is_whole(folder)
    (folder / "model.json").write_text("{}")
    assert not hub_chaos.is_whole(folder)
    (folder / "manifest.json").unlink()
    assert not hub_chaos.is_whole(folder)


@pytest.mark.parametrize("kills, faults, phases, kinds, right", [
    (5, 10, 5, 8, True), (4, 10, 5, 8, False), (5, 9, 5, 8, False), (5, 10, 4, 8, False), (5, 10, 5, 7, False)])
def test_too_little_is_told(kills, faults, phases, kinds, right):
    found = {"sessions": 20, "kills": kills, "faults": faults, "kills_by_phase": dict.fromkeys(range(phases)),
             "faults_by_kind": dict.fromkeys(range(kinds))}
    assert (not list(hub_chaos.too_little(found))) == right


# -- the bench itself

def test_four_sessions(tmp_path):
    ran = subprocess.run([sys.executable, "bench/hub_chaos.py", "--sessions", "4", "--seed", "1"], cwd=ROOT, text=True,
                         capture_output=True, timeout=900, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["sessions"] == 4 and found["kills"] >= 1 and found["faults"] >= 2
    assert found["unequal"] == found["pointer_violations"] == found["wrong"] == 0
    assert found["pointer_moves"] >= 1 and found["looks"] > 20
    assert not list(tmp_path.iterdir()), "it cleans up"
