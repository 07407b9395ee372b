"""Checkpoint folders on disk: write order, manifest, verification, newest, pointer, prune, lock.

python checkpoint.py list OUT_DIR                    # every checkpoint and milestone, read in full
python checkpoint.py verify OUT_DIR                  # the same; exit 1 where anything is damaged
python checkpoint.py rollback OUT_DIR step_00000030  # let training go on from an earlier checkpoint

A folder gets its name by the rename that ends its save, and the pointer (latest.json) moves after that, so a
kill at any instant leaves the checkpoint before it whole and found. What is damaged or in the way is renamed
(.damaged-1, .aside-1, .abandoned), never overwritten. Only rank 0, holding the lock, changes anything; while it
trains, a thread of it writes (Saver).
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import traceback
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

FOLDER = re.compile("step_([0-9]{8}|[1-9][0-9]{8,})")  # a folder that was set aside has another name
MANIFEST = {"format": int, "run": str, "step": int, "files": list}
FILE = {"name": str, "bytes": int, "sha256": str}
TRAINER = {"run": str, "lineage": list, "step": int, "windows": int, "tokens": int, "settings": dict}
BATCH = {"batch_tokens": int, "block_size": int}
POINTER = {"format": int, "run": str, "step": int, "tokens": int, "windows": int, "checkpoint": str,
           "manifest_sha256": str, "commit": str, "nonce": str}
LOG_EVERY_S = 0.2  # rows and live lines of shorter steps are written together; longer ones are told as they end
SAVES_THAT_MAY_FAIL = 1  # in a row; one more ends the run


class Damaged(ValueError):
    """A checkpoint or a pointer is not what was written."""


class Locked(ValueError):
    """Another process trains in this folder."""


# -- files

def lock(out_dir):
    """Lock a run's folder for as long as the returned file is open; a kill frees it. Raises: Locked."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    file = open(Path(out_dir) / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip()
        raise Locked(f"{out_dir} is in use by {holder}; stop that process, or set another out_dir") from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def write_json(path, obj):
    """Replace a JSON file in one instant. Raises: OSError, ValueError for NaN; the old file then stays."""
    temporary = _temporary(Path(path))
    try:
        _write_new(temporary, obj)
        os.replace(temporary, path)
        _fsync(temporary.parent)
    finally:
        temporary.unlink(missing_ok=True)


one_line = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one for each line


def append_line(path, obj):
    """Append a line of JSON by a single write: a kill tears the last line at most. Raises: as write_json."""
    line = one_line(obj)
    with open(path, "ab", buffering=0) as file:
        write_line(file, line)


def write_line(file, line):
    """As append_line, for a file that is open to append to, without a buffer."""
    line = line.encode() + b"\n"
    if (written := file.write(line)) < len(line):
        mend(file.name)  # or the next line would be glued to half of this one
        raise OSError(f"{file.name}: only {written} of {len(line)} bytes could be written; is the disk full?")


def mend(path):
    """Cut the torn last line, the one without a newline, that a kill may have left."""
    if Path(path).exists():
        with open(path, "rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def clean(out_dir):
    """Remove the temporary files and folders of killed processes."""
    for folder in (Path(out_dir), Path(out_dir) / "checkpoints", Path(out_dir) / "milestones"):
        for path in folder.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def sha256(path):
    """The sha256, in hex, of a file's bytes as they are read back."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary(path):
    return path.with_name(f".tmp-{os.urandom(4).hex()}")


def _fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_new(path, content, step=0):
    """Write and fsync a new file: tensors, with their step, under a name that ends in .safetensors, else JSON or bytes.

    The run's id is not among the tensors: two runs with the same weights have the same file."""
    if path.suffix == ".safetensors":
        try:
            save_file(content, path, {"step": str(step)})  # one entry: it keeps several in no order
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(f"{path}: {error}") from error
        os.chmod(path, path.parent.stat().st_mode & 0o666)  # save_file leaves 0600, whatever the umask
    else:
        as_it_is = isinstance(content, bytes)
        path.write_bytes(content if as_it_is else json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    _fsync(path)


def _set_aside(path, word, number=1):
    """Rename a path to path.word-1 or the next free number (0: path.word itself); returns its new name."""
    aside = path.with_name(f"{path.name}.{word}" + f"-{number}" * (number > 0))
    if os.path.lexists(aside):
        return _set_aside(path, word, number + 1)
    os.rename(path, aside)
    _fsync(path.parent)
    return aside.name


# -- one checkpoint

def step_of(name):
    """The step in a folder's name. Raises: ValueError for any other name."""
    if not FOLDER.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint; write it like step_00000030")
    return int(name.removeprefix("step_"))


def write(out_dir, step, files, run, kind="checkpoints"):
    """Write one folder, whole or not at all, and return its path; a folder in the way is set aside.

    files maps a name to a dict of tensors (.safetensors) or to a JSON object (.json), or to its bytes as they are.
    Raises: OSError; ValueError for NaN in JSON, or where latest.json points at this very folder.
    """
    target = Path(out_dir) / kind / f"step_{step:08d}"
    temporary, listed = _temporary(target), []
    temporary.mkdir(parents=True)
    try:
        for name, content in files.items():
            path = temporary / name
            assert path.suffix in (".safetensors", ".json"), f"{name}: only .safetensors and .json files"
            _write_new(path, content, step)
            listed.append({"name": name, "bytes": path.stat().st_size, "sha256": sha256(path)})
        _write_new(temporary / "manifest.json", {"format": 1, "run": run, "step": step, "files": listed})
        _fsync(temporary)
        if os.path.lexists(target):
            pointed = pointer(out_dir) if kind == "checkpoints" else None
            if pointed and pointed["checkpoint"] == target.name:  # a kill between the renames would lose both
                raise ValueError(f"{target} is not written again: latest.json points at it")
            _set_aside(target, "aside")
        os.rename(temporary, target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already where the rename was reached
    return target


def load_tensors(folder, name):
    """The tensors of one file of a verified folder, on the CPU."""
    return load_file(Path(folder) / name)


def read(folder, name, wanted):
    """The tensors of one file of a folder, with just the names and shapes of `wanted` {name: tensor}.

    Raises: ValueError where the file cannot be read or has other tensors.
    """
    path = Path(folder) / name
    try:
        tensors = load_tensors(folder, name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found, asked = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, wanted))
    if wrong := sorted(name for name in found.keys() | asked.keys() if found.get(name) != asked.get(name)):
        raise ValueError(f"{path} does not fit the settings: " + "; ".join(
            f"{name} is {found.get(name, 'not there')}, wanted {asked.get(name, 'not there')}" for name in wrong[:8])
            + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))
    return tensors


def read_all(folder, parameters, state):
    """The tensors of a folder for a model's parameters and, unless it is {}, an optimizer's state.

    Raises: as `read`.
    """
    weights = read(folder, "model.safetensors", parameters)
    return weights | (read(folder, "optimizer.safetensors", state) if state else {})


def check_init(folder, model, wanted_sha256):
    """Check that init_from ('': nothing is taken) is a folder with whole weights of a model of these settings.

    Raises: ValueError where something is missing, damaged, of another sha256 ('': any) or of other model settings.
    """
    if not folder:
        return
    weights, description = Path(folder) / "model.safetensors", Path(folder) / "model.json"
    if folder in ("scratch", "resume"):
        raise ValueError(f"init_from={folder!r}: init_from names a folder with weights; without one a run starts from "
                         "drawn weights or, with resume='auto', goes on from its newest checkpoint")
    if missing := [path.name for path in (weights, description) if not path.is_file()]:
        raise ValueError(f"init_from={str(folder)!r} holds no {' and no '.join(missing)}; a folder under "
                         "checkpoints/ or milestones/ holds both")
    if (Path(folder) / "manifest.json").exists():
        verify(folder)
    if wanted_sha256 and (digest := sha256(weights)) != wanted_sha256:
        raise ValueError(f"{weights} has sha256 {digest}, init_sha256 asks for {wanted_sha256}")
    recorded = _read_json(description, {"model": dict})["model"]
    if different := [f"{name} is {recorded[name]!r}, asked for {value!r}" for name, value in model.items() if
                     name not in ("dropout", "mlp_ratio", "block_size") and recorded.get(name, value) != value]:
        raise ValueError(f"init_from={str(folder)!r} has weights of another model:\n  " + "\n  ".join(different))


def holds(folder, run, tensors):
    """Whether a folder is there, whole, of this run and with just these weights."""
    try:
        verify(folder, run)
        there = load_tensors(folder, "model.safetensors")
    except (Damaged, OSError, SafetensorError):
        return False
    return there.keys() == tensors.keys() and all(bool((there[name] == tensors[name]).all()) for name in tensors)


def verify(folder, run=None, manifest_sha256=None):
    """Read a folder in full against its manifest; returns (manifest, trainer.json, None in a milestone).

    Raises: Damaged, naming the folder, the file, what was found and what was wanted.
    """
    def want(right, problem):
        if not right:
            raise Damaged(f"{folder.name}: {problem}")

    folder, trainer = Path(folder), None
    manifest = _read_json(folder / "manifest.json", MANIFEST)
    listed = {entry["name"]: entry for entry in manifest["files"] if _has(entry, FILE)}
    named = FOLDER.fullmatch(folder.name)  # a copy may have any other name
    want(not named or int(named[1]) == manifest["step"], f"manifest.json: step is {manifest['step']}")
    want(run in (None, manifest["run"]), f"manifest.json: run is {manifest['run']!r}, wanted {run!r}")
    try:
        there = set(os.listdir(folder)) - {"manifest.json"}
        for name in sorted(there ^ listed.keys()):
            want(name in listed, f"{name}: there, but not in manifest.json")
            want(name in there, f"{name}: in manifest.json, but not there")
        for name, entry in listed.items():
            for key, read in (("bytes", os.path.getsize), ("sha256", sha256)):
                found = read(folder / name)
                want(found == entry[key], f"{name}: {key} is {found}, manifest.json says {entry[key]}")
            if name.endswith(".safetensors"):
                with safe_open(folder / name, "pt") as file:
                    found = (file.metadata() or {}).get("step")
                want(found in (None, str(manifest["step"])), f"{name}: is of step {found}, manifest.json says "
                     f"{manifest['step']}")
    except (OSError, SafetensorError) as error:  # what the disk does not give back is damaged
        raise Damaged(f"{folder.name}: {error}") from error
    if "trainer.json" in listed or folder.parent.name == "checkpoints":
        trainer = _read_json(folder / "trainer.json", TRAINER)
        for key in ("run", "step"):
            want(trainer[key] == manifest[key],
                 f"trainer.json: {key} is {trainer[key]!r}, manifest.json says {manifest[key]!r}")
        lineage, settings = trainer["lineage"], trainer["settings"]
        want(lineage and all(type(entry) is list and [*map(type, entry)] == [str, int] for entry in lineage),
             f"trainer.json: lineage is {lineage}, wanted [[session nonce, first step], ...]")
        want(_has(settings, BATCH), "trainer.json: settings lack batch_tokens or block_size")
        step, windows, tokens = trainer["step"], trainer["windows"], trainer["tokens"]
        want(windows * settings["block_size"] == tokens == step * settings["batch_tokens"],
             f"trainer.json: {tokens} tokens and {windows} windows of {settings['block_size']}, "
             f"but step {step} has {step * settings['batch_tokens']} tokens")
    if manifest_sha256 is not None:
        digest = sha256(folder / "manifest.json")
        want(digest == manifest_sha256, f"manifest.json: sha256 is {digest}, pointed at is {manifest_sha256}")
    return manifest, trainer


def _read_json(path, shape):
    """A JSON object with at least the keys and types of a shape. Raises: Damaged."""
    where = f"{path.parent.name}: {path.name}"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"{where}: {error}") from error
    if not _has(found, shape) or found.get("format", 1) != 1:
        raise Damaged(f"{where}: wanted format 1 with {', '.join(shape)}; found {str(found)[:200]}")
    return found


def _has(found, shape):
    return isinstance(found, dict) and all(type(found.get(key)) is wanted for key, wanted in shape.items())


# -- the checkpoints of a run

def pointer(out_dir):
    """What latest.json says, None where there is none. Raises: Damaged if `point` cannot have written it."""
    path = Path(out_dir) / "latest.json"
    if not os.path.lexists(path):
        return None
    found = _read_json(path, POINTER)
    if found["checkpoint"] != f"step_{found['step']:08d}":
        raise Damaged(f"latest.json: checkpoint is {found['checkpoint']!r}, but step is {found['step']}")
    if not re.fullmatch("[0-9a-f]{64}", found["manifest_sha256"]):
        raise Damaged(f"latest.json: manifest_sha256 is {found['manifest_sha256']!r}, wanted 64 hex digits")
    if not re.fullmatch("|[0-9a-f]{40}", found["commit"]):
        raise Damaged(f"latest.json: commit is {found['commit']!r}, wanted '' or 40 hex digits")
    return found


def point(out_dir, folder, nonce):
    """Make a whole checkpoint the one to resume from; returns what latest.json now says."""
    trainer = _read_json(Path(folder) / "trainer.json", TRAINER)
    found = {"format": 1, **{key: trainer[key] for key in ("run", "step", "tokens", "windows")},
             "checkpoint": Path(folder).name, "manifest_sha256": sha256(Path(folder) / "manifest.json"),
             "commit": "", "nonce": nonce}
    write_json(Path(out_dir) / "latest.json", found)
    return found


def descends(child, parent):
    """Whether training has come from checkpoint `parent` to checkpoint `child`, by their trainer.json."""
    known = len(parent["lineage"])
    if child["run"] != parent["run"] or child["lineage"][:known] != parent["lineage"]:
        return False
    sessions_since = child["lineage"][known:]
    return (sessions_since[0][1] if sessions_since else child["step"]) >= parent["step"]


def newest(out_dir, report):
    """This run's newest valid checkpoint as (folder, trainer.json), now pointed at; None where none ever was.

    It is the pointed one, or the newest whole one that descends from it. A damaged one is reported and set
    aside and the next older one taken; a damaged pointer is rebuilt. report(event, **fields) is called with
    damaged (checkpoint, cause), adopt and pointer (checkpoint, pointed: the one before).
    Raises: ValueError where some are there but none is valid, or of several runs; nothing is moved then.
    """
    out_dir, pointed, damaged = Path(out_dir), None, {}
    try:
        pointed = pointer(out_dir)
    except Damaged as error:
        damaged[out_dir / "latest.json"] = str(error)
    there = sorted(path.name for path in out_dir.glob("checkpoints/step_*"))
    if not (there or pointed or damaged):
        return None
    found, ahead = None, []
    for folder in _of_run(out_dir, _run(out_dir, pointed)):
        try:
            is_pointed = pointed and folder.name == pointed["checkpoint"]
            _, trainer = verify(folder, None, pointed["manifest_sha256"] if is_pointed else None)
        except Damaged as error:
            damaged[folder] = str(error)
            continue
        if is_pointed and (wrong := [key for key, value in (trainer | {"nonce": trainer["lineage"][-1][0]}).items()
                                     if pointed.get(key, value) != value]):
            damaged[out_dir / "latest.json"] = f"{folder.name} has another {' and '.join(wrong)}"
        if not pointed or trainer["step"] <= pointed["step"]:
            found = folder, trainer
            break
        ahead.append((folder, trainer))
    for path, cause in damaged.items():
        report("damaged", checkpoint=path.name, cause=cause)
    if not found:
        raise ValueError("\n  ".join([
            f"{out_dir}: there are checkpoints and none is valid, and a run does not start over them;",
            f"put a copy back, try `python checkpoint.py rollback {out_dir} step_...`, or change out_dir",
            f"there are: {', '.join(there) or 'none any more'}", *damaged.values(),
            *[f"latest.json is of run {pointed['run']}" for pointed in [pointed] if pointed],
            *(f"{path.name}: whole, but not known to descend from the pointed one" for path, _ in ahead)]))
    found = folder, trainer = next((later for later in ahead if descends(later[1], found[1])), found)
    for path in damaged:
        _set_aside(path, "damaged")
    if not pointed or pointed["step"] != trainer["step"]:
        report("adopt" if not pointed or pointed["step"] < trainer["step"] else "pointer",
               checkpoint=folder.name, pointed=pointed["checkpoint"] if pointed else "")
    elif out_dir / "latest.json" not in damaged:
        return found
    point(out_dir, folder, trainer["lineage"][-1][0])
    return found


def _folders(out_dir):
    """Each checkpoint folder, newest first, with the runs it names: none or two only where it is damaged."""
    folders = [path for path in Path(out_dir).glob("checkpoints/step_*") if FOLDER.fullmatch(path.name)]
    found = {folder: set() for folder in sorted(folders, key=lambda path: step_of(path.name), reverse=True)}
    for folder, runs in found.items():
        for name in ("manifest.json", "trainer.json"):
            try:
                runs.add(_read_json(folder / name, {"run": str})["run"])
            except Damaged:
                continue  # `verify` reports it
    return found


def _of_run(out_dir, run):
    """The checkpoint folders, newest first, that are of a run or too damaged to tell; run None: of any."""
    return [folder for folder, runs in _folders(out_dir).items() if run is None or not runs or run in runs]


def _run(out_dir, pointed):
    """The run that counts: the pointer's, else the only one, else None. Raises: ValueError for several."""
    if pointed:
        manifest = out_dir / "checkpoints" / pointed["checkpoint"] / "manifest.json"
        if manifest.is_file() and sha256(manifest) == pointed["manifest_sha256"]:
            return _read_json(manifest, MANIFEST)["run"]  # proven by its hash, unlike the pointer's own
        return pointed["run"]
    runs = sorted(set().union(*_folders(out_dir).values()))
    if len(runs) > 1:
        raise ValueError(f"{out_dir}: there are checkpoints of several runs ({', '.join(runs)}) and no valid "
                         f"latest.json; choose one by `python checkpoint.py rollback {out_dir} step_...`")
    return runs[0] if runs else None


def find(out_dir, resume, report, writes):
    """(folder, trainer record) to go on from as `resume` asks, or None for a fresh start.

    A named one is read in full; `rollback` then makes it the newest, once settings and data are known to fit. With
    `writes` off nothing is repaired or moved: the named or pointed one is taken, else the newest whole one.
    """
    if resume.startswith("step_"):
        return named(out_dir, resume)
    found = newest(out_dir, report) if writes else _newest_as_it_lies(Path(out_dir))
    if resume == "never" and found:
        raise ValueError(f"resume='never', but {out_dir} holds {found[0].name} of run {found[1]['run']}; "
                         "resume='auto' goes on with it, another out_dir starts anew")
    if resume == "must" and not found:
        raise ValueError(f"resume='must', but {out_dir} holds no checkpoint")
    return found


def _newest_as_it_lies(out_dir):
    folders, pointed, causes = [*_folders(out_dir)], None, []
    try:
        pointed = pointer(out_dir)
    except Damaged as error:  # then the newest whole one it is
        causes.append(str(error))
    if pointed:
        folders.sort(key=lambda folder: folder.name != pointed["checkpoint"])
    for folder in folders:
        try:
            if trainer := verify(folder, pointed and pointed["run"])[1]:
                for cause in causes:
                    print(f"passed over: {cause}", flush=True)
                return folder, trainer
        except Damaged as error:
            causes.append(str(error))
    if causes or pointed:
        raise ValueError(f"{out_dir} has no whole checkpoint: " + ("; ".join(causes) or "it is not there"))
    return None


class Failed(RuntimeError):
    """The run cannot go on; `reason` is one of status.json's."""

    def __init__(self, text, reason="error"):
        super().__init__(text)
        self.reason = reason


# -- saves while training goes on

class Saver:
    """The saves of rank 0: a snapshot into host memory that training cannot touch, then a thread that writes it while
    steps go on; one at a time.

    live: {file: {name: float32 tensor}}, as training changes them in place. held: the same in host memory, of just
    their bytes. touch: the memory is taken and touched while the session starts, not by the first save: the first use
    of fresh memory costs several times the copy.
    """

    def __init__(self, out_dir, run, live, keep, min_free_gb, damage, report, say, pusher=None, *, saved_at,
                 touch):
        self.pusher = pusher or None  # of hub.py, where checkpoints go to the Hub
        self.out_dir, self.run, self.live, self.keep, self.min_free_gb = Path(out_dir), run, live, keep, min_free_gb
        self.damage, self.report, self.say = damage, report, say
        self.saved_at = saved_at  # step of the checkpoint that is pointed at, -1 for none
        self.written_at = self.milestone_at = -1  # steps: of the last folder with its name, of the last milestone begun
        self.failures, self.cause = 0, ""  # saves that failed in a row, and why the last one did
        self.error = None  # why the run cannot go on
        self.ended = False  # whether `pushed` was called
        sizes = [tensor.numel() for tensors in live.values() for tensor in tensors.values()]
        self.memory = torch.empty(sum(sizes))
        self.seconds = self.memory.nbytes / 100e6  # a save takes until it is durable; before the first one, a guess
        parts = iter(self.memory.split(sizes))
        self.held = {file: {name: next(parts).view(tensor.shape) for name, tensor in tensors.items()}
                     for file, tensors in live.items()}
        self.on_gpu, self.pinned = any(tensor.is_cuda for tensor in live["model.safetensors"].values()), False
        self.thread = ThreadPoolExecutor(1, "save", torch.set_num_threads, (1,))  # the other cores train on
        self.saving = self.thread.submit(self._touch if touch else int)
        if self.pusher and saved_at > self.pusher.safe_step:  # the session that saved it could not push it
            self.pusher.offer(self.out_dir / "checkpoints" / f"step_{saved_at:08d}")

    def _touch(self):
        self.memory.zero_()
        if self.on_gpu:
            # where it is refused the copy is slower, not wrong
            self.pinned = not int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, 1))

    def begin(self, step, nonce, records, checkpoint, milestone):
        """Take a snapshot of this step and let the thread write it, after the save in flight, as a checkpoint (once a
        step), a milestone or both. Call until it is True: a save that waits for the Hub at the disk's floor takes long.

        records() is called now, for a function that the thread calls for {file name: JSON object}, with True where
        they are for a checkpoint. Raises: as `wait`.
        """
        began = time.perf_counter()
        if not self.idle(60):
            return False
        self.wait()
        checkpoint = checkpoint and self.saved_at != step
        if not (checkpoint or milestone):
            return True
        self.milestone_at = step if milestone else self.milestone_at
        files = records()
        for file, tensors in self.live.items():
            for name, tensor in tensors.items():
                self.held[file][name].copy_(tensor, non_blocking=self.on_gpu)
        copied = torch.cuda.Event() if self.on_gpu else None  # later steps are queued behind the copy
        if copied:
            copied.record()
        stall_s = time.perf_counter() - began
        self.saving = self.thread.submit(self._save, step, nonce, files, checkpoint, milestone, copied, began, stall_s)
        return True

    def wait(self):
        """Wait for the save in flight. Raises: what the thread met that ends the run; Failed for damaged data, or where
        another session has taken the run over on the Hub."""
        self.saving.result()
        if self.error:
            raise self.error
        if self.pusher and self.pusher.overtaken:
            raise Failed(self.pusher.overtaken, "hub")
        if damage := self.damage():
            self.report("damaged", cause=damage)
            raise Failed(damage)

    def wishes(self, session_ends, more_s):
        """Of train.py's REQUESTS: those that `wait` has an answer to; 'minutes' where by the clock there would be no
        time left after `more_s` seconds for a save in flight, the last one, and their pushes."""
        push_s = self.pusher.exit_s(self.memory.nbytes) if self.pusher else 0.0
        out_of_time = time.monotonic() + more_s + 2 * self.seconds + push_s > session_ends
        ends = bool(self.error or self.pusher and self.pusher.overtaken)
        return ["data"] * bool(self.damage()) + ["save"] * ends + ["minutes"] * out_of_time

    def finish(self, step, nonce, records, milestone=False):
        """Call until it is True: then this step is durable. A minute at most a call, since other ranks wait.

        A save that fails is tried once more. Raises: as `wait`.
        """
        if not self.idle(60):
            return False
        self.wait()
        milestone = milestone and self.milestone_at != step
        if self.saved_at != step or milestone:
            self.begin(step, nonce, records, True, milestone)
            if not self.idle(60):
                return False
            self.wait()
        return self.saved_at == step

    def idle(self, seconds):
        """Whether no save is in flight, after so many seconds at most."""
        return bool(futures.wait([self.saving], seconds).done)

    def pushed(self, in_time, session_ends):
        """Call until it is True: then what is to be pushed is safe on the Hub, or its time is over. A push after the
        last evaluation takes that along, where there is time. Raises: as `wait`."""
        if not self.pusher:
            return True
        if in_time and not self.ended:
            self.pusher.offer(self.out_dir / "checkpoints" / f"step_{self.saved_at:08d}")
        self.ended = True
        done = self.pusher.settle(session_ends)
        self.wait()
        return done

    def close(self):
        """Wait for the save in flight, whatever ends the session."""
        if self.pusher:
            self.pusher.close()  # first: at the disk's floor the save waits for it
        self.thread.shutdown()
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.pinned = False

    def _save(self, step, nonce, files, checkpoint, milestone, copied, began, stall_s):
        report = functools.partial(self.report, step=step)
        try:
            if copied:
                copied.synchronize()
            if not torch.stack(self.memory.aminmax()).isfinite().all():  # a NaN is both the least and the largest
                raise Failed(f"the weights or the optimizer state of step {step:,} are not finite; the checkpoint "
                             "before it stands")
            if checkpoint:
                self._save_checkpoint(step, nonce, files, report, began, stall_s)
            if milestone:
                self._save_milestone(step, files, report)
            if checkpoint and self.pusher and self.saved_at == step:
                self.pusher.offer(self.out_dir / "checkpoints" / f"step_{step:08d}")
        except Exception as error:  # `wait` raises it where training can answer
            self.error = error

    def _save_checkpoint(self, step, nonce, files, report, began, stall_s):
        folder = self.out_dir / "checkpoints" / f"step_{step:08d}"
        try:
            if self.written_at != step:  # else it could not be pointed at, and is there
                self._make_room(self.memory.nbytes, report)
                write(self.out_dir, step, self.held | files(True), self.run)
                self.written_at = step
            if damage := self.damage():
                report("damaged", cause=damage, checkpoint=_set_aside(folder, "aside"))
                raise Failed(damage)
            point(self.out_dir, folder, nonce)
        except (OSError, Damaged) as error:
            self.failures, self.cause = self.failures + 1, str(error)
            report("save_failed", cause=self.cause)
            self.say(f"save   step {step:,} failed ({self.cause}); the next one is tried")
            if self.failures > SAVES_THAT_MAY_FAIL:
                self.error = Failed(f"{self.failures} checkpoints in a row could not be saved: {self.cause}", "save")
            return
        self.saved_at, self.failures, self.seconds = step, 0, time.perf_counter() - began
        report("save", checkpoint=folder.name, bytes=_bytes_of(folder), seconds=round(self.seconds, 3),
               stall_s=round(stall_s, 4))
        self.say(f"save   step {step:,} in {self.seconds:.1f} s; training waited {stall_s:.2f} s of it")
        with contextlib.suppress(OSError, Damaged):  # what keeps its name is pruned after the next save
            prune(self.out_dir, self.run, self.keep, report)

    def _make_room(self, size, report):
        """`make_room`; a payload of the Hub holds the space of a checkpoint that is pruned, so its push comes first."""
        try:
            make_room(self.out_dir, self.run, size, self.min_free_gb, report)
        except OSError:
            if not self.pusher or not self.pusher.give_way():
                raise
            make_room(self.out_dir, self.run, size, self.min_free_gb, report)

    def _save_milestone(self, step, files, report):
        """Weights only, to be kept for ever; a step that is done again finds them there."""
        weights = self.held["model.safetensors"]
        if holds(self.out_dir / "milestones" / f"step_{step:08d}", self.run, weights):
            return
        try:
            size = sum(tensor.nbytes for tensor in weights.values())
            self._make_room(size, report)
            content = {"model.safetensors": weights, **files(False)}
            report("save", milestone=write(self.out_dir, step, content, self.run, "milestones").name)
        except (OSError, Damaged) as error:
            report("save_failed", milestone=f"step_{step:08d}", cause=str(error))
            self.say(f"save   milestone of step {step:,} failed ({error}); it is not tried again")


@dataclass
class Journal:
    """The files of a run folder that tell its story. Only rank 0 writes them, but each rank the errors/ of its own."""

    out_dir: str
    writes: bool
    run: object  # with session, step and horizon
    started: bool = False  # past the start: an error is no longer one of settings
    claimed: bool = False  # the folder is locked by this run: its status and errors/ are ours to write
    early: list = field(default_factory=list)  # events from before the session has its number
    turn: object = field(default_factory=threading.Lock)  # training and saving write lines
    files: dict = field(default_factory=dict)  # open to append to: between two steps the way to a file is a long one
    unwritten: list = field(default_factory=list)  # logged steps
    settled: float = 0.0  # when they were last written

    def report(self, event, **fields):
        """One line of events.jsonl; `step` among the fields says that it is of another step than the present one."""
        row = {"time": round(time.time(), 3), "session": self.run.session, "step": self.run.step, "event": event,
               **fields}
        early, self.early = self.early, []
        for row in [*early, row]:
            if self.run.session:
                self.line("events.jsonl", row | {"session": self.run.session})
            else:
                self.early.append(row)

    def log(self, *logged):
        """Have row_of(*numbers) written to metrics.jsonl and line_of(row, *numbers) said, at once or, where steps are
        short, some together: after a step the caches are cold, and four rows cost little more than one. logged: row_of,
        line_of, say and the numbers."""
        if self.writes:
            self.unwritten.append(logged)
            if time.monotonic() > self.settled + LOG_EVERY_S:
                self.settle()

    def settle(self):
        """Write and say what was logged up to now."""
        self.settled = time.monotonic()
        while self.unwritten:
            row_of, line_of, say, *numbers = self.unwritten.pop(0)
            row = row_of(*numbers)
            self.line("metrics.jsonl", row)
            say(line_of(row, *numbers))

    def line(self, name, row):
        """One line of a jsonl file; a disk that takes none costs the line, not the run."""
        if self.writes:
            line = one_line(row)
            try:
                with self.turn:
                    if name not in self.files:
                        self.files[name] = open(f"{self.out_dir}/{name}", "ab", buffering=0)
                    write_line(self.files[name], line)
            except OSError as error:
                print(f"a line of {name} is lost: {error}", file=sys.stderr, flush=True)

    def status(self, state, reason):
        """What status.json says from now on; on a full disk it is written over in place."""
        path, found = Path(self.out_dir) / "status.json", {"state": state, "reason": reason, "step": self.run.step,
                                                           "max_steps": self.run.horizon}
        if self.writes:
            try:
                write_json(path, found)
            except OSError as error:
                print(f"status.json: {error}", file=sys.stderr, flush=True)
                with contextlib.suppress(OSError), open(path, "r+b") as file:
                    file.write(json.dumps(found).encode().ljust(path.stat().st_size))

    def begin(self, start, folder, trainer, changed, source):
        """What a session begins with, on record: start, then resume or init."""
        write_json(Path(self.out_dir) / "config.json", start["settings"])
        self.report("start", **start)
        if trainer:
            recorded = {name: trainer[name] for name in start.keys() & trainer.keys() - {"run", "settings"}}
            self.report("resume", checkpoint=folder.name, changed=changed, recorded=recorded)
        else:
            self.report("init", source=source)
        if "max_steps" in changed:
            self.report("horizon", recorded=changed["max_steps"][0], now=self.run.horizon)
        self.status("running", "")

    def finished(self):
        """Whether status.json says that the run was finished."""
        path = Path(self.out_dir) / "status.json"
        return path.exists() and json.loads(path.read_text())["state"] == "finished"

    def _events(self):
        path = Path(self.out_dir) / "events.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else ()
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may have torn the last

    def last_session(self):
        """The largest session number on record, 0 where there is none."""
        return max((row["session"] for row in self._events()), default=0)

    def evaluation_at(self, step, windows):
        """The last evaluation of this run recorded for a step, over at least so many windows, or None."""
        wanted = {"event": "eval", "step": step, "run": self.run.run, "complete": True}
        found = [row for row in self._events() if row.items() >= wanted.items() and row["windows"] >= windows]
        return found[-1] if found and found[-1]["val_loss"] is not None else None

    @contextlib.contextmanager
    def answering_errors(self):
        """Turn an error into an exit status: 2 with one message for what a person can mend before the first step, 1 for
        all else, with the traceback in errors/rank_N.txt."""
        try:
            with self.telling_errors():
                yield
        except KeyboardInterrupt as heard:  # by all ranks; one that comes before they have met has no words
            if not heard.args:
                raise
            if int(os.environ.get("RANK", 0)) == 0:
                print(heard.args[0], flush=True)
            if not (Path(self.out_dir) / "status.json").exists():
                self.status("stopped", "signal")
        except Exception as error:  # the one place that sees every failure
            raise SystemExit(2 if self._of_settings(error) else 1) from error

    def _of_settings(self, error):
        return isinstance(error, (ValueError, OSError)) and not self.started

    @contextlib.contextmanager
    def telling_errors(self):
        """Leave an error's cause on disk and on stderr, at once: what closes after that may take its time."""
        try:
            yield
        except Exception as error:  # told here, answered by `answering_errors`
            if not getattr(error, "told", False):
                error.told = True
                self._tell(error, int(os.environ.get("RANK", 0)))
            with contextlib.suppress(Exception):  # the rows before it, as far as a broken device lets them be made
                self.settle()
            raise

    def _tell(self, error, rank):
        of_this_disk = isinstance(error, OSError) and not getattr(error, "told_by_rank_0", False)
        if not (self._of_settings(error) or isinstance(error, Failed)):
            traceback.print_exc()
        elif rank == 0 or of_this_disk:  # what all ranks find alike, rank 0 tells
            print(f"train.py: {f'rank {rank}: ' * (rank > 0)}{error}", file=sys.stderr, flush=True)
        if not self._of_settings(error) and self.claimed:
            self.status("failed", getattr(error, "reason", "error"))
            path = Path(self.out_dir) / "errors" / f"rank_{rank}.txt"
            with contextlib.suppress(OSError):  # a full disk; the traceback is on stderr too
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(traceback.format_exc())


def claim(out_dir, at_exit):
    """Make out_dir this process's until at_exit (an ExitStack) closes: the lock, and no leftovers of a killed one.

    Raises: Locked.
    """
    if Path(out_dir).exists() and not Path(out_dir).is_dir():
        raise ValueError(f"out_dir {str(out_dir)!r} is a file; name a folder")
    at_exit.callback(lock(out_dir).close)
    clean(out_dir)
    for name in ("metrics.jsonl", "events.jsonl", "windows.jsonl", "machine.jsonl"):
        mend(Path(out_dir) / name)


def _bytes_of(folder):
    """The bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _prunable(out_dir, run):
    """The checkpoints of a run that are older than the pointed one, newest first; [] without a pointer of the run."""
    pointed = pointer(out_dir)
    if not pointed or pointed["run"] != run:
        return []
    return [folder for folder, runs in _folders(out_dir).items()
            if runs == {run} and step_of(folder.name) < pointed["step"]]


def _prune(folder, report):
    temporary = _temporary(folder)
    os.rename(folder, temporary)  # a folder half deleted must not be taken for a checkpoint
    _fsync(folder.parent)
    shutil.rmtree(temporary)
    report("prune", checkpoint=folder.name)


def make_room(out_dir, run, size, min_free_gb, report):
    """See to it that `size` bytes fit and min_free_gb stay free: the oldest checkpoints go, never the pointed one.

    Raises: OSError where all of them would not be enough; nothing is deleted then.
    """
    missing = lambda: size + 1e9 * min_free_gb - shutil.disk_usage(out_dir).free
    older = _prunable(out_dir, run) if missing() > 0 else []
    if missing() > sum(map(_bytes_of, older)):
        raise OSError(f"{out_dir} is on a disk with {shutil.disk_usage(out_dir).free / 1e9:.3f} GB free; "
                      f"{size / 1e9:.3f} GB do not fit" + f" beside min_free_gb {min_free_gb}" * (min_free_gb > 0))
    while missing() > 0 and older:
        _prune(older.pop(), report)
    if missing() > 0:  # what was deleted is linked elsewhere, or another process was faster
        raise OSError(f"{out_dir} is on a disk that stays {missing() / 1e9:.3f} GB short of {size / 1e9:.3f} GB more")


def prune(out_dir, run, keep, report):
    """Keep the pointed checkpoint and the `keep` - 1 newest before it; delete what is older in this run."""
    for folder in reversed(_prunable(out_dir, run)[max(keep, 1) - 1:]):
        _prune(folder, report)


def named(out_dir, name):
    """The checkpoint of that name, read in full, as (folder, trainer.json).

    Raises: ValueError where there is none, Damaged where it is not whole.
    """
    folder = Path(out_dir) / "checkpoints" / f"step_{step_of(name):08d}"
    if not folder.is_dir():
        there = ", ".join(path.name for path in _folders(out_dir)) or "none"
        raise ValueError(f"{out_dir}: there is no {folder.name}; there are: {there}")
    return folder, verify(folder)[1]


def rollback(out_dir, name, report):
    """Point at the named checkpoint and rename its run's later ones *.abandoned; (folder, trainer.json).

    Raises: as `named`; nothing is changed then.
    """
    folder, trainer = named(out_dir, name)
    step = trainer["step"]
    point(out_dir, folder, trainer["lineage"][-1][0])
    later = [path for path in _of_run(out_dir, trainer["run"]) if step_of(path.name) > step]
    # oldest first: after a kill the newest, which descends from this one, is adopted, as if never rolled back
    abandoned = [_set_aside(path, "abandoned", number=0) for path in reversed(later)]
    report("rollback", checkpoint=folder.name, abandoned=abandoned)
    return folder, trainer


# -- commands

def survey(out_dir):
    """Rows (name, run, bytes, pointed, state) of all checkpoints and milestones, and of a damaged pointer."""
    rows, pointed = [], {"checkpoint": ""}
    try:
        pointed = pointer(out_dir) or pointed
        if not (out_dir / "checkpoints" / pointed["checkpoint"]).is_dir():
            raise Damaged(f"{pointed['checkpoint']} is not there")
    except Damaged as error:
        rows.append(("latest.json", "", 0, "", f"damaged: {error}"))
    for folder in sorted([*out_dir.glob("checkpoints/step_*"), *out_dir.glob("milestones/step_*")]):
        is_pointed, run, state = folder == out_dir / "checkpoints" / pointed["checkpoint"], "", "set aside"
        if FOLDER.fullmatch(folder.name):
            try:
                manifest, _ = verify(folder, None, pointed["manifest_sha256"] if is_pointed else None)
                run, state = manifest["run"], "whole"
            except Damaged as error:
                state = f"damaged: {error}"
        rows.append((f"{folder.parent.name}/{folder.name}", run, _bytes_of(folder), "yes" if is_pointed else "", state))
    return rows


def main(words=None):
    """Run one command; returns the exit status: 0, 1 where `verify` finds damage, 2 for an error."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("list", "verify", "rollback"):
        commands.add_parser(command).add_argument("out_dir", type=Path)
    commands.choices["rollback"].add_argument("checkpoint")
    asked = parser.parse_args(words)
    try:
        if not asked.out_dir.is_dir():
            raise ValueError(f"{asked.out_dir} is not a folder")
        if asked.command == "rollback":
            with lock(asked.out_dir):
                rollback(asked.out_dir, asked.checkpoint, lambda event, **fields: print(event, json.dumps(fields)))
            return 0
        rows = survey(asked.out_dir)
    except (ValueError, OSError) as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"{'checkpoint':36} {'run':16} {'bytes':>15} pointed state")
    for name, run, size, is_pointed, state in rows:
        print(f"{name:36} {run or '-':16} {size:15,} {is_pointed or '-':7} {state}")
    return int(asked.command == "verify" and any(row[-1].startswith("damaged") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
