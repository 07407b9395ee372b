"""Runs of the trainer for tests: in this process, as ranks in one process group, or by the real command line.

Every process that is started here is ended by `end_all`, which a fixture calls after each test."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from safetensors.torch import load_file

import checkpoint
import configurator
import train
from data import prepare

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")
DEFAULTS = configurator.settings(vars(train))
train_step, evaluate = train.train_step, train.evaluate
LIMIT_S = 60  # no test needs a process for so long
RANK_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

# A tiny run: a step is 8 windows of 16 tokens in 4 micro-batches, a pass of 43 windows takes about five steps
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 2, "batch_tokens": 128,
        "max_steps": 12, "warmup_steps": 3, "learning_rate": 3e-3, "checkpoint_interval": 4,
        "eval_interval": 0, "eval_tokens": 128, "sample_interval": 0, "sample_tokens": 4,
        "prompts_file": "", "log_interval": 1, "trace_windows": True, "data_verify": "off",
        "device": "cpu", "compile": "off"}

processes = []  # started, and not known to have ended
forks = multiprocessing.get_context("forkserver")  # its server imports torch once: a rank starts in no time
forks.set_forkserver_preload(["driver", "torch._inductor"])


def words_of(out_dir, data_dir, **settings):
    """The command line of a tiny run."""
    settings = {**TINY, "out_dir": out_dir, "data_dir": data_dir, **settings}
    return [f"--{name}={value}" for name, value in settings.items()]


def session(words, **patches):
    """One call of train.main in this process as (exit status, what it printed).

    `patches` hold for this call: what a name of train, or one below it like "checkpoint.write", is then."""
    text = io.StringIO()
    with contextlib.ExitStack() as undo:
        undo.callback(vars(train).update, DEFAULTS)
        for name, value in patches.items():
            undo.enter_context(mock.patch(f"train.{name}", value))
        undo.enter_context(contextlib.redirect_stdout(text))
        undo.enter_context(contextlib.redirect_stderr(text))
        try:
            configurator.configure(vars(train), words)
            train.main()
        except SystemExit as leaving:
            return leaving.code or 0, text.getvalue()
    return 0, text.getvalue()


@dataclass
class Before:
    """A function of train that does something before one of its calls (1 is the first), on one rank."""
    function: Callable
    number: int
    action: Callable
    rank: int = 0
    calls: int = 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == self.number and int(os.environ.get("RANK", 0)) == self.rank:
            self.action()
        return self.function(*arguments)


def before_step(number, action, rank=0):
    return Before(train_step, number, action, rank)


def before_evaluation(number, action, rank=0):
    return Before(evaluate, number, action, rank)


def signal_self(*names):
    """Signals, to this very process."""
    for name in names:
        os.kill(os.getpid(), signal.Signals[name])


def boom():
    raise RuntimeError("boom")


class PatientHasher(prepare.ShardHasher):
    """A hasher of shards that lets no step go on before the damage is found."""

    def reads(self, *arguments):
        super().reads(*arguments)
        if self.enabled:
            wait_for(lambda: self.damage)


class AtOnce:
    """In place of the thread that saves: each save is through before training goes on."""

    def __init__(self, *_):
        pass

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self):
        pass


AT_ONCE = {"checkpoint.ThreadPoolExecutor": AtOnce}


def exact(value):
    """In place of train.finite: numbers as they are, every digit."""
    return value


# -- ranks

def work(rank, world_size, store, jobs, answers):
    """A rank's life: all sessions of `jobs`, one after the other, in one process group."""
    os.environ |= dict(zip(RANK_WORDS, map(str, (rank, world_size, rank, world_size))))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for words, patches in jobs:
        answers.send(session(words, **patches))
    answers.close()
    if world_size > 1:
        dist.destroy_process_group()


def start_ranks(world_size, folder, *jobs):
    """Starts ranks for jobs [(words, patches), ...]; [(process, where its answers come from), ...]."""
    store = Path(folder, f"store-{os.urandom(4).hex()}")
    group = []
    for rank in range(world_size):
        ours, theirs = forks.Pipe(duplex=False)
        process = forks.Process(target=work, args=(rank, world_size, store, jobs, theirs), daemon=True)
        process.start()
        processes.append(process)
        theirs.close()
        group.append((process, ours))
    return group


def run_ranks(world_size, folder, *jobs):
    """All jobs in one group: [[(exit status, text) of each rank] of each job]; (None, '') of a dead rank."""
    if world_size == 1:
        return [[session(words, **patches)] for words, patches in jobs]
    group, found = start_ranks(world_size, folder, *jobs), []
    deadline = time.monotonic() + LIMIT_S + 10 * len(jobs)
    for _ in jobs:
        found.append([])
        for _, answers in group:
            try:
                assert answers.poll(max(0, deadline - time.monotonic())), f"a rank hangs; so far: {found}"
                found[-1].append(answers.recv())
            except EOFError:
                found[-1].append((None, ""))
    for process, _ in group:
        process.join(max(0, deadline - time.monotonic()))
        assert process.exitcode is not None, "a rank does not end"
    return found


# -- the command line

def start_command(log, *words, ranks=0):
    """Starts train.py, under torchrun where `ranks` are given; its output goes to the file `log`."""
    front = [TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"] if ranks else [sys.executable]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_WORDS}
    environment["TMPDIR"] = str(Path(log).parent)  # torchrun leaves folders there when it is killed
    with open(log, "ab") as file:
        process = subprocess.Popen([*front, "train.py", *words], cwd=ROOT, stdout=file, stderr=file,
                                   env=environment)
    processes.append(process)
    return process


def family(pid):
    """A process and all below it: torchrun gives each rank a process group of its own."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def is_there(pid):
    """Whether a process still does anything: it exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*started):
    """SIGKILL, at one instant, to started processes and all below them; returns when they are gone."""
    pids = [pid for process in started for pid in family(process.pid) if is_there(process.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait(LIMIT_S) if isinstance(process, subprocess.Popen) else process.join(LIMIT_S)
    wait_for(lambda: not any(map(is_there, pids)))


def end_all():
    kill(*processes)
    processes.clear()


def wait_for(condition, *alive):
    """Polls until a condition holds and returns what it gave; fails when a process has ended by itself."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        assert all(is_there(process.pid) for process in alive), "a process has ended by itself"
        time.sleep(0.005)
    return found


# -- what a run has left

def rows(path):
    """The whole lines of a jsonl file, [] where there is none."""
    path = Path(path)
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")] if path.exists() else []


def events(out_dir, name):
    return [row for row in rows(Path(out_dir, "events.jsonl")) if row["event"] == name]


def by_step(path, *fields):
    """{step: those fields} of a jsonl file, where the row of the later session counts."""
    return {row["step"]: [row[field] for field in fields] for row in rows(path)}


def status(out_dir):
    found = json.loads(Path(out_dir, "status.json").read_text())
    return found["state"], found["reason"], found["step"]


def reached(out_dir):
    """The last step that metrics.jsonl shows."""
    return max((row["step"] for row in rows(Path(out_dir, "metrics.jsonl"))), default=0)


def tensors(path):
    """{name: bytes} of a safetensors file, whose header also tells its step."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def checkpoints(out_dir):
    return sorted(path.name for path in Path(out_dir, "checkpoints").iterdir())


def pointed(out_dir):
    """The folder and the trainer.json that latest.json names, verified."""
    found = checkpoint.pointer(out_dir)
    folder = Path(out_dir, "checkpoints", found["checkpoint"])
    return folder, checkpoint.verify(folder, found["run"], found["manifest_sha256"])[1]


def end_state(out_dir):
    """All that must not depend on stops: bytes of weights and optimizer, counters, each step's numbers."""
    folder, trainer = pointed(out_dir)
    counters = {name: trainer[name] for name in (
        "step", "updates", "bad_steps", "windows", "tokens", "pass", "order_fingerprint", "data_fingerprint",
        "segments", "scaler", "control", "best_val_loss", "loss_spread")}
    history = by_step(Path(out_dir, "metrics.jsonl"),
                      "tokens", "windows", "epoch", "loss", "lr", "muon_lr", "grad_norm")
    tensors = {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}
    assert len(tensors["optimizer.safetensors"]) > 1000
    return {"tensors": tensors, "counters": counters, "history": history,
            "windows": by_step(Path(out_dir, "windows.jsonl"), "windows")}


def assert_same(out_dir, straight, *but):
    """That two runs have ended in the same state, bit for bit, but for some counters."""
    found, wanted = end_state(out_dir), end_state(straight)
    for name in but:
        del found["counters"][name], wanted["counters"][name]
    assert found["counters"] == wanted["counters"]
    assert found["windows"] == wanted["windows"]
    assert found["history"] == wanted["history"]
    assert found["tensors"] == wanted["tensors"], "the bits differ"
