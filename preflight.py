"""Checks before the first step: settings against each other, a resume against what it resumes, and facts of the host.

And what is set once per process: signals, threads, kernels. No collective, no file is written. What a person can mend
is a ValueError that says what was asked, what was found and what would do.
"""
import collections
import contextlib
import ctypes
import functools
import gc
import hashlib
import math
import os
import pathlib
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy
import safetensors
import torch

from model import GPTConfig

HERE = os.path.dirname(os.path.abspath(__file__))

CHOICES = {
    "data_verify": ("background", "off"), "prepare": ("", "stdlib"),
    "optimizer": ("adamw", "muon"), "schedule": ("wsd", "cosine", "constant"),
    "hub_verify": ("sample", "full"), "device": ("auto", "cuda", "mps", "cpu"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "on", "off"),
}
AT_LEAST_ONE = ("batch_tokens", "batch_size", "log_interval", "keep_checkpoints", "hub_keep",
                "max_bad_steps")
RATIOS = ("decay_ratio", "min_lr_ratio", "beta1", "beta2", "muon_momentum")
# Settings that may differ when a run is resumed; `device`, `compile` and their like change how a step is computed, not
# which step it is. Everything that is not named here or in HORIZON is frozen, so a new setting starts frozen.
MAY_DIFFER = frozenset("""
    out_dir resume init_sha256 eval_only dry_run data_dir prepare data_verify batch_size
    eval_interval eval_tokens sample_interval sample_tokens prompts_file probes_file control_tolerance
    checkpoint_interval keep_checkpoints milestone_interval milestone_at_segment_end stop_after_steps
    stop_at_segment_end session_minutes min_free_gb
    hub_repo hub_private hub_verify hub_keep hub_max_gb hub_prune_local hub_exit_minutes
    log_interval wandb_log wandb_project wandb_run_name trace_windows
    device dtype compile activation_checkpointing loss_chunk_tokens deterministic
    max_bad_steps price_per_hour price_per_kwh peak_tflops""".split())
OF_BITS = frozenset(("batch_size", "compile", "loss_chunk_tokens"))  # frozen too where reproducible=True
CAUGHT = ("SIGTERM", "SIGINT", "SIGUSR1")
HORIZON = frozenset(("max_steps", "max_tokens", "tokens_per_parameter"))  # judged together by `check_horizon`

# Dense peaks in TFLOP/s as NVIDIA's data sheets give them, without sparsity; the first name that occurs in the device's
# name counts. A5000: 256 tensor cores x 128 FMA x 2 x 1.695 GHz. float32 is computed as TF32 where the card has that,
# at half the rate of bfloat16 on all of these. An unknown device has no MFU rather than a wrong one.
PEAKS = (
    ("H200 NVL", {"bfloat16": 836, "float16": 836}), ("H200", {"bfloat16": 989, "float16": 989}),
    ("H100 PCIe", {"bfloat16": 756, "float16": 756}), ("H100 NVL", {"bfloat16": 835, "float16": 835}),
    ("H100", {"bfloat16": 989, "float16": 989}), ("GH200", {"bfloat16": 989, "float16": 989}),
    ("B200", {"bfloat16": 2250, "float16": 2250}),
    ("A100", {"bfloat16": 312, "float16": 312}), ("A10G", {"bfloat16": 70, "float16": 70}),
    ("L40S", {"bfloat16": 362, "float16": 362}), ("L4", {"bfloat16": 121, "float16": 121}),
    ("A5000", {"bfloat16": 111.1, "float16": 111.1}), ("A6000", {"bfloat16": 154.8, "float16": 154.8}),
    ("RTX 4090", {"bfloat16": 165.2, "float16": 165.2}), ("RTX 3090", {"bfloat16": 71, "float16": 71}),
    ("T4", {"float16": 65, "float32": 8.1}), ("V100", {"float16": 125, "float32": 15.7}),
)


def check_settings(settings):
    """Raises one ValueError that lists every setting whose value cannot work, whatever the data and the device."""
    model_settings = GPTConfig.__dataclass_fields__  # which it checks itself
    problems = [f"{name} is {settings[name]!r}; it is one of {', '.join(map(repr, choices))}"
                for name, choices in CHOICES.items() if settings[name] not in choices]
    for name, value in settings.items():
        if name in AT_LEAST_ONE and value < 1:
            problems.append(f"{name} is {value}; it must be at least 1")
        elif name in RATIOS and not 0 <= value <= 1:
            problems.append(f"{name} is {value}; it must lie in 0 to 1")
        elif type(value) in (int, float) and value < 0 and name not in model_settings:
            problems.append(f"{name} is {value}; it must not be negative")
    if settings["resume"] not in ("auto", "never", "must") and not settings["resume"].startswith("step_"):
        problems.append(f"resume is {settings['resume']!r}; it is 'auto', 'never', 'must' or a checkpoint such as "
                        "'step_00000030'")
    if settings["beta1"] == 1 or settings["beta2"] == 1:
        problems.append("beta1 and beta2 must be below 1")
    if settings["eval_only"] and settings["dry_run"]:
        problems.append("eval_only and dry_run exclude each other")
    if settings["init_sha256"] and not settings["init_from"]:
        problems.append("init_sha256 is set, but init_from names no folder to hold against it")
    problems += [f"{name} is ''; name a folder" for name in ("out_dir", "data_dir") if not settings[name]]
    try:
        GPTConfig(**{name: settings[name] for name in model_settings} | {"vocab_size": settings["vocab_size"] or 1})
        if not problems:
            micro_batches_of(settings["batch_tokens"], settings["block_size"], settings["batch_size"], 1)
    except ValueError as error:
        problems += [line.strip() for line in str(error).splitlines() if not line.endswith("cannot be used:")]
    if problems:
        raise ValueError("settings that cannot work:\n  " + "\n  ".join(problems))


def micro_batches_of(batch_tokens, block_size, batch_size, world_size):
    """The number of micro-batches in a step over all ranks. Raises ValueError where the step cannot be cut so."""
    unit = block_size * batch_size
    if batch_tokens % unit:
        below, above = batch_tokens // unit * unit, (batch_tokens // unit + 1) * unit
        raise ValueError(f"batch_tokens {batch_tokens:,} is not a multiple of block_size x batch_size = {block_size:,} "
                         f"x {batch_size:,} = {unit:,}; nearest: " + (f"{below:,} or " if below else "") + f"{above:,}")
    if batch_tokens // unit < world_size:
        windows = batch_tokens // block_size
        largest = max((size for size in range(1, windows // world_size + 1) if windows % size == 0), default=0)
        raise ValueError(f"a step of batch_tokens {batch_tokens:,} is {batch_tokens // unit} micro-batches of "
                         f"batch_size {batch_size} x block_size {block_size:,}, too few for {world_size} ranks; "
                         + f"a batch_size of {largest} or " * (largest > 0)
                         + f"batch_tokens of at least {unit * world_size:,} would do")
    return batch_tokens // unit


def blocks_of(micro_batches, world_size, device_type, dtype):
    """The blocks in which reproducible=True sums a step: a power of two that depends on the step alone.

    Raises ValueError where so many ranks cannot share them, or where the same bits are not promised."""
    if (device_type, dtype) != ("cpu", "float32"):
        raise ValueError(f"reproducible=True holds for device='cpu' with dtype='float32'; found {device_type} with "
                         f"{dtype}. Without it a run is exact for one number of ranks, and close for others")
    blocks = max(number for number in (1, 2, 4, 8) if micro_batches % number == 0)
    if blocks % world_size:
        fit = " or ".join(str(number) for number in (1, 2, 4, 8) if number <= blocks)
        raise ValueError(f"reproducible=True sums the {micro_batches} micro-batches of a step in {blocks} equal "
                         f"blocks, which {world_size} ranks cannot share; {fit} can. A number of micro-batches "
                         "(batch_tokens / block_size / batch_size) that 8 divides serves 1, 2, 4 and 8 ranks")
    return blocks


def vocabulary_of(vocab_size, data_vocab_size, data_dir):
    """The model's vocabulary: as set, else that of the data. Raises ValueError where the data have ids beyond it."""
    if 0 < vocab_size < data_vocab_size:
        raise ValueError(f"vocab_size is {vocab_size:,}, but {data_dir} has ids up to {data_vocab_size - 1:,}")
    return vocab_size or data_vocab_size


def check_length(order, block_size, data_dir):
    """Raises ValueError where the training data, or those of a source of a mixture, do not fill one window. `order`:
    (first window, train tokens) or (0, tokens, mixture)."""
    sources = [(f"{source.name} in ", source.tokens) for mixture in order[2:] for source in mixture.sources]
    for name, tokens in [("", order[1]), *sources]:
        if tokens <= block_size:
            raise ValueError(f"{name}{data_dir} has {tokens:,} train tokens; a window of block_size {block_size:,} "
                             f"needs at least {block_size + 1:,}")


def check_eval_only(source, val_windows, out_dir, data_dir):
    """Raises ValueError where eval_only has no weights or no data to work on."""
    if not source:
        raise ValueError(f"eval_only=True, but {out_dir} holds no checkpoint and init_from names none")
    if not val_windows:
        raise ValueError(f"eval_only=True, but {data_dir} has no validation window")


def next_due(step, interval, horizon):
    """The next step after `step` that is a multiple of `interval`, at most the horizon."""
    return min(horizon, (step // interval + 1) * interval) if interval else horizon


def horizon_of(max_steps, max_tokens, tokens_per_parameter, parameters, batch_tokens):
    """The step the schedule is planned for: from tokens_per_parameter, else max_tokens, else max_steps."""
    tokens = int(tokens_per_parameter * parameters) if tokens_per_parameter else max_tokens
    given = tokens_per_parameter or max_tokens
    horizon = tokens // batch_tokens if given else max_steps
    if horizon < 1:
        raise ValueError(f"no step to do: {tokens:,} tokens are less than batch_tokens {batch_tokens:,}" if given else
                         "no step to do: max_steps, max_tokens and tokens_per_parameter are all 0")
    return horizon


def schedule_note(schedule, horizon, warmup_steps, decay_ratio):
    """A warning where the warmup leaves no stable phase (in short trials of a long run's settings), else ''."""
    decay_start = horizon - round(decay_ratio * horizon) if schedule == "wsd" else horizon
    if warmup_steps <= decay_start:
        return ""
    return (f"note   warmup_steps {warmup_steps:,} reaches past step {decay_start:,} of {horizon:,}, where the "
            f"{schedule} schedule {'begins to decay' if schedule == 'wsd' else 'ends'}: the peak rate is not held")


def check_horizon(schedule, decay_ratio, step, recorded, wanted):
    """Raises ValueError where the horizon may not go from `recorded` to `wanted` at `step`: never under cosine; under
    wsd only before the decay start of both, so that no learning rate already used would have been another."""
    if recorded == wanted or schedule == "constant":
        return
    if schedule == "cosine":
        raise ValueError(f"the horizon of a cosine schedule cannot change: this run was planned for {recorded:,} "
                         f"steps and {wanted:,} were asked for; a wsd schedule can be prolonged before it decays")
    first = min(horizon - round(decay_ratio * horizon) for horizon in (recorded, wanted))
    if step >= first:
        raise ValueError(f"the horizon cannot change from {recorded:,} to {wanted:,} steps at step {step:,}: one of "
                         f"the two begins to decay at step {first:,}; go back before it with resume='step_...'")


def check_resume(recorded, present):
    """Raises one ValueError listing every frozen setting whose value is not the recorded one.

    A setting that the record does not know is new since then and is left alone."""
    free = MAY_DIFFER - OF_BITS if recorded.get("reproducible") else MAY_DIFFER
    differences = [f"{name}: the run has {recorded[name]!r}, asked for {value!r}" for name, value in present.items()
                   if name in recorded and name not in free | HORIZON and recorded[name] != value]
    if differences:
        raise ValueError("this run cannot go on with other values of settings that shape it:\n  "
                         + "\n  ".join(differences) + "\nGive them their old values, or start another run in another "
                         "out_dir (init_from takes the weights).")


def pick_device(name):
    """The device type asked for, or the best there is. Raises ValueError where the host lacks it."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there.get(name):
        raise ValueError(f"device='{name}' was asked for, but this torch finds only "
                         f"{', '.join(kind for kind, found in there.items() if found)}")
    return name


def pick_dtype(name, device_type, bf16_native, recorded=""):
    """The compute dtype: as asked for, else as `recorded` by the run, else the fastest that the device has in hardware.

    `bf16_native`: as `has_bf16` says. Raises ValueError where the device lacks the dtype."""
    wanted = name
    if name == "auto":
        fastest = ("bfloat16" if bf16_native else "float16") if device_type == "cuda" else "float32"
        wanted = recorded or fastest
    if wanted == "bfloat16" and not bf16_native and (name == "auto" or device_type == "cuda"):
        raise ValueError(f"dtype bfloat16 is {'what this run recorded' if name == 'auto' else 'asked for'}, but this "
                         f"{device_type} device only emulates it, slowly; dtype='float16' or dtype='float32' would do")
    if wanted == "float16" and device_type == "mps":
        raise ValueError("dtype float16 is not built for mps; dtype='float32' would do")
    return wanted


def has_bf16(device_type):
    """Whether the device multiplies bfloat16 in hardware. A T4 says that it supports it, and emulates it."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


def pick_compile(name, device_type, bf16_native):
    """Whether to compile: 'auto' does on CUDA cards of capability 8 and up. Raises ValueError without a compiler."""
    if name == "on" and device_type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ValueError("compile='on' needs a C++ compiler on CPU and none was found; compile='off' would do")
    return name == "on" or name == "auto" and device_type == "cuda" and bf16_native


def peak_flops(device_type, dtype, peak_tflops):
    """Dense peak of one device in FLOP/s at `dtype`, or 0 where it is not known. `peak_tflops` overrides the table."""
    if peak_tflops:
        return peak_tflops * 1e12
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    row = next((peaks for part, peaks in PEAKS if re.search(rf"\b{part}\b(?! (Ti|D|Laptop)\b)", name)), {})
    return (row | {"float32": row.get("float32", row.get("bfloat16", 0) / 2)}).get(dtype, 0) * 1e12


def threads_of(cores, ranks_on_host, omp_num_threads):
    """CPU threads for this rank: one process takes all cores, ranks on one host share them.

    torchrun sets OMP_NUM_THREADS=1 for several ranks, so a 1 there is taken for torchrun's and not for a wish."""
    if omp_num_threads and not (ranks_on_host > 1 and omp_num_threads == 1):
        return omp_num_threads
    return max(1, cores // ranks_on_host)


Ranks = collections.namedtuple("Ranks", "rank world_size device")  # who this process is in the job


def take_place(device_type, one_thread):
    """The Ranks of this process, as torchrun says; sets its device and CPU threads.

    Raises ValueError, alike on all ranks of a host, where it has fewer GPUs than ranks."""
    number = lambda name, default: int(os.environ.get(name) or default)
    device = torch.device(device_type)
    if device_type == "cuda":
        if (found := torch.cuda.device_count()) < (wanted := number("LOCAL_WORLD_SIZE", 1)):
            raise ValueError(f"{wanted} ranks on this host need a GPU each, found {found}; --nproc_per_node={found} or "
                             "device='cpu' would do")
        device = torch.device("cuda", number("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
    torch.set_num_threads(1 if one_thread else threads_of(
        cores(), number("LOCAL_WORLD_SIZE", 1), number("OMP_NUM_THREADS", 0)))
    return Ranks(number("RANK", 0), number("WORLD_SIZE", 1), device)


def end_with_launcher():
    """Asks Linux for a SIGTERM when torchrun is gone, which tells its ranks nothing when it gets a SIGKILL.

    It may be gone already, within the moment in which this process began; then nothing answers at its store."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, prctl(2)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60).close()
        except ConnectionRefusedError:
            os.kill(os.getpid(), signal.SIGTERM)
        except OSError:
            pass  # a network that is slow today: the process group has its own patience


def cores():
    """The CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def free_gb(path):
    """Free space in GB (10^9 bytes) on the disk that holds `path` or will."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free / 1e9


@functools.lru_cache(1)
def free_gb_around(path, moment):
    """free_gb, asked for once in each `moment`, so that a row of each step need not."""
    return round(free_gb(path), 3)


def check_disk(path, min_free_gb):
    """Raises ValueError where less than `min_free_gb` are free."""
    if free_gb(path) < min_free_gb:
        raise ValueError(f"min_free_gb asks for {min_free_gb} GB free beside {path}, found {free_gb(path):.2f} GB")


def keep_freed_memory(on):
    """Lets glibc keep what a step frees for the next one, or not any more. Else it gives each large buffer back to the
    system at once, and every page of the next one is faulted in and zeroed again. Nothing happens without glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt  # mallopt(3): M_MMAP_MAX is -4, M_TRIM_THRESHOLD -1
        mallopt(-4, 0 if on else 65536)
        mallopt(-1, 2**31 - 1 if on else 128 * 1024)
        mallopt(-8, 1 if on else 8 * cores())  # M_ARENA_MAX: no pools for the threads of evaluations and saves


def set_kernels(kind, deterministic):
    """Sets what torch keeps per process and returns a function that puts it back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    if deterministic != before[0]:  # the call imports the compiler, which takes a second
        torch.use_deterministic_algorithms(deterministic)
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where the card has it
    keep_freed_memory(kind == "cpu")
    gc.freeze()  # what the imports made stays; collections need not look through it while steps go on

    def restore():
        gc.unfreeze()
        keep_freed_memory(False)
        if deterministic != before[0]:
            torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
    return restore


def or_shipped(path):
    """A path as it is, or where nothing lies there that of the file shipped beside this one."""
    return path if os.path.exists(path) else os.path.join(HERE, path)


def read_prompts(path):
    """The prompts of a text file, one a line, \\n for a line break; without a file [''], the start of a document."""
    if not path:
        return [""]
    try:
        with open(or_shipped(path), encoding="utf-8") as file:
            prompts = [line.rstrip("\n").replace("\\n", "\n") for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts_file {path!r} cannot be read ({error}); sample_interval=0 turns samples "
                         "off") from error
    if not prompts:
        raise ValueError(f"prompts_file {path!r} has no line with a prompt; sample_interval=0 turns samples off")
    return prompts


def check_control(found, recorded, tolerance, folder):
    """Raises ValueError where the loaded model does not reproduce the loss that was recorded with it."""
    if None not in (recorded, found) and not abs(found - recorded) <= tolerance:
        raise ValueError(f"the weights of {folder} give a loss of {found:.6f} on the control windows, {recorded:.6f} "
                         f"was recorded when they were saved; control_tolerance is {tolerance}. The model's code or "
                         "the validation data are not what they were")


def peak_memory_gb(device):
    """Peak memory of this rank in GB: device memory on CUDA, resident memory elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


def seed_device(device, seed):
    """Seeds the device's own generator; torch.manual_seed would seed every kind of device, a hundred times slower."""
    {"cpu": torch.default_generator.manual_seed, "cuda": torch.cuda.manual_seed,
     "mps": torch.mps.manual_seed}[device.type](seed)


def on_device(numbers, device):
    """A float32 vector on `device` without waiting for it."""
    vector = torch.tensor(numbers, dtype=torch.float32)
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector.to(device)


def to_host(vector):
    """Starts the copy of a device vector to the host; calling the result waits for it and gives a list of numbers."""
    if vector.device.type != "cuda":
        return vector.tolist
    host, done = torch.empty(vector.shape, pin_memory=True), torch.cuda.Event()
    host.copy_(vector, non_blocking=True)
    done.record()
    return lambda: (done.synchronize(), host.tolist())[1]


def versions():
    """Versions of what computes and of what writes files."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
            "safetensors": safetensors.__version__}


def git_commit():
    """The commit of this code, '' outside a git checkout."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, timeout=5)
        return answer.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def code_sha256():
    """The sha256 of the files that decide what a step does."""
    here = pathlib.Path(HERE)
    return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in ("train.py", "model.py")}


def host_record(world_size):
    """What a session's bits may depend on beside settings and data."""
    return {"world_size": world_size, "threads": torch.get_num_threads(), "versions": versions(),
            "git_commit": git_commit(), "code": code_sha256()}


def bad_steps_text(run, step, max_bad_steps):
    """Why a run ends after so many bad steps in a row, with the windows of each."""
    return (f"{run.bad_steps} steps in a row had a non-finite loss or gradient (max_bad_steps {max_bad_steps}), the "
            f"last at step {step:,}; none of them is in the weights, and the last checkpoint stands. Their windows "
            "([pass, window]):" + "".join(f"\n  step {step:,}: {windows}" for step, windows in run.bad_windows))


def finite(value):
    """`value` rounded for a JSON line, None where it is not a finite number (JSON has none)."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


@dataclass
class Interrupt:
    """The first signal's name and when it was heard; later ones change nothing."""
    name: str = ""
    at: float = math.inf

    def note(self, names):
        if names and not self.name:
            self.name, self.at = names[0], time.monotonic()
        return names

    def arrived(self, number, _frame):
        self.note([signal.Signals(number).name])

    @contextlib.contextmanager
    def listening(self):
        """Takes the signals of CAUGHT, and in the end gives them back to whoever had them."""
        before = {name: signal.signal(signal.Signals[name], self.arrived) for name in CAUGHT}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(signal.Signals[name], handler)


class Stages:
    """Seconds of each stage of the start, by name."""

    def __init__(self, **seconds):
        self.seconds, self.mark = {name: round(value, 3) for name, value in seconds.items()}, time.perf_counter()

    def end(self, name):
        """Ends the stage that began where the one before it ended."""
        now = time.perf_counter()
        self.seconds[name], self.mark = round(now - self.mark, 3), now


# -- lines for a person

def say(text):
    """Prints a line at once; a terminal that is gone or a full disk under a log costs the line, not the run."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        pass


def describe(say, counts, flops, expected_loss, found_loss, stream, pass_tokens, settings, micro_batches, world_size,
             live):
    """The first lines of a run: model, data, plan, first loss to expect. `live`: the tensors of a checkpoint."""
    block_size, steps, batch_tokens = settings["block_size"], settings["max_steps"], settings["batch_tokens"]
    tokens, pass_tokens = steps * batch_tokens, (pass_tokens - 1) // block_size * block_size
    checkpoint_bytes = sum(tensor.nbytes for tensors in live.values() for tensor in tensors.values())
    groups = ", ".join(f"{name} {number:,}" for name, number in counts.items() if name != "total" and number)
    say(f"model  {counts['total']:,} parameters ({groups}), {flops / 1e6:,.1f} MFLOP a token")
    say(f"data   {settings['data_dir']}: {len(stream):,} train tokens in {plural(len(stream.shards), 'shard')}, "
        f"vocabulary {settings['vocab_size']:,}")
    say(f"plan   {steps:,} steps x {batch_tokens:,} tokens = {tokens:,} tokens: {tokens / pass_tokens:.2f} passes, "
        f"{tokens / counts['total']:.1f} tokens per parameter")
    compiled = "compiled" if settings["compile"] == "on" else "not compiled"
    say(f"       a step is {plural(micro_batches, 'micro-batch', 'micro-batches')} of {settings['batch_size']} x "
        f"{block_size:,} over {plural(world_size, 'rank')} on {settings['device']} in {settings['dtype']}, {compiled}; "
        f"{checkpoint_bytes / 1e6:,.1f} MB a checkpoint")
    if found_loss is not None:
        say(f"loss   expected first loss {expected_loss:.3f} nats per token, found {found_loss:.3f} on random tokens; "
            "on text it is some tenths off, as some tokens are frequent")
    if note := schedule_note(settings["schedule"], steps, settings["warmup_steps"], settings["decay_ratio"]):
        say(note)


def describe_start(say, run, out_dir, recorded, host, checkpoint_interval, eval_interval, val_windows, evaluated):
    """On what a resumed session differs from the one before, where the same bits are no longer promised, and what comes
    next. `recorded`: trainer.json, None in a fresh run. `evaluated`: whether this very step was."""
    words = {"world_size": "number of ranks", "threads": "threads", "versions": "versions", "code": "code"}
    if recorded and recorded["settings"].get("reproducible"):
        del words["world_size"]
    if different := [word for name, word in words.items() if recorded and recorded[name] != host[name]]:
        say(f"note   {', '.join(different)} differ from the session before: the same windows, but not the same bits")
    next_save = next_due(run.step, checkpoint_interval, run.horizon)
    next_eval = f"at step {next_due(run.step - (not evaluated), eval_interval, run.horizon):,}"
    say(f"start  run {run.run} in {out_dir}; next save at step {next_save:,}, next evaluation "
        + (next_eval if val_windows else "never (no validation data)"))


def describe_end(say, run, out_dir, finished, reason, result, world_size, costs):
    """How the session ended, what all have cost ('': no price is set) and the command to type next. `result`: of the
    last evaluation, if there was one."""
    if finished and result:
        say(eval_line(run.step, result))
    if reason == "segment":
        say("all data have been drawn: 'prepare.py append' adds more for the next session, or with "
            "stop_at_segment_end=False it draws them once more")
    if costs:
        say(f"costs  {costs} in all sessions")
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else ["python"]
    after = ["python", "checkpoint.py", "list", out_dir] if finished else [*launcher, *sys.argv]
    say(f"{'finished' if finished else 'stopped'} ({reason}) at step {run.step:,} of {run.horizon:,}; next:\n"
        f"  {shlex.join(['python', 'sample.py', f'--out_dir={out_dir}'])}\n  {shlex.join(after)}")


def plural(number, one, many=""):
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def memory_note(device, peak_gb):
    """'mem 41.2 GB, 98.1 free': the peak of the rank that has the highest, and what is left of this rank's GPU."""
    with contextlib.suppress(RuntimeError):  # after an error of the device it cannot be asked
        if device.type == "cuda":
            return f"mem {peak_gb:.1f} GB, {torch.cuda.mem_get_info(device)[0] / 1e9:.1f} free"
    return ""


def live_line(row, horizon, left_s, safe_step, mean_loss=None, *notes):
    """Step, loss and its running mean, rate, gradient norm, speed, notes, time left; with a Hub the newest step that is
    safe there, -1 for none."""
    safe = "" if safe_step is None else f"  safe {safe_step:,}" if safe_step >= 0 else "  safe none"
    loss, norm = ("not finite" if row[name] is None else f"{row[name]:.{digits}f}" for name, digits in
                  (("loss", 4), ("grad_norm", 3)))
    mean = "" if not mean_loss else f" mean {mean_loss:.4f}"
    return (f"step {row['step']:>6,}/{horizon:,}  loss {loss}{mean}  lr {row['lr']:.2e}  norm {norm}  "
            f"{row['tokens_per_s']:>9,.0f} tokens/s" + (f"  MFU {row['mfu']:.1%}" if row["mfu"] else "")
            + "".join(f"  {note}" for note in notes if note) + f"  {duration(left_s)} left{safe}")


def eval_line(step, result, best=None, train_mean=None):
    """Validation loss in nats per token and bits per byte, the best one, and the gap to the mean of training."""
    if not result["complete"]:
        return f"eval   step {step:,}: cut short by a signal"
    per_byte = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
    loss = "not finite" if result["val_loss"] is None else f"{result['val_loss']:.4f}"
    each = "".join(f", {name} {'not finite' if mean is None else f'{mean:.4f}'}"
                   for name, mean in result.get("sources", {}).items())
    beside = "" if best is None else f", best {best:.4f}"
    if train_mean and result["val_loss"] is not None:
        beside += f", {result['val_loss'] - train_mean:+.4f} to the mean of training"
    return (f"eval   step {step:,}: val loss {loss} nats per token{per_byte}{each}{beside} "
            f"({result['windows']:,} windows, {result['seconds']:.1f} s)")


def duration(seconds):
    """'1 h 02 min', '3 min 20 s', '14 s'."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"
