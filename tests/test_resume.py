"""The run after N stops and kills is the same run, to the last bit of weights, optimizer and numbers."""

import functools
import os
import shutil

import pytest

import train
from conftest import append_shard, write_data
from driver import (assert_same, before_step, by_step, end_state, events, kill, pointed,
                    reached, rows, run_ranks, session, signal_self, start_command, start_ranks, status,
                    train_step, wait_for, words_of)

MODERN = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "qk_norm": True,
          "value_residual": True, "n_kv_head": 1, "logit_cap": 15, "tie_embeddings": False}
CELLS = {
    "adamw": {"optimizer": "adamw", "schedule": "wsd"},
    "muon": {"optimizer": "muon", "schedule": "constant", **MODERN},
    "adamw-float16": {"optimizer": "adamw", "schedule": "cosine", "dtype": "float16", **MODERN},
    "muon-float16": {"optimizer": "muon", "schedule": "wsd", "dtype": "float16"},
}
# a scale that overflows at once, and that grows back into overflow every few steps
SCALES = {"FIRST_LOSS_SCALE": 2.0**19, "LOSS_SCALE_GROWTH_STEPS": 2}
STOPS = [3, 6, 0]  # steps of each session: none ends where a checkpoint is due or a pass ends
WORLD_SIZES = [1, 2, 3, 4]


# -- the matrix

@pytest.fixture(scope="module", params=WORLD_SIZES, ids=lambda world_size: f"{world_size}-ranks")
def matrix(request, tmp_path_factory, data):
    """Where all cells of a world size have run, in one process group: NAME/straight and NAME/stopped."""
    folder, jobs = tmp_path_factory.mktemp("matrix"), []
    for name, cell in CELLS.items():
        patches = SCALES if "float16" in name else {}
        words = functools.partial(words_of, data_dir=data, dropout=0.1, **cell)
        jobs.append((words(folder / name / "straight"), patches))
        jobs += [(words(folder / name / "stopped", stop_after_steps=steps), patches) for steps in STOPS]
    for ranks in run_ranks(request.param, folder, *jobs):
        assert [code for code, _ in ranks] == [0] * request.param, ranks
    return folder


@pytest.mark.parametrize("name", CELLS)
def test_a_run_that_was_stopped_and_resumed_has_the_bits_of_one_that_was_not(matrix, name):
    assert_same(matrix / name / "stopped", matrix / name / "straight")
    assert len(events(matrix / name / "stopped", "resume")) == 2
    assert not events(matrix / name / "straight", "resume")
    assert pointed(matrix / name / "stopped")[1]["pass"] == 2, "several passes"


@pytest.mark.parametrize("name", [name for name in CELLS if "float16" in name])
def test_loss_scale_falls_and_grows_between_stops(matrix, name):
    overflows = events(matrix / name / "stopped", "overflow")
    scales = [row["loss_scale"] for row in overflows]
    assert any(later >= earlier for earlier, later in zip(scales, scales[1:])), "a growth lies between"
    assert any(later < earlier for earlier, later in zip(scales, scales[1:]))
    assert len({row["session"] for row in overflows}) == 3
    keys = [(row["at"], row["loss_scale"]) for row in overflows]
    assert keys == [(row["at"], row["loss_scale"]) for row in events(matrix / name / "straight", "overflow")]
    trainer = pointed(matrix / name / "stopped")[1]
    assert trainer["updates"] == trainer["step"] - len(overflows)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """A run of one rank that nothing stopped."""
    out_dir = tmp_path_factory.mktemp("alone") / "run"
    assert session(words_of(out_dir, data, dropout=0.1))[0] == 0
    return out_dir


def test_every_world_size_takes_the_same_windows_and_agrees_in_loss(matrix, alone):
    for name in CELLS:
        assert by_step(matrix / name / "stopped" / "windows.jsonl", "windows") == by_step(
            alone / "windows.jsonl", "windows")
    assert_close(matrix / "adamw" / "stopped", alone)


# -- the same bits at any world size

@pytest.fixture(scope="module")
def reproducible(tmp_path_factory, data):
    """NAME/alone: one rank, never stopped; NAME/moved: sessions of 4, 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("reproducible")
    for name in ("adamw", "muon"):
        words = functools.partial(words_of, data_dir=data, dropout=0.1, reproducible=True, eval_interval=6,
                                  **CELLS[name])
        assert session(words(folder / name / "alone"))[0] == 0
        for world_size, steps in ((4, 3), (1, 2), (2, 3), (4, 0)):
            (ranks,) = run_ranks(world_size, folder, (words(folder / name / "moved", stop_after_steps=steps), {}))
            assert [code for code, _ in ranks] == [0] * world_size, ranks
    return folder


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_reproducible_run_has_the_same_bits_whichever_way_its_ranks_change(reproducible, name):
    assert_same(reproducible / name / "moved", reproducible / name / "alone")
    found = events(reproducible / name / "moved", "start")
    assert [(row["world_size"], row["threads"]) for row in found] == [(4, 1), (1, 1), (2, 1), (4, 1)]


def test_a_reproducible_run_computes_with_one_thread(tmp_path, data, monkeypatch):
    monkeypatch.setattr(train.preflight, "threads_of", lambda *_: 3)
    for reproducible, threads in ((False, 3), (True, 1)):
        out_dir = tmp_path / str(reproducible)
        assert session(words_of(out_dir, data, reproducible=reproducible, max_steps=1))[0] == 0
        assert events(out_dir, "start")[0]["threads"] == threads


def test_a_number_of_ranks_that_cannot_share_the_sum_is_refused(tmp_path, data):
    (ranks,) = run_ranks(3, tmp_path, (words_of(tmp_path / "run", data, reproducible=True), {}))
    assert [code for code, _ in ranks] == [2, 2, 2]
    assert "4 micro-batches of a step in 4 equal blocks, which 3 ranks cannot share; 1 or 2 or 4 can" in ranks[0][1]


# -- kills

@pytest.mark.parametrize("world_size, optimizer", [(1, "adamw"), (2, "muon"), (3, "adamw"), (4, "muon")])
def test_a_run_that_was_killed_again_and_again_has_the_bits_of_one_that_was_not(tmp_path, data, world_size,
                                                                                optimizer):
    endless = functools.partial(words_of, data_dir=data, optimizer=optimizer, dropout=0.1,
                                schedule="constant", checkpoint_interval=3)
    words = endless(tmp_path / "killed", max_steps=10**6)
    torchrun = start_command(tmp_path / "log", *words, ranks=world_size)
    wait_for(lambda: reached(tmp_path / "killed") >= 7, torchrun)
    kill(torchrun)
    for _ in range(2):
        before = reached(tmp_path / "killed")
        group = [process for process, _ in start_ranks(world_size, tmp_path, (words, {}))]
        wait_for(lambda: reached(tmp_path / "killed") >= before + 5, *group)
        kill(*group)
    assert status(tmp_path / "killed")[0] == "running"
    end = reached(tmp_path / "killed") + 4  # beyond what any session has on record
    for ranks in run_ranks(world_size, tmp_path, (endless(tmp_path / "killed", max_steps=end), {}),
                           (endless(tmp_path / "straight", max_steps=end), {})):
        assert [code for code, _ in ranks] == [0] * world_size, ranks
    assert_same(tmp_path / "killed", tmp_path / "straight")
    assert pointed(tmp_path / "killed")[1]["session"] == 4


# -- what must not change a bit

CADENCES = {
    "reports": {"eval_interval": 2, "eval_tokens": 0, "sample_interval": 3, "log_interval": 7,
                "trace_windows": False, "data_verify": "background"},
    "saves": {"checkpoint_interval": 1, "keep_checkpoints": 1, "milestone_interval": 5},
    "activation_checkpointing": {"activation_checkpointing": True},
}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda world_size: f"{world_size}-ranks")
def cadences(request, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cadences")
    jobs = [(words_of(folder / name, data, dropout=0.1, optimizer="muon", **changes), {})
            for name, changes in {"plain": {}, **CADENCES}.items()]
    for ranks in run_ranks(request.param, folder, *jobs):
        assert [code for code, _ in ranks] == [0] * request.param, ranks
    return folder


@pytest.mark.parametrize("name", CADENCES)
def test_no_bit_depends_on(cadences, name):
    assert end_state(cadences / name)["tensors"] == end_state(cadences / "plain")["tensors"]


def test_cadences_do_what_they_say(cadences):
    assert [row["step"] for row in events(cadences / "reports", "eval")] == [0, 2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in events(cadences / "reports", "sample")] == [0, 3, 6, 9, 12]
    assert [row["step"] for row in rows(cadences / "reports" / "metrics.jsonl")] == [1, 7]
    assert not (cadences / "reports" / "windows.jsonl").exists()
    saves = events(cadences / "saves", "save")
    assert [row["step"] for row in saves if "checkpoint" in row] == list(range(1, 13))
    assert [row["step"] for row in saves if "milestone" in row] == [5, 10]


def test_the_best_validation_loss_survives_a_stop_right_after_it(tmp_path, data):
    words = functools.partial(words_of, data_dir=data, eval_interval=5)
    assert session(words(tmp_path / "straight"))[0] == 0
    assert session(words(tmp_path / "stopped", stop_after_steps=10))[0] == 0
    assert session(words(tmp_path / "stopped"))[0] == 0
    assert_same(tmp_path / "stopped", tmp_path / "straight")


# -- another shape of the job on resume

def assert_close(out_dir, straight):
    """That two runs took the same windows, and agree in rate and loss as different sums do."""
    assert by_step(out_dir / "windows.jsonl", "windows") == by_step(straight / "windows.jsonl", "windows")
    found, wanted = (by_step(path / "metrics.jsonl", "lr", "loss") for path in (out_dir, straight))
    assert found.keys() == wanted.keys()
    for step, (lr, loss) in wanted.items():
        assert found[step][0] == lr and found[step][1] == pytest.approx(loss, abs=1e-5)


def test_a_resume_with_another_world_size_goes_on_with_the_same_order_and_loss(tmp_path, data, alone):
    words = functools.partial(words_of, tmp_path / "moved", data, dropout=0.1)
    for world_size, steps in ((1, 3), (3, 4), (2, 0)):
        (ranks,) = run_ranks(world_size, tmp_path, (words(stop_after_steps=steps), {}))
        assert [code for code, _ in ranks] == [0] * world_size, ranks
    assert_close(tmp_path / "moved", alone)
    assert [row["world_size"] for row in events(tmp_path / "moved", "start")] == [1, 3, 2]


def test_a_resume_with_another_batch_size_goes_on_with_the_same_order_and_loss(tmp_path, data):
    words = functools.partial(words_of, data_dir=data)
    assert session(words(tmp_path / "straight"))[0] == 0
    for batch_size, steps in ((2, 5), (4, 4), (1, 0)):
        code, text = session(words(tmp_path / "moved", batch_size=batch_size, stop_after_steps=steps))
        assert code == 0, text
    assert_close(tmp_path / "moved", tmp_path / "straight")
    assert [row["changed"]["batch_size"] for row in events(tmp_path / "moved", "resume")] == [[2, 4], [4, 1]]


def test_a_resume_after_a_move_of_data_and_run_goes_on_exactly(tmp_path, data):
    assert session(words_of(tmp_path / "straight", data))[0] == 0
    shutil.copytree(data, tmp_path / "data")
    assert session(words_of(tmp_path / "here", tmp_path / "data", stop_after_steps=5))[0] == 0
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert session(words_of(tmp_path / "there", tmp_path / "moved"))[0] == 0
    assert_same(tmp_path / "there", tmp_path / "straight")


# -- growth of the data

@pytest.mark.parametrize("size", [300, 5], ids=lambda size: f"{size}-tokens")
def test_an_append_while_the_run_is_up_gives_the_same_order_as_one_while_it_is_down(tmp_path, size):
    folders = {name: write_data(tmp_path / f"data-{name}", 700) for name in ("up", "up-later", "down")}
    for name, steps in (("up", 2), ("up-later", 5), ("down", 5)):
        # a pass ends within step 6: the append waits for it wherever in the pass it comes
        grow = functools.partial(append_shard, folders[name], size)
        words = functools.partial(words_of, tmp_path / name, folders[name], max_steps=14)
        if name.startswith("up"):
            assert session(words(), train_step=before_step(steps, grow))[0] == 0
        else:
            assert session(words(stop_after_steps=steps))[0] == 0
            grow()
        for stop in (4, 0) if name.startswith("down") else ():
            code, text = session(words(stop_after_steps=stop))
            assert code == 0, text
    for name in ("up-later", "down"):
        assert_same(tmp_path / name, tmp_path / "up")
    segments = pointed(tmp_path / "up")[1]["segments"]
    assert [(first, len(shards)) for first, shards in segments] == [(0, 1), (43, 2)]
    passes = {}
    for (windows,) in by_step(tmp_path / "up" / "windows.jsonl", "windows").values():
        for number, window in windows:
            passes.setdefault(number, []).append(window)
    fresh, every = (size - 1) // 16, (700 + size - 1) // 16
    assert [sorted(passes[number]) for number in (0, 1)] == [list(range(43)), list(range(fresh or every))]


def test_an_append_that_a_dropped_step_took_up_gives_the_same_order(tmp_path):
    for name, steps in (("straight", 0), ("dropped", 5)):  # the first pass ends within step 6
        folder = write_data(tmp_path / f"data-{name}", 700)
        words = words_of(tmp_path / name, folder, max_steps=14)
        assert session([*words, "--stop_after_steps=4"])[0] == 0
        append_shard(folder, 300)
        if steps:
            late = before_step(steps + 1 - 4, functools.partial(signal_self, "SIGTERM"))
            assert session(words, train_step=late, DROP_STEP_AFTER_S=-1.0)[0] == 0
            assert status(tmp_path / name) == ("stopped", "signal", steps)
            assert events(tmp_path / name, "append")
        assert session(words)[0] == 0
    assert_same(tmp_path / "dropped", tmp_path / "straight")


def test_an_append_of_several_shards_one_after_the_other_is_taken_up_pass_by_pass(tmp_path):
    for name in ("up", "down"):
        folder, first, second = write_data(tmp_path / f"data-{name}", 700), 3, 7
        words = functools.partial(words_of, tmp_path / name, folder, max_steps=20)
        if name == "up":
            def step(*arguments, steps=iter(range(1, 100)), folder=folder):
                if next(steps) in (first + 1, second + 1):
                    append_shard(folder, 400)
                return train_step(*arguments)
            assert session(words(), train_step=step)[0] == 0
        else:
            for stop in (first, second - first, 0):
                assert session(words(stop_after_steps=stop))[0] == 0
                if stop:
                    append_shard(folder, 400)
    assert_same(tmp_path / "down", tmp_path / "up")
    assert [len(shards) for _, shards in pointed(tmp_path / "up")[1]["segments"]] == [1, 2, 3]


# -- files that change under a run

@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shard_cut_off_under_a_run_ends_it_before_a_wrong_update(tmp_path, data, world_size):
    folder, out = shutil.copytree(data, tmp_path / "data"), tmp_path / "cut"
    whole = (folder / "train-00000.bin").read_bytes()
    [ranks] = run_ranks(world_size, tmp_path, (words_of(out, folder), {
        "READ_STEPS": 1,
        "train_step": before_step(6, functools.partial(os.truncate, folder / "train-00000.bin", 300))}))
    code, text = ranks[0]
    assert code == 1, text
    told = [path.read_text() for path in (out / "errors").glob("rank_*.txt")]  # of whichever rank reads first
    assert any("train-00000.bin changed while this run reads it" in text for text in told), told
    assert 7 - world_size <= reached(out) <= 6 and pointed(out)[1]["step"] == 4, "another rank may read step 6 later"
    code, text = session(words_of(out, folder))
    assert code == 2 and "train-00000.bin: 300 bytes on disk, 1,400 in the manifest" in text
    (folder / "train-00000.bin").write_bytes(whole)
    for name in (out, tmp_path / "straight"):
        [ranks] = run_ranks(world_size, tmp_path, (words_of(name, folder), {}))
        assert ranks[0][0] == 0, ranks
    assert_same(out, tmp_path / "straight")


# -- the end of a segment

def stops(folder):
    return [(row["step"], row["reason"]) for row in events(folder, "stop")]


def test_a_session_stops_at_the_end_of_a_segment_and_goes_on_with_what_was_appended(tmp_path):
    """43 windows are five whole steps of 8; the sixth draws what is left and then what is new."""
    for name in ("never", "queue"):
        folder = write_data(tmp_path / f"data-{name}", 700)
        words = functools.partial(words_of, tmp_path / name, folder, max_steps=14, milestone_at_segment_end=True)
        if name == "queue":
            for _ in range(2):  # nothing is drawn again while there is nothing new
                code, text = session(words(stop_at_segment_end=True))
                assert code == 0 and "all data have been drawn" in text, text
                assert status(tmp_path / name) == ("stopped", "segment", 5) and reached(tmp_path / name) == 5
            append_shard(folder, 300)
            assert session(words(stop_at_segment_end=True))[0] == 0
            assert stops(tmp_path / name) == [(5, "segment"), (5, "segment"), (7, "segment")]
            assert session(words())[0] == 0
        else:
            grow = functools.partial(append_shard, folder, 300)
            assert session(words(), train_step=before_step(2, grow))[0] == 0
    assert_same(tmp_path / "queue", tmp_path / "never")
    for name in ("never", "queue"):
        found = sorted(path.name for path in (tmp_path / name / "milestones").iterdir())
        assert found == ["step_00000005", "step_00000007"], "43 + 18 windows are drawn within step 8"


def test_an_end_of_a_segment_between_two_steps_is_met_exactly(tmp_path):
    folder = write_data(tmp_path / "data", 16 * 40 + 5)  # 40 windows: five steps
    words = functools.partial(words_of, tmp_path / "out", folder, max_steps=14, stop_at_segment_end=True)
    for _ in range(2):
        assert session(words())[0] == 0
        assert status(tmp_path / "out") == ("stopped", "segment", 5)
    append_shard(folder, 16 * 16 + 1)  # two more
    assert session(words())[0] == 0
    assert stops(tmp_path / "out") == [(5, "segment"), (5, "segment"), (7, "segment")]
    assert [row["window"] for row in events(tmp_path / "out", "append")] == [40]
    drawn = [window for [step] in by_step(tmp_path / "out" / "windows.jsonl", "windows").values() for window in step]
    assert sorted(drawn) == [[0, window] for window in range(40)] + [[1, window] for window in range(16)]


def test_an_append_while_the_session_runs_stops_it_at_the_end_of_the_segment_too(tmp_path):
    folder = write_data(tmp_path / "data", 700)
    words = words_of(tmp_path / "out", folder, max_steps=14, stop_at_segment_end=True)
    grow = before_step(3, functools.partial(append_shard, folder, 300))
    [ranks] = run_ranks(2, tmp_path, (words, {"train_step": grow}))
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert status(tmp_path / "out") == ("stopped", "segment", 5) and not events(tmp_path / "out", "append")
    assert session(words)[0] == 0
    assert status(tmp_path / "out") == ("stopped", "segment", 7) and len(events(tmp_path / "out", "append")) == 1
