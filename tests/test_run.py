"""What a run does: how it begins, goes on and ends, what it refuses, and what it leaves on disk."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import threading
import time
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import train
from conftest import shard_row, write_data
from driver import (AT_ONCE, PatientHasher, assert_same, before_evaluation, before_step, boom, by_step, checkpoints,
                    events, exact, pointed, reached, rows, run_ranks, session, signal_self, start_command,
                    start_ranks, status, tensors, train_step, wait_for, words_of)

ROW = {"session", "step", "tokens", "windows", "epoch", "loss", "lr", "muon_lr", "grad_norm", "tokens_per_s",
       "mfu", "step_ms", "data_ms", "mem_gb", "free_gb", "time"}


@pytest.fixture
def words(tmp_path, data):
    """The command line of a tiny run in `tmp_path`/run."""
    return functools.partial(words_of, tmp_path / "run", data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A run that was left to itself for 12 steps. Tests that change it take a copy."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    settings = {"dropout": 0.1, "keep_checkpoints": 9, "eval_interval": 6, "milestone_interval": 6,
                "sample_interval": 6}
    text = ok(words_of(out_dir, data, **settings), **AT_ONCE)
    return types.SimpleNamespace(out_dir=out_dir, text=text, settings=settings)


def ok(words, **patches):
    """What a session prints that must exit 0."""
    code, text = session(words, **patches)
    assert code == 0, text
    return text


def refused(words, *wanted):
    """The message of a session that must exit 2, with all the wanted words in it."""
    code, text = session(words)
    assert code == 2, text
    assert "Traceback" not in text
    for part in wanted:
        assert part in text
    return text


def tree(folder):
    """{path: sha256} of all files below a folder."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def weights(folder):
    return tensors(folder / "model.safetensors")


def copy(run, tmp_path):
    return shutil.copytree(run.out_dir, tmp_path / "run")


# -- beginning and going on

def test_max_steps_is_exact_and_max_tokens_counts_whole_steps(words, tmp_path):
    ok(words(max_steps=7))
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 8))
    assert pointed(tmp_path / "run")[1]["step"] == 7
    ok(words_of(tmp_path / "tokens", words.args[1], max_tokens=6 * 128 - 1))
    assert status(tmp_path / "tokens") == ("finished", "horizon", 5)


def test_a_finished_run_says_so_and_changes_nothing(finished, data, tmp_path):
    out_dir = copy(finished, tmp_path)
    before = tree(out_dir)
    for resume in ("auto", "must"):
        assert "finished" in ok(words_of(out_dir, data, resume=resume, **finished.settings))
    after = tree(out_dir)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"lock", "events.jsonl", "config.json"}
    assert status(out_dir) == ("finished", "horizon", 12)


def test_resume_never_and_must(words):
    refused(words(resume="must"), "holds no checkpoint")
    ok(words(resume="never", max_steps=4, schedule="constant"))
    refused(words(resume="never", max_steps=8, schedule="constant"), "step_00000004", "resume='auto'")
    ok(words(resume="must", max_steps=8, schedule="constant"))


def test_going_back_to_a_step_renames_later_checkpoints_and_goes_on_exactly(finished, data, tmp_path):
    out_dir = copy(finished, tmp_path)
    before = weights(out_dir / "checkpoints" / "step_00000012")
    words = functools.partial(words_of, out_dir, data, **finished.settings)
    ok(words(resume="step_00000004", stop_after_steps=3))
    abandoned = ["step_00000008.abandoned", "step_00000012.abandoned"]
    assert checkpoints(out_dir) == ["step_00000004", "step_00000007", *abandoned]
    assert events(out_dir, "rollback")[0]["abandoned"] == abandoned
    ok(words())
    assert_same(out_dir, finished.out_dir)
    assert weights(out_dir / "checkpoints" / "step_00000012.abandoned") == before
    refused(words(resume="step_00000005"), "there is no step_00000005", "step_00000007")


def test_a_frozen_setting_that_changed_is_one_error_that_lists_all(finished, data):
    changes = {"seed": 7, "dropout": 0.2, "learning_rate": 0.001, "n_layer": 3, "optimizer": "muon",
               "decay_ratio": 0.5, "batch_tokens": 256, "data_seed": 8}
    before = tree(finished.out_dir / "checkpoints")
    text = refused(words_of(finished.out_dir, data, **finished.settings | changes), *changes)
    assert "seed: the run has 1337, asked for 7" in text
    assert "max_steps" not in text and "eval_interval" not in text
    assert tree(finished.out_dir / "checkpoints") == before


def test_a_refusal_reaches_all_ranks_and_one_speaks(finished, data, tmp_path):
    words = words_of(finished.out_dir, data, **finished.settings | {"seed": 7})
    (ranks,) = run_ranks(2, tmp_path, (words, {}))
    assert [code for code, _ in ranks] == [2, 2]
    assert ranks[0][1].count("seed: the run has") == 1 and ranks[1][1] == ""


def test_a_setting_that_may_differ_is_taken_and_recorded(words, tmp_path):
    ok(words(stop_after_steps=4))
    changes = {"batch_size": 4, "eval_interval": 5, "log_interval": 2, "checkpoint_interval": 3,
               "keep_checkpoints": 1, "loss_chunk_tokens": 16, "activation_checkpointing": True,
               "max_bad_steps": 3}
    ok(words(**changes))
    (event,) = events(tmp_path / "run", "resume")
    found = {name: now for name, (_, now) in event["changed"].items() if name != "stop_after_steps"}
    assert found == changes
    assert json.loads((tmp_path / "run" / "config.json").read_text())["batch_size"] == 4


def test_a_wsd_run_may_be_extended_before_it_decays_and_ends_as_if_planned_so(words, data, tmp_path):
    ok(words(max_steps=12, stop_after_steps=5))
    ok(words(max_steps=16))
    (event,) = events(tmp_path / "run", "horizon")
    assert (event["recorded"], event["now"]) == (12, 16)
    ok(words_of(tmp_path / "straight", data, max_steps=16))
    assert_same(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("schedule, stop, wanted", [
    ("wsd", 11, "begins to decay at step 10"), ("cosine", 2, "cosine")])
def test_a_horizon_that_would_change_rates_already_used_is_refused(words, schedule, stop, wanted):
    ok(words(schedule=schedule, stop_after_steps=stop))
    refused(words(schedule=schedule, max_steps=16), wanted, "12", "16")
    ok(words(schedule=schedule, stop_after_steps=1))


def test_data_that_changed_are_refused(words, tmp_path):
    words = functools.partial(words_of, tmp_path / "run", write_data(tmp_path / "data", 700))
    ok(words(stop_after_steps=2))
    other_train = write_data(tmp_path / "train", 701)
    other_val = write_data(tmp_path / "val", 700, val_tokens=401)
    refused(words_of(tmp_path / "run", other_train), "train-00000.bin", "never changed")
    refused(words_of(tmp_path / "run", other_val), "not those of this run")
    ok(words())


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_end_is_the_same(finished, data, tmp_path):
    words = functools.partial(words_of, tmp_path / "run", data, **finished.settings)
    ok(words(stop_after_steps=8))
    path = tmp_path / "run" / "checkpoints" / "step_00000008" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    ok(words())
    assert events(tmp_path / "run", "damaged")[0]["checkpoint"] == "step_00000008"
    assert events(tmp_path / "run", "resume")[0]["checkpoint"] == "step_00000004"
    assert "step_00000008.damaged-1" in checkpoints(tmp_path / "run")
    assert_same(tmp_path / "run", finished.out_dir)


def test_weights_that_do_not_give_the_recorded_control_loss_are_refused(words, monkeypatch):
    ok(words(stop_after_steps=4))
    monkeypatch.setattr(train, "control_loss", lambda *arguments: 9.0)
    refused(words(), "a loss of 9.0", "control_tolerance")
    ok(words(control_tolerance=9))


def test_dtype_auto_keeps_the_recorded_one_and_another_is_recorded(words, tmp_path):
    for dtype in ("float16", "auto", "float32", "auto"):
        ok(words(dtype=dtype, stop_after_steps=2))
    assert [row["settings"]["dtype"] for row in events(tmp_path / "run", "start")] == [
        "float16", "float16", "float32", "float32"]
    assert [row["changed"].get("dtype") for row in events(tmp_path / "run", "resume")] == [
        None, ["float16", "float32"], None]


# -- weights from elsewhere

@pytest.mark.parametrize("source", ["checkpoints/step_00000008", "milestones/step_00000006"])
def test_init_from_takes_the_weights_alone(finished, words, tmp_path, source):
    source = finished.out_dir / source
    sha256 = checkpoint.sha256(source / "model.safetensors")
    settings = {"init_from": source, "init_sha256": sha256, "learning_rate": 0.0, "max_steps": 1}
    ok(words(**settings))
    folder, trainer = pointed(tmp_path / "run")
    assert weights(folder) == weights(source), "at a rate of 0"
    assert (trainer["step"], trainer["updates"], trainer["windows"]) == (1, 1, 8)
    assert trainer["run"] != json.loads((source / "manifest.json").read_text())["run"]
    state = load_file(folder / "optimizer.safetensors")
    for name in (name for name in state if name.startswith("exp_avg.")):
        gradient = state[name] / (1 - train.beta1)
        squared = state[name.replace("exp_avg.", "exp_avg_sq.")] / (1 - train.beta2)
        assert torch.allclose(squared, gradient**2, rtol=1e-4, atol=1e-12), "one update from nothing"
    assert events(tmp_path / "run", "init")[0]["source"] == str(source)


def test_init_from_refuses_another_sha256_and_what_does_not_fit(finished, words, tmp_path):
    source = finished.out_dir / "checkpoints" / "step_00000008"
    refused(words(init_from=source, init_sha256="0" * 64), "init_sha256 asks for 0000")
    refused(words(init_from=source, n_embd=32), "n_embd is 16, asked for 32")
    refused(words(init_from=source, n_head=4), "n_head is 2, asked for 4")
    refused(words(init_from=tmp_path / "nothing"), "nothing")
    assert tree(tmp_path / "run").keys() == {"lock"}


# -- runs that change nothing

@pytest.mark.parametrize("world_size", [1, 2])
def test_eval_only_prints_the_loss_and_changes_nothing(finished, data, tmp_path, world_size):
    out_dir = copy(finished, tmp_path)
    before = tree(out_dir)
    words = words_of(out_dir, data, eval_only=True, **finished.settings)
    (ranks,) = run_ranks(world_size, tmp_path, (words, {}))
    assert [code for code, _ in ranks] == [0] * world_size
    assert f"step 12: val loss {events(out_dir, 'eval')[-1]['val_loss']:.4f}" in ranks[0][1]
    assert tree(out_dir) == before


def test_eval_only_without_weights_or_validation_is_refused(words, tmp_path):
    refused(words(eval_only=True), "holds no checkpoint")
    assert not (tmp_path / "run").exists()
    folder = write_data(tmp_path / "data", 700, val_tokens=0)
    ok(words_of(tmp_path / "other", folder))
    refused(words_of(tmp_path / "other", folder, eval_only=True), "no validation window")


def test_dry_run_writes_nothing(finished, words, data, tmp_path):
    assert "dry run" in ok(words(dry_run=True))
    assert not (tmp_path / "run").exists()
    out_dir = copy(finished, tmp_path)
    before = tree(out_dir)
    assert "dry run" in ok(words_of(out_dir, data, dry_run=True, **finished.settings))
    assert tree(out_dir) == before


def test_a_second_trainer_exits_2_naming_the_first(words, tmp_path):
    with checkpoint.lock(tmp_path / "run"):
        refused(words(), f"in use by pid {os.getpid()} on ")
    assert tree(tmp_path / "run").keys() == {"lock"}
    ok(words())


# -- files

def test_metrics_rows_have_all_fields_and_their_arithmetic_holds(words, tmp_path):
    ok(words(optimizer="muon", learning_rate=0.01, muon_learning_rate=0.02, log_interval=3))
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 3, 6, 9, 12]
    for row in found:
        assert row.keys() == ROW
        assert row["tokens"] == row["step"] * 128 and row["windows"] == row["step"] * 8
        assert row["epoch"] == pytest.approx(row["windows"] / 43, abs=1e-6)
        assert row["muon_lr"] == pytest.approx(2 * row["lr"]) and 0 < row["lr"] <= 0.01
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["step_ms"], rel=1e-5)
        assert row["session"] == 1 and row["mfu"] is None and row["loss"] > 0 and row["grad_norm"] > 0
        assert row["mem_gb"] > 0 and row["free_gb"] > 0 and 0 <= row["data_ms"] < row["step_ms"]
    assert found[0]["lr"] == pytest.approx(0.01 / 3), "the first step has a rate"


def test_the_first_loss_is_what_the_initial_weights_promise(finished):
    (loss,) = by_step(finished.out_dir / "metrics.jsonl", "loss")[1]
    assert loss == pytest.approx(math.log(320), abs=0.1)
    assert "expected first loss 5.77" in finished.text


def test_events_tell_how_the_session_began(finished):
    (start,) = events(finished.out_dir, "start")
    assert {"imports", "ranks", "data", "model", "load", "control"} <= start["stages"].keys()
    assert all(seconds >= 0 for seconds in start["stages"].values())
    assert start["versions"]["torch"] == torch.__version__
    assert (start["world_size"], start["threads"], start["session"]) == (1, 1, 1)
    assert start["data_fingerprint"] == pointed(finished.out_dir)[1]["data_fingerprint"]
    assert start["settings"] == json.loads((finished.out_dir / "config.json").read_text())
    assert start["settings"]["dropout"] == 0.1 and start["settings"]["vocab_size"] == 257
    assert events(finished.out_dir, "init")[0]["source"] == "seed 1337"
    for row in rows(finished.out_dir / "events.jsonl"):
        assert list(row)[:4] == ["time", "session", "step", "event"]


def test_the_order_of_events_saves_before_it_evaluates(finished):
    names = [row["event"] for row in rows(finished.out_dir / "events.jsonl")]
    assert names == ["start", "init", "eval", "sample", "probe", "save", "save", "eval", "sample", "probe", "save",
                     "save", "save", "eval", "sample", "probe", "finish"]
    assert "next save at step 4, next evaluation at step 0" in finished.text
    assert [row["step"] for row in events(finished.out_dir, "eval")] == [0, 6, 12]
    assert [row["windows"] for row in events(finished.out_dir, "eval")] == [8, 8, 24], "all at the horizon"


def test_evaluations_say_nats_bits_and_perplexity(finished):
    for row in events(finished.out_dir, "eval"):
        assert row["complete"] and row["split"] == "val" and row["seconds"] > 0
        assert row["perplexity"] == pytest.approx(math.exp(row["val_loss"]), rel=1e-5)
        bits = row["val_loss"] / math.log(2)
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5), "a token is a byte here"


def test_the_evaluation_at_the_horizon_has_bits_per_byte_whatever_the_intervals(words, tmp_path):
    ok(words(eval_interval=0, sample_interval=0))
    (row,) = events(tmp_path / "run", "eval")
    assert row["step"] == 12
    assert row["bits_per_byte"] == pytest.approx(row["val_loss"] / math.log(2), rel=1e-5)


def test_a_checkpoint_holds_its_step_and_where_it_comes_from(finished):
    folder, trainer = pointed(finished.out_dir)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "model.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]
    assert (trainer["step"], trainer["windows"], trainer["tokens"], trainer["updates"]) == (12, 96, 1536, 12)
    assert trainer["session"] == 1 and len(trainer["lineage"]) == 1 and trainer["segments"][0][0] == 0
    assert trainer["versions"]["torch"] == torch.__version__
    assert set(trainer["code"]) == {"train.py", "model.py"}
    tensors = load_file(folder / "optimizer.safetensors") | load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in tensors)


def test_keep_checkpoints_keeps_the_newest(words, tmp_path):
    for keep, kept in ((1, ["step_00000006"]), (3, ["step_00000008", "step_00000010", "step_00000012"])):
        ok(words(checkpoint_interval=2, keep_checkpoints=keep, stop_after_steps=6))
        assert checkpoints(tmp_path / "run") == kept
    assert [row["checkpoint"] for row in events(tmp_path / "run", "prune")] == [
        "step_00000002", "step_00000004", "step_00000006"]


def test_milestones_are_kept_and_hold_the_model_only(finished, tmp_path):
    folders = sorted((finished.out_dir / "milestones").iterdir())
    assert [folder.name for folder in folders] == ["step_00000006", "step_00000012"]
    for folder in folders:
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["manifest.json", "model.json", "model.safetensors"]
        checkpoint.verify(folder, pointed(finished.out_dir)[1]["run"])
    assert weights(folders[1]) == weights(pointed(finished.out_dir)[0])
    assert [row.get("milestone") for row in events(finished.out_dir, "save")] == [
        None, "step_00000006", None, None, "step_00000012"]


def test_a_milestone_is_there_even_if_a_kill_came_just_before_it(words, tmp_path, monkeypatch):
    write = checkpoint.write

    def killed(*arguments):
        if "milestones" in arguments:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        session(words(milestone_interval=4))
    monkeypatch.undo()
    assert pointed(tmp_path / "run")[1]["step"] == 4
    ok(words(milestone_interval=4))
    names = sorted(path.name for path in (tmp_path / "run" / "milestones").iterdir())
    assert names == ["step_00000004", "step_00000008", "step_00000012"]


def test_samples_are_written_for_a_person(finished):
    assert sorted(path.name for path in (finished.out_dir / "samples").iterdir()) == [
        "reel.md", "step_00000000.md", "step_00000006.md", "step_00000012.md"]


def test_validation_has_the_same_bits_for_every_world_size_and_batch_size(tmp_path, data):
    found = {}
    for world_size in (1, 2, 3):
        jobs = [(words_of(tmp_path / f"{world_size}-{batch_size}", data, max_steps=1, batch_tokens=384,
                          batch_size=batch_size, eval_tokens=0, eval_interval=1), {"finite": exact})
                for batch_size in (1, 2, 8)]
        for ranks in run_ranks(world_size, tmp_path, *jobs):
            assert [code for code, _ in ranks] == [0] * world_size, ranks
        for batch_size in (1, 2, 8):
            row = events(tmp_path / f"{world_size}-{batch_size}", "eval")[0]
            assert row["step"] == 0 and row["windows"] == 24
            found[world_size, batch_size] = row["val_loss"], row["bits_per_byte"], row["perplexity"]
    assert len(set(found.values())) == 1, found
    assert f"{found[1, 1][0]:.7g}" != str(found[1, 1][0]), "every digit was compared"


def test_validation_has_the_same_bits_for_every_number_of_threads(tmp_path, data, monkeypatch):
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        ok(words_of(tmp_path / threads, data, max_steps=1, eval_tokens=0, eval_interval=1), finite=exact)
        assert events(tmp_path / threads, "start")[0]["threads"] == int(threads)
    assert len({events(tmp_path / threads, "eval")[0]["val_loss"] for threads in ("1", "2", "3")}) == 1


# -- data

def test_data_shorter_than_a_window_are_refused(tmp_path):
    refused(words_of(tmp_path / "run", write_data(tmp_path / "data", 16)), "16 train tokens", "at least 17")
    ok(words_of(tmp_path / "run", write_data(tmp_path / "enough", 17), max_steps=2))
    refused(words_of(tmp_path / "other", tmp_path / "nowhere"), "nowhere is no data folder")


def test_data_without_validation_train_and_are_not_evaluated(tmp_path):
    for val_tokens in (0, 16):
        words = words_of(tmp_path / f"run-{val_tokens}", write_data(tmp_path / f"data-{val_tokens}", 1000,
                         val_tokens=val_tokens), eval_interval=4, max_steps=6)
        ok([*words, "--stop_after_steps=5"])
        ok(words)
        assert not events(tmp_path / f"run-{val_tokens}", "eval")
        assert pointed(tmp_path / f"run-{val_tokens}")[1]["best_val_loss"] is None


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_id_beyond_the_vocabulary_names_file_and_place(tmp_path, split, world_size):
    folder = write_data(tmp_path / "data", 700)
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.fromfile(folder / f"{split}-00000.bin", "<u2")
    ids[200] = 300
    ids.tofile(folder / f"{split}-00000.bin")
    manifest[split] = [shard_row(folder, f"{split}-00000.bin")]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    words = words_of(tmp_path / "run", folder, eval_interval=6, eval_tokens=0, checkpoint_interval=0)
    (ranks,) = run_ranks(world_size, tmp_path, (words, {}))
    assert [code for code, _ in ranks] == [1] * world_size
    text = "".join(text for _, text in ranks)
    assert f"{split}-00000.bin: token 200 is 300, beyond the vocabulary of 257" in text
    assert status(tmp_path / "run")[:2] == ("failed", "error")


@pytest.mark.parametrize("world_size, interval", [(1, 1), (1, 0), (2, 0)])
def test_a_damaged_shard_stops_the_run_before_another_checkpoint_is_pointed_at(tmp_path, world_size,
                                                                               interval):
    folder = write_data(tmp_path / "data", 700)
    words = functools.partial(words_of, tmp_path / "run", folder, checkpoint_interval=interval)
    ok(words(stop_after_steps=2))
    with open(folder / "train-00000.bin", "rb+") as file:
        file.write(b"z")
    patches = {"data_prepare.ShardHasher": PatientHasher}
    (ranks,) = run_ranks(world_size, tmp_path, (words(data_verify="background"), patches))
    assert [code for code, _ in ranks] == [1] * world_size
    assert "train-00000.bin has sha256" in ranks[0][1]
    assert pointed(tmp_path / "run")[1]["step"] == 2 and checkpoints(tmp_path / "run")[-1] == "step_00000002"
    assert status(tmp_path / "run")[:2] == ("failed", "error")


# -- stopping

@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_stops_a_run_at_a_step_boundary_and_it_goes_on_exactly(finished, data, tmp_path, name):
    words = words_of(tmp_path / "run", data, **finished.settings)
    ok(words, train_step=before_step(5, functools.partial(signal_self, name, "SIGTERM", name)))
    assert status(tmp_path / "run") == ("stopped", "signal", 5)
    assert pointed(tmp_path / "run")[1]["step"] == 5 and events(tmp_path / "run", "signal")[0]["name"] == name
    ok(words)
    assert_same(tmp_path / "run", finished.out_dir)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_and_a_slow_step_is_dropped(tmp_path, data, rank):
    words = functools.partial(words_of, data_dir=data, dropout=0.1)
    action = before_step(6, functools.partial(signal_self, "SIGTERM"), rank)
    patches = {"train_step": action, "DROP_STEP_AFTER_S": -1.0}
    for ranks in run_ranks(2, tmp_path, (words(tmp_path / "run"), patches), (words(tmp_path / "run"), {}),
                           (words(tmp_path / "straight"), {})):
        assert [code for code, _ in ranks] == [0, 0], ranks
    assert events(tmp_path / "run", "stop")[0]["step"] == 5, "the state of the last boundary"
    assert pointed(tmp_path / "run")[1]["session"] == 2
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_first_step_that_is_dropped_leaves_a_run_that_can_begin(finished, data, tmp_path):
    words = words_of(tmp_path / "run", data, **finished.settings)
    ok(words, train_step=before_step(1, functools.partial(signal_self, "SIGTERM")), DROP_STEP_AFTER_S=-1.0)
    assert status(tmp_path / "run") == ("stopped", "signal", 0)
    ok(words)
    assert_same(tmp_path / "run", finished.out_dir)


@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 0), (2, 1)])
def test_a_signal_in_the_last_evaluation_cuts_it_short_and_the_next_launch_ends_it(tmp_path, data,
                                                                                   world_size, rank):
    words = words_of(tmp_path / "run", data, eval_tokens=0)
    action = before_evaluation(1, functools.partial(signal_self, "SIGTERM"), rank)
    patches = {"evaluate": action, "CPU_EVAL_TOKENS": 1}  # so that each rank has some windows
    (ranks,) = run_ranks(world_size, tmp_path, (words, patches))
    assert [code for code, _ in ranks] == [0] * world_size
    assert status(tmp_path / "run") == ("stopped", "signal", 12)
    assert "finished (horizon)" in ok(words)
    assert status(tmp_path / "run") == ("finished", "horizon", 12)
    assert [row["complete"] for row in events(tmp_path / "run", "eval")] == [False, True]
    assert len(events(tmp_path / "run", "save")) == 3


def test_signals_to_a_process_and_to_torchrun_end_in_a_whole_checkpoint(tmp_path, data):
    for ranks, code in ((0, 0), (2, 1)):  # torchrun itself reports 1 after a signal
        out_dir = tmp_path / f"run-{ranks}"
        words = words_of(out_dir, data, dropout=0.1, schedule="constant", max_steps=10**6)
        process = start_command(tmp_path / "log", *words, ranks=ranks)
        wait_for(lambda: reached(out_dir) >= 3, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code, (tmp_path / "log").read_text()
        step = pointed(out_dir)[1]["step"]
        assert status(out_dir) == ("stopped", "signal", step) and reached(out_dir) == step
        assert not (out_dir / "errors").exists()
        jobs = [(words_of(path, data, dropout=0.1, schedule="constant", max_steps=step + 2), {})
                for path in (out_dir, tmp_path / f"straight-{ranks}")]
        for answers in run_ranks(ranks or 1, tmp_path, *jobs):
            assert {answer[0] for answer in answers} == {0}
        assert_same(out_dir, tmp_path / f"straight-{ranks}")


def test_every_rank_exits_0_after_a_signal_to_all(tmp_path, data):
    words = words_of(tmp_path / "run", data, schedule="constant", max_steps=10**6)
    group = start_ranks(2, tmp_path, (words, {}))
    wait_for(lambda: reached(tmp_path / "run") >= 3, *(process for process, _ in group))
    for process, _ in group:
        os.kill(process.pid, signal.SIGINT)
    for process, answers in group:
        assert answers.poll(60) and answers.recv()[0] == 0
    assert status(tmp_path / "run")[:2] == ("stopped", "signal")


@pytest.mark.parametrize("log_interval", [1, 10])
@pytest.mark.parametrize("step_s, save_s", [(10, 1), (1, 10), (10, 10)])
def test_session_minutes_stops_in_time_for_the_last_save(words, tmp_path, log_interval, step_s, save_s,
                                                         monkeypatch):
    now, write = [0.0], checkpoint.write

    def slow_step(*arguments):
        now[0] += step_s
        return train_step(*arguments)

    def slow_write(*arguments):
        now[0] += save_s
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow_write)
    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], time=time.time)
    ok(words(session_minutes=2, log_interval=log_interval, schedule="constant", max_steps=1000),
       train_step=slow_step, time=clock, **{"checkpoint.time": clock}, **AT_ONCE)
    assert status(tmp_path / "run")[:2] == ("stopped", "minutes")
    assert pointed(tmp_path / "run")[1]["step"] == status(tmp_path / "run")[2]
    assert 60 < now[0] <= 120 - train.IMPORT_SECONDS, "used, and not overrun"


def test_stop_after_steps_counts_the_steps_of_the_session(words, tmp_path):
    for session_number in (1, 2):
        ok(words(stop_after_steps=5))
        assert status(tmp_path / "run") == ("stopped", "steps", 5 * session_number)
    ok(words(stop_after_steps=5))
    assert status(tmp_path / "run") == ("finished", "horizon", 12)


# -- failing

def poisoned(*bad):
    """A train_step that makes the loss, and with it every gradient, of some steps of the session NaN."""
    steps = iter(range(1, 10**6))

    def step(model, *arguments):
        if next(steps) in bad:
            return train_step(lambda *batch: model(*batch) * math.nan, *arguments)
        return train_step(model, *arguments)
    return step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bad_step_is_skipped_and_the_run_goes_on(words, tmp_path, optimizer):
    ok(words(optimizer=optimizer, checkpoint_interval=1, keep_checkpoints=20, dropout=0.1, max_bad_steps=3),
       train_step=poisoned(5, 6, 9))
    folders = [tmp_path / "run" / "checkpoints" / f"step_{step:08d}" for step in range(13)]
    for step, folder in enumerate(folders[2:], 2):
        for name in ("model.safetensors", "optimizer.safetensors"):
            same = tensors(folder / name) == tensors(folders[step - 1] / name)
            assert same == (step in (5, 6, 9)), f"{name} at step {step}"
    skips = events(tmp_path / "run", "skip")
    assert [(row["at"], row["in_a_row"], len(row["windows"])) for row in skips] == [
        (5, 1, 8), (6, 2, 8), (9, 1, 8)]
    trainer = pointed(tmp_path / "run")[1]
    assert (trainer["step"], trainer["updates"], trainer["bad_steps"]) == (12, 9, 0)
    assert by_step(tmp_path / "run" / "metrics.jsonl", "loss")[5] == [None]


def test_bad_steps_in_a_row_stop_the_run_and_the_last_good_checkpoint_stands(words, tmp_path):
    code, text = session(words(max_bad_steps=3), train_step=poisoned(*range(6, 99)))
    assert code == 1 and "Traceback" not in text
    windows = rows(tmp_path / "run" / "windows.jsonl")[-1]["windows"]
    assert "3 steps in a row" in text and str(windows) in text
    assert status(tmp_path / "run")[:2] == ("failed", "bad_steps")
    assert pointed(tmp_path / "run")[1]["step"] == 4
    assert "3 steps in a row" in (tmp_path / "run" / "errors" / "rank_0.txt").read_text()
    ok(words(max_bad_steps=3))
    assert status(tmp_path / "run")[0] == "finished"


def test_bad_steps_in_a_row_are_counted_across_sessions(words, tmp_path):
    ok(words(max_bad_steps=3, stop_after_steps=5), train_step=poisoned(4, 5))
    assert session(words(max_bad_steps=3), train_step=poisoned(1))[0] == 1
    assert status(tmp_path / "run")[:2] == ("failed", "bad_steps")
    assert pointed(tmp_path / "run")[1]["step"] == 5


def test_weights_that_are_not_finite_are_never_pointed_at(words, tmp_path):
    def ruin(model, *arguments, steps=iter(range(1, 100))):
        outcome = train_step(model, *arguments)
        if next(steps) == 7:
            next(model.parameters()).data[3, 3] = math.inf
        return outcome

    code, text = session(words(), train_step=ruin)
    assert code == 1 and "step 8 are not finite" in text
    assert pointed(tmp_path / "run")[1]["step"] == 4 and checkpoints(tmp_path / "run") == ["step_00000004"]
    assert status(tmp_path / "run")[0] == "failed"


def failing_saves(*bad):
    """checkpoint.write on a disk that is full at some of its calls."""
    write, calls = checkpoint.write, iter(range(1, 100))

    def written(*arguments):
        if next(calls) in bad:
            raise OSError(errno.ENOSPC, "no space left")
        return write(*arguments)
    return written


def test_a_save_that_fails_is_an_event_and_the_next_one_is_tried(finished, data, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", failing_saves(2))
    settings = finished.settings | {"milestone_interval": 0}
    ok(words_of(tmp_path / "run", data, **settings))
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [8]
    assert "no space left" in events(tmp_path / "run", "save_failed")[0]["cause"]
    assert [row["step"] for row in events(tmp_path / "run", "save")] == [4, 12]
    assert_same(tmp_path / "run", finished.out_dir)


@pytest.mark.parametrize("bad, step", [((2, 3), 4), ((3, 4), 8)], ids=["twice-in-a-row", "the-last-twice"])
def test_a_run_that_cannot_save_fails_and_the_last_good_checkpoint_stands(words, tmp_path, monkeypatch, bad,
                                                                          step):
    monkeypatch.setattr(checkpoint, "write", failing_saves(*bad))
    code, text = session(words(keep_checkpoints=1))
    assert code == 1 and "could not be saved: " in text
    assert status(tmp_path / "run") == ("failed", "save", 12)
    assert pointed(tmp_path / "run")[1]["step"] == step
    assert checkpoints(tmp_path / "run") == [f"step_{step:08d}"]
    monkeypatch.undo()
    ok(words(keep_checkpoints=1))


def test_a_milestone_that_cannot_be_written_does_not_end_the_run(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", failing_saves(2))
    ok(words(milestone_interval=4))
    assert [row["step"] for row in events(tmp_path / "run", "save_failed")] == [4]
    assert status(tmp_path / "run") == ("finished", "horizon", 12)


def test_an_evaluation_that_dies_leaves_the_checkpoint_of_its_step(words, tmp_path):
    def dies(*arguments):
        raise torch.OutOfMemoryError("evaluation")

    code, text = session(words(), evaluate=dies)
    assert code == 1 and "evaluation" in text
    assert status(tmp_path / "run") == ("failed", "error", 12)
    assert pointed(tmp_path / "run")[1]["step"] == 12
    assert "finished (horizon)" in ok(words())


@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 0), (2, 1)])
def test_a_crash_leaves_a_traceback_of_its_rank_and_a_status(tmp_path, data, world_size, rank):
    words = words_of(tmp_path / "run", data)
    (ranks,) = run_ranks(world_size, tmp_path, (words, {"train_step": before_step(6, boom, rank)}))
    assert [code for code, _ in ranks] == [1] * world_size, "the others do not wait for ever"
    assert "RuntimeError: boom" in (tmp_path / "run" / "errors" / f"rank_{rank}.txt").read_text()
    assert status(tmp_path / "run")[:2] == ("failed", "error")
    assert pointed(tmp_path / "run")[1]["step"] == 4
    ok(words)
    assert status(tmp_path / "run")[0] == "finished"


@pytest.mark.parametrize("count", [0, 3, 4, 10])
def test_a_gpu_evaluates_in_one_shape_and_each_window_counts_once(monkeypatch, count):
    shapes = []

    def forward(starts_B):
        shapes.append(len(starts_B))
        return starts_B[:, None].float().repeat(1, 3)
    monkeypatch.setattr(train, "to_batch", lambda starts, _: (torch.from_numpy(starts),))
    stream = types.SimpleNamespace(windows=lambda starts, length: starts)
    model = types.SimpleNamespace(training=True, eval=lambda: None, train=lambda mode: None, forward=None)
    sums = train.window_losses(model, forward, stream, np.arange(count), 4, 3, types.SimpleNamespace(type="cuda"),
                               contextlib.nullcontext, lambda: False)
    assert sums == [3.0 * start for start in range(count)] and shapes == [4] * -(-count // 4)


@pytest.mark.parametrize("number", [None, 6], ids=["finished", "crashed"])
def test_main_leaves_signals_threads_and_process_group_as_it_found_them(words, tmp_path, number):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.signal(signum, lambda *_: None) for signum in numbers]
    threads, count = threading.enumerate(), torch.get_num_threads()
    try:
        ours = [signal.getsignal(signum) for signum in numbers]
        torch.set_num_threads(count + 1)
        code, _ = session(words(data_verify="background", deterministic=True),
                          train_step=before_step(number, boom))
        assert code == (1 if number else 0)
        assert [signal.getsignal(signum) for signum in numbers] == ours
        assert torch.get_num_threads() == count + 1
    finally:
        torch.set_num_threads(count)
        for signum, handler in zip(numbers, handlers):
            signal.signal(signum, handler)
    assert threading.enumerate() == threads
    assert not torch.distributed.is_initialized() and not torch.are_deterministic_algorithms_enabled()
    with checkpoint.lock(tmp_path / "run"):
        pass


def test_ranks_keep_the_process_group_they_came_with(tmp_path, data):
    jobs = [(words_of(tmp_path / "run", data, stop_after_steps=4), {}) for _ in range(3)]
    assert [[code for code, _ in ranks] for ranks in run_ranks(2, tmp_path, *jobs)] == [[0, 0]] * 3


def test_a_save_that_failed_is_tried_again_when_the_next_step_is_dropped(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", failing_saves(2))

    def late():  # a signal, as if it had come so long ago that the step must be dropped
        signal_self("SIGTERM")

    text = ok(words(), DROP_STEP_AFTER_S=-1.0, train_step=before_step(9, late))
    assert "stopped (signal) at step 8" in text
    assert pointed(tmp_path / "run")[1]["step"] == 8


# -- what is told of a session

def test_sessions_have_numbers_of_their_own_also_after_one_that_saved_nothing(words, tmp_path):
    def session_numbers():
        return [row["session"] for row in events(tmp_path / "run", "start")]

    with pytest.raises(KeyboardInterrupt):
        session(words(), train_step=before_step(3, leave))
    ok(words(stop_after_steps=4))
    with pytest.raises(KeyboardInterrupt):
        session(words(), train_step=before_step(3, leave))
    ok(words())
    assert session_numbers() == [1, 2, 3, 4]
    ok(words(resume="step_00000008"))
    assert session_numbers() == [1, 2, 3, 4, 5]


def leave():
    raise KeyboardInterrupt


def test_going_back_moves_nothing_where_the_session_is_refused(finished, data, tmp_path):
    """For whatever reason: other settings, a number of ranks that cannot share a sum, other data."""
    out_dir = copy(finished, tmp_path)
    before = tree(out_dir / "checkpoints"), (out_dir / "latest.json").read_bytes()
    for changed in ({"seed": 5}, {"reproducible": True}, {"max_steps": 10**6, "schedule": "cosine"}):
        refused(words_of(out_dir, data, **finished.settings, resume="step_00000008", **changed))
        assert (tree(out_dir / "checkpoints"), (out_dir / "latest.json").read_bytes()) == before
    assert not events(out_dir, "rollback")


def test_a_torn_last_event_disturbs_no_one(finished, data, tmp_path):
    out_dir = copy(finished, tmp_path)
    with open(out_dir / "events.jsonl", "a") as file:
        file.write('{"time": 1.0, "sess')
    ok(words_of(out_dir, data, **finished.settings, eval_only=True))
    ok(words_of(out_dir, data, **finished.settings))


def test_a_finished_run_ends_with_its_validation_loss(finished):
    loss = events(finished.out_dir, "eval")[-1]["val_loss"]
    assert f"val loss {loss:.4f} nats per token" in finished.text[finished.text.index("## "):].split("finished (")[0]


# -- vocabularies and weights of other places

def test_a_vocabulary_larger_than_the_tokenizers_is_sampled_too(words, tmp_path):
    ok(words(vocab_size=400, sample_interval=4, sample_tokens=200, max_steps=4))
    assert (tmp_path / "run" / "samples" / "step_00000004.md").read_text()


def test_init_from_takes_a_copied_folder_and_refuses_a_damaged_one(finished, words, tmp_path):
    source = shutil.copytree(finished.out_dir / "milestones" / "step_00000006", tmp_path / "base")
    ok(words(init_from=source, max_steps=1))
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(words_of(tmp_path / "other", words.args[1], init_from=source), "model.safetensors", "sha256")


# -- the host reads a step late, as it does on a GPU

LATE = {"STEPS_READ_LATE": {"cpu": 1}}


def test_a_host_that_reads_a_step_late_leaves_the_same_run(finished, data, tmp_path):
    words = functools.partial(words_of, tmp_path / "run", data, **finished.settings)
    ok(words(stop_after_steps=5), **LATE)
    ok(words(), **LATE)
    assert_same(tmp_path / "run", finished.out_dir)
    steps = [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, 13)), "every step has its row, once"


@pytest.mark.parametrize("limit_s, step", [(60.0, 10), (-1.0, 8)], ids=["in-time", "dropped"])
def test_a_signal_ends_a_run_that_is_read_a_step_late(finished, data, tmp_path, limit_s, step):
    words = words_of(tmp_path / "run", data, **finished.settings)
    signalled = before_step(9, lambda: signal_self("SIGTERM"))  # a step after a boundary
    ok(words, DROP_STEP_AFTER_S=limit_s, train_step=signalled, **LATE)
    assert status(tmp_path / "run") == ("stopped", "signal", step)
    ok(words, **LATE)
    assert_same(tmp_path / "run", finished.out_dir)


def test_bad_steps_are_counted_by_a_host_that_reads_a_step_late(words, tmp_path):
    code, text = session(words(max_bad_steps=3), **LATE, train_step=poisoned(*range(1, 99)))
    assert code == 1 and status(tmp_path / "run")[:2] == ("failed", "bad_steps"), text
    assert [row["in_a_row"] for row in events(tmp_path / "run", "skip")] == [1, 2, 3]


# -- rows of many steps at once

def journal_in(folder, monkeypatch):
    """(a Journal, what it says, a list with the time in it, that many seconds after its first row)."""
    run, said, now = train.Run(run="r", session=1), [], [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    journal = checkpoint.Journal(str(folder), True, run)
    log = lambda step: journal.log(lambda step, lr: {"step": step, "lr": lr}, lambda row, step, lr: f"{row} {lr}",
                                   said.append, step, step / 10)
    return journal, log, said, now


def test_rows_of_short_steps_are_written_together_and_those_of_longer_ones_as_they_end(tmp_path, monkeypatch):
    journal, log, said, now = journal_in(tmp_path, monkeypatch)
    written = lambda: [row["step"] for row in rows(tmp_path / "metrics.jsonl")]
    log(1)
    assert written() == [1] and said == ["{'step': 1, 'lr': 0.1} 0.1"], "the first at once"
    now[0] += checkpoint.LOG_EVERY_S / 2
    log(2)
    assert written() == [1]
    now[0] += checkpoint.LOG_EVERY_S
    log(3)
    assert written() == [1, 2, 3] and len(said) == 3
    log(4)
    journal.settle()
    journal.settle()
    assert written() == [1, 2, 3, 4] and len(said) == 4, "once each"
    assert checkpoint.LOG_EVERY_S <= 0.2, "who times a run by its lines sees each step of 0.2 s"
    for step in (5, 6, 7):
        now[0] += checkpoint.LOG_EVERY_S + 0.001
        log(step)
        assert written()[-1] == step, "longer steps wait for nothing"


def test_an_error_does_not_lose_the_rows_before_it(tmp_path, monkeypatch):
    journal, log, said, now = journal_in(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="boom"), journal.telling_errors():
        log(1)
        log(2)
        raise RuntimeError("boom")
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2] and len(said) == 2


def test_an_error_is_told_whatever_the_rows_before_it_meet(tmp_path, monkeypatch, capsys):
    journal, log, said, now = journal_in(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="boom"), journal.telling_errors():
        log(1)
        log(2)
        journal.log(lambda: {"step": 3}, lambda row: 1 / 0, said.append)
        raise RuntimeError("boom")
    assert "RuntimeError: boom" in capsys.readouterr().err and len(said) == 2
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("asked", [{}, {"stop_after_steps": 6}])
def test_a_session_reads_no_windows_beyond_its_end(words, monkeypatch, asked):
    read = []
    monkeypatch.setattr(train.data_prepare.StepQueue, "_read", lambda queue, step, steps, *rest, real=(
        train.data_prepare.StepQueue._read): (read.extend(range(step, step + steps)), real(queue, step, steps, *rest)))
    assert session(words(max_steps=9, **asked))[0] == 0
    assert read == list(range(asked.get("stop_after_steps", 9)))


def test_a_rank_that_writes_nothing_makes_no_rows(tmp_path):
    journal = checkpoint.Journal(str(tmp_path), False, train.Run())
    journal.log(None, None, None)
    journal.settle()
    assert not list(tmp_path.iterdir())
