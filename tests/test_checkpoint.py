"""Checkpoints on disk: write order, kills, I/O errors, damage, lineage, prune, rollback, lock, commands."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint

RUN = "run-a"
FILES = ["model.safetensors", "optimizer.safetensors", "model.json", "trainer.json"]


# -- helpers

def trainer_json(step, run=RUN, lineage=(("n1", 0),), **changes):
    found = {"run": run, "lineage": [list(entry) for entry in lineage], "step": step, "updates": step,
             "windows": step * 4, "tokens": step * 64, "settings": {"batch_tokens": 64, "block_size": 16}}
    return found | changes


def contents(step, run=RUN, lineage=(("n1", 0),), **changes):
    weights = torch.arange(24, dtype=torch.float32) + step
    return {"model.safetensors": {"wte.weight": weights.view(4, 6)},
            "optimizer.safetensors": {"exp_avg": weights / 7, "exp_avg_sq": weights.square()},
            "model.json": {"format": 1, "model": {"n_layer": 2, "note": run}},
            "trainer.json": trainer_json(step, run, lineage, **changes)}


def save(out_dir, step, run=RUN, lineage=(("n1", 0),), point=True, **changes):
    folder = checkpoint.write(out_dir, step, contents(step, run, lineage, **changes), run)
    if point:
        checkpoint.point(out_dir, folder, lineage[-1][0])
    return folder


def milestone(out_dir, step):
    files = {"model.safetensors": {"w": torch.ones(2)}, "model.json": {"format": 1}}
    return checkpoint.write(out_dir, step, files, RUN, kind="milestones")


def folder_of(out_dir, step):
    return out_dir / "checkpoints" / f"step_{step:08d}"


def names(out_dir):
    return sorted(path.name for path in (out_dir / "checkpoints").iterdir())


def leftovers(out_dir):
    return [path for path in out_dir.rglob("*") if path.name.startswith(".tmp-")]


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fix_manifest(folder):
    """Make the manifest agree with the files there, as a person would who edits a checkpoint by hand."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = [{"name": path.name, "bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
                         for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
    checkpoint.write_json(folder / "manifest.json", manifest)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path, position, bit):
    with open(path, "rb+") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


class Events(list):
    """A report function that keeps what it is told."""

    def __call__(self, event, **fields):
        self.append((event, fields))

    def named(self, event):
        return [fields for name, fields in self if name == event]


@contextlib.contextmanager
def limited(size):
    """Let files grow to `size` bytes only: real write() calls then fail as on a full disk or over a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def events():
    return Events()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No test can cut the power, so none waits for the disk: fsync calls are recorded where they matter."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("template") / "out"
    save(out_dir, 10)
    save(out_dir, 20)
    return out_dir


@pytest.fixture
def two(tmp_path, template):
    """An output folder with checkpoints at steps 10 and 20, the second one pointed at."""
    return shutil.copytree(template, tmp_path / "out")


# -- write and read

def test_write_verify_and_load(tmp_path):
    folder = save(tmp_path, 10)
    assert folder == folder_of(tmp_path, 10)
    manifest, trainer = checkpoint.verify(folder, RUN)
    assert {key: manifest[key] for key in ("format", "run", "step")} == {"format": 1, "run": RUN, "step": 10}
    assert [entry["name"] for entry in manifest["files"]] == FILES
    assert trainer == trainer_json(10)
    for name in ("model.safetensors", "optimizer.safetensors"):
        loaded, wanted = checkpoint.load_tensors(folder, name), contents(10)[name]
        assert loaded.keys() == wanted.keys()
        for key in wanted:
            assert torch.equal(loaded[key], wanted[key]) and loaded[key].dtype == wanted[key].dtype
    assert checkpoint.pointer(tmp_path) == {
        "format": 1, "run": RUN, "step": 10, "tokens": 640, "windows": 40, "checkpoint": "step_00000010",
        "manifest_sha256": checkpoint.sha256(folder / "manifest.json"), "commit": "", "nonce": "n1"}


def test_only_safetensors_and_json_on_disk(tmp_path):
    save(tmp_path, 10)
    milestone(tmp_path, 10)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 9 and {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            header = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8:8 + header])
    with pytest.raises(AssertionError, match="only .safetensors and .json"):
        checkpoint.write(tmp_path, 20, {"model.pt": {}}, RUN)
    assert not leftovers(tmp_path)


def test_the_same_state_gives_the_same_bytes_and_plain_file_modes(tmp_path):
    first, second = save(tmp_path / "a", 10), save(tmp_path / "b", 10)
    assert snapshot(first) == snapshot(second)
    assert len({path.stat().st_mode for path in first.iterdir()}) == 1


def test_milestones_verify_without_trainer_json(tmp_path):
    folder = milestone(tmp_path, 5000)
    assert folder == tmp_path / "milestones" / "step_00005000"
    assert checkpoint.verify(folder, RUN)[1] is None
    with pytest.raises(checkpoint.Damaged, match="run is 'run-a', wanted 'run-b'"):
        checkpoint.verify(folder, "run-b")


def test_a_folder_in_the_way_is_set_aside_whole(two, events):
    save(two, 30, lineage=(("n1", 0), ("other", 15)), point=False)
    before = snapshot(folder_of(two, 30))
    save(two, 30, lineage=(("n1", 0), ("n2", 20)))
    assert names(two)[2:] == ["step_00000030", "step_00000030.aside-1"]
    assert snapshot(folder_of(two, 30).with_name("step_00000030.aside-1")) == before
    assert checkpoint.newest(two, events)[1]["lineage"][-1] == ["n2", 20] and not events


def test_the_pointed_checkpoint_is_never_replaced(two):
    before = snapshot(folder_of(two, 20))
    with pytest.raises(ValueError, match="step_00000020.*latest.json points at it"):
        save(two, 20)
    assert snapshot(folder_of(two, 20)) == before and not leftovers(two)


# -- write order, kills and I/O errors

def tapped(monkeypatch, after):
    """Call after(call, *arguments) behind every os.fsync, os.rename and os.replace."""
    for call in ("fsync", "rename", "replace"):
        def wrapper(*arguments, call=call, real=getattr(os, call)):
            real(*arguments)
            after(call, *arguments)
        monkeypatch.setattr(os, call, wrapper)


def test_write_order(tmp_path, monkeypatch):
    save(tmp_path, 10)
    calls = []  # (call, inode, names then in the temporary folder)

    def note(call, first, second=None):
        temporary = leftovers(tmp_path / "checkpoints")
        listed = sorted(path.name for path in temporary[0].iterdir()) if temporary else []
        inode = (os.fstat(first) if second is None else os.stat(second)).st_ino
        calls.append((call, inode, listed))

    with monkeypatch.context() as patch:
        tapped(patch, note)
        folder = checkpoint.write(tmp_path, 20, contents(20), RUN)
        assert checkpoint.pointer(tmp_path)["step"] == 10
        checkpoint.point(tmp_path, folder, "n1")
    paths = [tmp_path, *tmp_path.rglob("*")]
    inodes = {path.stat().st_ino: path.relative_to(tmp_path).as_posix() for path in paths}
    new = "checkpoints/step_00000020"
    assert [(call, inodes[inode]) for call, inode, _ in calls] == [
        *(("fsync", f"{new}/{name}") for name in FILES), ("fsync", f"{new}/manifest.json"), ("fsync", new),
        ("rename", new), ("fsync", "checkpoints"),
        ("fsync", "latest.json"), ("replace", "latest.json"), ("fsync", ".")]
    before_the_manifest = [listed for _, _, listed in calls[:len(FILES)]]
    assert not any("manifest.json" in listed for listed in before_the_manifest)


def killed_after(count, act):
    """Run act in a child that gets SIGKILL behind its count-th recorded call: (killed, inodes fsynced)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def note(call, first, second=None):
            nonlocal seen
            if call == "fsync":
                os.write(writing, b"%d\n" % os.fstat(first).st_ino)
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            tapped(pytest.MonkeyPatch(), note)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as file:
        synced = {int(line) for line in file}
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), "the child failed by itself"
    return status != 0, synced


def cut_power(out_dir, kept):
    """Empty every file whose bytes were never fsynced: what a power cut may leave of them."""
    for path in out_dir.rglob("*"):
        if path.is_file() and path.stat().st_ino not in kept:
            os.truncate(path, 0)


def kill_everywhere(tmp_path, prepare, act):
    """Yield (out_dir, calls done) for a kill behind each recorded call, then for a power cut behind each."""
    template = tmp_path / "template"
    prepare(template)
    for power_cut in (False, True):
        count, killed = 0, True
        while killed:
            out_dir = tmp_path / f"out-{power_cut}-{count}"
            shutil.copytree(template, out_dir)
            before = {path.stat().st_ino for path in out_dir.rglob("*")}
            killed, synced = killed_after(count, lambda: act(out_dir))
            if power_cut:
                cut_power(out_dir, before | synced)
            yield out_dir, count
            count += 1
        assert count > 3


def test_a_kill_anywhere_in_a_save_leaves_the_old_or_the_new(tmp_path):
    adopted = 0
    prepare, act = (lambda out_dir: save(out_dir, 10)), (lambda out_dir: save(out_dir, 20))
    for out_dir, count in kill_everywhere(tmp_path, prepare, act):
        events = Events()
        checkpoint.clean(out_dir)
        folder, trainer = checkpoint.newest(out_dir, events)
        renamed = count >= 7  # four files, the manifest, the folder, then the rename
        assert trainer["step"] == (20 if renamed else 10), f"killed after {count} calls"
        assert not leftovers(out_dir) and not events.named("damaged")
        assert checkpoint.pointer(out_dir)["checkpoint"] == folder.name
        assert checkpoint.verify(folder_of(out_dir, 10), RUN)
        adopted += len(events.named("adopt"))
        save(out_dir, trainer["step"] + 10)
    assert adopted == 2 * 3  # behind the rename, the parent's fsync and the pointer's fsync


def test_a_kill_anywhere_in_the_first_save_never_strands_the_run(tmp_path, events):
    for out_dir, count in kill_everywhere(tmp_path, os.mkdir, lambda out_dir: save(out_dir, 10)):
        checkpoint.clean(out_dir)
        found = checkpoint.newest(out_dir, events)
        assert (found is not None) == (count >= 7)


def test_a_kill_anywhere_while_a_folder_is_in_the_way(tmp_path, events):
    def prepare(out_dir):
        save(out_dir, 10)
        save(out_dir, 20, lineage=(("stray", 0),), point=False)

    for out_dir, _ in kill_everywhere(tmp_path, prepare, lambda out_dir: save(out_dir, 20)):
        checkpoint.clean(out_dir)
        trainer = checkpoint.newest(out_dir, events)[1]
        assert trainer["lineage"] == [["n1", 0]] and trainer["step"] in (10, 20)


def test_a_kill_anywhere_in_prune_and_rollback(tmp_path):
    def prepare(out_dir):
        for step in (10, 20, 30, 40):
            save(out_dir, step)

    def prune(out_dir):
        checkpoint.prune(out_dir, RUN, 1, Events())

    def rollback(out_dir):
        checkpoint.rollback(out_dir, "step_00000020", Events())

    for act, allowed in ((prune, {40}), (rollback, {20, 40})):
        folder = tmp_path / act.__name__
        folder.mkdir()
        for out_dir, _ in kill_everywhere(folder, prepare, act):
            checkpoint.clean(out_dir)
            events = Events()
            assert checkpoint.newest(out_dir, events)[1]["step"] in allowed
            assert not leftovers(out_dir) and not events.named("damaged")


def test_an_io_error_at_each_call_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 10)
    before, latest = snapshot(folder_of(tmp_path, 10)), (tmp_path / "latest.json").read_bytes()
    failing, finished = 0, False
    while not finished:
        failing += 1
        remaining = failing

        def fail(call, *arguments):
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            for call in ("fsync", "rename", "replace"):
                def wrapper(*arguments, call=call, real=getattr(os, call)):
                    fail(call)
                    real(*arguments)
                patch.setattr(os, call, wrapper)
            try:
                folder = checkpoint.write(tmp_path, 20, contents(20), RUN)
                finished = True
            except OSError as error:
                assert error.errno == errno.ENOSPC
        if not finished:
            shutil.rmtree(folder_of(tmp_path, 20), ignore_errors=True)  # there if only the last fsync failed
        assert not leftovers(tmp_path)
        assert snapshot(folder_of(tmp_path, 10)) == before
        assert (tmp_path / "latest.json").read_bytes() == latest
    assert failing == 9 and checkpoint.verify(folder, RUN)


def test_an_io_error_in_the_pointer_leaves_the_old_pointer(tmp_path, monkeypatch):
    save(tmp_path, 10)
    folder, latest = save(tmp_path, 20, point=False), (tmp_path / "latest.json").read_bytes()

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError):
                checkpoint.point(tmp_path, folder, "n1")
        assert (tmp_path / "latest.json").read_bytes() == latest and not leftovers(tmp_path)


@pytest.mark.parametrize("limit", [0, 100, 200, 400])
def test_a_full_disk_is_an_os_error_and_leaves_the_previous_checkpoint(tmp_path, limit):
    save(tmp_path, 10)
    before = snapshot(folder_of(tmp_path, 10))
    with limited(limit), pytest.raises(OSError, match="too large"):
        save(tmp_path, 20)
    assert not leftovers(tmp_path) and names(tmp_path) == ["step_00000010"]
    assert snapshot(folder_of(tmp_path, 10)) == before
    assert checkpoint.newest(tmp_path, Events())[1]["step"] == 10


# -- damage

def random_flip(name, seed):
    def damage(folder):
        draw = random.Random(f"{name}{seed}")
        flip(folder / name, draw.randrange((folder / name).stat().st_size), draw.randrange(8))
    return damage


def zeroed_page(folder):
    data = bytearray((folder / "optimizer.safetensors").read_bytes())
    data[-128:] = bytes(128)
    (folder / "optimizer.safetensors").write_bytes(data)


def truncated(name, size):
    return lambda folder: os.truncate(folder / name, size)


def missing(name):
    return lambda folder: (folder / name).unlink()


def extra_file(folder):
    (folder / "optimizer_2.safetensors").write_bytes((folder / "optimizer.safetensors").read_bytes())


def of_another_step(name, fixed):
    def damage(folder):
        shutil.copy(folder.with_name("step_00000010") / name, folder / name)
        if fixed:
            fix_manifest(folder)
    return damage


def of_another_run(name, fixed):
    def damage(folder):
        other = save(folder.parents[2] / "other", 20, run="run-b", lineage=(("b1", 0),))
        shutil.copy(other / name, folder / name)
        if fixed:
            fix_manifest(folder)
    return damage


def edited(fixed=True, **changes):
    def damage(folder):
        edit_json(folder / "trainer.json", **changes)
        if fixed:
            fix_manifest(folder)
    return damage


def folder_of_another_step(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_00000010"), folder)


DAMAGE = [
    *(pytest.param(name, random_flip(name, seed), id=f"flip-{name}-{seed}")
      for name in [*FILES, "manifest.json"] for seed in range(8)),
    pytest.param("optimizer.safetensors", zeroed_page, id="zeroed-page"),
    *(pytest.param(name, truncated(name, size), id=f"cut-{name}-{size}")
      for name in [*FILES, "manifest.json"] for size in (0, 40)),
    *(pytest.param(name, missing(name), id=f"missing-{name}") for name in [*FILES, "manifest.json"]),
    pytest.param("optimizer_2.safetensors", extra_file, id="extra-file"),
    *(pytest.param(name, of_another_step(name, fixed=False), id=f"other-step-{name}") for name in
      ["model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"]),
    pytest.param("manifest.json", of_another_step("model.safetensors", fixed=True), id="other-weights-fixed"),
    pytest.param("trainer.json", of_another_step("trainer.json", fixed=True), id="other-step-trainer-fixed"),
    *(pytest.param(name, of_another_run(name, fixed=False), id=f"other-run-{name}") for name in
      ["model.json", "trainer.json", "manifest.json"]),
    pytest.param("trainer.json", of_another_run("trainer.json", fixed=True), id="other-run-trainer-fixed"),
    pytest.param("manifest.json", folder_of_another_step, id="folder-of-another-step"),
    *(pytest.param("trainer.json", edited(**{key: value}), id=f"edited-{key}") for key, value in
      [("step", 21), ("windows", 81), ("tokens", 1281), ("windows", 80.0), ("run", 7),
       ("lineage", []), ("lineage", [["n1"]]), ("lineage", ["n1"]),
       ("settings", {"batch_tokens": 32, "block_size": 16}), ("settings", {"batch_tokens": 64})]),
    pytest.param("trainer.json", edited(fixed=False, updates=19), id="edited-updates"),
    pytest.param("manifest.json", edited(updates=19), id="edited-updates-fixed-up"),
]


@pytest.mark.parametrize("named, damage", DAMAGE)
def test_damage_is_named_and_set_aside_and_the_older_one_taken(two, events, named, damage):
    damage(folder_of(two, 20))
    damaged = snapshot(folder_of(two, 20))
    folder, trainer = checkpoint.newest(two, events)
    assert folder == folder_of(two, 10) and trainer == trainer_json(10)
    assert [fields["checkpoint"] for fields in events.named("damaged")] == ["step_00000020"]
    cause = events.named("damaged")[0]["cause"]
    assert cause.startswith("step_00000020: ") and named in cause
    assert names(two) == ["step_00000010", "step_00000020.damaged-1"]
    assert snapshot(folder_of(two, 20).with_name("step_00000020.damaged-1")) == damaged
    assert checkpoint.pointer(two)["checkpoint"] == "step_00000010"
    again = Events()
    assert checkpoint.newest(two, again)[0] == folder and not again


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_tensors_of_another_step_are_found_whatever_the_manifest_says(two, events, name):
    """Even where someone has made the manifest agree and no pointer tells its hash: they name their step."""
    of_another_step(name, fixed=True)(folder_of(two, 20))
    (two / "latest.json").unlink()
    assert checkpoint.newest(two, events)[1]["step"] == 10
    assert f"step_00000020: {name}: is of step 10, manifest.json says 20" in events.named("damaged")[0]["cause"]


@pytest.mark.parametrize("changes", [{"nonce": "n2"}, {"commit": "x"}, {"commit": "A" * 40}, {"run": "run-b"},
                                     {"tokens": 1}, {"windows": 1}])
def test_a_pointer_that_says_what_point_never_wrote_is_reported(two, events, changes):
    edit_json(two / "latest.json", **changes)
    assert checkpoint.newest(two, events)[1]["step"] == 20
    assert [fields["checkpoint"] for fields in events.named("damaged")] == ["latest.json"]
    assert checkpoint.pointer(two)["nonce"] == "n1" and (two / "latest.json.damaged-1").exists()


def test_a_damaged_pointer_is_reported_where_a_newer_checkpoint_takes_its_place_too(two, events):
    """After a kill between rename and pointer: what it says is not used, and is told all the same."""
    save(two, 30, lineage=(("n1", 0), ("n2", 20)), point=False)
    edit_json(two / "latest.json", nonce="n7")
    assert checkpoint.newest(two, events)[1]["step"] == 30
    assert [fields["checkpoint"] for fields in events.named("damaged")] == ["latest.json"]
    assert [fields["pointed"] for fields in events.named("adopt")] == ["step_00000020"]
    assert checkpoint.pointer(two)["step"] == 30 and (two / "latest.json.damaged-1").exists()


def test_every_flipped_bit_of_a_manifest_is_found(two):
    path = folder_of(two, 20) / "manifest.json"
    for position in range(path.stat().st_size):
        for bit in range(8):
            flip(path, position, bit)
            with pytest.raises(checkpoint.Damaged):
                checkpoint.verify(path.parent)
            flip(path, position, bit)
    checkpoint.verify(path.parent)


def test_a_second_damaged_folder_of_a_step_gets_its_own_name(two, events):
    for number in (1, 2):
        truncated("model.safetensors", 0)(folder_of(two, 20))
        checkpoint.newest(two, events)
        assert names(two)[-1] == f"step_00000020.damaged-{number}"
        save(two, 20)


def test_an_unreadable_file_is_damage(two, events, monkeypatch):
    real = checkpoint.sha256

    def failing(path):
        if path.parent.name == "step_00000020" and path.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(checkpoint, "sha256", failing)
    assert checkpoint.newest(two, events)[1]["step"] == 10
    assert "Input/output error" in events.named("damaged")[0]["cause"]


def test_several_damaged_ones_are_all_passed_over(two, events):
    save(two, 30)
    for step in (20, 30):
        missing("model.safetensors")(folder_of(two, step))
    assert checkpoint.newest(two, events)[1]["step"] == 10
    assert [fields["checkpoint"] for fields in events.named("damaged")] == ["step_00000030", "step_00000020"]


def test_none_valid_is_an_error_that_moves_nothing(two, events):
    for step in (10, 20):
        random_flip("model.safetensors", 0)(folder_of(two, step))
    for _ in range(2):
        with pytest.raises(ValueError, match="(?s)none is valid.*rollback.*step_00000020: .*step_00000010: "):
            checkpoint.newest(two, events)
        assert names(two) == ["step_00000010", "step_00000020"]
    assert len(events.named("damaged")) == 4


def test_set_aside_or_missing_folders_are_never_a_fresh_start(two, events):
    for step in (10, 20):
        folder_of(two, step).rename(folder_of(two, step).with_name(f"step_{step:08d}.damaged-1"))
    with pytest.raises(ValueError, match="none is valid"):
        checkpoint.newest(two, events)
    (two / "latest.json").unlink()
    with pytest.raises(ValueError, match="none is valid"):
        checkpoint.newest(two, events)
    shutil.rmtree(two / "checkpoints")
    save(two, 10)
    shutil.rmtree(two / "checkpoints")
    with pytest.raises(ValueError, match="none is valid"):
        checkpoint.newest(two, events)


def test_no_checkpoint_at_all_is_none(tmp_path, events):
    assert checkpoint.newest(tmp_path / "absent", events) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.newest(tmp_path, events) is None and not events


# -- the pointer

@pytest.mark.parametrize("damage", [
    lambda path: os.truncate(path, 0), lambda path: os.truncate(path, 100),
    lambda path: path.write_bytes(bytes(200)), lambda path: path.write_text("[]"),
    lambda path: edit_json(path, format=2), lambda path: edit_json(path, step=10),
    lambda path: edit_json(path, checkpoint="../step_00000020"), lambda path: edit_json(path, tokens=1.5),
    lambda path: edit_json(path, manifest_sha256="ab"), lambda path: edit_json(path, run="run-z"),
    lambda path: edit_json(path, tokens=1344), lambda path: edit_json(path, windows=84),
    lambda path: path.write_text('{"step": NaN}')])
def test_a_damaged_pointer_is_reported_set_aside_and_rebuilt(two, events, damage):
    whole = json.loads((two / "latest.json").read_text())
    damage(two / "latest.json")
    damaged = (two / "latest.json").read_bytes()
    assert checkpoint.newest(two, events)[1]["step"] == 20
    assert [fields["checkpoint"] for fields in events.named("damaged")] == ["latest.json"]
    assert (two / "latest.json.damaged-1").read_bytes() == damaged
    assert checkpoint.pointer(two) == whole
    assert names(two) == ["step_00000010", "step_00000020"]


def test_flipped_bits_of_the_pointer_never_lose_the_run(two):
    whole = (two / "latest.json").read_bytes()
    sha_at = whole.index(b'"manifest_sha256": "') + len(b'"manifest_sha256": "')
    draw = random.Random(1)
    for _ in range(150):
        position = draw.randrange(len(whole))
        out_dir, events = two.with_name("copy"), Events()
        shutil.copytree(two, out_dir)
        flip(out_dir / "latest.json", position, draw.randrange(8))
        folder, trainer = checkpoint.newest(out_dir, events)
        hash_is_hit = sha_at <= position < sha_at + 64 and not (out_dir / "latest.json.damaged-1").exists()
        assert trainer["step"] == (10 if hash_is_hit else 20)
        assert events.named("damaged"), "none is passed over"
        assert checkpoint.pointer(out_dir)["checkpoint"] == folder.name
        now = checkpoint.pointer(out_dir)
        changed = {key for key, value in json.loads(whole).items() if now[key] != value}
        assert events.named("damaged") or changed <= {"nonce", "commit"}
        shutil.rmtree(out_dir)


def test_a_lost_pointer_is_rebuilt(two, events):
    whole = (two / "latest.json").read_bytes()
    (two / "latest.json").unlink()
    assert checkpoint.newest(two, events)[1]["step"] == 20
    assert (two / "latest.json").read_bytes() == whole
    assert events == [("adopt", {"checkpoint": "step_00000020", "pointed": ""})]


def test_a_pointer_to_a_missing_folder_falls_back_to_the_older_one(two, events):
    shutil.rmtree(folder_of(two, 20))
    assert checkpoint.newest(two, events)[1]["step"] == 10
    assert events.named("pointer") == [{"checkpoint": "step_00000010", "pointed": "step_00000020"}]


def test_modification_times_decide_nothing(two, events):
    for path in folder_of(two, 10).iterdir():
        os.utime(path, (2e9, 2e9))
    os.utime(folder_of(two, 10), (2e9, 2e9))
    assert checkpoint.newest(two, events)[1]["step"] == 20
    checkpoint.prune(two, RUN, 1, events)
    assert names(two) == ["step_00000020"]


# -- other runs, adoption, lineage

def test_other_runs_are_left_alone(two, events):
    save(two, 15, run="run-b", lineage=(("b1", 0),), point=False)
    save(two, 40, run="run-b", lineage=(("b1", 0),), point=False)
    missing("model.safetensors")(folder_of(two, 40))
    assert checkpoint.newest(two, events)[1]["step"] == 20 and not events
    truncated("model.safetensors", 0)(folder_of(two, 20))
    assert checkpoint.newest(two, events)[1]["step"] == 10
    checkpoint.prune(two, RUN, 1, events)
    checkpoint.rollback(two, "step_00000010", events)
    assert names(two) == ["step_00000010", "step_00000015", "step_00000020.damaged-1", "step_00000040"]


def test_a_folder_of_another_run_in_the_pointed_place_is_not_taken_or_touched(two, events):
    shutil.rmtree(folder_of(two, 20))
    save(two.with_name("other"), 20, run="run-b", lineage=(("b1", 0),))
    shutil.copytree(folder_of(two.with_name("other"), 20), folder_of(two, 20))
    assert checkpoint.newest(two, events)[1]["step"] == 10
    assert names(two) == ["step_00000010", "step_00000020"] and checkpoint.verify(folder_of(two, 20), "run-b")
    assert events == [("pointer", {"checkpoint": "step_00000010", "pointed": "step_00000020"})]


def test_several_runs_without_a_pointer_is_an_error_that_names_them(two, events):
    save(two, 30, run="run-b", lineage=(("b1", 0),), point=False)
    (two / "latest.json").unlink()
    with pytest.raises(ValueError, match="run-a.*run-b.*rollback"):
        checkpoint.newest(two, events)
    checkpoint.rollback(two, "step_00000020", events)
    assert checkpoint.newest(two, events)[1]["step"] == 20
    assert names(two) == ["step_00000010", "step_00000020", "step_00000030"]


def test_a_whole_newer_descendant_is_adopted(two, events):
    save(two, 30, lineage=(("n1", 0), ("n2", 20)), point=False)
    folder, trainer = checkpoint.newest(two, events)
    assert trainer["step"] == 30 and checkpoint.pointer(two)["checkpoint"] == folder.name
    assert events == [("adopt", {"checkpoint": "step_00000030", "pointed": "step_00000020"})]


def test_a_newer_folder_that_does_not_descend_is_not_adopted(two, events):
    save(two, 30, lineage=(("n1", 0), ("n2", 15)), point=False)
    save(two, 40, lineage=(("stray", 0),), point=False)
    assert checkpoint.newest(two, events)[1]["step"] == 20 and not events
    assert names(two) == [f"step_{step:08d}" for step in (10, 20, 30, 40)]


def test_a_damaged_newer_folder_is_set_aside_and_the_pointed_one_taken(two, events):
    save(two, 30, point=False)
    truncated("optimizer.safetensors", 8)(folder_of(two, 30))
    assert checkpoint.newest(two, events)[1]["step"] == 20
    assert names(two)[-1] == "step_00000030.damaged-1" and checkpoint.pointer(two)["step"] == 20


def test_a_descendant_is_adopted_past_a_damaged_pointed_folder(two, events):
    save(two, 30, point=False)
    truncated("model.safetensors", 0)(folder_of(two, 20))
    assert checkpoint.newest(two, events)[1]["step"] == 30
    assert [name for name, _ in events] == ["damaged", "adopt"]


def test_a_whole_folder_of_unknown_descent_is_named_but_not_taken(two, events):
    save(two, 30, point=False)
    for step in (10, 20):
        truncated("model.safetensors", 0)(folder_of(two, step))
    with pytest.raises(ValueError, match="step_00000030: whole, but"):
        checkpoint.newest(two, events)


def line(step, *lineage, run=RUN):
    return {"run": run, "step": step, "lineage": [list(entry) for entry in lineage]}


@pytest.mark.parametrize("child, parent, expected", [
    (line(20, ("a", 0)), line(10, ("a", 0)), True),
    (line(10, ("a", 0)), line(10, ("a", 0)), True),
    (line(10, ("a", 0)), line(20, ("a", 0)), False),
    (line(30, ("a", 0), ("b", 20)), line(20, ("a", 0)), True),
    (line(30, ("a", 0), ("b", 20)), line(10, ("a", 0)), True),
    (line(30, ("a", 0), ("b", 20)), line(25, ("a", 0)), False),
    (line(40, ("a", 0), ("b", 20), ("c", 30)), line(20, ("a", 0)), True),
    (line(40, ("a", 0), ("b", 20), ("c", 30)), line(30, ("a", 0), ("b", 20)), True),
    (line(40, ("a", 0), ("b", 20), ("c", 30)), line(35, ("a", 0), ("b", 20)), False),
    (line(30, ("a", 0), ("c", 20)), line(25, ("a", 0), ("b", 20)), False),
    (line(30, ("a", 0)), line(20, ("a", 0), ("b", 10)), False),
    (line(30, ("a", 0), ("b", 10)), line(20, ("a", 0), ("b", 11)), False),
    (line(30, ("z", 0)), line(20, ("a", 0)), False),
    (line(20, ("a", 0), run="run-b"), line(10, ("a", 0)), False),
    (line(0, ("a", 0), ("b", 0)), line(0, ("a", 0)), True),
])
def test_descends(child, parent, expected):
    assert checkpoint.descends(child, parent) is expected


# -- prune, clean, rollback

def test_prune_keeps_the_newest_of_this_run_and_the_pointed_one(two, events):
    for step in (5, 15):
        save(two, step, run="run-b", lineage=(("b1", 0),), point=False)
    for step in (30, 40, 50):
        save(two, step)
    milestone(two, 10)
    save(two, 60, lineage=(("stray", 0),), point=False)
    checkpoint.prune(two, RUN, 2, events)
    assert names(two) == [f"step_{step:08d}" for step in (5, 15, 40, 50, 60)]
    pruned = [fields["checkpoint"] for fields in events.named("prune")]
    assert pruned == [f"step_{step:08d}" for step in (10, 20, 30)]
    checkpoint.point(two, folder_of(two, 40), "n1")
    checkpoint.prune(two, RUN, 0, events)
    assert names(two) == [f"step_{step:08d}" for step in (5, 15, 40, 50, 60)]
    assert (two / "milestones" / "step_00000010").is_dir() and not leftovers(two)


def test_prune_does_nothing_without_this_runs_pointer(two, events):
    checkpoint.prune(two, "run-b", 1, events)
    (two / "latest.json").unlink()
    checkpoint.prune(two, RUN, 1, events)
    assert names(two) == ["step_00000010", "step_00000020"] and not events


def test_clean_removes_only_temporaries(two):
    before = {path for path in two.rglob("*")}
    (two / "checkpoints" / ".tmp-abc").mkdir()
    (two / "checkpoints" / ".tmp-abc" / "model.safetensors").write_bytes(b"half")
    (two / "milestones" / ".tmp-abc").mkdir(parents=True)
    (two / ".tmp-abc").write_bytes(b"half")
    checkpoint.clean(two)
    assert {path for path in two.rglob("*")} == before | {two / "milestones"}


def test_rollback_abandons_later_folders_and_points_back(two, events):
    save(two, 30)
    save(two, 40)
    folder, trainer = checkpoint.rollback(two, "step_00000020", events)
    assert folder == folder_of(two, 20) and trainer["step"] == 20
    assert names(two)[:2] == ["step_00000010", "step_00000020"]
    assert names(two)[2:] == ["step_00000030.abandoned", "step_00000040.abandoned"]
    assert events == [("rollback", {"checkpoint": "step_00000020",
                                    "abandoned": ["step_00000030.abandoned", "step_00000040.abandoned"]})]
    assert checkpoint.newest(two, events)[1]["step"] == 20
    save(two, 30)
    checkpoint.rollback(two, "step_00000020", events)
    assert names(two)[2:] == [
        "step_00000030.abandoned", "step_00000030.abandoned-1", "step_00000040.abandoned"]


def test_rollback_refuses_what_is_missing_or_damaged(two, events):
    with pytest.raises(ValueError, match="no step_00000015.*step_00000020, step_00000010"):
        checkpoint.rollback(two, "step_00000015", events)
    missing("model.safetensors")(folder_of(two, 10))
    with pytest.raises(checkpoint.Damaged, match="step_00000010: model.safetensors"):
        checkpoint.rollback(two, "step_00000010", events)
    assert names(two) == ["step_00000010", "step_00000020"] and not events
    assert checkpoint.pointer(two)["step"] == 20


def test_rollback_takes_a_whole_folder_where_the_pointer_is_damaged(two, events):
    (two / "latest.json").write_text("{")
    assert checkpoint.rollback(two, "step_00000010", events)[1]["step"] == 10
    assert checkpoint.newest(two, events)[1]["step"] == 10


@pytest.mark.parametrize("name", [
    "step_30", "30", "step_00000030.abandoned", "step_000000030", "../step_00000030", ""])
def test_step_of_refuses_other_names(name):
    assert checkpoint.step_of("step_00000030") == 30
    with pytest.raises(ValueError, match="step_00000030"):
        checkpoint.step_of(name)


# -- the lock

def test_a_second_process_is_refused_with_pid_and_host_and_a_kill_frees_the_lock(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = checkpoint.lock(tmp_path / "out")
            os.write(writing, b"locked")
            signal.pause()
            held.close()
        finally:
            os._exit(1)
    assert os.read(reading, 6) == b"locked"
    with pytest.raises(checkpoint.Locked, match=f"pid {child} on {socket.gethostname()}"):
        checkpoint.lock(tmp_path / "out")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    held = checkpoint.lock(tmp_path / "out")
    assert (tmp_path / "out" / "lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    held.close()
    checkpoint.lock(tmp_path / "out").close()


# -- JSON

def test_json_never_holds_nan(tmp_path):
    for write in (checkpoint.write_json, checkpoint.append_line):
        for number in (float("nan"), float("inf"), -float("inf")):
            with pytest.raises(ValueError):
                write(tmp_path / "file", {"loss": number})
    with pytest.raises(ValueError):
        save(tmp_path, 10, best_val_loss=float("nan"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_write_json_replaces_whole_files_only(tmp_path):
    path = tmp_path / "status.json"
    checkpoint.write_json(path, {"state": "running"})
    held = open(path)
    checkpoint.write_json(path, {"state": "stopped"})
    assert json.load(held) == {"state": "running"} and json.loads(path.read_text()) == {"state": "stopped"}
    assert os.listdir(tmp_path) == ["status.json"]
    held.close()


def test_append_line_and_mend(tmp_path):
    path = tmp_path / "metrics.jsonl"
    checkpoint.mend(path)
    assert not path.exists()
    for step in (1, 2):
        checkpoint.append_line(path, {"step": step, "loss": 0.1})
    whole = path.read_bytes()
    checkpoint.mend(path)
    assert path.read_bytes() == whole and whole.count(b"\n") == 2
    for torn in (b'{"step": 3, "lo', b"\0\0\0", b"{"):
        path.write_bytes(whole + torn)
        checkpoint.mend(path)
        assert path.read_bytes() == whole
    path.write_bytes(b'{"st')
    checkpoint.mend(path)
    checkpoint.append_line(path, {"step": 1})
    assert [json.loads(row) for row in path.read_text().splitlines()] == [{"step": 1}]


def test_a_line_cut_short_by_a_full_disk_is_an_error_and_leaves_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    checkpoint.append_line(path, {"step": 1})
    with limited(path.stat().st_size + 5), pytest.raises(OSError, match="metrics.jsonl: only 5 of 12 bytes"):
        checkpoint.append_line(path, {"step": 2})
    assert path.read_text() == '{"step": 1}\n'


# -- commands

def test_list_shows_every_folder(two, capsys):
    milestone(two, 10)
    shutil.copytree(folder_of(two, 10), folder_of(two, 10).with_name("step_00000010.abandoned"))
    missing("model.json")(folder_of(two, 10))
    before = snapshot(two / "checkpoints" / "step_00000010"), names(two)
    assert checkpoint.main(["list", str(two)]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert [row[:2] + row[3:5] for row in rows] == [
        ["checkpoint", "run", "pointed", "state"], ["checkpoints/step_00000010", "-", "-", "damaged:"],
        ["checkpoints/step_00000010.abandoned", "-", "-", "set"],
        ["checkpoints/step_00000020", RUN, "yes", "whole"],
        ["milestones/step_00000010", RUN, "-", "whole"]]
    size = sum(path.stat().st_size for path in folder_of(two, 20).iterdir())
    assert int(rows[3][2].replace(",", "")) == size
    assert before == (snapshot(two / "checkpoints" / "step_00000010"), names(two))


def verified(out_dir, capsys):
    """The exit code of the verify command, and the state it prints of each name."""
    code = checkpoint.main(["verify", str(out_dir)])
    rows = capsys.readouterr().out.splitlines()[1:]
    return code, {row.split()[0]: row.split("damaged: ")[-1] if "damaged" in row else "whole" for row in rows}


def test_verify_command(two, capsys):
    milestone(two, 10)
    whole = dict.fromkeys(
        ["checkpoints/step_00000010", "checkpoints/step_00000020", "milestones/step_00000010"], "whole")
    assert verified(two, capsys) == (0, whole)
    for folder in (two / "milestones" / "step_00000010", folder_of(two, 20)):
        size = (folder / "model.safetensors").stat().st_size
        flip(folder / "model.safetensors", size - 1, 0)
        code, states = verified(two, capsys)
        name = f"{folder.parent.name}/{folder.name}"
        assert code == 1 and states[name].startswith(f"{folder.name}: model.safetensors: sha256")
        assert states | {name: "whole"} == whole
        flip(folder / "model.safetensors", size - 1, 0)
    edited(updates=19)(folder_of(two, 20))
    code, states = verified(two, capsys)
    assert code == 1 and "manifest.json: sha256" in states["checkpoints/step_00000020"]
    shutil.rmtree(folder_of(two, 20))
    code, states = verified(two, capsys)
    assert code == 1 and "step_00000020" in states["latest.json"]
    (two / "latest.json").write_text("{")
    assert verified(two, capsys)[0] == 1
    assert names(two) == ["step_00000010"]


def test_rollback_command(two, capsys):
    assert checkpoint.main(["rollback", str(two), "step_00000010"]) == 0
    assert "step_00000010" in capsys.readouterr().out
    assert names(two) == ["step_00000010", "step_00000020.abandoned"]
    held = checkpoint.lock(two)
    assert checkpoint.main(["rollback", str(two), "step_00000010"]) == 2
    assert "in use by pid" in capsys.readouterr().err
    held.close()
    assert checkpoint.main(["rollback", str(two), "step_00000010.abandoned"]) == 2
    assert "step_00000010.abandoned" in capsys.readouterr().err


def test_commands_answer_a_wrong_folder_on_stderr(tmp_path, capsys):
    absent = str(tmp_path / "absent")
    for words in (["list", absent], ["verify", absent], ["rollback", absent, "step_00000010"]):
        assert checkpoint.main(words) == 2
        assert "absent" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()


def test_the_script_exits_with_the_code(two):
    script = Path(checkpoint.__file__)
    truncated("model.safetensors", 0)(folder_of(two, 10))
    done = subprocess.run([sys.executable, script, "verify", two], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert "damaged: step_00000010: model.safetensors" in done.stdout
