"""What the trainer does on one GPU, in one bounded run that checks itself: correctness, speed, saves, resume, profile.

    python bench/gpu.py                              every part, at most 8 minutes in all
    python bench/gpu.py --parts 350m_muon profile    some parts, in this order
    python bench/gpu.py --rehearse                   the same on CPU in tiny shapes: that the script works, no figures
    python bench/gpu.py --parts 124m_muon -- --batch_size=128      more words for train.py

Each part is a process of its own with a limit; one that fails or is killed is told with the last lines it printed, and
the next one goes on. Parts stand in the order of their worth, and what no longer fits into the minutes is not run.
Speed is train.py's own: its command line, its logging, random ids as unequal in frequency as words (Zipf's law); the
first steps, in which it compiles, do not count. MFU is by model.flops_per_token, as nanoGPT counts. A missed target is
told and fails nothing. Prints a table, then one JSON line. Exit 0 where nothing failed, 1 otherwise, 2 without a GPU.
"""
import argparse
import contextlib
import functools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"124m": {"must": 440e3, "good": 530e3, "stretch": 580e3},  # tokens/s on one H200 at a context of 1,024
           "350m": {"must": 180e3, "good": 200e3, "stretch": 224e3}}
CONFIGS = {"adamw": "config/124m.py", "muon": "config/124m_muon.py"}
SHAPES = {"124m": ["--batch_size=64"], "350m": ["--n_layer=24", "--n_head=16", "--n_embd=1024", "--batch_size=32"]}
TINY = ["--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=4", "--batch_tokens=512", "--vocab_size=257",
        "--device=cpu", "--dtype=float32", "--compile=off"]
QUIET = ["--eval_interval=0", "--eval_tokens=1024", "--sample_interval=0", "--milestone_interval=0", "--log_interval=1",
         "--checkpoint_interval=0", "--data_verify=off"]
WARM, FEWEST = 3, 2  # steps of a run that do not count, and the fewest that make a figure
LAST_S = 5  # of a part's limit: kept for telling what was found
# How far each way of computing may lie from float32 on the same device: the mean loss in nats, the gradient as a share
# of its norm. TF32 keeps 10 bits and bfloat16 7; control_tolerance asks for 0.001 nats, in TF32 as well
BOUNDS = {"float32 on CPU": (1e-4, None), "TF32": (1e-3, 1e-2), "bfloat16": (1e-2, 3e-2),
          "bfloat16 in chunks": (1e-2, 3e-2), "bfloat16 compiled": (1e-2, 3e-2)}
GROUPS = (  # of kernels: what the name of one holds, the first that fits
    ("nccl", "nccl"), ("attention", "flash|fmha|sdpa|attention|attn"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|wgmma|splitk|aten::(mm|bmm|addmm|baddbmm)\b"),
    ("copies", r"memcpy|memset|aten::(copy_|zero_|fill_|cat)\b"),
    ("norm, elementwise, fused", "triton|elementwise|vectorized|norm|softmax|reduce|embedding|nll_loss|aten::"))


# ---- what parts share

def words_of(asked, size, optimizer):
    """The words for train.py of a size and an optimizer: a shipped config in the shape that is measured here."""
    shape = [*TINY, f"--n_layer={1 + list(SHAPES).index(size)}"] if asked.rehearse else [
        *SHAPES[size], "--vocab_size=50257", "--device=cuda", "--dtype=bfloat16"]
    return [CONFIGS[optimizer], *QUIET, *shape, f"--data_dir={data_in(asked)}", *asked.words]


def data_in(asked):
    """A data folder of random ids, made by the first part that needs it."""
    folder, tokens, vocab = Path(asked.folder), *((20_000, 257) if asked.rehearse else (4_000_000, 50257))
    if not (folder / "data" / "manifest.json").exists():
        import numpy as np
        draw = np.random.default_rng(1337)
        for name, count in (("train.bin", tokens), ("val.bin", 20_000)):
            ((draw.zipf(1.3, count) - 1) % vocab).astype("<u2").tofile(folder / name)
        subprocess.run([sys.executable, "data/prepare.py", "import", folder / "train.bin", folder / "val.bin", "--out",
                        folder / "data", "--tokenizer", "none", "--vocab-size", str(vocab)], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)
    return folder / "data"


def rows(path):
    """The whole lines of a jsonl file that another process may be writing."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def saves(out_dir):
    return [row for row in rows(out_dir / "events.jsonl") if row["event"] == "save"]


def start(words):
    """Starts train.py; what it prints goes where this process prints."""
    print("train.py", shlex.join(map(str, words)), flush=True)
    return subprocess.Popen([sys.executable, "train.py", *map(str, words)], cwd=ROOT, stdin=subprocess.DEVNULL)


def settings_of(words):
    """All settings of train.py under these words."""
    import configurator
    import train
    return configurator.configure(configurator.settings(vars(train)), words)


def model_of(settings, device, **more):
    from model import GPT, GPTConfig
    return GPT(GPTConfig(**{name: settings[name] for name in GPTConfig.__dataclass_fields__}), **more).to(device)


def fixed_ids(settings, count):
    """[count, block_size + 1] ids, the same each time, some of them far more frequent than others."""
    import torch
    draw = torch.rand(count, settings["block_size"] + 1, generator=torch.Generator().manual_seed(0))
    return (draw**4 * settings["vocab_size"]).long()


# ---- parts: each returns its figures and what is wrong with them, [] where nothing is

def facts(asked):
    """Versions, the device, and what PyTorch will choose for attention in the shape of the 124M run."""
    import torch
    from torch.nn.attention import SDPBackend
    cuda, s = torch.backends.cuda, settings_of(words_of(asked, "124m", "muon"))
    found = {"device": "cpu", "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
             "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if s["device"] == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {"device": device.name, "capability": f"{device.major}.{device.minor}",
                  "memory_gb": round(device.total_memory / 1e9, 1), "multiprocessors": device.multi_processor_count}
    if shutil.which("nvidia-smi"):
        found["driver"] = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                         text=True, capture_output=True, timeout=30).stdout.strip()
    asks = {"flash": cuda.flash_sdp_enabled, "efficient": cuda.mem_efficient_sdp_enabled,
            "cudnn": cuda.cudnn_sdp_enabled, "math": cuda.math_sdp_enabled}
    query = torch.zeros(s["batch_size"], s["n_head"], s["block_size"], s["n_embd"] // s["n_head"],
                        dtype=torch.bfloat16, device=s["device"], requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(query, query, query, None, 0.0, True)).name
    return found | {"sdpa_enabled": [name for name, ask in asks.items() if ask()], "sdpa_chosen": chosen}, []


def loss_and_gradient(model, batch, half):
    """The mean loss of a batch and the whole gradient as one vector, in autocast to bfloat16 where `half`."""
    import torch
    model.zero_grad()
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=half):
        loss = model(*batch).mean()
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def ways_of_computing(settings):
    """{way: (loss, gradient)} of one fixed batch; 'float32' is what the others are held against."""
    import torch
    device = settings["device"]
    ids = fixed_ids(settings, 8)
    batch = ids[:, :-1].to(device), ids[:, 1:].to(device)
    whole = model_of(settings, device, seed=1)
    chunked = model_of(settings, device, seed=1, loss_chunk_tokens=batch[0].numel() // 3 + 1)
    torch.set_float32_matmul_precision("highest")
    found = {"float32": loss_and_gradient(whole, batch, False)}
    with torch.no_grad():
        found["float32 on CPU"] = model_of(settings, "cpu", seed=1)(ids[:, :-1], ids[:, 1:]).mean().item(), None
    torch.set_float32_matmul_precision("high")
    found["TF32"] = loss_and_gradient(whole, batch, False)
    found["bfloat16"] = loss_and_gradient(whole, batch, True)
    found["bfloat16 in chunks"] = loss_and_gradient(chunked, batch, True)
    # on CPU traced only: to generate code for it takes a minute
    whole.compile(dynamic=False, backend="inductor" if device == "cuda" else "aot_eager")
    found["bfloat16 compiled"] = loss_and_gradient(whole, batch, True)
    return found


def correctness(asked):
    """One batch through two layers of the 124M shape, both kinds of block, in every way of computing it."""
    figures, problems = {}, []
    for optimizer in CONFIGS:
        found = ways_of_computing(settings_of([*words_of(asked, "124m", optimizer), "--n_layer=2"]))
        loss, gradient = found.pop("float32")
        for way, (its_loss, its_gradient) in found.items():
            name, (most_nats, most_share) = f"{CONFIGS[optimizer]}, {way}", BOUNDS[way]
            off = {"nats_off": abs(its_loss - loss)}
            if its_gradient is not None:
                off |= {"gradient_off": float((its_gradient - gradient).norm() / gradient.norm()),
                        "gradient_norm": float(its_gradient.norm())}
            figures[name] = {"loss": its_loss, **off}
            if not (off["nats_off"] <= most_nats and off.get("gradient_off", 0) <= (most_share or 0)):
                problems.append(f"{name}: {figures[name]}; off by {most_nats} and {most_share} is allowed")
    return figures, problems


def speed(asked, size, optimizer, more=(), save=False):
    """train.py until enough steps are logged and, with `save`, until a checkpoint made on the way is durable."""
    out_dir, last = Path(asked.folder) / asked.part, WARM + asked.steps
    metrics, deadline = out_dir / "metrics.jsonl", BEGAN + asked.limit - LAST_S
    words = [*words_of(asked, size, optimizer), *more, f"--out_dir={out_dir}"]
    process = start([*words, f"--checkpoint_interval={last}"] if save else words)
    enough = lambda: len(rows(metrics)) >= last and (not save or saves(out_dir))
    try:
        while process.poll() is None and not enough() and time.monotonic() < deadline:
            time.sleep(0.1)
        ended = process.poll()
    finally:
        process.kill()  # a save at the end would tell nothing more
        process.wait()
    logged, saved = rows(metrics), saves(out_dir)
    if len(logged) < WARM + FEWEST:
        why = f"train.py ended by itself with exit status {ended}" if ended is not None else "time was over"
        return {}, [f"{len(logged)} steps were logged, {WARM + FEWEST} are the fewest that count: {why}"]
    figures, problems = speed_figures(logged, last, size), []
    if saved:
        figures |= {"save_stall_s": saved[0]["stall_s"], "save_durable_s": saved[0]["seconds"],
                    "save_bytes": saved[0]["bytes"], "step_ms_while_it_is_written": [
                        row["step_ms"] for row in logged[last:]]}
    elif save:
        problems.append("no checkpoint became durable in time")
    if not all(row["loss"] is not None and row["loss"] < logged[0]["loss"] + 0.5 for row in logged):
        problems.append(f"the loss of some step is not finite or has risen: {[row['loss'] for row in logged]}")
    return figures, problems


def speed_figures(logged, last, size):
    """What the rows of metrics.jsonl say about speed and memory up to step `last`, without the first steps."""
    counted = logged[WARM:last]
    took = [row["step_ms"] for row in counted]
    batch_tokens = counted[0]["tokens"] // counted[0]["step"]
    tokens_per_s = 1000 * batch_tokens * len(took) / sum(took)
    mfu = counted[0]["mfu"] and counted[0]["mfu"] / counted[0]["tokens_per_s"] * tokens_per_s
    reached = [name for name, target in TARGETS[size].items() if tokens_per_s >= target]
    return {"tokens_per_s": round(tokens_per_s), "mfu": mfu and round(mfu, 4),
            "target": reached[-1] if reached else "none", "steps": len(took), "step_ms": statistics.median(took),
            "fastest_ms": min(took), "slowest_ms": max(took), "data_ms": statistics.median(
                row["data_ms"] for row in counted), "first_step_s": round(logged[0]["step_ms"] / 1000, 2),
            "peak_gb": logged[-1]["mem_gb"], "first_loss": logged[0]["loss"], "last_loss": counted[-1]["loss"]}


def tensors(out_dir):
    """{file and name: bytes} of the checkpoint that latest.json points at."""
    from safetensors.torch import load_file
    folder = out_dir / "checkpoints" / json.loads((out_dir / "latest.json").read_text())["checkpoint"]
    return {f"{path.name} {name}": tensor.numpy().tobytes() for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()}


def resume(asked):
    """Eight steps with deterministic=True in one session and in two: the same bits, dropout's included."""
    shape = [] if asked.rehearse else ["--batch_size=8", "--batch_tokens=32768"]
    words = [*words_of(asked, "124m", "muon"), *shape, "--n_layer=2", "--dropout=0.1", "--deterministic=True",
             "--warmup_steps=2"]
    one, two = (Path(asked.folder) / f"{asked.part}_in_{name}" for name in ("one", "two"))
    whole = start([*words, f"--out_dir={one}", "--stop_after_steps=8"])
    problems = []
    for _ in range(2):  # the first beside the one that does not stop: they have nothing in common
        if status := start([*words, f"--out_dir={two}", "--stop_after_steps=4"]).wait():
            problems.append(f"a session of four steps ended with exit status {status}")
    if status := whole.wait():
        problems.append(f"the session of eight steps ended with exit status {status}")
    if problems:
        return {}, problems
    found, wanted = tensors(two), tensors(one)
    losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in rows(out_dir / "metrics.jsonl")]
              for out_dir in (one, two)]
    different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if different:
        problems.append(f"{len(different)} of {len(wanted)} tensors have other bits, the first {different[0]}")
    if losses[0] != losses[1]:
        problems.append(f"losses or gradient norms differ: {losses[0]} in one session, {losses[1]} in two")
    return {"steps": len(losses[0]), "sessions": [1, 2], "tensors": len(wanted), "different": len(different)}, problems


def gpu_tests(asked):
    """pytest -m gpu; without a GPU those tests skip themselves."""
    files = [path for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rfE",
                           *files],  # of all files it would take long to find them
                          cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout, flush=True)
    counts = {word: int(number) for number, word in re.findall(
        r"(\d+) (passed|failed|errors?|skipped)", "".join(done.stdout.splitlines()[-1:]))}
    wrong = done.returncode != 0 or not (counts.get("passed") or asked.rehearse)
    return counts, [f"pytest ended with exit status {done.returncode} and {counts}"] * wrong


def a_step(settings):
    """A function that does one step of train.py on fixed ids, with what an update launches under one name."""
    import torch

    import preflight
    import train
    device = torch.device("cuda", 0) if settings["device"] == "cuda" else torch.device("cpu")
    half = settings["dtype"] == "bfloat16"
    for name in ("adamw_update", "muon_update"):
        setattr(train, name, torch.profiler.record_function("optimizer")(getattr(train, name)))
    preflight.set_kernels(device.type, False)
    ranks, model, batch_size = preflight.Ranks(0, 1, device), model_of(settings, device, seed=1), settings["batch_size"]
    if settings["compile"] != "off":
        model.compile(dynamic=False)
    opt = train.new_optimizer(
        model, settings["optimizer"], ranks, False, betas=(settings["beta1"], settings["beta2"]),
        weight_decay=settings["weight_decay"], momentum=settings["muon_momentum"], grad_clip=settings["grad_clip"],
        heads=(model.config.n_head, model.config.n_kv_head, model.config.head_width),
        matrix_dtype=torch.bfloat16 if half else torch.float32)
    count = preflight.micro_batches_of(settings["batch_tokens"], settings["block_size"], batch_size, 1)
    ids = fixed_ids(settings, batch_size).numpy()
    autocast = lambda: torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext()

    def step():
        batches = ((index, train.to_batch(ids.copy(), device)) for index in range(count))
        train.train_step(model, ranks, opt, count, autocast, 1e-4, 1e-4, batches, None, (), preflight.Interrupt())
    return step


def spent_by_group(events, on_gpu):
    """({group: microseconds}, {kernel: microseconds}); on CPU of operators, without what they call."""
    from torch.autograd import DeviceType
    mine = [event for event in events if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)]
    updates = [event.time_range for event in mine if event.name == "optimizer"]
    groups, kernels = {}, {}
    for event in mine:
        if event.name == "optimizer" or on_gpu and getattr(event, "is_user_annotation", False):
            continue  # it spans kernels, which are counted themselves
        spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        in_update = any(span.start <= event.time_range.start <= span.end for span in updates)
        group = "optimizer" if in_update or "multi_tensor" in event.name else next(
            (group for group, names in GROUPS if re.search(names, event.name, re.IGNORECASE)), "other")
        groups[group] = groups.get(group, 0) + spent
        kernels[event.name] = kernels.get(event.name, 0) + spent
    return groups, kernels


def profile(asked):
    """One step of the 124M Muon run by group of kernels, and where the host waits for the device in it."""
    import torch
    from torch.profiler import ProfilerActivity
    settings = settings_of(words_of(asked, "124m", "muon"))
    on_gpu, step = settings["device"] == "cuda", a_step(settings)
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(WARM):
        step()
    finish()
    began = time.perf_counter()
    step()
    queued_ms = 1000 * (time.perf_counter() - began)
    finish()
    step_ms = 1000 * (time.perf_counter() - began)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        step()
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    waits = sorted({f"{Path(said.filename).name}:{said.lineno}" for said in heard
                    if "called a synchronizing" in str(said.message)})
    finish()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with torch.profiler.profile(activities=activities) as found:
        step()
        finish()  # one cudaDeviceSynchronize of those told is this one
    groups, kernels = spent_by_group(found.events(), on_gpu)
    total = sum(groups.values())
    calls = [event.name for event in found.events() if re.search("cuda.*Synchronize|cudaMemcpy$", event.name)]
    figures = {"step_ms": round(step_ms, 2), "host_ms": round(queued_ms, 2), "kernel_ms": round(total / 1000, 2),
               "shares": {name: round(spent / total, 4) for name, spent in sorted(groups.items(), key=lambda g: -g[1])},
               "longest_ms": {name[:90]: round(spent / 1000, 2) for name, spent in sorted(
                   kernels.items(), key=lambda kernel: -kernel[1])[:12]},
               "host_waits_at": waits, "synchronizing_calls": {name: calls.count(name) for name in sorted(set(calls))}}
    problems = [f"the host waits for the device within a step: {', '.join(waits)}"] * bool(waits)
    if not groups:
        problems.append("the profiler saw no kernel")  # a host may forbid it
    if on_gpu and total / 1000 > 1.2 * step_ms:
        problems.append("the kernels add up to more than the step took: some are counted twice")
    return figures, problems


PARTS = {  # in the order of their worth: function, the least seconds it is begun with, its limit in seconds
    "facts": (facts, 15, 60),
    "correctness": (correctness, 40, 120),
    "124m_muon": (functools.partial(speed, size="124m", optimizer="muon", save=True), 60, 170),
    "resume": (resume, 40, 110),
    "350m_adamw": (functools.partial(speed, size="350m", optimizer="adamw"), 75, 180),
    "profile": (profile, 30, 110),
    "gpu_tests": (gpu_tests, 15, 80),
    "124m_adamw": (functools.partial(speed, size="124m", optimizer="adamw"), 50, 130),
    "124m_adamw_eager": (functools.partial(speed, size="124m", optimizer="adamw", more=["--compile=off"]), 25, 90),
    "350m_muon": (functools.partial(speed, size="350m", optimizer="muon"), 75, 180),
}


# ---- around them

def one_part(command, limit, log):
    """Runs a part until it ends or its limit is over: {verdict, seconds, figures, problems}, and the last lines it said
    where it failed. A part prints its figures and problems as one JSON line, last."""
    began, folder = time.monotonic(), Path(log).parent
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                   env=environment, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"killed at its limit of {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
    lines = Path(log).read_text(errors="replace").splitlines()
    found = {"figures": {}, "problems": [f"ended: {status}" if isinstance(status, str) else f"exit status {status}"]}
    if status == 0 and lines:
        found = json.loads(lines.pop())
    said = {"said": lines[-15:]} if found["problems"] else {}
    return {"verdict": "failed" if said else "passed", "seconds": round(time.monotonic() - began, 1), **found, **said}


def in_words(value):
    """A figure for a person: short, whatever it is made of."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(map(in_words, value)) or "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def run_parts(asked):
    """{part: what was found}, printed as it comes."""
    found = {}
    for name in asked.parts or PARTS:
        _, needs, limit = PARTS[name]
        left = 60 * asked.minutes - (time.monotonic() - BEGAN)
        if left < (1 if asked.rehearse else needs):
            found[name] = {"verdict": "not run (time)", "seconds": 0.0, "figures": {}, "problems": []}
            continue
        limit = min(limit, left)
        command = [sys.executable, __file__, *["--rehearse"] * asked.rehearse, f"--steps={asked.steps}",
                   f"--part={name}", f"--folder={asked.folder}", f"--limit={limit}", "--", *asked.words]
        found[name] = one_part(command, limit, Path(asked.folder) / f"{name}.log")
        print(f"{name}: {found[name]['verdict']} in {found[name]['seconds']} s")
        for figure, value in found[name]["figures"].items():
            print(f"    {figure:46} {in_words(value)}")
        print("".join([f"    wrong: {text}\n" for text in found[name]["problems"]]
                      + [f"    | {line}\n" for line in found[name].get("said", [])]), end="", flush=True)
    return found


def describe(found, rehearsal):
    """The last table: speeds beside their targets, then each part's verdict."""
    print("speed" + " (tiny shapes on CPU: no figures)" * rehearsal)
    for name, part in found.items():
        if "tokens_per_s" in part["figures"]:
            figures, targets = part["figures"], TARGETS[name.partition("_")[0]]
            mfu = f"{figures['mfu']:.1%}" if figures["mfu"] else "-"
            print(f"  {name:18} {figures['tokens_per_s']:9,} tokens/s  MFU {mfu:>6}  peak {figures['peak_gb']:6.1f} GB"
                  f"  reached: {figures['target']} of "
                  + ", ".join(f"{word} {target:,.0f}" for word, target in targets.items()))
    print("verdicts")
    for name, part in found.items():
        print(f"  {name:18} {part['verdict']:15} {part['seconds']:6.1f} s  {'; '.join(part['problems'])[:150]}")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="all of it together")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on CPU")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run that count; 0 = 8, in a rehearsal 3")
    parser.add_argument("words", nargs="*", help="more words for train.py, after --")
    for name in ("--part", "--folder"):  # one part, in the process that runs it
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    asked.steps = asked.steps or (3 if asked.rehearse else 8)
    return asked


def main(words=None):
    """Runs the parts, or the one part that is asked for; returns the exit status."""
    asked = parse(words)
    sys.path.insert(0, str(ROOT))
    if asked.part:
        figures, problems = PARTS[asked.part][0](asked)
        print("\n" + json.dumps({"figures": figures, "problems": problems}))
        return 0
    if not asked.rehearse:
        import torch
        if not torch.cuda.is_available():
            print("no CUDA device was found; --rehearse tries the script on CPU", file=sys.stderr)
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the part in progress is ended too
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as asked.folder:  # a compiler may write there still
        found = run_parts(asked)
    describe(found, asked.rehearse)
    failed = [name for name, part in found.items() if part["verdict"] == "failed"]
    known = found.get("facts", {}).get("figures", {})
    print(json.dumps({"bench": "gpu", "rehearsal": asked.rehearse, "hardware": known.get("device", ""),
                      "versions": {name: known.get(name) for name in ("python", "torch", "cuda", "cudnn", "driver")},
                      "words": asked.words, "parts": found, "failed": failed,
                      "seconds": round(time.monotonic() - BEGAN, 1)}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
