"""Saves while training goes on: what the snapshot is, one at a time, room on the disk, failures, and every exit."""

import collections
import ctypes
import errno
import functools
import json
import math
import mmap
import os
import subprocess
import sys
import threading
import types
from concurrent import futures

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import preflight
import train
from conftest import append_shard, write_data
from driver import (AT_ONCE, ROOT, assert_same, before_step, boom, checkpoints, events, pointed, run_ranks, session,
                    signal_self, status, train_step, words_of)
from test_run import failing_saves, ok

LIMIT_S = 60  # no test waits for so long


@pytest.fixture
def words(tmp_path, data):
    return functools.partial(words_of, tmp_path / "run", data)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    """A run whose saves were through before training went on, with a checkpoint of every step."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    ok(words_of(out_dir, data, dropout=0.1, checkpoint_interval=1, keep_checkpoints=99), **AT_ONCE)
    return out_dir


# -- the snapshot

def write_waits_for(reached, monkeypatch, calls=(1,)):
    """Lets the given calls of checkpoint.write wait for an event first."""
    write, numbers = checkpoint.write, iter(range(1, 100))

    def written(*arguments):
        if next(numbers) in calls:
            assert reached.wait(LIMIT_S), "training did not go on"
        return write(*arguments)
    monkeypatch.setattr(checkpoint, "write", written)


def test_steps_go_on_while_a_checkpoint_is_written_and_cannot_touch_it(words, straight, tmp_path, monkeypatch):
    """The write of step 4 begins when step 7 does: weights and state in it are those of step 4 all the same."""
    reached = threading.Event()
    write_waits_for(reached, monkeypatch)
    ok(words(dropout=0.1, keep_checkpoints=9), train_step=before_step(7, reached.set))
    found, wanted = (out_dir / "checkpoints" / "step_00000004" for out_dir in (tmp_path / "run", straight))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes()
    records = [json.loads((folder / "trainer.json").read_text()) for folder in (found, wanted)]
    for name in ("step", "updates", "windows", "loss_spread", "control", "best_val_loss"):
        assert records[0][name] == records[1][name], name
    assert events(tmp_path / "run", "save")[0]["step"] == 4, "told of the step that was saved"


def test_a_save_in_the_background_has_the_bits_of_one_that_training_waits_for(words, straight, tmp_path):
    ok(words(dropout=0.1, checkpoint_interval=1, keep_checkpoints=99))
    assert_same(tmp_path / "run", straight)
    for step in range(1, 13):
        names = [f"checkpoints/step_{step:08d}/{kind}.safetensors" for kind in ("model", "optimizer")]
        assert [(tmp_path / "run" / name).read_bytes() for name in names] == [
            (straight / name).read_bytes() for name in names]


def test_data_that_grow_while_a_checkpoint_is_written_are_not_in_it(tmp_path):
    """The pass ends, and the shards appended meanwhile are taken up, before trainer.json is written: then a crash."""
    for name in ("crashed", "straight"):
        folder, reached = write_data(tmp_path / f"data-{name}", 700), threading.Event()
        words = words_of(tmp_path / name, folder, max_steps=14, checkpoint_interval=5)
        assert session([*words, "--stop_after_steps=3"])[0] == 0
        append_shard(folder, 300)
        with pytest.MonkeyPatch.context() as patch:
            if name == "crashed":  # the first pass ends within step 6
                write_waits_for(reached, patch)
                code, _ = session(words, train_step=before_step(7 - 3, lambda: (reached.set(), boom())))
                assert code == 1 and pointed(tmp_path / name)[1]["step"] == 5
                assert len(pointed(tmp_path / name)[1]["segments"]) == 1
        ok(words)
    assert_same(tmp_path / "crashed", tmp_path / "straight")


def test_one_save_is_in_flight_at_most(words, tmp_path, monkeypatch):
    """Saves are due every step and each takes longer than a step: the next one waits for it."""
    write, running, seen = checkpoint.write, [], collections.Counter()
    next_step = threading.Event()

    def written(*arguments):
        running.append(1)
        seen["most"] = max(seen["most"], len(running))
        next_step.wait(0.05)  # only to make an overlap likely, were it possible
        folder = write(*arguments)
        running.pop()
        return folder

    monkeypatch.setattr(checkpoint, "write", written)
    ok(words(checkpoint_interval=1, milestone_interval=2))
    assert seen["most"] == 1
    assert [row["step"] for row in events(tmp_path / "run", "save") if "checkpoint" in row] == list(range(1, 13))


def saver(out_dir, live, **changes):
    """A Saver of its own and what it reports."""
    found = []
    arguments = dict(run="run-a", keep=2, min_free_gb=0.0, damage=lambda: "", say=lambda text: None, saved_at=-1,
                     touch=True, report=lambda event, **fields: found.append((event, fields)))
    return checkpoint.Saver(out_dir, live=live, **(arguments | changes)), found


def records(step, **changes):
    trainer = {"run": "run-a", "lineage": [["n1", 0]], "step": step, "windows": step * 4, "tokens": step * 64,
               "settings": {"batch_tokens": 64, "block_size": 16}} | changes
    return lambda: lambda whole: {"model.json": {}} | ({"trainer.json": trainer} if whole else {})


def live_tensors(numbers=24):
    return {"model.safetensors": {"w": torch.arange(numbers, dtype=torch.float32).view(-1, 4)},
            "optimizer.safetensors": {"exp_avg.w": torch.ones(numbers), "exp_avg_sq.w": torch.ones(3)}}


def resident(tensor):
    """The share of a tensor's whole pages that have memory behind them."""
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    pages = (tensor.data_ptr() + tensor.nbytes - first) // page
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), states) == 0, ctypes.get_errno()
    return sum(state & 1 for state in states) / pages


@pytest.mark.parametrize("touch", [True, False])
def test_the_memory_of_a_snapshot_is_its_bytes_taken_and_touched_at_the_start(tmp_path, touch):
    live = live_tensors(4_000_000)
    saves, _ = saver(tmp_path, live, touch=touch)
    saves.wait()
    assert saves.memory.nbytes == 4 * (4_000_000 + 4_000_000 + 3)
    assert resident(saves.memory) == (1.0 if touch else 0.0)
    for file, named in saves.held.items():
        for name, tensor in named.items():
            assert tensor.untyped_storage().data_ptr() == saves.memory.untyped_storage().data_ptr()
            assert tensor.shape == live[file][name].shape
    saves.close()


def test_a_run_without_saves_on_the_way_takes_no_memory_for_them_at_the_start(data, tmp_path, monkeypatch):
    made, real = [], checkpoint.Saver
    monkeypatch.setattr(checkpoint, "Saver", lambda *arguments, touch, **keywords: made.append(bool(touch)) or real(
        *arguments, touch=touch, **keywords))
    for i, settings in enumerate(({}, {"checkpoint_interval": 0},
                                  {"checkpoint_interval": 0, "milestone_interval": 5})):
        ok(words_of(tmp_path / f"run-{i}", data, **settings))
    assert made == [True, False, True]


# -- loading

class OnRank0:
    """A function of the disk that no other rank may call: its disk has nothing of the run."""

    def __init__(self, name):
        self.name, self.function = name, getattr(checkpoint, name)

    def __call__(self, *arguments, **keywords):
        assert os.environ.get("RANK", "0") == "0", f"{self.name} was called on another rank"
        return self.function(*arguments, **keywords)


def test_ranks_with_disks_of_their_own_are_served_by_rank_0(tmp_path, data):
    words = functools.partial(words_of, data_dir=data, dropout=0.1)
    of_disk = {f"checkpoint.{name}": OnRank0(name) for name in (
        "find", "newest", "pointer", "verify", "read", "load_tensors", "check_init", "claim", "write", "point", "prune",
        "make_room")}
    jobs = [(words(tmp_path / "run", stop_after_steps=5), of_disk), (words(tmp_path / "run"), of_disk),
            (words(tmp_path / "straight"), {})]
    for ranks in run_ranks(2, tmp_path, *jobs):
        assert [code for code, _ in ranks] == [0, 0], ranks
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_loading_takes_no_more_device_memory_than_a_fresh_start(words, tmp_path):
    """Everything is copied into the tensors that are there: nothing new is made on the device."""
    ok(words(optimizer="muon"))
    folder, trainer = pointed(tmp_path / "run")
    config = train.GPTConfig(**{name: trainer["settings"][name] for name in train.GPTConfig.__dataclass_fields__})
    device = torch.device("meta")  # stands for a device with memory of its own
    model = train.GPT(config, seed=1).to(device)
    ranks = preflight.Ranks(0, 1, device)
    opt = train.new_optimizer(model, "muon", ranks, False, betas=(0.9, 0.95), weight_decay=0.1, momentum=0.95,
                              grad_clip=1.0, heads=(2, 2, 8), matrix_dtype=torch.float32)
    with MadeOn(device) as made:
        train.load_state(ranks, folder, model, opt, 1)
    assert made.copies == len(list(model.parameters())) + len(opt.state) and not made.tensors
    with MadeOn(device) as made:  # or the line above would show nothing
        torch.ones(3).to(device)
    assert made.tensors


class MadeOn(TorchDispatchMode):
    """Counts copies into tensors of a device, and keeps what operators make there."""

    def __init__(self, device):
        super().__init__()
        self.device, self.copies, self.tensors = device, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        in_place = function is torch.ops.aten.copy_.default
        self.copies += in_place
        if isinstance(answer, torch.Tensor) and answer.device == self.device and not in_place:
            self.tensors.append(function)
        return answer


# -- room on the disk

def disk(free, monkeypatch):
    """A disk with so many bytes free, one number a look, the last for ever."""
    looks = iter(free)
    last = [0]

    def usage(path):
        last[0] = next(looks, last[0])
        return types.SimpleNamespace(free=last[0])
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", usage)


def saved(out_dir, *steps, **changes):
    """Saves these steps one after the other; returns what was reported."""
    saves, found = saver(out_dir, live_tensors(), **changes)
    for step in steps:
        saves.begin(step, "n1", records(step), True, False)
        saves.wait()
    saves.close()
    return found


SIZE = 4 * (24 + 24 + 3)


def bytes_of(out_dir, step):
    return sum(path.stat().st_size for path in (out_dir / "checkpoints" / f"step_{step:08d}").iterdir())


@pytest.mark.parametrize("missing, gone", [(0, []), (1, [10]), ("one", [10]), ("more than one", [10, 20])])
def test_room_is_made_by_the_oldest_as_many_as_are_needed(tmp_path, monkeypatch, missing, gone):
    saved(tmp_path, 10, 20, 30, keep=9)
    missing = {"one": bytes_of(tmp_path, 10), "more than one": bytes_of(tmp_path, 10) + 1}.get(missing, missing)
    free = SIZE - missing + sum(bytes_of(tmp_path, step) for step in (10, 20, 30))

    def usage(path):  # what is deleted is free again
        there = sum(bytes_of(tmp_path, step) for step in (10, 20, 30)
                    if (tmp_path / "checkpoints" / f"step_{step:08d}").exists())
        return types.SimpleNamespace(free=free - there)

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", usage)
    found = saved(tmp_path, 40, keep=9)
    assert [(event, fields["checkpoint"]) for event, fields in found] == [
        *(("prune", f"step_{step:08d}") for step in gone), ("save", "step_00000040")]


@pytest.mark.parametrize("min_free_gb", [0.0, 2.5])
def test_where_even_all_would_not_be_enough_nothing_is_deleted_and_the_numbers_are_told(tmp_path, monkeypatch,
                                                                                        min_free_gb):
    saved(tmp_path, 10, 20)
    disk([int(min_free_gb * 1e9) + SIZE - 1 - bytes_of(tmp_path, 10)], monkeypatch)
    found = saved(tmp_path, 30, min_free_gb=min_free_gb)
    assert [event for event, _ in found] == ["save_failed"]
    cause = found[-1][1]["cause"]
    assert f"{min_free_gb:.3f} GB free" in cause and ("min_free_gb 2.5" in cause) == (min_free_gb > 0)
    assert checkpoints(tmp_path) == ["step_00000010", "step_00000020"] and checkpoint.pointer(tmp_path)["step"] == 20


def test_the_pointed_checkpoint_makes_no_room(tmp_path, monkeypatch):
    saved(tmp_path, 10)
    disk([0], monkeypatch)
    assert [event for event, _ in saved(tmp_path, 20)] == ["save_failed"]
    assert checkpoints(tmp_path) == ["step_00000010"]


def test_a_disk_that_stays_short_after_pruning_is_a_failed_save(tmp_path, monkeypatch):
    saved(tmp_path, 10, 20)
    disk([SIZE - 1], monkeypatch)  # what is deleted is not given back
    found = saved(tmp_path, 30)
    assert [event for event, _ in found] == ["prune", "save_failed"] and "stays" in found[-1][1]["cause"]


def test_a_milestone_keeps_min_free_gb_too(tmp_path, monkeypatch):
    disk([10**9], monkeypatch)
    saves, found = saver(tmp_path, live_tensors(), min_free_gb=2.0)
    saves.begin(10, "n1", records(10), False, True)
    saves.wait()
    saves.close()
    assert [(event, fields.get("milestone")) for event, fields in found] == [("save_failed", "step_00000010")]


# -- failures

def test_two_failed_saves_in_a_row_stop_the_run_at_the_next_step(words, tmp_path, monkeypatch):
    """Not at the next save: what would be done until then would be lost."""
    write, failures, told = failing_saves(2, 3), [], threading.Event()

    def written(*arguments):
        try:
            return write(*arguments)
        except OSError:
            failures.append(1)
            raise

    def step(*arguments, calls=iter(range(1, 1000))):
        if next(calls) == 62:  # the second failed save is that of step 60, the next one is due at step 80
            for _ in range(LIMIT_S):
                if len(failures) == 2 and not told.wait(1):
                    break  # it has failed, and a second ago: the run knows
        return train_step(*arguments)

    monkeypatch.setattr(checkpoint, "write", written)
    code, text = session(words(schedule="constant", max_steps=400, checkpoint_interval=20), train_step=step)
    assert code == 1 and "2 checkpoints in a row could not be saved: " in text and "Traceback" not in text
    state, reason, reached = status(tmp_path / "run")
    assert (state, reason) == ("failed", "save") and 60 < reached < 70
    assert pointed(tmp_path / "run")[1]["step"] == 20 and checkpoints(tmp_path / "run") == ["step_00000020"]
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [40, 60]
    assert "no space left" in (tmp_path / "run" / "errors" / "rank_0.txt").read_text()


def test_two_failed_saves_that_are_not_in_a_row_stop_nothing(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", failing_saves(2, 4))
    ok(words(checkpoint_interval=2))
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [4, 8]
    assert pointed(tmp_path / "run")[1]["step"] == 12


def test_the_last_save_is_tried_twice(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", failing_saves(3))
    ok(words())
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [12]
    assert pointed(tmp_path / "run")[1]["step"] == 12


@pytest.mark.parametrize("fails", [False, True])
def test_a_last_milestone_that_takes_longer_than_a_look_is_begun_once(tmp_path, monkeypatch, fails):
    """`finish` is asked again and again while it is written, and then is through, whatever became of it."""
    write, waits, begun = checkpoint.write, futures.wait, []

    def written(*arguments):
        begun.append(arguments[-1])
        if arguments[-1] == "milestones" and fails:
            raise OSError(errno.ENOSPC, "no space left")
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", written)
    saves, found = saver(tmp_path, live_tensors())
    looks = []

    def impatient(pending, seconds):
        looks.append(seconds)
        return waits(pending, 0 if len(looks) == 2 else LIMIT_S)  # not through at the second look

    monkeypatch.setattr(checkpoint.futures, "wait", impatient)
    answers = [saves.finish(10, "n1", records(10), True) for _ in range(2)]
    saves.close()
    assert answers[-1] and begun.count("milestones") == 1 and looks[0] == 60
    assert [event for event, _ in found] == ["save", "save_failed" if fails else "save"]


def test_an_error_after_the_pointer_has_moved_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "holds", lambda *_: boom())
    saves, _ = saver(tmp_path, live_tensors())
    with pytest.raises(RuntimeError, match="boom"):
        saves.finish(10, "n1", records(10), True)
    saves.close()
    assert checkpoint.pointer(tmp_path)["step"] == 10


def test_a_folder_that_could_not_be_pointed_at_is_not_written_again(words, tmp_path, monkeypatch):
    point, calls, written = checkpoint.point, iter(range(1, 100)), []

    def called(*arguments):
        if next(calls) == 3:
            raise OSError(errno.EIO, "input/output error")
        return point(*arguments)

    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "point", called)
    monkeypatch.setattr(checkpoint, "write", lambda *arguments: written.append(arguments[1]) or write(*arguments))
    ok(words())
    assert written == [4, 8, 12] and pointed(tmp_path / "run")[1]["step"] == 12
    assert checkpoints(tmp_path / "run") == ["step_00000008", "step_00000012"]


@pytest.mark.parametrize("name", ["make_room", "point"])
def test_a_save_that_fails_before_or_after_its_write_is_an_event_too(words, straight, tmp_path, monkeypatch, name):
    """Where the folder is there and could not be pointed at, the next one is; the end is the same."""
    real, calls = getattr(checkpoint, name), iter(range(1, 100))

    def called(*arguments):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left")
        return real(*arguments)

    monkeypatch.setattr(checkpoint, name, called)
    ok(words(dropout=0.1))
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [8]
    assert [row["step"] for row in events(tmp_path / "run", "save")] == [4, 12]
    assert_same(tmp_path / "run", straight)


def test_what_cannot_be_pruned_is_pruned_after_the_next_save(words, tmp_path, monkeypatch):
    prune, calls = checkpoint.prune, iter(range(1, 100))

    def called(*arguments):
        if next(calls) == 2:
            raise OSError(errno.EIO, "input/output error")
        return prune(*arguments)

    monkeypatch.setattr(checkpoint, "prune", called)
    ok(words(checkpoint_interval=3, keep_checkpoints=1))
    assert not events(tmp_path / "run", "save_failed") and checkpoints(tmp_path / "run") == ["step_00000012"]


def test_all_ranks_stop_where_rank_0_cannot_save(tmp_path, data):
    words = words_of(tmp_path / "run", data, schedule="constant", max_steps=400)
    (ranks,) = run_ranks(2, tmp_path, (words, {"checkpoint.write": FullDisk()}))
    assert [code for code, _ in ranks] == [1, 1]
    assert status(tmp_path / "run")[:2] == ("failed", "save")
    text = "".join(text for _, text in ranks)
    assert text.count("2 checkpoints in a row could not be saved") == 1, "rank 0 tells it"
    assert not (tmp_path / "run" / "latest.json").exists()


class FullDisk:
    def __call__(self, *_):
        raise OSError(errno.ENOSPC, "no space left")


def test_what_goes_wrong_in_the_thread_is_raised_where_training_answers(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "point", lambda *_: boom())
    code, text = session(words(schedule="constant", max_steps=400))
    assert code == 1 and "RuntimeError: boom" in text
    assert "RuntimeError: boom" in (tmp_path / "run" / "errors" / "rank_0.txt").read_text()
    assert status(tmp_path / "run")[0] == "failed" and status(tmp_path / "run")[2] < 12


@pytest.mark.parametrize("where", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_that_is_not_finite_is_written(tmp_path, where, value):
    live = live_tensors()
    next(iter(live[where].values())).view(-1)[5] = value
    saves, found = saver(tmp_path, live)
    saves.begin(10, "n1", records(10), True, True)
    with pytest.raises(checkpoint.Failed, match="step 10 are not finite"):
        saves.wait()
    saves.close()
    assert not found and not (tmp_path / "checkpoints").exists() and not (tmp_path / "milestones").exists()


def test_data_found_damaged_while_a_checkpoint_is_written_are_not_pointed_at(tmp_path, monkeypatch):
    saved(tmp_path, 10)
    found, write = [], checkpoint.write

    def written(*arguments):
        found.append("shard 3 is damaged")
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", written)
    saves, told = saver(tmp_path, live_tensors(), damage=lambda: "".join(found))
    saves.begin(20, "n1", records(20), True, False)
    with pytest.raises(checkpoint.Failed, match="shard 3 is damaged"):
        saves.wait()
    saves.close()
    assert checkpoint.pointer(tmp_path)["step"] == 10
    assert checkpoints(tmp_path) == ["step_00000010", "step_00000020.aside-1"], "nothing newer can be adopted"
    assert [event for event, _ in told] == ["damaged"]


# -- exits

def test_a_crash_waits_for_the_save_in_flight(words, tmp_path, monkeypatch):
    crashed = threading.Event()
    write_waits_for(crashed, monkeypatch)

    def dies():
        crashed.set()
        boom()

    code, text = session(words(), train_step=before_step(6, dies))
    assert code == 1 and "boom" in text
    assert pointed(tmp_path / "run")[1]["step"] == 4


def test_a_failure_is_told_before_the_save_in_flight_is_waited_for(words, tmp_path, monkeypatch):
    """A kill may come in that time: by then the cause is on disk."""
    told, write = [], checkpoint.write
    crashed = threading.Event()

    def written(*arguments):
        if arguments[1] == 4:
            assert crashed.wait(LIMIT_S)
            for _ in range(LIMIT_S * 20):
                if (tmp_path / "run" / "errors").exists():
                    told.append(status(tmp_path / "run")[:2])
                    break
                crashed.wait()
                threading.Event().wait(0.05)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", written)
    code, _ = session(words(), train_step=before_step(6, lambda: (crashed.set(), boom())))
    assert code == 1 and told == [("failed", "error")]
    assert pointed(tmp_path / "run")[1]["step"] == 4


def test_the_other_ranks_of_a_failing_run_wait_for_the_save_in_flight(tmp_path, data):
    """Or torchrun, which sees one of them end, would kill rank 0 in the middle of it."""
    words = words_of(tmp_path / "run", data, max_bad_steps=2, checkpoint_interval=4)
    patches = {"checkpoint.write": SlowToWrite(checkpoint.write), "judge": FailsAt(train.judge, 6),
               "checkpoint.Journal.telling_errors": checkpoint.Journal.telling_errors}
    group = run_ranks(2, tmp_path, (words, patches))
    assert [code for code, _ in group[0]] == [1, 1]
    assert pointed(tmp_path / "run")[1]["step"] == 4
    assert (tmp_path / "run" / "errors" / "rank_1.txt").stat().st_mtime <= (
        tmp_path / "run" / "latest.json").stat().st_mtime


class SlowToWrite:
    """A disk on which a checkpoint is not through before both ranks have told why they fail."""

    def __init__(self, function):
        self.function = function

    def __call__(self, out_dir, *arguments):
        told = [out_dir / "errors" / f"rank_{rank}.txt" for rank in (0, 1)]
        for _ in range(LIMIT_S * 20):
            if all(path.exists() for path in told):
                break
            threading.Event().wait(0.05)
        return self.function(out_dir, *arguments)


class FailsAt:
    """judge, and at a step the failure that all ranks share."""

    def __init__(self, function, step):
        self.function, self.step = function, step

    def __call__(self, outcome, step, *arguments):
        self.function(outcome, step, *arguments)
        if step == self.step:
            raise checkpoint.Failed("as planned", "bad_steps")


def test_a_signal_waits_for_the_save_in_flight_and_saves_its_own_step(words, tmp_path, monkeypatch):
    """Repeated signals while it is written spoil nothing."""
    signalled = threading.Event()
    write_waits_for(signalled, monkeypatch)

    def stop():
        signal_self("SIGTERM", "SIGINT", "SIGTERM", "SIGUSR1")
        signalled.set()

    ok(words(keep_checkpoints=9), train_step=before_step(6, stop))
    assert status(tmp_path / "run") == ("stopped", "signal", 6)
    assert checkpoints(tmp_path / "run") == ["step_00000004", "step_00000006"]


def test_an_exit_leaves_no_thread(words):
    before = threading.enumerate()
    session(words(), train_step=before_step(6, boom))
    assert threading.enumerate() == before


def test_the_pointer_moves_after_the_folder_and_before_anything_is_pruned(words, monkeypatch, tmp_path):
    calls = []
    for name in ("make_room", "write", "point", "prune"):
        def called(*arguments, name=name, real=getattr(checkpoint, name), **keywords):
            calls.append(name)
            return real(*arguments, **keywords)
        monkeypatch.setattr(checkpoint, name, called)
    ok(words())
    assert calls == ["make_room", "write", "point", "prune"] * 3


def test_a_terminal_that_is_gone_does_not_end_a_run(tmp_path, data):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "train.py", *words_of(tmp_path / "run", data, max_steps=3)], cwd=ROOT,
                              stdout=writing, stderr=subprocess.PIPE, timeout=LIMIT_S)
    finally:
        os.close(writing)
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "run") == ("finished", "horizon", 3)
