"""The trainer with a Hub: sessions on empty disks are one run, two writers, outages, signals, the end of a session."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint
import hub
import preflight
from driver import (LIMIT_S, ROOT, Before, assert_same, before_step, checkpoints, events, family, is_there, kill,
                    pointed, reached, rows, session, signal_self, start_command, status, wait_for, words_of)
from test_checkpoint import save
from test_hub import COMMIT, POINT, REPO, Session, pointed_at, server, there
from test_save import live_tensors, records, saver

assert server  # a fixture


@pytest.fixture
def words(tmp_path, data):
    """words(name, **settings): the command line of a tiny run that pushes."""
    return lambda name="run", **settings: words_of(tmp_path / name, data, **{"hub_repo": REPO, **settings})


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    """The run that nothing has disturbed, without a Hub."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    assert session(words_of(out_dir, data, eval_interval=6))[0] == 0
    return out_dir


def ok(words, **patches):
    code, text = session(words, **patches)
    assert code == 0, text
    return text


# -- one run on many disks

def on_empty_disks(words, straight):
    """Three sessions, each on a disk of its own; the last one's folder, after it was compared."""
    for number in range(3):
        text = ok(words(f"disk-{number}", eval_interval=6, stop_after_steps=5))
    out_dir = straight_to(words, "disk-2")
    assert "finished (horizon) at step 12" in text and status(out_dir) == ("finished", "horizon", 12)
    assert_same(out_dir, straight)
    return out_dir


def straight_to(words, name):
    return Path(next(word for word in words(name) if word.startswith("--out_dir=")).partition("=")[2])


def test_sessions_on_empty_disks_are_one_run(words, straight, server):
    out_dir = on_empty_disks(words, straight)
    steps = {row["step"]: row["session"] for row in rows(out_dir / "metrics.jsonl")}
    assert steps == {step: 1 + (step - 1) // 5 for step in range(1, 13)}, "the story is whole on the last disk"
    [first, second] = events(out_dir, "pull")
    assert (first["session"], first["checkpoint"], second["session"]) == (2, "step_00000005", 3)
    assert {"look_s", "download_s", "verify_s", "bytes"} <= first.keys()
    assert [row["step"] for row in events(out_dir, "init")] == [0]
    assert all(start["stages"]["hub"] > 0 for start in events(out_dir, "start"))
    assert pointed_at(server)[0] == 12 and there(server) == ["step_00000010", "step_00000012"]
    story = server.tree(REPO)["events.jsonl"].decode()
    assert '"finish"' in story and story.count('"eval"') == 3, "what came after the last save is there too"


def test_ranks_without_a_disk_go_on_from_the_hub(words, straight, tmp_path, data, server):
    """Two ranks by torchrun, then one: rank 0 alone looks at the Hub."""
    more = {"reproducible": True, "eval_interval": 6}
    assert session(words_of(tmp_path / "straight", data, **more))[0] == 0
    ok(words("disk-0", **more, stop_after_steps=5))
    log = tmp_path / "log"
    assert start_command(log, *words("disk-1", **more, stop_after_steps=4), ranks=2).wait(LIMIT_S) == 0, log.read_text()
    ok(words("disk-2", **more))
    assert_same(tmp_path / "disk-2", tmp_path / "straight")


def test_a_kill_at_any_time_costs_what_was_not_pushed(words, straight, tmp_path, server):
    process = start_command(tmp_path / "log", *words("disk-0", eval_interval=6, max_steps=12))
    server.wait_for(POINT)
    kill(process)
    shutil.rmtree(tmp_path / "disk-0")
    at = pointed_at(server)[0] if "latest.json" in server.tree(REPO) else 0
    ok(words("disk-1", eval_interval=6))
    assert_same(tmp_path / "disk-1", straight)
    assert [row["checkpoint"] for row in events(tmp_path / "disk-1", "pull")] == [f"step_{at:08d}"] * (at > 0)


def test_a_finished_run_on_an_empty_disk_says_so_and_does_nothing_again(words, straight, server, tmp_path):
    ok(words("disk-0", eval_interval=6))
    text = ok(words("disk-1", eval_interval=6), train_step=before_step(1, lambda: pytest.fail("a step")))
    assert "finished (horizon) at step 12" in text
    assert len(events(tmp_path / "disk-1", "eval")) == 3, "0, 6 and 12, each once"
    assert pointed_at(server)[0] == 12


def test_the_live_line_shows_what_is_safe(words, server, tmp_path):
    made = []

    def kept(*arguments):
        made.append(hub.Pusher(*arguments))
        return made[0]

    pusher = type("hub", (), vars(hub) | {"Pusher": staticmethod(kept)})
    safe = lambda: wait_for(lambda: made[0].safe_step == 4)
    text = ok(words(schedule="constant"), hub=pusher, train_step=before_step(7, safe))
    live = {int(line.split()[1].partition("/")[0]): line for line in text.splitlines() if line.startswith("step ")}
    assert live[1].endswith("  safe none") and live[7].endswith("  safe 4")
    assert "hub    step 12 is safe on me/run" in text
    text = ok(words("disk-1", hub_keep=3, max_steps=13, schedule="constant"))
    assert "  safe 12" in text, "what was brought from there is safe there"


def test_here_only_what_is_not_yet_safe_is_kept(words, tmp_path, server):
    ok(words(hub_prune_local=True, keep_checkpoints=9))
    assert checkpoints(tmp_path / "run") == ["step_00000012"]
    assert len(there(server)) == 2


# -- what must not begin

@pytest.mark.parametrize("fault,message", [
    ({"kind": "drop"}, "start again when it answers, or set hub_repo=''"),
    ({"kind": "status", "code": 401, "match": "/api/models"}, "the token, of HF_TOKEN or of the client's login"),
    ({"kind": "corrupt", "match": "GET /lfs"}, "has no whole checkpoint"),
], ids=["unreachable", "refused", "damaged"])
def test_a_session_that_cannot_read_the_hub_does_not_begin(words, server, tmp_path, fault, message):
    ok(words("disk-0", max_steps=4))
    server.add_fault(**fault, times=0)
    code, text = session(words("disk-1", max_steps=4))
    assert code == 2 and message in text and "Traceback" not in text
    assert not list((tmp_path / "disk-1").glob("*.jsonl")) and not list((tmp_path / "disk-1").glob("checkpoints/*"))


def test_another_runs_repository_is_refused_at_the_start(words, server, tmp_path):
    ok(words("disk-0", max_steps=4))
    ok(words("other", max_steps=4, hub_repo=""))
    code, text = session(words("other", max_steps=4))
    assert code == 2 and "set another hub_repo or another out_dir" in text


@pytest.mark.parametrize("repo", ["name", "a/b/c", "hf:me/run", "me/run "])
def test_a_repository_is_named_by_owner_and_name(words, repo):
    code, text = session(words(hub_repo=repo))
    assert code == 2 and "is not a repository of the Hub; write owner/name" in text


def test_another_runs_step_is_not_gone_back_to(words, server, tmp_path):
    ok(words("disk-0", max_steps=8, schedule="constant"))
    ok(words("other", hub_repo="", max_steps=4, seed=7, schedule="constant"))
    shutil.rmtree(tmp_path / "disk-0/checkpoints/step_00000004")
    shutil.copytree(tmp_path / "other/checkpoints/step_00000004", tmp_path / "disk-0/checkpoints/step_00000004")
    before = pointed_at(server)
    code, text = session(words("disk-0", max_steps=8, seed=7, schedule="constant", resume="step_00000004"))
    assert code == 1 and "holds run" in text and pointed_at(server) == before


def test_a_session_that_only_reads_says_what_the_hub_holds(words, server, tmp_path):
    ok(words("disk-0", max_steps=4))
    code, text = session(words("empty", max_steps=4, dry_run=True))
    assert code == 0 and "a session that trains would bring step_00000004 first" in text
    code, text = session(words("empty", max_steps=4, eval_only=True))
    assert code == 2 and "would bring step_00000004 first" in text and not (tmp_path / "empty").exists()
    ok(words("other", max_steps=4, hub_repo=""))
    code, text = session(words("other", max_steps=4, dry_run=True))
    assert code == 2 and "set another hub_repo or another out_dir" in text


# -- two writers

def test_a_frozen_session_that_wakes_up_stops_and_moves_nothing(words, server, tmp_path):
    frozen = start_command(tmp_path / "log", *words("frozen", max_steps=10**6, schedule="constant"))
    assert server.wait_for(POINT, timeout=LIMIT_S)
    pids = family(frozen.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with server.lock:
        taken = pointed_at(server)
    other = start_command(tmp_path / "log-2", *words("other", max_steps=10**6, schedule="constant", stop_after_steps=3))
    assert other.wait(LIMIT_S) == 0, (tmp_path / "log-2").read_text()
    step, nonce = pointed_at(server)
    assert step == taken[0] + 3 and nonce != taken[1]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert frozen.wait(LIMIT_S) == 1
    text = (tmp_path / "log").read_text()
    assert "another session has taken the run over, and this one stops" in text and "Traceback" not in text
    assert pointed_at(server) == (step, nonce)
    assert status(tmp_path / "frozen")[:2] == ("failed", "hub")
    assert [row["kind"] for row in events(tmp_path / "frozen", "hub_error")][-1] == "overtaken"
    folder, trainer = pointed(tmp_path / "frozen")
    assert trainer["lineage"][-1][0] == taken[1], "the local state is whole"
    assert not any(map(is_there, pids))


def test_of_two_sessions_that_begin_a_run_one_goes_on(words, server, tmp_path):
    def other():
        process = start_command(tmp_path / "log", *words("other", max_steps=4))
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()

    code, text = session(words(), train_step=before_step(2, other))
    assert code == 1 and "set another hub_repo" in text and status(tmp_path / "run")[:2] == ("failed", "hub")
    assert pointed_at(server)[0] == 4


# -- training does not wait

def test_an_outage_of_the_whole_session_costs_no_step(words, straight, server, tmp_path):
    out = lambda: server.add_fault("status", times=0, code=503)
    text = ok(words(eval_interval=6, hub_exit_minutes=0.02), train_step=before_step(1, out))
    assert "the time for the last push is over" in text and status(tmp_path / "run") == ("finished", "horizon", 12)
    assert_same(tmp_path / "run", straight)
    assert not [path for path in server.files(REPO) if path.startswith("checkpoints")]
    server.faults.clear()
    ok(words(eval_interval=6))
    assert pointed_at(server)[0] == 12, "a further launch brings it there"


def test_what_an_outage_kept_from_the_hub_is_pushed_when_the_next_session_begins(words, server, tmp_path):
    more = {"max_steps": 1000, "schedule": "constant"}
    ok(words(stop_after_steps=4, **more))
    ok(words(stop_after_steps=4, hub_repo="", **more))
    seen = lambda: wait_for(lambda: pointed_at(server)[0] == 8)
    ok(words(checkpoint_interval=0, stop_after_steps=3, hub_exit_minutes=0, **more), train_step=before_step(2, seen))


def test_the_deadline_of_a_session_holds_for_the_last_push_too(words, server, tmp_path):
    """hub_exit_minutes is longer than what session_minutes leaves, and the Hub is out."""
    out = lambda: server.add_fault("status", times=0, code=503)
    began = time.monotonic()
    ok(words(max_steps=10**6, schedule="constant", log_interval=1000, session_minutes=0.4, hub_exit_minutes=0.15,
             checkpoint_interval=0), train_step=before_step(1, out))
    assert time.monotonic() - began < 24 + 5 and status(tmp_path / "run")[:2] == ("stopped", "minutes")
    assert events(tmp_path / "run", "hub_error")[-1]["cause"] == "the time for the last push is over"


def test_a_push_that_hangs_holds_up_no_step(words, server, tmp_path):
    server.add_fault("hang", "PUT /lfs", times=0)
    ok(words(hub_exit_minutes=0.02))
    assert reached(tmp_path / "run") == 12 and not events(tmp_path / "run", "pointer")
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_the_last_push_is_finished_up_to_hub_exit_minutes(words, server):
    server.add_fault("hang", COMMIT, seconds=3)
    ok(words(max_steps=4))
    assert pointed_at(server)[0] == 4


def test_after_a_signal_a_push_gets_what_time_there_is(words, server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "AFTER_SIGNAL_S", 2.0)
    server.add_fault("hang", "PUT /lfs", times=0)
    began = time.monotonic()
    text = ok(words(), train_step=before_step(6, lambda: signal_self("SIGTERM")))
    assert time.monotonic() - began < 20 and "the time for the last push is over" in text
    assert status(tmp_path / "run") == ("stopped", "signal", 6)


def test_a_signal_while_the_last_push_is_waited_for_ends_the_wait(words, server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "AFTER_SIGNAL_S", 1.0)
    server.add_fault("hang", "PUT /lfs", times=0)
    settle = Before(hub.Pusher.settle, 2, lambda: signal_self("SIGINT"))
    monkeypatch.setattr(hub.Pusher, "settle", lambda *arguments: settle(*arguments))
    text = ok(words(max_steps=4))
    assert "the time for the last push is over" in text and status(tmp_path / "run") == ("finished", "horizon", 4)


def test_a_signal_in_a_cold_start_ends_it_and_leaves_nothing(words, server, tmp_path):
    ok(words("disk-0", max_steps=4))
    server.add_fault("hang", "GET /lfs", times=0)
    process = start_command(tmp_path / "log", *words("disk-1"))
    assert server.wait_for("GET /lfs", len(server.requests("GET /lfs")) + 1, LIMIT_S)
    pids = family(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert status(tmp_path / "disk-1") == ("stopped", "signal", 0)
    assert "nothing was loaded yet that could be saved" in (tmp_path / "log").read_text()
    assert sorted(path.name for path in (tmp_path / "disk-1").iterdir()) == ["lock", "status.json"]
    assert not any(map(is_there, pids))
    server.faults.clear()
    ok(words("disk-1", max_steps=4))
    assert pointed_at(server)[0] == 4 and len(events(tmp_path / "disk-1", "init")) == 1


# -- where the disk is short, and the clock

class Pushing:
    """In place of a Pusher: one payload at work, whose end gives its space back."""
    overtaken, seconds, safe_step = "", 7.0, -1

    def __init__(self, held=True):
        self.held, self.offered = held, []

    def give_way(self):
        held, self.held = self.held, False
        return held

    def offer(self, folder):
        self.offered.append(folder.name)

    def exit_s(self, size):
        return 2 * self.seconds

    def close(self):
        pass


@pytest.mark.parametrize("held", [True, False])
def test_at_the_disk_floor_a_save_waits_for_the_push(tmp_path, monkeypatch, held):
    pusher = Pushing(held)
    saves, found = saver(tmp_path, live_tensors(), pusher=pusher)

    def make_room(*_):
        if pusher.held or not held:
            raise OSError("no room")

    monkeypatch.setattr(checkpoint, "make_room", make_room)
    assert saves.begin(4, "n1", records(4), True, False)
    saves.wait()
    assert [event for event, _ in found] == ["save" if held else "save_failed"]
    assert pusher.offered == ["step_00000004"] * held
    saves.close()


def test_a_push_gives_way_between_its_attempts_and_ends_one_that_is_at_work(server, tmp_path):
    server.add_fault("status", times=0, code=503)
    with Session(tmp_path / "run") as at_work:
        at_work.pusher.offer(save(tmp_path / "run", 4))
        assert at_work.pusher.give_way() and not at_work.pusher.give_way()
        assert not list((tmp_path / "run").glob(".tmp-push-*"))
        server.faults.clear()
        assert at_work.push(save(tmp_path / "run", 8)), "the next one is pushed"


def test_after_a_signal_no_save_waits_for_a_push_that_hangs(server, tmp_path):
    server.add_fault("hang", COMMIT)
    interrupt = preflight.Interrupt()
    with Session(tmp_path / "run", interrupt=interrupt) as at_work:
        at_work.pusher.offer(save(tmp_path / "run", 4))
        assert server.wait_for(COMMIT)
        interrupt.note(["SIGTERM"])
        assert at_work.pusher.give_way() and at_work.failures() == ["killed"]


def test_time_is_kept_for_the_last_push(tmp_path):
    saves, _ = saver(tmp_path, live_tensors(), pusher=Pushing())
    saves.seconds = 3.0
    ends = lambda seconds: time.monotonic() + seconds
    assert saves.wishes(ends(100), 1.0) == []
    assert saves.wishes(ends(2 * 3 + 2 * 7 + 0.5), 1.0) == ["minutes"]
    assert saves.wishes(ends(2 * 3 + 2 * 7 + 60), 1.0) == []
    saves.close()


def test_seconds_to_keep_follow_the_last_push_within_hub_exit_minutes(server, tmp_path):
    with Session(tmp_path / "run", patience_s=60.0) as at_work:
        assert at_work.pusher.exit_s(100e6) == 2 * (10 + 5) and at_work.pusher.exit_s(10e9) == 60
        assert at_work.push(save(tmp_path / "run", 4))
        assert 0 < at_work.pusher.exit_s(10e9) == 2 * at_work.pusher.seconds < 60


# -- weights by name

def test_weights_of_a_repository_begin_another_run(words, server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ok(words("disk-0", max_steps=4))
    text = ok(words("tuned", max_steps=4, hub_repo="", init_from=f"hf:{REPO}"))
    [init] = events(tmp_path / "tuned", "init")
    assert init["source"].startswith(str(tmp_path / "cache")) and "me--run@" in init["source"]
    weights = pointed(tmp_path / "disk-0")[0] / "model.safetensors"
    assert checkpoint.sha256(Path(init["source"], "model.safetensors")) == checkpoint.sha256(weights), text
    assert "nothing is left to do" in ok(words("tuned", max_steps=4, hub_repo="", init_from=f"hf:{REPO}"))
    code, text = session(words("none", hub_repo="", init_from="hf:me/nothing"))
    assert code == 2 and "me/nothing" in text


def test_a_sample_of_a_repository(words, server, tmp_path):
    ok(words("disk-0", max_steps=4))
    command = [sys.executable, "sample.py", f"--checkpoint=hf:{REPO}", "--samples=1", "--tokens=4", "--device=cpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
                          capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "---- 1" in done.stdout, done.stderr
    command[2] = "--checkpoint=hf:me/nothing"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "me/nothing" in done.stderr and "Traceback" not in done.stderr


# -- the Hub itself

@pytest.mark.hub
def test_the_same_run_on_the_hub_itself(straight, tmp_path, data):
    """Needs HF_TOKEN, of a login that may make a repository; it is deleted in the end."""
    from huggingface_hub import HfApi

    api = HfApi()
    repo = f"{api.whoami()['name']}/longhaul-test-{os.urandom(4).hex()}"
    try:
        on_empty_disks(lambda name="run", **settings: words_of(tmp_path / name, data, hub_repo=repo, **settings),
                       straight)
        assert hub.main(["verify", repo, "--full"]) == 0
    finally:
        api.delete_repo(repo, missing_ok=True)
