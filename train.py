"""longhaul: train a GPT in plain PyTorch, on machines that will be taken away. The run after N kills is the same run.

    python train.py config/quickstart.py                                  one process; all CPU cores or one GPU
    torchrun --standalone --nproc_per_node=8 train.py config/124m.py      one host, 8 ranks
    python train.py config/quickstart.py --max_steps=300 --out_dir=out/short   later words win

Type the same line again after a kill, a Ctrl-C or a quota: it goes on from the newest checkpoint in `out_dir`, with
whatever number of ranks. `python train.py --help` lists every setting.

Whatever can be a pure function of the step is one: the windows of a step, the learning rate, the dropout seeds. So a
checkpoint is weights, optimizer state and a few integers, and there is no generator or loader state to lose.
Order of this file: settings, data, schedule, optimizer, evaluation, checkpoints, the step and what is told of it, main.

Tensor shapes: B windows, T positions, V vocabulary, N matrices of one shape, R rows, C columns.
"""
import sys
import time

import configurator

STARTED = time.perf_counter()

# -- run: which run this is, and how this session begins
out_dir = "out"  # folder of this run: checkpoints, metrics, events, samples
seed = 1337  # initial weights and dropout
resume = "auto"  # 'auto' (newest checkpoint, else start), 'never', 'must', or 'step_00000030' (go back to it)
init_from = ""  # a checkpoint or milestone folder, or hf:owner/name: weights only, fresh optimizer, step 0; '' = drawn
init_sha256 = ""  # sha256 that init_from's model.safetensors must have; '' = any
eval_only = False  # evaluate the checkpoint on all of val and stop; out_dir is left as it is
dry_run = False  # do everything up to the first step, print the plan and stop; out_dir is left as it is
# -- data: prepared by data/prepare.py
data_dir = "data/stdlib"  # folder with manifest.json and shards
data_seed = 1337  # order of the windows
prepare = ""  # 'stdlib': build the embedded corpus (Python's own sources) when data_dir is absent; '' = off
data_verify = "background"  # hash the shards that are read, at low priority, once per session: 'background' or 'off'
# -- model: GPT-2 124M as it stands
block_size = 1024  # positions in a window (tokens of context)
vocab_size = 0  # token ids; 0 = from the data manifest (padded to a multiple of 64 inside the model)
n_layer = 12  # blocks
n_head = 12  # query heads
n_kv_head = 0  # key and value heads; 0 = n_head
head_width = 0  # width of a head; 0 = n_embd // n_head
n_embd = 768  # width of the residual stream
norm = "layernorm"  # 'layernorm' or 'rmsnorm'
norm_eps = 1e-5  # added to the variance
position = "learned"  # 'learned' (a table) or 'rope'
rope_theta = 10000.0  # base of the rotary angles
mlp = "gelu"  # 'gelu' (by tanh, GPT-2's), 'gelu_erf' (exact, nanoGPT's) or 'swiglu'
mlp_ratio = 4.0  # hidden width of the MLP / n_embd
mlp_hidden = 0  # hidden width of the MLP; 0 = mlp_ratio * n_embd, to a multiple of 64
bias = True  # biases in linear layers and layer norms
dropout = 0.0  # share of activations dropped
qk_norm = False  # RMSNorm on queries and keys
value_residual = False  # mix the first block's values into every later block's
logit_cap = 0.0  # logits pass through cap * tanh(logits / cap); 0 = off
tie_embeddings = True  # the head uses the token embedding's weights
# -- batch: one step is batch_tokens over all ranks, however many there are
batch_tokens = 524288  # tokens per step over all ranks; a multiple of block_size * batch_size
batch_size = 16  # windows in one forward on one rank (a micro-batch)
# -- optimizer
optimizer = "adamw"  # 'adamw', or 'muon' = Muon on hidden matrices, AdamW on the rest
learning_rate = 6e-4  # peak rate of AdamW
muon_learning_rate = 0.02  # peak rate of Muon
muon_momentum = 0.95  # reached from 0.85 over the first 300 updates
weight_decay = 0.1  # decoupled, on 2-D parameters: p *= 1 - rate * weight_decay
beta1 = 0.9  # AdamW
beta2 = 0.95  # AdamW
grad_clip = 1.0  # largest norm of the gradient over all parameters; 0 = off
# -- schedule: the factor on both rates, a function of the step
schedule = "wsd"  # 'wsd' (warmup, stable, linear decay), 'cosine', 'constant'
max_steps = 19073  # steps; the horizon of the schedule
max_tokens = 0  # tokens; when set, max_steps = max_tokens // batch_tokens
tokens_per_parameter = 0.0  # tokens per parameter; when set, max_tokens follows from it
warmup_steps = 700  # steps of linear warmup
decay_ratio = 0.2  # share of the run in which wsd decays, at its end
min_lr_ratio = 0.1  # final rate / peak rate
# -- evaluation
eval_interval = 500  # steps between evaluations; 0 = only at the horizon
eval_tokens = 10485760  # tokens of val in an evaluation before the horizon; 0 = all of val
sample_interval = 2000  # steps between samples and probes; 0 = off
sample_tokens = 120  # tokens in a sample
prompts_file = "data/prompts.txt"  # one prompt a line, \n for a line break; '' = from the start of a document
probes_file = "data/probes.jsonl"  # facts for which P(right) / (P(right) + P(wrong)) is told with the samples; '' = off
control_tolerance = 0.001  # nats; how far the 8 control windows' loss may lie from the recorded one after loading
# -- checkpoint
checkpoint_interval = 500  # steps between checkpoints; 0 = only at the end of a session
keep_checkpoints = 2  # newest checkpoints to keep
milestone_interval = 0  # steps between milestones (weights only, kept for ever); 0 = off
milestone_at_segment_end = False  # a milestone too where all data are drawn and appended ones may be taken up
stop_after_steps = 0  # stop this session after so many steps; 0 = off
stop_at_segment_end = False  # stop this session there, before data are drawn once more
session_minutes = 0.0  # stop this session in time for a last save; 0 = off
min_free_gb = 0.0  # GB; refuse to start with less free disk
# -- hub: checkpoints go to a repository of the Hugging Face Hub, and a session on an empty disk goes on from there
hub_repo = ""  # 'owner/name'; the token comes from HF_TOKEN or the client's login; '' = off
hub_private = True  # whether a repository that is made is private
hub_verify = "sample"  # what is read back after a push: 'sample' (ranges of large files), 'full' (every byte)
hub_keep = 2  # newest checkpoints to keep there
hub_max_gb = 80.0  # GB; above it the repository's history is squashed, and where that is not enough pushing stops
hub_prune_local = False  # delete older checkpoints here once a newer one is safe there
hub_exit_minutes = 10.0  # how long the end of a session waits for the last push; after a signal it is seconds
# -- logging
log_interval = 10  # steps between rows of metrics.jsonl and live lines
wandb_log = False  # copy rows, events, evaluations and samples to wandb; without a key or a network, into out_dir/wandb
wandb_project = "longhaul"  # of wandb
wandb_run_name = ""  # as wandb shows it; '' = the name of out_dir
trace_windows = False  # write the windows of every step to windows.jsonl
# -- system
device = "auto"  # 'auto', 'cuda', 'mps', 'cpu'
dtype = "auto"  # compute: 'auto', 'float32', 'bfloat16', 'float16' (with loss scaling)
compile = "auto"  # 'auto' (on for CUDA cards of capability 8 and up), 'on', 'off'
activation_checkpointing = False  # recompute activations in the backward pass: less memory, a third more work
loss_chunk_tokens = 0  # tokens of logits held at a time; 0 = all
deterministic = False  # deterministic kernels only (same bits on GPU and under compile), slower
reproducible = False  # the same bits for 1, 2, 4 or 8 ranks: one fixed tree of sums; float32 on CPU, a thread a rank
# -- guards
max_bad_steps = 10  # steps with a non-finite loss or gradient in a row before the run stops
price_per_hour = 0.0  # of all machines of the run, in any money; live lines then tell what is spent
price_per_kwh = 0.0  # of the energy that the GPUs take, in the same money
peak_tflops = 0.0  # TFLOP/s of the device, for MFU; 0 = from the table in preflight.py

if __name__ == "__main__":
    configurator.configure(globals(), sys.argv[1:])  # before torch is imported: a typo is answered at once

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import os
import secrets
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
import hub
import preflight
import sample
import watch
from checkpoint import Failed
from data import prepare as data_prepare
from data.shuffle import hash64, permute
from model import GPT, GPTConfig, expected_first_loss, first_loss, flops_per_token, parameter_counts, with_weights
from preflight import Interrupt, finite, on_device, seed_device, to_host
from ranks import from_rank_0, patiently_from_rank_0, share_of, signals_heard, start_ranks

IMPORT_SECONDS = time.perf_counter() - STARTED
ADAM_EPS = 1e-8
MUON_FIRST_MOMENTUM, MUON_WARMUP_UPDATES = 0.85, 300  # then muon_momentum
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Source: Jordan et al., "Muon", 2024: the quintic's coefficients
FIRST_LOSS_SCALE, LOSS_SCALE_GROWTH_STEPS = 2.0**16, 2000  # float16; it doubles after so many without overflow
CONTROL_WINDOWS = 8
READ_STEPS, READ_TOKENS = 256, 2**21  # most that are read at once: after a step, with cold caches, few cost like many
MIX_BLOCK = 10_000  # windows after each of which the shares of a mixture are exact
CPU_EVAL_TOKENS = 1024  # in one evaluation forward on CPU, or 8 windows: fixed, so that batch_size changes no bit of it
DROP_STEP_AFTER_S, CONTROL_AFTER_SIGNAL_S = 10.0, 5.0  # after a signal: when a step, and a control loss, are given up
STEPS_READ_LATE = {"cuda": 1}  # on a GPU the host reads a step's outcome while the next step runs
RANK_TIMEOUT_S = 600  # a rank that has not answered for so long ends the session
SPIKE_DEVIATIONS, SPIKE_STEPS = 6.0, 64  # a loss so far above its running mean over about so many steps is an event
REQUESTS = ("signal", "minutes", "data", "save", "drop")  # what any rank can ask for; agreed with each step's sum


# ---- data: which windows a step takes, and their tokens ----------------------------------------------------

# One time through `tokens` tokens from first_token on: `windows` windows of the job from `first` on.
Pass = collections.namedtuple("Pass", "number first windows first_token tokens")


@functools.lru_cache(2)
def mixed_block(block, mixture, data_seed):
    """MIX_BLOCK windows of the job from MIX_BLOCK * block on: the source of each, and its number in it (int64 arrays).

    At the ends of blocks every source has had its share of all windows, to less than one; where in a block they lie is
    drawn. The windows of a source keep their order, so that its passes follow one another."""
    before, after = (mixture.windows_before(MIX_BLOCK * number) for number in (block, block + 1))
    places = permute(np.arange(MIX_BLOCK), MIX_BLOCK, hash64(data_seed, "mixture", mixture.seed, block))
    sources = np.repeat(np.arange(len(before)), after - before)[places.astype(np.int64)]
    numbers = np.empty_like(sources)
    numbers[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(*ends) for ends in zip(before, after)])
    return sources, numbers


def draw_mixed(first, count, mixture, data_seed, block_size):
    """draw_windows over several sources, each with passes of its own; the fourth array is the source of each window."""
    blocks = range(first // MIX_BLOCK, (first + count - 1) // MIX_BLOCK + 1)
    both = np.concatenate([mixed_block(block, mixture, data_seed) for block in blocks], axis=1)
    sources, numbers = both[:, first % MIX_BLOCK:][:, :count]
    drawn = np.stack([sources] * 4)
    for source in np.unique(sources).tolist():
        mine, key = sources == source, hash64(data_seed, "source", mixture.seed, source)
        order = ((0, mixture.sources[source].tokens),)
        drawn[:3, mine] = draw_windows(int(numbers[mine][0]), int(mine.sum()), order, key, block_size)
        drawn[2, mine] += mixture.sources[source].first_token
    return tuple(drawn)


def tokens_by_source(windows, order, data_seed, block_size):
    """{'source_tokens': {name: how many of its tokens were drawn}} after so many windows of a mixture, else {}."""
    if len(order[0]) == 2:
        return {}
    mixture, (block, more) = order[0][2], divmod(windows, MIX_BLOCK)
    partly = np.bincount(mixed_block(block, mixture, data_seed)[0][:more], minlength=len(mixture.sources))
    taken = (mixture.windows_before(MIX_BLOCK * block) + partly) * block_size
    return {"source_tokens": {source.name: count for source, count in zip(mixture.sources, taken.tolist())}}


def pass_of(window, order, block_size):
    """The pass that holds a window of the job.

    `order`: [(first window of the job, train tokens then), ...], one entry per growth of the data. After a growth the
    next pass runs over the tokens that no pass has covered, the passes after it over everything. A mixture is a third
    member of the one entry, whose tokens count as a pass."""
    number = covered = 0
    for (first, total, *_), (end, *_) in zip(order, [*order[1:], (math.inf, 0)]):
        fresh = (total - covered - 1) // block_size if covered else 0
        if fresh > 0:
            if window < first + fresh:
                return Pass(number, first, fresh, covered, total - covered)
            number, first = number + 1, first + fresh
        every = (total - 1) // block_size
        whole = (min(window, end - 1) - first) // every
        if window < end:
            return Pass(number + whole, first + whole * every, every, 0, total)
        number, covered = number + (end - first) // every, total
    raise AssertionError(f"window {window} lies before the first segment of {order}")


def draw_windows(first, count, order, data_seed, block_size):
    """Windows first .. first+count-1 of the job as three int64 arrays: pass, window within the pass, first token.

    A pure function: the whole job's list, whatever the ranks; dealt to micro-batches in runs of batch_size afterwards.
    Each pass has its own permutation and its own offset below one window, so it draws each of its windows once.
    """
    if len(order[0]) > 2:
        return draw_mixed(first, count, order[0][2], data_seed, block_size)
    drawn = []
    while count:
        part = pass_of(first, order, block_size)
        take = min(count, part.first + part.windows - first)
        index = np.arange(first - part.first, first - part.first + take, dtype=np.uint64)
        windows = permute(index, part.windows, hash64(data_seed, "pass", part.number)).astype(np.int64)
        offset = hash64(data_seed, "offset", part.number) % ((part.tokens - 1) % block_size + 1)
        drawn.append((np.full(take, part.number), windows, part.first_token + offset + windows * block_size))
        first, count = first + take, count - take
    return tuple(np.concatenate(column) for column in zip(*drawn))


def pass_starting_in(first, count, order, block_size):
    """The first window in first .. first+count-1 that starts a pass after the run's first, or None."""
    part = pass_of(first, order, block_size)
    start = first if first == part.first and first > 0 else part.first + part.windows
    return start if start < first + count else None


def window_ids(drawn):
    """[[pass, window], ...] of what draw_windows gave; of a mixture [[pass, window, source], ...]."""
    return np.stack([*drawn[:2], *drawn[3:]], axis=1).tolist()


def token_order(segments):
    """The `order` of pass_of, from trainer.json's segments [[first window, shard list], ...]."""
    if len(segments[0]) > 2:
        return data_prepare.mixed_order(segments[0][2])
    return tuple((first, sum(shard["tokens"] for shard in shards)) for first, shards in segments)


def to_batch(windows, device):
    """idx_BT and targets_BT (int64, on `device`) of windows as read, [..., T + 1]; targets are one token ahead."""
    batch = torch.from_numpy(windows)
    if device.type == "cuda":
        batch = batch.pin_memory()  # from the caching host allocator, which reuses a block only after its copy is done
    batch = batch.to(device, non_blocking=True)
    return batch[..., :-1], batch[..., 1:]


# ---- schedule ----------------------------------------------------------------------------------------------

def lr_factor(i, schedule, horizon, warmup_steps, decay_ratio, min_lr_ratio):
    """The factor on both learning rates in the i-th step (0-based)."""
    if i < warmup_steps:
        return (i + 1) / warmup_steps
    decay_steps = round(decay_ratio * horizon)
    if schedule == "wsd" and i >= horizon - decay_steps:
        return min_lr_ratio + (1 - min_lr_ratio) * (horizon - i) / decay_steps
    if schedule == "cosine":
        progress = (i - warmup_steps) / max(1, horizon - 1 - warmup_steps)
        return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


# ---- optimizer ---------------------------------------------------------------------------------------------

@dataclass
class Optimizer:
    """Parameters in groups, their state by parameter name, and numbers that live on the device, so that no step waits
    for the host. `flat` holds all gradients and in its tail what ranks must agree on: one exchange a step does both."""
    groups: list  # [(kind, decays, [(name, parameter), ...]), ...]; kind 'adamw' or 'muon'
    state: dict  # 'exp_avg.NAME', 'exp_avg_sq.NAME', 'momentum.NAME' -> float32 tensor
    flat: torch.Tensor  # float32: gradients of all parameters, then loss, requests and memory of each rank
    gradients: torch.Tensor  # the head of `flat`; every parameter's .grad is a view of it
    tail: torch.Tensor  # the rest of it
    updates: torch.Tensor  # applied steps: AdamW's bias correction and the momentum warmup follow it
    loss_scale: torch.Tensor  # 1 but in float16
    growth: torch.Tensor  # applied steps since the loss scale last changed
    halted: torch.Tensor  # 1 once a step was dropped: nothing is applied after that
    scaling: bool  # float16: the loss scale moves
    betas: tuple
    weight_decay: float
    momentum: float
    grad_clip: float
    heads: tuple  # query heads, key and value heads, head width
    matrix_dtype: torch.dtype  # of Newton-Schulz
    blocks: int = 0  # the parts of a step that are summed in a fixed tree; 0 = one plain sum
    spare: list = field(default_factory=list)  # memory for partial sums of the tree


def group_parameters(model, optimizer):
    """[(kind, decays, [(name, parameter), ...]), ...] with each parameter in exactly one group.

    Muon takes the matrices of the blocks; embeddings, head and vectors stay with AdamW. 2-D parameters decay.
    """
    groups = {("muon", True): [], ("adamw", True): [], ("adamw", False): []}
    for name, parameter in model.named_parameters():
        kind = "muon" if optimizer == "muon" and name.startswith("h.") and parameter.ndim == 2 else "adamw"
        groups[kind, parameter.ndim == 2].append((name, parameter))
    return [(kind, decays, named) for (kind, decays), named in groups.items() if named]


def new_optimizer(model, optimizer, ranks, scaling, **constants):
    """A fresh Optimizer; all state is there from the start, so that all ranks and checkpoints have the same keys."""
    groups = group_parameters(model, optimizer)
    state = {f"{slot}.{name}": torch.zeros_like(parameter) for kind, _, named in groups for name, parameter in named
             for slot in (("momentum",) if kind == "muon" else ("exp_avg", "exp_avg_sq"))}
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(count + 1 + len(REQUESTS) + ranks.world_size, device=ranks.device)
    parts = flat[:count].split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts):
        parameter.grad = part.view_as(parameter)
        parameter.register_post_accumulate_grad_hook(functools.partial(into_place, place=parameter.grad))
    updates, growth, halted = (torch.zeros((), device=ranks.device) for _ in range(3))
    loss_scale = torch.full_like(updates, FIRST_LOSS_SCALE if scaling else 1.0)
    return Optimizer(groups, state, flat, flat[:count], flat[count:], updates, loss_scale, growth, halted, scaling,
                     **constants)


def into_place(parameter, place):
    """Puts the gradient of a step's first micro-batch where the others are added to it: copying it costs two thirds of
    adding it to zeros, and the zeros need not be written."""
    if parameter.grad is not place:
        parameter.grad = place.copy_(parameter.grad)


def adamw_update(opt, named, lr, weight_decay, skip):
    """One AdamW update of the named parameters in place, nothing at all where `skip` is 1.

    The kernel is the one behind torch.optim.AdamW(fused=True), which takes the flag from the device.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2."""
    averages, squares = ([opt.state[slot + name] for name, _ in named] for slot in ("exp_avg.", "exp_avg_sq."))
    torch._fused_adamw_([p for _, p in named], [p.grad for _, p in named], averages, squares, [],
                        [opt.updates] * len(named), lr=lr, beta1=opt.betas[0], beta2=opt.betas[1],
                        weight_decay=weight_decay, eps=ADAM_EPS, amsgrad=False, maximize=False, found_inf=skip)


def orthogonalise(matrices_NRC, dtype):
    """The nearest semi-orthogonal matrix to each of a stack, roughly: singular values end in about 0.7 to 1.2.

    Five Newton-Schulz steps on X / ||X||, normalised in float32 before the cast.
    Source: Jordan et al., "Muon", 2024."""
    a, b, c = NEWTON_SCHULZ
    x = (matrices_NRC / (matrices_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # aX + (bA + cAA)X
    return (x.mT if tall else x).float()


def matrices_of(name, tensor, heads):
    """The matrices in a parameter: queries, keys and values are stored as one and orthogonalised apart."""
    if not name.endswith("attn.c_attn.weight"):
        return [tensor]
    n_head, n_kv_head, width = heads
    return list(tensor.split([n_head * width, n_kv_head * width, n_kv_head * width]))


def muon_update(opt, named, lr, weight_decay, skip):
    """One Muon update of the named matrices in place, nothing where `skip` is 1.

    Momentum as an exponential average with Nesterov's look-ahead, then the nearest semi-orthogonal matrix times
    sqrt(max(1, rows / columns)). Matrices of one shape go through Newton-Schulz as one stack.
    Source: Jordan et al., "Muon", 2024; decoupled decay as in Liu et al., "Muon is scalable for LLM training", 2025."""
    applied = 1 - skip
    first = min(MUON_FIRST_MOMENTUM, opt.momentum)
    beta = first + (opt.momentum - first) * (opt.updates / MUON_WARMUP_UPDATES).clamp(max=1)
    stacks = {}
    for name, parameter in named:
        gradient = torch.where(skip > 0, 0, parameter.grad)
        average = opt.state["momentum." + name].lerp_(gradient, (1 - beta) * applied)
        ahead = torch.lerp(gradient, average, beta)
        for matrix, update in zip(matrices_of(name, parameter.data, opt.heads), matrices_of(name, ahead, opt.heads)):
            stacks.setdefault(matrix.shape, []).append((matrix, update))
    for (rows, columns), pieces in stacks.items():
        updates_NRC = orthogonalise(torch.stack([update for _, update in pieces]), opt.matrix_dtype)
        step_NRC = updates_NRC * (lr * max(1, rows / columns) ** 0.5 * applied)
        for (matrix, _), step in zip(pieces, step_NRC):
            matrix.mul_(1 - lr * weight_decay * applied).sub_(step)


# ---- evaluation --------------------------------------------------------------------------------------------

def window_losses(model, forward, stream, starts, group, block_size, device, autocast, cut_short):
    """Each window's loss summed over its tokens in float64, in the order of `starts`; fewer where cut_short() is true.

    A window's loss must not depend on what it is read with. On a GPU each forward has `group` windows (one shape to
    compile; the last is filled up with some twice). On CPU each has one thread, uncompiled, and several run side by
    side: a product split over threads may round otherwise."""
    cpu, threads, training = device.type == "cpu", torch.get_num_threads(), model.training

    @torch.no_grad()
    def sums_of(batch):
        with autocast():
            losses_BT = (model.forward if cpu else forward)(*batch)
        return losses_BT.cpu().double().sum(dim=1).tolist()

    filled, sums = starts if cpu else np.resize(starts, -(-len(starts) // group) * group), []
    groups = [filled[first:first + group] for first in range(0, len(filled), group)]
    model.eval()
    with concurrent.futures.ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for first in range(0, len(groups), threads):
            if cut_short():
                break
            batches = [to_batch(stream.windows(windows, block_size + 1), device)
                       for windows in groups[first:first + threads]]
            sums.extend(number for part in (pool.map if cpu else map)(sums_of, batches) for number in part)
    model.train(training)
    return sums[:len(starts)]


def evaluate(model, ranks, stream, starts, group, block_size, autocast, token_bytes, interrupt, sources):
    """Mean loss over the windows at `starts`, dealt to all ranks in groups and summed in window order. The `sources` of
    a mixture count by their shares and have a loss each; other data are one source without a name.

    `token_bytes`: the bytes of text that each id stands for, or None. Returns the fields of an `eval` event, val_loss
    in nats per token; not complete, and without numbers, where a signal cut it short. Ranks: all (one exchange)."""
    began = time.perf_counter()
    groups = share_of(-(-len(starts) // group), ranks)
    first, mine = groups.start * group, starts[groups.start * group:groups.stop * group]
    sums = window_losses(model, model, stream, mine, group, block_size, ranks.device, autocast, lambda: interrupt.name)
    table = torch.zeros(3, len(starts), dtype=torch.float64)  # of each window: loss, bytes of text, done
    table[0, first:first + len(sums)] = torch.tensor(sums, dtype=torch.float64)
    table[2, first:first + len(sums)] = 1
    for i, start in enumerate(mine[:len(sums)] if token_bytes is not None else ()):
        table[1, first + i] = float(token_bytes[stream.windows([start + 1], block_size)].sum())
    if ranks.world_size > 1:
        table = table.to(ranks.device)
        dist.all_reduce(table)  # each window has one rank's number and zeros: the sum is exact
    loss, text_bytes, done = table.cpu().tolist()
    result = {"split": "val", "val_loss": None, "bits_per_byte": None, "perplexity": None, "windows": len(starts),
              "complete": all(done), "seconds": round(time.perf_counter() - began, 3)}
    if result["complete"]:
        result |= data_prepare.losses_by_source(sources, starts, loss, block_size)
        loss, text_bytes = (data_prepare.by_share(sources, starts, column) for column in (loss, text_bytes))
        mean = sum(loss) / (len(starts) * block_size)
        result["val_loss"], result["perplexity"] = finite(mean), finite(math.exp(min(mean, 700.0)))
        result["bits_per_byte"] = finite(sum(loss) / math.log(2) / sum(text_bytes)) if any(text_bytes) else None
    return result


def validation_starts(stream, block_size, eval_tokens):
    """First tokens of the fixed validation windows: all, or so many spread evenly that eval_tokens are reached."""
    windows = max(0, (len(stream) - 1) // block_size)
    wanted = min(windows, -(-eval_tokens // block_size)) if eval_tokens else windows
    return np.arange(wanted, dtype=np.int64) * windows // max(1, wanted) * block_size


def control_loss(model, stream, block_size, device, interrupt):
    """Mean loss on the first windows of `stream`, in float32, window by window: a loaded model must reproduce it.

    None where it would take too long after a signal."""
    starts = np.arange(min(CONTROL_WINDOWS, (len(stream) - 1) // block_size)) * block_size
    sums = window_losses(model, model.forward, stream, starts, 1, block_size, device, contextlib.nullcontext,
                         lambda: time.monotonic() > interrupt.at + CONTROL_AFTER_SIGNAL_S)
    return sum(sums) / (len(starts) * block_size) if len(sums) == len(starts) else None


# ---- checkpoints: what goes into one, and what is taken from it --------------------------------------------

@dataclass
class Run:
    """What identifies this run and what the loop changes; trainer.json holds it."""
    run: str = ""  # drawn at step 0, for ever
    lineage: list = field(default_factory=list)  # [[session nonce, first step], ...]
    session: int = 0
    step: int = 0  # completed steps, applied or skipped
    segments: list = field(default_factory=list)  # [[first window of the job, train shard list], ...]
    bad_steps: int = 0  # in a row, up to now
    bad_windows: list = field(default_factory=list)  # [[step, window ids], ...] of these
    loss_spread: list = field(default_factory=lambda: [0, 0.0, 0.0])  # applied steps, running mean and variance
    best_val_loss: float | None = None
    horizon: int = 0  # the step the schedule is planned for


def order_fingerprint(windows, order, data_seed, block_size):
    """A hash of the first windows of the pass at the cursor: another permutation in the same place would show."""
    part = pass_of(windows, order, block_size)
    head = draw_windows(part.first, min(64, part.windows), order, data_seed, block_size)
    return hashlib.sha256(json.dumps([column.tolist() for column in head]).encode()).hexdigest()


def trainer_record(run, opt, settings, manifest, host):
    """trainer.json but for `control`: everything of a checkpoint that is not a tensor of model or optimizer."""
    tokens, block_size, order = run.step * settings["batch_tokens"], settings["block_size"], token_order(run.segments)
    windows = tokens // block_size
    assert windows * block_size == tokens, "the cursor counts whole windows"
    return {
        "format": 1, "run": run.run, "lineage": run.lineage, "session": run.session, "step": run.step,
        "updates": int(opt.updates), "bad_steps": run.bad_steps, "bad_windows": run.bad_windows,
        "windows": windows, "tokens": tokens, "pass": pass_of(windows, order, block_size).number,
        "order_fingerprint": order_fingerprint(windows, order, settings["data_seed"], block_size),
        "data_fingerprint": data_prepare.fingerprint(manifest | {"train": run.segments[-1][1]}),
        "segments": list(run.segments), "settings": settings,  # a copy: the list may grow before this is written
        "scaler": {"scale": float(opt.loss_scale), "growth_steps": int(opt.growth)},
        "best_val_loss": run.best_val_loss, "loss_spread": run.loss_spread, "wandb_run_id": run.run,
    } | tokens_by_source(windows, order, settings["data_seed"], block_size) | host


def tensors_of(model, opt):
    """The tensors of a checkpoint by file and name, as they live on the device."""
    return {"model.safetensors": {name: parameter.detach() for name, parameter in model.named_parameters()},
            "optimizer.safetensors": opt.state}


def records_of(run, opt, config, settings, manifest, host, control, at_once):
    """A function for the JSON files of a checkpoint of this very step, or of a milestone. The control loss is computed
    here where `at_once`, else where that function is called. Ranks: rank 0."""
    trainer = trainer_record(run, opt, settings, manifest, host)
    loss = control() if at_once else None
    model = {"format": 1, "model": asdict(config), "tokenizer": manifest["tokenizer"]}
    return lambda whole: data_prepare.tokenizer_file(settings["data_dir"], manifest) | {"model.json": model} | ({
        "trainer.json": trainer | {"control": finite(loss if at_once else control())}} if whole else {})


def take_over(trainer, run, opt, manifest, settings):
    """Checks that settings and data are those of the recorded run, takes its counters over, and returns the settings
    that differ as {name: [recorded, now]}. Raises ValueError where it is not the same run."""
    recorded, shards = trainer["settings"], trainer["segments"][-1][1]
    preflight.check_resume(recorded, settings)
    preflight.check_horizon(settings["schedule"], settings["decay_ratio"], trainer["step"], recorded["max_steps"],
                            settings["max_steps"])
    data_prepare.grown(shards, manifest["train"])  # shards may have been appended since, not changed
    data_prepare.check_fingerprint(manifest | {"train": shards}, trainer["data_fingerprint"], settings["data_dir"])
    if trainer["order_fingerprint"] != order_fingerprint(trainer["windows"], token_order(trainer["segments"]),
                                                         settings["data_seed"], settings["block_size"]):
        raise ValueError("the order of windows at the cursor is not the recorded one: the code has changed")
    for name in ("run", "lineage", "step", "segments", "bad_steps", "bad_windows", "loss_spread", "best_val_loss"):
        setattr(run, name, trainer.get(name, getattr(run, name)))
    opt.updates.fill_(trainer["updates"])
    if recorded["dtype"] == settings["dtype"]:
        opt.loss_scale.fill_(trainer["scaler"]["scale"])
        opt.growth.fill_(trainer["scaler"]["growth_steps"])
    return {name: [recorded[name], now] for name, now in settings.items() if name in recorded and recorded[name] != now}


def load_state(ranks, folder, model, opt, init_seed):
    """Puts a folder's tensors, read on rank 0, into every rank's model and, unless it is None, optimizer; without a
    folder first weights, drawn on rank 0. No rank but 0 needs the disk. Ranks: all (one broadcast a tensor)."""
    parameters, state, held = dict(model.named_parameters()), opt.state if opt else {}, {}
    from_rank_0(ranks, lambda: held.update(checkpoint.read_all(folder, parameters, state)) if folder else
                model.init_weights(init_seed))
    with torch.no_grad():
        for name, tensor in [*parameters.items(), *state.items()]:
            if name in held:
                tensor.copy_(held.pop(name))
            if ranks.world_size > 1:
                dist.broadcast(tensor.data, src=0)


# ---- the step ----------------------------------------------------------------------------------------------

def all_sum(flat, ranks, in_a_tree):
    """Sums `flat` over ranks, in place. In a tree: with the neighbour, the pair beside, the four beside; both sides
    add the same two numbers, so every rank gets the same bits. Ranks: all (all-reduce or exchanges)."""
    if ranks.world_size == 1 or not in_a_tree:
        return dist.all_reduce(flat) if ranks.world_size > 1 else None
    theirs, distance = torch.empty_like(flat), 1
    while distance < ranks.world_size:
        partner = ranks.rank ^ distance
        for exchange in (dist.isend(flat, partner), dist.irecv(theirs, partner)):
            exchange.wait()
        flat.add_(theirs)
        distance *= 2


def close_block(flat, sums, spare, blocks):
    """Puts a finished block of micro-batches into the tree ((1 + 2) + (3 + 4)) + ...; `blocks` are finished now.

    Partial sums lie in `sums`, in memory that is kept in `spare` from step to step."""
    while blocks % 2 == 0:
        spare.append(sums.pop())
        flat.add_(spare[-1])
        blocks //= 2
    sums.append((spare.pop() if spare else torch.empty_like(flat)).copy_(flat))
    flat.zero_()


def train_step(model, ranks, opt, count, autocast, lr, muon_lr, micro_batches, dropout_key, wishes, interrupt):
    """One step: this rank's micro-batches, one exchange of gradients, one decision, one update.

    `micro_batches` yields this rank's (index in the step, (idx_BT, targets_BT)); `count` is their number over all
    ranks; `wishes`: REQUESTS of this rank beside signal and drop. The decision to skip is a device tensor folded into
    every update, so the host waits for nothing here.
    Returns the outcome as a device vector that outcome_of reads. Ranks: all (one sum over ranks)."""
    opt.tail.zero_()
    places = [(parameter, parameter.grad) for _, _, named in opt.groups for _, parameter in named]
    for parameter, _ in places:
        parameter.grad = None  # `into_place` takes what comes first
    dropped, sums = False, []
    for done, (index, batch) in enumerate(micro_batches, start=1):
        if dropped := time.monotonic() > interrupt.at + DROP_STEP_AFTER_S:
            break
        if dropout_key:
            draw = hash64(*dropout_key, index)
            seed_device(ranks.device, (draw >> 32) ^ (draw & 0xFFFFFFFF))  # the CPU's generator ignores all but 32 bits
        with autocast():
            loss = model(*batch).mean()
        (loss * opt.loss_scale).backward()
        opt.tail[0] += loss.detach()
        if opt.blocks and done * opt.blocks % count == 0:
            close_block(opt.flat, sums, opt.spare, done * opt.blocks // count)
    for parameter, place in places:
        if parameter.grad is None:  # dropped before the first micro-batch
            parameter.grad = place.zero_()
    opt.spare.extend(sums)
    if sums:
        opt.flat.copy_(sums[-1])
    memory = [0.0] * ranks.world_size
    memory[ranks.rank] = preflight.peak_memory_gb(ranks.device)
    asked = [bool(interrupt.name), *(name in wishes for name in REQUESTS[1:-1]), dropped]
    opt.tail[1:] = on_device([*asked, *memory], ranks.device)
    all_sum(opt.flat, ranks, opt.blocks)

    # every micro-batch has the same number of tokens: the sum of means over `count` is the mean over the step's tokens
    scale = opt.loss_scale * count
    loss, grad_norm = opt.tail[0] / count, torch.linalg.vector_norm(opt.gradients) / scale
    bad_loss, bad_gradient = ~loss.isfinite(), ~grad_norm.isfinite()
    opt.halted.copy_(torch.maximum(opt.halted, opt.tail[1 + REQUESTS.index("drop")]).clamp(max=1))
    skip = (bad_loss | bad_gradient | (opt.halted > 0)).float()
    outcome = torch.stack([loss, grad_norm, bad_loss.float(), bad_gradient.float(), opt.halted, opt.loss_scale])
    outcome = torch.cat([outcome, opt.tail[1:]])

    clip = (opt.grad_clip / (grad_norm + 1e-6)).clamp(max=1) if opt.grad_clip else 1.0
    opt.gradients.mul_(clip / scale)
    opt.updates.add_(1 - skip)
    with torch.no_grad():
        for kind, decays, named in opt.groups:
            if kind == "adamw":
                adamw_update(opt, named, lr, opt.weight_decay * decays, skip)
            else:
                muon_update(opt, named, muon_lr, opt.weight_decay * decays, skip)
    if opt.scaling:
        overflow = bad_gradient & ~bad_loss & (opt.halted == 0) & (opt.loss_scale > 1)
        grown = opt.growth + (1 - skip)
        full = grown >= LOSS_SCALE_GROWTH_STEPS
        opt.growth.copy_(torch.where(overflow | full, 0, grown))
        opt.loss_scale.mul_(torch.where(overflow, 0.5, torch.where(full, 2.0, 1.0)))
    return outcome


# What a step has come to. verdict: 'applied', 'overflow', 'bad' or 'dropped'; stop: why a rank asks for it, or ''.
Outcome = collections.namedtuple("Outcome", "loss grad_norm verdict loss_scale stop mem_gb")


def outcome_of(numbers, scaling):
    """The Outcome in the numbers that train_step gave, now on the host; mem_gb is the largest over ranks."""
    loss, grad_norm, bad_loss, bad_gradient, halted, loss_scale = numbers[:6]
    signalled, minutes, data, save, dropped, *memory = numbers[6:]
    verdict = ("dropped" if halted else "overflow" if scaling and bad_gradient and not bad_loss and loss_scale > 1
               else "bad" if bad_loss or bad_gradient else "applied")
    stop = ("data" if data else "save" if save else "signal" if signalled or dropped else "minutes" if minutes else "")
    return Outcome(loss, grad_norm, verdict, loss_scale, stop, max(memory))


def is_spike(run, loss):
    """Whether a loss lies far above its running mean; it is counted in, a spike only as far as the limit.

    Source: Finch, "Incremental calculation of weighted mean and variance", 2009, section 9."""
    count, mean, variance = run.loss_spread
    found = count >= SPIKE_STEPS and loss > (limit := mean + SPIKE_DEVIATIONS * variance ** 0.5)
    share, ahead = 1 / min(count + 1, SPIKE_STEPS), (limit if found else loss) - mean
    run.loss_spread = [count + 1, mean + share * ahead, (1 - share) * (variance + share * ahead * ahead)]
    return found


def judge(outcome, step, run, report, drawn, max_bad_steps):
    """Counts and reports a step that was not applied or has a spike; `drawn` are its windows. Ranks: all, alike.

    Raises Failed after max_bad_steps in a row, naming the windows."""
    if outcome.verdict == "overflow":
        report("overflow", at=step, loss_scale=outcome.loss_scale)
    elif outcome.verdict == "bad":
        run.bad_steps, run.bad_windows = run.bad_steps + 1, [*run.bad_windows, [step, window_ids(drawn)]]
        report("skip", at=step, loss=finite(outcome.loss), grad_norm=finite(outcome.grad_norm), in_a_row=run.bad_steps,
               windows=run.bad_windows[-1][1])
        if run.bad_steps >= max_bad_steps:
            raise Failed(preflight.bad_steps_text(run, step, max_bad_steps), "bad_steps")
    else:
        run.bad_steps, run.bad_windows, mean = 0, [], run.loss_spread[1]
        if is_spike(run, outcome.loss):
            report("spike", at=step, loss=finite(outcome.loss), running_mean=finite(mean), windows=window_ids(drawn))


def metrics_row(outcome, step, session, order, batch_tokens, block_size, mfu_each, at, steps, step_s, data_s):
    """A row of metrics.jsonl but for learning rates and disk; the seconds are of the `steps` steps since the last row,
    which were done `at` a time of the day. mfu_each: the MFU of one token/s, 0 where no peak is known."""
    windows, tokens_per_s = step * batch_tokens // block_size, steps * batch_tokens / step_s
    part = pass_of(windows, order, block_size)
    return {"session": session, "step": step, "tokens": step * batch_tokens, "windows": windows,
            "epoch": round(part.number + (windows - part.first) / part.windows, 6), "loss": finite(outcome.loss),
            "grad_norm": finite(outcome.grad_norm), "tokens_per_s": finite(tokens_per_s),
            "mfu": finite(tokens_per_s * mfu_each) if mfu_each else None,
            "step_ms": finite(1000 * step_s / steps), "data_ms": finite(1000 * data_s / steps),
            "mem_gb": finite(outcome.mem_gb), "time": round(at, 3)}


# ---- main --------------------------------------------------------------------------------------------------

def main():
    """Trains as the settings say. Exits 2 on what a person can mend before the first step, else 1. Ranks: all."""
    settings, session_began = configurator.settings(globals()), time.monotonic() - IMPORT_SECONDS
    lead, writes = int(os.environ.get("RANK", 0)) == 0, not (eval_only or dry_run)
    interrupt, run, stages = Interrupt(), Run(), preflight.Stages(imports=IMPORT_SECONDS)
    journal = checkpoint.Journal(out_dir, lead and writes, run)
    report, say = journal.report, preflight.say if lead else lambda text: None
    with contextlib.ExitStack() as at_exit:
        at_exit.enter_context(journal.answering_errors())
        preflight.check_settings(settings)
        kind = preflight.pick_device(device)
        ranks = at_exit.enter_context(start_ranks(kind, reproducible, interrupt, RANK_TIMEOUT_S))
        at_exit.callback(preflight.set_kernels(kind, deterministic))
        stages.end("ranks")

        # data and model
        manifest = from_rank_0(ranks, data_prepare.open_data, data_dir, prepare)
        vocabulary = preflight.vocabulary_of(vocab_size, manifest["vocab_size"], data_dir)
        tokenizer = data_prepare.open_tokenizer(manifest, say, data_dir) if lead else None
        token_bytes = from_rank_0(ranks, lambda: tokenizer and tokenizer.token_bytes())
        prompts = from_rank_0(ranks, preflight.read_prompts, prompts_file) if sample_interval else []
        probes = from_rank_0(ranks, sample.read_probes, prompts and probes_file, tokenizer, block_size, say)
        stages.end("data")
        config = GPTConfig(**{k: settings[k] for k in GPTConfig.__dataclass_fields__} | {"vocab_size": vocabulary})
        micro_batch_count = preflight.micro_batches_of(batch_tokens, block_size, batch_size, ranks.world_size)
        model = GPT(config, activation_checkpointing, loss_chunk_tokens, seed=None).to(ranks.device)
        counts = parameter_counts(model)
        run.horizon = preflight.horizon_of(max_steps, max_tokens, tokens_per_parameter, counts["total"], batch_tokens)
        stages.end("model")

        # what is resumed, or begun
        if writes:
            from_rank_0(ranks, preflight.check_disk, out_dir, min_free_gb)
            from_rank_0(ranks, checkpoint.claim, out_dir, at_exit)
            journal.claimed = True
        if hub_repo:
            known = patiently_from_rank_0(ranks, interrupt, hub.restore, hub_repo, out_dir, resume, report, say,
                                          hub_private, writes)
            stages.end("hub")
        run.session = 1 + from_rank_0(ranks, journal.last_session)
        tell = lambda event, **fields: (say(f"{event:6} {json.dumps(fields)}"), report(event, **fields))
        folder, trainer = from_rank_0(ranks, checkpoint.find, out_dir, resume, tell, writes) or (None, None)
        bf16_native = preflight.has_bf16(kind)
        compute = preflight.pick_dtype(dtype, kind, bf16_native, trainer["settings"]["dtype"] if trainer else "")
        compiled = preflight.pick_compile(compile, kind, bf16_native)
        blocks = preflight.blocks_of(micro_batch_count, ranks.world_size, kind, compute) if reproducible else 0
        settings |= asdict(config) | {"max_steps": run.horizon, "device": kind, "dtype": compute,
                                      "compile": "on" if compiled else "off"}
        opt = new_optimizer(
            model, optimizer, ranks, compute == "float16", betas=(beta1, beta2), weight_decay=weight_decay,
            momentum=muon_momentum, grad_clip=grad_clip, heads=(config.n_head, config.n_kv_head, config.head_width),
            matrix_dtype=torch.bfloat16 if bf16_native else torch.float32, blocks=blocks)
        changed = take_over(trainer, run, opt, manifest, settings) if trainer else {}
        if writes and resume.startswith("step_"):
            from_rank_0(ranks, checkpoint.rollback, out_dir, resume, tell)
        initial = init_from
        if not trainer:
            run.run, run.segments = from_rank_0(ranks, secrets.token_hex, 4), data_prepare.first_segments(manifest)
            if init_from.startswith("hf:"):
                initial = patiently_from_rank_0(ranks, interrupt, hub.fetch, init_from)
            from_rank_0(ranks, checkpoint.check_init, initial, asdict(config), init_sha256)
        load_state(ranks, folder or initial, model, opt if folder else None, hash64(seed, "init") >> 1)
        run.lineage = [*run.lineage, [from_rank_0(ranks, secrets.token_hex, 4), run.step]]
        run.session = max(run.session, trainer["session"] + 1 if trainer else 0)
        stages.end("load")

        # the data as token streams, and what stays the same from step to step
        order, per_step = token_order(run.segments), batch_tokens // block_size
        mine, draw = share_of(micro_batch_count, ranks), functools.lru_cache(2)(draw_windows)
        shards = manifest["train"][:len(run.segments[-1][1])]  # the recorded ones, under their present names
        train_stream, val_stream = (data_prepare.Tokens(data_dir, files, manifest["vocab_size"])
                                    for files in (shards, manifest["val"]))
        preflight.check_length(order[-1], block_size, data_dir)
        sources = data_prepare.val_sources(manifest, block_size)
        some_val, all_val = (np.concatenate([source.first_token + validation_starts(
            range(source.tokens), block_size, math.ceil(tokens * source.share)) for source in sources])
            for tokens in (eval_tokens, 0))
        control_stream = val_stream if len(all_val) else train_stream
        autocast = lambda: (contextlib.nullcontext() if compute == "float32"
                            else torch.autocast(kind, getattr(torch, compute)))
        group = max(8, CPU_EVAL_TOKENS // block_size) if kind == "cpu" else batch_size
        evaluation = group, block_size, autocast, token_bytes, interrupt, sources
        peak = ranks.world_size * preflight.peak_flops(kind, compute, peak_tflops)
        live = tensors_of(model, opt)
        found_loss = first_loss(model) if lead and not (trainer or init_from) else None
        preflight.describe(say, counts, flops_per_token(config), expected_first_loss(config), found_loss, train_stream,
                           order[-1][1], settings, micro_batch_count, ranks.world_size, live)
        if writes and not hub_repo and run.step >= run.horizon and from_rank_0(ranks, journal.finished):
            if wandb_log and lead:
                watch.send_rest(journal, wandb_project, wandb_run_name, say)
            return say(f"finished: run {run.run} stands at its horizon, step {run.step:,}; nothing is left to do")
        if trainer:
            say(f"resume {folder.name} of run {run.run}: session {run.session} goes on after step {run.step:,}")
            loss = from_rank_0(ranks, control_loss, model, control_stream, block_size, ranks.device, interrupt)
            report("control", recorded=trainer["control"], found=finite(loss), tolerance=control_tolerance)
            preflight.check_control(loss, trainer["control"], control_tolerance, folder)
        if compiled:
            model.compile(dynamic=False)
        stages.end("control")
        if eval_only:
            preflight.check_eval_only(trainer or init_from, len(all_val), out_dir, data_dir)
            return say(preflight.eval_line(run.step, evaluate(model, ranks, val_stream, all_val, *evaluation)))
        if dry_run:
            return say("dry run: everything up to the first step holds; nothing was written")

        # what this session begins with, on record
        host = preflight.host_record(ranks.world_size)
        start = {"run": run.run, "nonce": run.lineage[-1][0], "stages": stages.seconds, "settings": settings,
                 "parameters": counts["total"], "data_fingerprint": data_prepare.fingerprint(manifest), **host}
        from_rank_0(ranks, journal.begin, start, folder, trainer, changed, str(initial) or f"seed {seed}")

        # the loop. At a boundary: save, evaluate, sample; then stop, or do a step
        journal.started, session_ends = True, session_began + (60 * session_minutes or math.inf)
        watcher = watch.Watcher(journal, kind, (price_per_hour, price_per_kwh), say, interrupt, session_ends)
        at_exit.push(watcher.close)
        if wandb_log and lead:
            watcher.start_mirror(wandb_project, wandb_run_name)
        hasher = data_prepare.ShardHasher(data_dir, lead and data_verify == "background")
        at_exit.callback(hasher.close)
        coming = data_prepare.StepQueue(
            lambda step, steps: np.stack(draw(step * per_step, steps * per_step, order, data_seed, block_size)).reshape(
                -1, steps, per_step),
            lambda windows: [list(zip(mine, zip(*(part.split(batch_size) for part in step))))
                             for step in zip(*to_batch(windows, ranks.device))],
            slice(mine.start * batch_size, mine.stop * batch_size), READ_STEPS, READ_TOKENS)
        if lead:
            pusher = hub_repo and hub.Pusher(hub_repo, out_dir, run.run, hub_private, hub_verify, hub_keep, hub_max_gb,
                                             hub_prune_local, report, say, *known, 60 * hub_exit_minutes, interrupt)
            saver = checkpoint.Saver(
                out_dir, run.run, live, keep_checkpoints, min_free_gb, lambda: hasher.damage, report, say, pusher,
                saved_at=run.step if trainer else -1,
                touch=checkpoint_interval or milestone_interval or milestone_at_segment_end)
            at_exit.callback(saver.close)
            snapshot = with_weights(model, saver.held["model.safetensors"]) if kind == "cpu" else model
            control = functools.partial(control_loss, snapshot, control_stream, block_size, ranks.device, interrupt)
            records = functools.partial(records_of, run, opt, config, settings, manifest, host, control, kind != "cpu")

        @at_exit.push
        def outlast_the_save(_, error, __):  # ranks that fail alike wait for rank 0's, or torchrun would kill it
            while type(error) is Failed and not from_rank_0(ranks, lambda: saver.idle(60)):
                pass
        at_exit.enter_context(journal.telling_errors())
        unread, steps, step_s, took_s, data_s, first_step = collections.deque(), 0, 0.0, 0.0, 0.0, run.step
        stop = "signal" if signals_heard(ranks, interrupt) else ""  # while all was loaded
        evaluated_at, result, complete, watch_s = -1, None, True, 0.0
        wanted = len(all_val if run.step >= run.horizon else some_val)
        if trainer and (result := from_rank_0(ranks, journal.evaluation_at, run.step, wanted)):  # made after the save
            evaluated_at, run.best_val_loss = run.step, min(result["val_loss"], run.best_val_loss or math.inf)
        preflight.describe_start(say, run, out_dir, trainer, host, checkpoint_interval, eval_interval, len(all_val),
                                 evaluated_at == run.step)
        paced, mark = None, time.perf_counter()
        due = lambda interval: interval > 0 and run.step % interval == 0
        row_of = lambda step, outcome, factor, left_s, mean, *spent: metrics_row(
            outcome, step, run.session, order, batch_tokens, block_size, peak and flops_per_token(config) / peak, *spent
        ) | tokens_by_source(step * per_step, order, data_seed, block_size) | {
            "lr": learning_rate * factor, "muon_lr": muon_learning_rate * factor if optimizer == "muon" else None,
            "free_gb": preflight.free_gb_around(out_dir, time.time() // 5)}
        line_of = lambda row, step, outcome, factor, left_s, mean, *spent: preflight.live_line(
            row, run.horizon, left_s, pusher.safe_step if pusher else None, mean,
            preflight.memory_note(ranks.device, outcome.mem_gb), watcher.costs())
        while True:
            pass_start = pass_starting_in(run.step * per_step, per_step, order, block_size)
            pass_ends = bool(pass_start and pass_start > run.segments[-1][0])  # in the step that comes
            boundary = stop or run.step >= run.horizon or pass_ends or any(
                map(due, (checkpoint_interval, milestone_interval, eval_interval, sample_interval)))
            while len(unread) > (0 if boundary else STEPS_READ_LATE.get(kind, 0)):
                step, read, factor, drawn = unread.popleft()
                outcome = outcome_of(read(), opt.scaling)
                took_s, mark = time.perf_counter() - mark, time.perf_counter()
                steps, step_s = steps + 1, step_s + took_s
                paced = paced or (step, time.monotonic())  # the time left is by what came after: no compilation
                stop = stop or outcome.stop
                if outcome.verdict == "dropped":
                    run.step -= 1
                    continue
                if stop in ("data", "save"):
                    from_rank_0(ranks, lambda: saver.wait())  # raises why
                judge(outcome, step, run, report, drawn, max_bad_steps)
                if step % log_interval == 0 or step == first_step + 1:
                    paced_s = (time.monotonic() - paced[1]) / (step - paced[0]) if step > paced[0] else took_s
                    journal.log(row_of, line_of, say, step, outcome, factor, paced_s * (run.horizon - step),
                                run.loss_spread[1], time.time(), steps, step_s, coming.seconds - data_s)
                    steps, step_s, data_s = 0, 0.0, coming.seconds
            stop = stop or ("steps" if 0 < stop_after_steps <= run.step - first_step else "")
            if stop_at_segment_end and pass_ends and not stop and (run.step > first_step or not from_rank_0(
                    ranks, data_prepare.growth, data_dir, run.segments[-1][1])):  # a session goes on with what is new
                stop = "segment"
            if stop and unread:
                continue  # settle what is in flight first
            if boundary or stop:
                journal.settle()
            at_end, in_time = run.step >= run.horizon, stop in ("", "steps", "segment")

            keeps = due(milestone_interval) or milestone_at_segment_end and pass_ends and in_time
            kinds = due(checkpoint_interval) and run.step > 0, keeps and run.step > 0
            if stop or at_end:
                while not from_rank_0(ranks, lambda: saver.finish(run.step, run.lineage[-1][0], records, kinds[1])):
                    pass
            elif any(kinds):
                while not from_rank_0(ranks, lambda: saver.begin(run.step, run.lineage[-1][0], records, *kinds)):
                    signals_heard(ranks, interrupt)
            began = time.monotonic()
            if in_time and len(all_val) and (at_end or due(eval_interval)) and run.step != evaluated_at:
                starts = all_val if at_end else some_val
                result = evaluate(model, ranks, val_stream, starts, *evaluation)
                report("eval", run=run.run, **result)
                hasher.reads(val_stream, starts, block_size)
                complete = result["complete"]
                if result["val_loss"] is not None:
                    run.best_val_loss = min(result["val_loss"], run.best_val_loss or math.inf)
                say(preflight.eval_line(run.step, result, run.best_val_loss, run.loss_spread[1]))
            if in_time and tokenizer and prompts and (at_end or due(sample_interval)):
                sections = sample.write_samples(model, tokenizer, prompts, sample_tokens, seed, out_dir, run.step,
                                                interrupt)
                if sections:
                    report("sample", prompts=len(sections), tokens=sample_tokens)
                    say("\n".join(sections if at_end else sections[:1]))
                if found := sample.probe(model, probes, interrupt):
                    report("probe", **found)
                    say(sample.probe_line(run.step, found))
            if stop or at_end:
                break
            watch_s = max(watch_s, time.monotonic() - began)
            mark = time.perf_counter() if boundary else mark  # what a boundary takes is no step's time

            # one step; where a pass ends in it, the next pass takes up the shards that were appended meanwhile
            if pass_ends:
                if grown := from_rank_0(ranks, data_prepare.growth, data_dir, run.segments[-1][1]):
                    run.segments.append([pass_start, grown])
                    order = token_order(run.segments)
                    coming.clear()
                    train_stream = data_prepare.Tokens(data_dir, grown, manifest["vocab_size"], train_stream.stamps)
                    report("append", window=pass_start, shards=len(grown), tokens=len(train_stream))
            drawn, batches = coming.take(run.step, min(run.horizon, first_step + (stop_after_steps or run.horizon)),
                                         train_stream, block_size)
            factor = lr_factor(run.step, schedule, run.horizon, warmup_steps, decay_ratio, min_lr_ratio)
            # time is kept for the step that comes, what is due after it, and what the saver knows of
            wishes = saver.wishes(session_ends, 2 * took_s + watch_s) if lead else ()
            run.step += 1
            outcome = train_step(
                model, ranks, opt, micro_batch_count, autocast, learning_rate * factor, muon_learning_rate * factor,
                batches, (seed, "dropout", run.step) if dropout else None, wishes, interrupt)
            unread.append((run.step, to_host(outcome), factor, drawn))
            hasher.reads(train_stream, drawn[2], block_size)
            if trace_windows:
                journal.line("windows.jsonl", {"session": run.session, "step": run.step, "windows": window_ids(drawn)})

        # the end of the session
        signals = signals_heard(ranks, interrupt)
        finished = run.step >= run.horizon and in_time and complete and not signals
        reason = "horizon" if finished else "signal" if signals or not complete else stop or "steps"
        if reason == "signal":
            report("signal", name=" ".join(signals))
        report("finish" if finished else "stop", reason=reason)
        while not from_rank_0(ranks, lambda: saver.pushed(in_time, session_ends)):
            signals_heard(ranks, interrupt)
        journal.status("finished" if finished else "stopped", reason)
        preflight.describe_end(say, run, out_dir, finished, reason, result, ranks.world_size, watcher.costs())


if __name__ == "__main__":
    main()
