"""Every signal to every target in every phase ends a run in a whole checkpoint; no process is left, none hangs."""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import checkpoint
import train
from driver import (LIMIT_S, ROOT, TORCHRUN, assert_same, events, family, is_there, kill, pointed, processes, reached,
                    run_ranks, session, signal_self, status, wait_for, words_of)

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
TARGETS = {"rank 0": (0,), "rank 1": (1,), "all": (0, 1)}


# -- in every phase

@dataclass
class Signalling:
    """A function that sends its own process signals before one of its calls, on some ranks."""
    function: object
    number: int
    ranks: tuple
    names: tuple
    calls: int = 0

    def __call__(self, *arguments, **keywords):
        self.calls += 1
        if self.calls == self.number and int(os.environ.get("RANK", 0)) in self.ranks:
            signal_self(*self.names)
        return self.function(*arguments, **keywords)


# phase: (what of train is called in it, which call, the step at which the run then stops)
PHASES = {
    "load": ("load_state", 1, 0),
    "first step": ("train_step", 1, 1),
    "mid-accumulation": ("seed_device", 6, 3),  # once a micro-batch: the second of step 3
    "a later step": ("train_step", 7, 7),
    "evaluation": ("evaluate", 2, 7),  # of step 6: it is cut short, and one step more is done
    "a save": ("records_of", 1, 5),  # of step 4
    "the last save": ("records_of", 3, 12),
}
ONLY_RANK_0 = ("a save", "the last save")


@pytest.fixture(scope="module")
def signalled(tmp_path_factory, data):
    """Runs of two ranks that got signals in each phase, and then went on; STRAIGHT is one that got none."""
    folder, jobs, cells = tmp_path_factory.mktemp("signalled"), [], {}
    names = itertools.cycle(itertools.permutations(SIGNALS))
    for phase, (function, number, _) in PHASES.items():
        for target, ranks in TARGETS.items():
            if phase in ONLY_RANK_0 and target == "rank 1":
                continue
            words = words_of(folder / f"{phase} {target}", data, dropout=0.1, eval_interval=6)
            cells[phase, target] = next(names), len(jobs)
            action = Signalling(getattr(train, function), number, ranks, cells[phase, target][0])
            jobs += [(words, {function: action}), (words, {})]
    jobs.append((words_of(folder / "straight", data, dropout=0.1, eval_interval=6), {}))
    return folder, cells, run_ranks(2, folder, *jobs)


CELLS = [(phase, target) for phase in PHASES for target in TARGETS if not (phase in ONLY_RANK_0 and target == "rank 1")]


@pytest.mark.parametrize("phase, target", CELLS)
def test_signals_in_any_phase_end_in_a_whole_checkpoint_of_a_whole_step(signalled, phase, target):
    folder, cells, answers = signalled
    names, job = cells[phase, target]
    out_dir, step = folder / f"{phase} {target}", PHASES[phase][2]
    for ranks in answers[job:job + 2]:
        assert [code for code, _ in ranks] == [0, 0], ranks
    assert f"stopped (signal) at step {step} of 12" in answers[job][0][1]
    (stop,) = events(out_dir, "signal")
    assert set(stop["name"].split()) <= set(names) and stop["name"] and stop["step"] == step
    saves = [row["checkpoint"] for row in events(out_dir, "save") if row["session"] == 1]
    assert saves[-1] == f"step_{step:08d}"
    assert_same(out_dir, folder / "straight", *["best_val_loss"] * (phase == "evaluation"))  # it was not made


def test_a_signal_while_all_is_loaded_stops_a_resumed_run_before_its_first_step(tmp_path, data):
    words = words_of(tmp_path / "run", data, dropout=0.1)
    assert session([*words, "--stop_after_steps=5"])[0] == 0
    before = (tmp_path / "run" / "latest.json").read_bytes()
    code, text = session(words, load_state=Signalling(train.load_state, 1, (0,), ("SIGTERM",)))
    assert code == 0 and "stopped (signal) at step 5" in text
    assert (tmp_path / "run" / "latest.json").read_bytes() == before, "nothing is saved twice"
    assert status(tmp_path / "run") == ("stopped", "signal", 5)


# -- through torchrun

def start_torchrun(log, *words, ranks=2, options=(), script="train.py"):
    """torchrun as the leader of a process group of its own, as a shell starts it."""
    with open(log, "ab") as file:
        process = subprocess.Popen([TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", *options, script, *words],
                                   cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
                                   env=os.environ | {"TMPDIR": str(log.parent)})
    processes.append(process)
    return process


def endless(out_dir, data, **settings):
    return words_of(out_dir, data, **{"dropout": 0.1, "schedule": "constant", "max_steps": 10**6, **settings})


def running(process, out_dir):
    """Waits until the run has a checkpoint; the pids of its ranks."""
    wait_for(lambda: (out_dir / "latest.json").exists(), process)
    ranks = [pid for pid in family(process.pid)[1:] if is_there(pid)]
    assert len(ranks) == 2
    return ranks


def gone(pids):
    return not any(map(is_there, pids))


CAUGHT = ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_to_torchruns_whole_group_and_its_ranks_ends_in_a_whole_checkpoint(tmp_path, data, name):
    """Twice to everything that is there, as a scheduler does that signals each process of a job."""
    out_dir = tmp_path / "run"
    torchrun = start_torchrun(tmp_path / "log", *endless(out_dir, data), options=CAUGHT)
    ranks = running(torchrun, out_dir)
    for _ in range(2):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(torchrun.pid, getattr(signal, name))
    began = time.monotonic()
    assert torchrun.wait(LIMIT_S) in (0, 1), "torchrun itself reports 1 after a signal"
    assert time.monotonic() - began < 25 and gone(ranks)
    state, reason, step = status(out_dir)
    assert (state, reason) == ("stopped", "signal") and pointed(out_dir)[1]["step"] == step == reached(out_dir)
    assert not (out_dir / "errors").exists(), (tmp_path / "log").read_text()


WAITING = """
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
import checkpoint, configurator, train

def wait_at(holder, name, folder=pathlib.Path({folder!r}), left=[{number}]):
    real = getattr(holder, name)

    def function(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            (folder / f"here-{{os.environ['RANK']}}").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return real(*arguments, **keywords)
    setattr(holder, name, function)

configurator.configure(vars(train), sys.argv[1:])
wait_at({holder}, {name!r})
train.main()
"""


@pytest.mark.parametrize("name, phase, holder, number, ranks", [
    ("SIGTERM", "write", "checkpoint", 2, 1), ("SIGINT", "evaluate", "train", 2, 2),
    ("SIGUSR1", "load_state", "train", 1, 2), ("SIGTERM", "seed_device", "train", 4, 2)])
def test_a_signal_to_torchrun_in_any_phase_ends_in_a_whole_checkpoint(tmp_path, data, name, phase, holder, number,
                                                                      ranks):
    """The ranks (rank 0 alone where it writes) are held in that phase until the signal is through, sent twice."""
    script, out_dir = tmp_path / "held.py", tmp_path / "run"
    script.write_text(WAITING.format(root=str(ROOT), folder=str(tmp_path), holder=holder, name=phase, number=number))
    words = words_of(out_dir, data, dropout=0.1, eval_interval=3)
    torchrun = start_torchrun(tmp_path / "log", *words, options=CAUGHT, script=script)
    wait_for(lambda: len(list(tmp_path.glob("here-*"))) == ranks, torchrun)
    pids = family(torchrun.pid)
    for _ in range(2):
        torchrun.send_signal(getattr(signal, name))
    (tmp_path / "go").touch()
    began = time.monotonic()
    assert torchrun.wait(LIMIT_S) in (0, 1)
    assert time.monotonic() - began < 25 and gone(pids)
    state, reason, step = status(out_dir)
    assert (state, reason) == ("stopped", "signal") and pointed(out_dir)[1]["step"] == step
    for answers in run_ranks(2, tmp_path, (words, {}), (words_of(tmp_path / "straight", data, dropout=0.1,
                                                                 eval_interval=3), {})):
        assert [code for code, _ in answers] == [0, 0]
    # training goes on beside a save that is held, so there too the signal may cut an evaluation short
    assert_same(out_dir, tmp_path / "straight", *["best_val_loss"] * (phase in ("evaluate", "write")))


def test_the_seconds_that_are_promised():
    """Spec of a stop: a step may take 10 s after a signal; a rank that hangs is given up after 10 minutes."""
    assert (train.DROP_STEP_AFTER_S, train.RANK_TIMEOUT_S) == (10.0, 600)


def test_no_rank_outlives_a_torchrun_that_was_killed(tmp_path, data):
    """SIGKILL tells the ranks nothing: they stop by themselves, in a whole checkpoint."""
    out_dir = tmp_path / "run"
    torchrun = start_torchrun(tmp_path / "log", *endless(out_dir, data))
    ranks = running(torchrun, out_dir)
    os.kill(torchrun.pid, signal.SIGKILL)
    torchrun.wait(LIMIT_S)
    wait_for(lambda: gone(ranks))
    state, reason, step = status(out_dir)
    assert (state, reason) == ("stopped", "signal") and pointed(out_dir)[1]["step"] == step
    with checkpoint.lock(out_dir):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_dies_ends_the_others_and_the_next_session_goes_on(tmp_path, data, rank):
    out_dir = tmp_path / "run"
    torchrun = start_torchrun(tmp_path / "log", *endless(out_dir, data, checkpoint_interval=2))
    ranks = running(torchrun, out_dir)
    began = time.monotonic()
    os.kill(sorted(ranks)[rank], signal.SIGKILL)
    assert torchrun.wait(LIMIT_S) == 1
    assert time.monotonic() - began < 30 and gone(ranks)
    assert "Signal 9 (SIGKILL)" in (tmp_path / "log").read_text(), "torchrun says which rank died of what"
    step = pointed(out_dir)[1]["step"]
    (ranks,) = run_ranks(2, tmp_path, (endless(out_dir, data, max_steps=step + 2), {}))
    assert [code for code, _ in ranks] == [0, 0]


def test_a_rank_that_hangs_ends_the_session_after_the_timeout(tmp_path, data):
    """SIGSTOP: it is there and does not answer. The others give up, each with the cause in its log."""
    script = tmp_path / "impatient.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import configurator, train\n"
                      "configurator.configure(vars(train), sys.argv[1:])\n"
                      "train.RANK_TIMEOUT_S = 12\n"
                      "train.main()\n")
    out_dir = tmp_path / "run"
    torchrun = start_torchrun(tmp_path / "log", *endless(out_dir, data), script=script)
    ranks = sorted(running(torchrun, out_dir))
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    wait_for(lambda: not is_there(ranks[0]))
    assert time.monotonic() - began < 12 + 12
    assert "imed out" in (out_dir / "errors" / "rank_0.txt").read_text()
    assert status(out_dir)[0] == "failed" and pointed(out_dir)
    kill(torchrun)


def test_an_error_of_one_ranks_own_disk_is_told(tmp_path, data):
    """A host without the data: the other ranks cannot tell."""
    words = words_of(tmp_path / "run", data)
    (ranks,) = run_ranks(2, tmp_path, (words, {"data_prepare.Tokens": NotOnRank1(train.data_prepare.Tokens)}))
    assert ranks[1][0] == 2 and "train.py: rank 1: " in ranks[1][1] and "train-00000.bin" in ranks[1][1]


@dataclass
class NotOnRank1:
    real: object

    def __call__(self, *arguments):
        if os.environ.get("RANK") == "1":
            raise FileNotFoundError("no such file: train-00000.bin")
        return self.real(*arguments)


@pytest.mark.parametrize("delay_s", [0.0, 0.5, 1.0])
def test_no_rank_outlives_a_torchrun_that_was_killed_while_the_ranks_still_import(tmp_path, data, delay_s):
    torchrun = start_torchrun(tmp_path / "log", *endless(tmp_path / "run", data))
    started = lambda: len([pid for pid in family(torchrun.pid)[1:] if "train.py" in words_at(pid)]) == 2
    wait_for(started, torchrun)
    ranks = [pid for pid in family(torchrun.pid)[1:] if is_there(pid)]
    deadline = time.monotonic() + delay_s  # an instant within their imports, whichever it is
    wait_for(lambda: time.monotonic() >= deadline, torchrun)
    os.kill(torchrun.pid, signal.SIGKILL)
    torchrun.wait(LIMIT_S)
    began = time.monotonic()
    wait_for(lambda: gone(ranks))
    assert time.monotonic() - began < 25


def words_at(pid):
    """The command line of a process, '' of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
