"""The fault-injection bench: it sees a single bit, each of its damages is one, and a minute of it comes out clean."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from driver import ROOT, session, words_of

spec = importlib.util.spec_from_file_location("chaos", ROOT / "bench" / "chaos.py")
chaos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chaos)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Two runs of three checkpoints, at steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {"one": {}, "other": {"seed": 2, "n_embd": 8}}.items():
        code, text = session(words_of(folder / name, data, keep_checkpoints=3, **changes))
        assert code == 0, text
    return folder / "one", folder / "other"


@pytest.fixture
def copy(runs, tmp_path):
    return Path(shutil.copytree(runs[0], tmp_path / "copy"))


# -- what is equal

def change(path, old, new):
    """Replaces one piece of a file by another of any length."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def told(runs, out_dir):
    return chaos.differences(chaos.state_of(out_dir, 12), chaos.state_of(runs[0], 12))


def test_a_run_is_equal_to_itself_and_to_no_other(runs, copy):
    assert not told(runs, copy)
    assert {key.split()[0] for key in told(runs, runs[1])} >= {"tensors", "counter", "metrics"}


@pytest.mark.parametrize("name", chaos.TENSORS)
def test_a_single_bit_of_a_tensor_is_a_difference(runs, copy, name):
    path = copy / "checkpoints" / "step_00000012" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert len(told(runs, copy)) == 1 and told(runs, copy)[0].startswith(f"tensors {name} ")


def test_metadata_of_a_tensor_file_is_no_difference(runs, copy):
    path = copy / "checkpoints" / "step_00000012" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    header["__metadata__"] = {"run": "another"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
    assert not told(runs, copy)


def test_a_counter_is_a_difference(runs, copy):
    change(copy / "checkpoints" / "step_00000012" / "trainer.json", b'"updates": 12', b'"updates": 11')
    assert told(runs, copy) == ["counter updates"]


@pytest.mark.parametrize("name", ["metrics", "windows"])
def test_a_missing_row_is_a_difference(runs, copy, name):
    lines = (copy / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
    (copy / f"{name}.jsonl").write_bytes(b"".join(lines[:6] + lines[7:]))
    assert told(runs, copy) == [f"{name} of step 7"]


@pytest.mark.parametrize("field, name", [("loss", "metrics"), ("lr", "metrics"), ("windows", "windows")])
def test_a_changed_number_is_a_difference_even_where_the_step_was_done_again(runs, copy, field, name):
    rows = chaos.rows(copy, name)
    again = dict(rows[4])
    rows[4][field] = rows[0][field]
    (copy / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, again]))
    assert told(runs, copy) == [f"{name} of step 5"]


# -- what is damaged

@pytest.mark.parametrize("name", chaos.FILES)
@pytest.mark.parametrize("kind", chaos.KINDS)
def test_a_damage_changes_bytes_of_the_copy_alone_and_is_found(runs, tmp_path, kind, name):
    before = {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()}
    entry = chaos.case_of(*runs, tmp_path / "damaged", kind, name, random.Random(f"{kind} {name}"))
    if entry is None:
        assert name == "model.json" and kind == "another step" or kind.endswith("agrees")
        return
    where = runs[0] / entry.path.relative_to(tmp_path / "damaged")
    assert (entry.path.read_bytes() if entry.path.exists() else None) != before[where]
    assert {path: path.read_bytes() for path in before} == before
    allowed = ["found"] + ["fell back", "refused"][:1 + (kind == "another run")] * (name == "latest.json")
    assert chaos.verdict(runs[0], entry) in allowed


def test_a_damage_that_was_not_noticed_is_missed(runs, tmp_path):
    entry = chaos.case_of(*runs, tmp_path / "damaged", "flipped bit", "model.safetensors", random.Random(1))
    with chaos.checks_off(runs[0]):
        assert chaos.verdict(runs[0], entry).startswith("missed: no event")


@pytest.mark.parametrize("check", chaos.CHECKS)
def test_each_check_tells_a_fault_that_no_other_does(runs, tmp_path, check):
    assert chaos.check_alone(check, runs[0], tmp_path / "copy", random.Random(1))


def test_a_check_that_is_on_is_no_control(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(chaos.CHECKS, "cursor", (*chaos.CHECKS["cursor"][:2], chaos.CHECKS["cursor"][1]))
    assert not chaos.check_alone("cursor", runs[0], tmp_path / "copy", random.Random(1))
    monkeypatch.setitem(chaos.CHECKS, "cursor", ("verify", "a check that is gone", "True"))
    with pytest.raises(ValueError, match="not 'a check that is gone' any more"):
        chaos.check_alone("cursor", runs[0], tmp_path / "copy", random.Random(1))


def test_only_a_pointer_of_another_run_may_be_refused(runs, tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("latest.json is of run abc")
    monkeypatch.setattr("checkpoint.find", refuse)
    for kind, right in (("another run", "refused"), ("flipped bit", "missed: it would not go on")):
        entry = chaos.case_of(*runs, tmp_path / "damaged", kind, "latest.json", random.Random(1))
        assert chaos.verdict(runs[0], entry).startswith(right)


def test_a_damaged_folder_that_was_deleted_is_missed(runs, tmp_path, monkeypatch):
    entry = chaos.case_of(*runs, tmp_path / "damaged", "truncated", "trainer.json", random.Random(1))
    monkeypatch.setattr("checkpoint._set_aside", lambda path, word: shutil.rmtree(path))
    assert chaos.verdict(runs[0], entry).startswith("missed: took")


# -- where a save stands

def test_phases(runs, copy):
    folder, temporary = copy / "checkpoints" / "step_00000012", copy / "checkpoints" / ".tmp-1"
    assert chaos.phase(copy) == ""
    temporary.mkdir()
    assert chaos.phase(copy) == "write"
    (temporary / "trainer.json").write_text('{"step": 16}')
    assert chaos.phase(copy) == "write"
    (temporary / "trainer.json").write_text('{"step": 4}')
    assert chaos.phase(copy) == "prune"
    shutil.rmtree(temporary)
    folder.rename(folder.with_name("step_00000016"))
    assert chaos.phase(copy) == "rename"
    (copy / ".tmp-2").touch()
    assert chaos.phase(copy) == "pointer"


def test_a_plan_is_a_function_of_the_seed():
    plans = [[chaos.plan_of(seed, number, chaos.CONFIGS) for number in range(20)] for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    sessions = [session for plan in plans[0] for session in plan["sessions"]]
    assert {session["aim"] for session in sessions} == set(chaos.AIMS)
    assert {session["target"] for session in sessions} == set(sum(chaos.TARGETS.values(), []))
    assert {session["ranks"] for session in sessions} == {1, 2, 3, 4}
    assert {session["disk"] for session in sessions} == {"", "lift", "stay"}


def test_a_kill_reaches_only_a_process_with_its_mark():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                          env={**os.environ, "CHAOS_SESSION": "mine"}) as process:
        assert chaos.strike("CHAOS_SESSION=another", [process.pid]) == [] and process.poll() is None
        assert chaos.strike("CHAOS_SESSION=mine", [process.pid]) == [process.pid] and process.wait() == -9
    assert chaos.strike("CHAOS_SESSION=mine", [process.pid]) == []


@pytest.mark.parametrize("name, found, reported", [
    ("plain", [0, {"tensors a": 1}], True), ("plain", [0, {"tensors a": 2}], False), ("plain", [1, None], False),
    ("forget", [0, {"tensors a": 2}], True), ("forget", [0, {"tensors a": 1}], False), ("forget", [1, None], False),
    ("swallow", [2, None], True), ("swallow", [0, {"tensors a": 1}], False), ("survivors", False, False)])
def test_a_control_is_reported_for_its_own_reason(name, found, reported):
    assert chaos.judge_control(name, found, {"tensors a": 1}) == reported


def test_what_a_pointers_event_says_decides():
    entry = SimpleNamespace(path=Path("latest.json"), kind="another step", pointed="step_2", says="step_1")
    assert chaos.notices({"event": "adopt", "pointed": "step_1"}, entry)
    assert not chaos.notices({"event": "adopt", "pointed": "step_2"}, entry)
    entry.kind = "flipped bit"
    assert not chaos.notices({"event": "adopt", "pointed": "step_1"}, entry)
    assert chaos.notices({"event": "damaged", "checkpoint": "latest.json"}, entry)


# -- the bench itself

def test_a_minute_of_chaos(tmp_path):
    ran = subprocess.run([sys.executable, "bench/chaos.py", "--minutes", "1", "--seed", "1"], cwd=ROOT, text=True,
                         capture_output=True, timeout=400, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["kills"] >= 5 and found["damages"] >= 200
    assert found["chains"] == found["chains_equal"] > 0
    assert 0 <= found["in_save_cut"] <= found["in_save"] <= found["kills"]
    assert found["controls"] >= 6 and found["controls_bulk"] >= 50 and found["controls_silent"] == 0
    assert found["missed"] == found["unequal"] == 0 and found["refused"] > 0 and found["fell_back"] >= 0
    assert not list(tmp_path.iterdir()), "it cleans up"
