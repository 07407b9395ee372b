"""train_step of train.py: any number of ranks, bad numbers, loss scaling, dropped steps, no host reads.

The ranks are processes over gloo: the fixture `worlds` runs this file as a script, which forks them, and they
leave what they found as files. B windows, T positions.
"""

import collections
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import preflight
import train
from model import GPT, GPTConfig
from ranks import share_of

ROOT = Path(__file__).resolve().parents[1]
GPT2 = dict(vocab_size=60, block_size=8, n_layer=2, n_head=2, n_embd=16)
MODERN = dict(GPT2, n_kv_head=1, norm="rmsnorm", position="rope", mlp="swiglu", bias=False, qk_norm=True,
              value_residual=True, tie_embeddings=False)
ONE_RANK = preflight.Ranks(0, 1, torch.device("cpu"))
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])
REPRODUCIBLE = (1, 2, 4)  # world sizes that share every bit
COUNTS = {1: (4, 5), 2: (4,), 3: (5,), 4: (4,)}  # micro-batches of a step, by world size
SHARED = pytest.mark.parametrize("world_size, count", [(2, 4), (4, 4), (3, 5)])  # to compare with one rank
SEVERAL = pytest.mark.parametrize("world_size", [2, 3, 4])
STEPS, WEIGHTS_AT = {"adamw": 50, "muon": 20}, 20
LAUNCH_S, RANKS_S = 240, 120  # bounds: of everything, and of the ranks of one world
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
               "barrier", "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter",
               "reduce_scatter_tensor", "scatter", "send", "recv")
float16 = lambda: torch.autocast("cpu", torch.float16)

# what can go wrong in a micro-batch: a function of its losses
FAULTS = {
    "nan loss": lambda loss_BT: loss_BT * math.nan,
    "nan loss, finite gradient": lambda loss_BT: loss_BT + math.nan,
    "inf loss": lambda loss_BT: loss_BT + math.inf,
    "inf gradient": lambda loss_BT: gradient_times(loss_BT, math.inf),
    "nan gradient": lambda loss_BT: gradient_times(loss_BT, math.nan),
}


def gradient_times(loss_BT, factor):
    """The same losses with a gradient that is multiplied by `factor`."""
    loss_BT = loss_BT * 1
    loss_BT.register_hook(lambda gradient: gradient * factor)
    return loss_BT


def new(kind, optimizer="adamw", ranks=ONE_RANK, scaling=False, **changed):
    """A model and its optimizer; it clips, since every gradient of these models is larger."""
    config = GPTConfig(**kind)
    model = GPT(config, seed=5)
    constants = dict(betas=(0.9, 0.95), weight_decay=0.1, momentum=0.95, grad_clip=0.1,
                     heads=(config.n_head, config.n_kv_head, config.head_width), matrix_dtype=torch.float32)
    return model, train.new_optimizer(model, optimizer, ranks, scaling, **(constants | changed))


def batch_of(step, index, B=2):
    """The same micro-batch on whatever rank."""
    tokens = torch.randint(60, (B, 9), generator=torch.Generator().manual_seed(100 * step + index))
    tokens[:, 1::2] = tokens[:, :-1:2]  # something to learn
    return tokens[:, :-1], tokens[:, 1:]


def do_step(model, opt, step, count=4, ranks=ONE_RANK, faults={}, autocast=contextlib.nullcontext, lr=0.01,
            dropout_key=None, wishes=(), interrupt=None):
    """One train_step; `faults` maps micro-batches to what goes wrong in them. Returns its numbers."""
    def faulty(idx_BT, targets_BT, fault=lambda loss_BT: loss_BT):
        return fault(model(idx_BT, targets_BT))

    batches = ((index, batch_of(step, index) + ((FAULTS[faults[index]],) if index in faults else ()))
               for index in share_of(count, ranks))
    return train.train_step(faulty, ranks, opt, count, autocast, lr, lr, batches, dropout_key, wishes,
                            interrupt or train.Interrupt())


def outcome_of(numbers, opt):
    return train.outcome_of(numbers.tolist(), opt.scaling)


def numbers_of(opt):
    """Copies of everything that a step may change for the next one."""
    tensors = {name: parameter.data for _, _, named in opt.groups for name, parameter in named} | opt.state
    tensors |= {name: getattr(opt, name) for name in ("updates", "loss_scale", "growth", "halted")}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def digest(opt):
    """A hash of the bits of numbers_of, but for `halted`."""
    sha256 = hashlib.sha256()
    for name, tensor in numbers_of(opt).items():
        if name != "halted":
            sha256.update(tensor.numpy().tobytes())
    return sha256.hexdigest()


def assert_unchanged(opt, before, *but):
    """Bit for bit."""
    for name, tensor in numbers_of(opt).items():
        if name not in but:
            assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32)), name


def relative(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def late():
    """An interrupt so long ago that a step is dropped."""
    return train.Interrupt("SIGTERM", time.monotonic() - train.DROP_STEP_AFTER_S - 1)


# ---- what each rank does: the script ---------------------------------------------------------------------


def rank_main(rank, world_size, folder):
    """What one rank of a world finds: numbers in WORLD_RANK.json, tensors in WORLD_RANK.safetensors."""
    torch.set_num_threads(1)
    ranks = preflight.Ranks(rank, world_size, torch.device("cpu"))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_{world_size}", rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=60))
    calls = collections.Counter()
    for name in COLLECTIVES:
        setattr(dist, name, counted(calls, name, getattr(dist, name)))
    record, tensors = {}, {}
    for count in COUNTS[world_size]:
        for kind, optimizer in ((GPT2, "adamw"), (MODERN, "muon")):
            model, opt = new(kind, optimizer, ranks)
            losses, norms, called, digests = [], [], [], []
            for step in range(STEPS[optimizer]):
                calls.clear()
                numbers = do_step(model, opt, step, count, ranks)
                called.append(dict(calls))
                outcome = outcome_of(numbers, opt)
                losses.append(outcome.loss)
                norms.append(outcome.grad_norm)
                digests.append(digest(opt) if step % 10 == 9 else "")
                if step == 0:
                    tensors |= {f"{optimizer} {count} gradient {name}": parameter.grad.clone()
                                for name, parameter in model.named_parameters()}
                if step == WEIGHTS_AT - 1:
                    tensors |= {f"{optimizer} {count} weight {name}": parameter.detach().clone()
                                for name, parameter in model.named_parameters()}
            record[f"{optimizer} {count}"] = dict(losses=losses, norms=norms, calls=called, digests=digests)

        model, opt = new(dict(GPT2, dropout=0.3), ranks=ranks)
        record[f"dropout {count}"] = [
            outcome_of(do_step(model, opt, step, count, ranks, dropout_key=(7, "dropout", step)), opt).loss
            for step in range(3)]

    for optimizer, kind in (("adamw", GPT2), ("muon", MODERN)) if world_size in REPRODUCIBLE else ():
        for count, blocks in ((4, 4), (12, 4), (8, 8)):
            model, opt = new(dict(kind, dropout=0.3), optimizer, ranks, blocks=blocks)
            calls.clear()
            numbers = [do_step(model, opt, step, count, ranks, dropout_key=(7, step))[:6].tolist()
                       for step in range(6)]
            record[f"reproducible {optimizer} {count}"] = [digest(opt), numbers]
            record[f"reproducible {optimizer} {count} calls"] = dict(calls)

    # one thing goes wrong on one rank: the last one, in the last micro-batch of the step
    count, last = COUNTS[world_size][0], rank == world_size - 1
    told = {
        **{fault: dict(faults={count - 1: fault}) for fault in FAULTS},
        "drop": dict(interrupt=late() if last else None),
        "signal": dict(interrupt=train.Interrupt("SIGTERM", time.monotonic() + 3600) if last else None),
        **{wish: dict(wishes=[wish] if last else ()) for wish in ("minutes", "data", "save")},
    }
    for optimizer in ("adamw", "muon"):
        for name, arguments in told.items():
            model, opt = new(MODERN, optimizer, ranks)
            do_step(model, opt, 0, count, ranks)
            record[f"{optimizer} {name}"] = seen_in_three_steps(model, opt, count, ranks, arguments)
    model, opt = new(MODERN, "muon", ranks, scaling=True)
    opt.loss_scale.fill_(2.0**12)
    record["overflow"] = seen_in_three_steps(
        model, opt, count, ranks, dict(faults={count - 1: "inf gradient"}, autocast=float16))

    Path(folder, f"{world_size}_{rank}.json").write_text(json.dumps(record), encoding="utf-8")
    save_file(tensors, Path(folder, f"{world_size}_{rank}.safetensors"))
    if world_size > 1:
        dist.destroy_process_group()


def seen_in_three_steps(model, opt, count, ranks, arguments):
    """A step in which something happens, and two in which nothing does: digests around them, and outcomes."""
    digests, outcomes, halted = [digest(opt)], [], []
    for step, given in enumerate((arguments, {}, {}), start=1):
        numbers = do_step(model, opt, step, count, ranks, **given)
        outcomes.append(outcome_of(numbers, opt)._asdict())
        digests.append(digest(opt))
        halted.append(float(opt.halted))
    return dict(digests=digests, outcomes=outcomes, halted=halted, loss_scale=float(opt.loss_scale),
                growth=float(opt.growth))


def counted(calls, name, function):
    def call(*arguments, **keywords):
        calls[name] += 1
        return function(*arguments, **keywords)
    return call


def launch(folder):
    """Forks the ranks of each world in turn; this process itself has used neither threads nor autograd."""
    context = multiprocessing.get_context("fork")
    for world_size in COUNTS:
        processes = [context.Process(target=rank_main, args=(rank, world_size, folder), daemon=True)
                     for rank in range(world_size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + RANKS_S
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        exits = [process.exitcode for process in processes]  # None: runs still; daemons end with this process
        if any(exits) or None in exits:
            sys.exit(f"of {world_size} ranks, exit codes: {exits}")


World = collections.namedtuple("World", "records tensors")  # of each rank


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """{world size: World} of what all ranks of all worlds found."""
    folder = tmp_path_factory.mktemp("worlds")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=LAUNCH_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever of the ranks is left
        process.wait()
    assert process.returncode == 0, output
    return {world_size: World(
        [json.loads((folder / f"{world_size}_{rank}.json").read_text()) for rank in range(world_size)],
        [load_file(folder / f"{world_size}_{rank}.safetensors") for rank in range(world_size)])
        for world_size in COUNTS}


# ---- any number of ranks does the same step --------------------------------------------------------------


@OPTIMIZERS
@SHARED
def test_gradients_and_their_norm_are_those_of_one_rank(worlds, optimizer, world_size, count):
    key = f"{optimizer} {count}"
    start = f"{key} gradient"
    alone = {name: wanted for name, wanted in worlds[1].tensors[0].items() if name.startswith(start)}
    norm = worlds[1].records[0][key]["norms"][0]
    assert len(alone) > 10 and norm > 0.2
    assert torch.cat([tensor.flatten() for tensor in alone.values()]).norm() == pytest.approx(0.1, rel=1e-3)
    for record, tensors in zip(*worlds[world_size]):
        assert record[key]["norms"][0] == pytest.approx(norm, rel=1e-6)
        for name, wanted in alone.items():
            assert relative(tensors[name], wanted) <= 1e-6, name


@OPTIMIZERS
@SHARED
def test_weights_after_20_steps_are_those_of_one_rank_except_key_biases(worlds, optimizer, world_size, count):
    start = f"{optimizer} {count} weight "
    alone = {name: wanted for name, wanted in worlds[1].tensors[0].items() if name.startswith(start)}
    assert len(alone) > 10
    for name, wanted in alone.items():
        found = worlds[world_size].tensors[0][name]
        if name.endswith("c_attn.bias"):
            found, wanted = (torch.cat([tensor[:16], tensor[32:]]) for tensor in (found, wanted))
        assert relative(found, wanted) <= 1e-5, f"{name}: {relative(found, wanted):.1e}"


@OPTIMIZERS
@SHARED
def test_loss_over_50_steps_is_that_of_one_rank(worlds, optimizer, world_size, count):
    """With Muon over 20."""
    wanted = worlds[1].records[0][f"{optimizer} {count}"]["losses"]
    assert len(wanted) == STEPS[optimizer] and wanted[-1] < wanted[0] - 0.3
    assert worlds[world_size].records[0][f"{optimizer} {count}"]["losses"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("world_size, count", [(1, 4), (1, 5), (2, 4), (4, 4), (3, 5)])
def test_the_loss_is_the_mean_over_every_token_of_the_step(worlds, world_size, count):
    model, _ = new(GPT2)
    with torch.no_grad():
        loss_BT = torch.cat([model(*batch_of(0, index)) for index in range(count)])
    for record in worlds[world_size].records:
        found = record[f"adamw {count}"]["losses"][0]
        assert found == pytest.approx(loss_BT.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("world_size, count", [(1, 4), (1, 5), (2, 4), (4, 4), (3, 5)])
def test_the_gradient_is_that_of_the_mean_loss_clipped_as_torch_clips(worlds, world_size, count):
    model, _ = new(GPT2)
    torch.cat([model(*batch_of(0, index)) for index in range(count)]).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    wanted = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for record, tensors in zip(*worlds[world_size]):
        found = [tensors[f"adamw {count} gradient {name}"].flatten() for name, _ in model.named_parameters()]
        assert relative(torch.cat(found), wanted) <= 2e-6
        assert record[f"adamw {count}"]["norms"][0] == pytest.approx(norm.item(), rel=2e-6)


@OPTIMIZERS
@SHARED
def test_all_ranks_see_the_same_loss_and_norm_to_the_bit(worlds, optimizer, world_size, count):
    """So the norm is that of the exchanged gradient, and clipping is the same everywhere."""
    first, *others = [record[f"{optimizer} {count}"] for record in worlds[world_size].records]
    for record in others:
        assert (record["losses"], record["norms"]) == (first["losses"], first["norms"])


@OPTIMIZERS
@SHARED
def test_all_ranks_hold_the_same_weights_and_state_to_the_bit(worlds, optimizer, world_size, count):
    first, *others = [record[f"{optimizer} {count}"]["digests"] for record in worlds[world_size].records]
    assert len(set(first)) == 1 + STEPS[optimizer] // 10
    assert others == [first] * (world_size - 1)


@OPTIMIZERS
@pytest.mark.parametrize("world_size, count", [(1, 4), (2, 4), (4, 4), (3, 5)])
def test_a_step_makes_exactly_one_all_reduce_and_no_other_call(worlds, optimizer, world_size, count):
    wanted = {"all_reduce": 1} if world_size > 1 else {}
    for record in worlds[world_size].records:
        assert record[f"{optimizer} {count}"]["calls"] == [wanted] * STEPS[optimizer]


@OPTIMIZERS
@pytest.mark.parametrize("count", [4, 12, 8])
def test_a_reproducible_step_has_the_same_bits_for_1_2_and_4_ranks(worlds, count, optimizer):
    """Weights, optimizer state, loss and gradient norm, with dropout on."""
    name = f"reproducible {optimizer} {count}"
    found = [record[name] for world_size in REPRODUCIBLE for record in worlds[world_size].records]
    assert len(found) == 7 and all(one == found[0] for one in found)


def test_a_reproducible_step_makes_no_sum_in_an_order_of_the_librarys_choice(worlds):
    for world_size in REPRODUCIBLE:
        for record in worlds[world_size].records:
            assert record["reproducible muon 8 calls"] == {}, "neighbours exchange and add, that is all"


def test_the_tree_of_a_reproducible_step_is_the_documented_one():
    """((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8)) over blocks, one after the other in a block: it is frozen."""
    draw = torch.Generator().manual_seed(3)
    leaves = [torch.randn(64, generator=draw) * 10.0**size for size in (0, 3, -3, 5, 1, 6, -2, 4)]
    for blocks in (1, 2, 4, 8):
        flat, sums, spare = torch.zeros(64), [], []
        for done, leaf in enumerate(leaves, start=1):
            flat += leaf
            if done * blocks % 8 == 0:
                train.close_block(flat, sums, spare, done * blocks // 8)
        parts = []
        for first in range(0, 8, 8 // blocks):
            part = leaves[first].clone()
            for leaf in leaves[first + 1:first + 8 // blocks]:
                part = part + leaf
            parts.append(part)
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2])]
        assert torch.equal(sums.pop(), parts[0]) and not sums and not flat.any()
        assert len(spare) < max(1, blocks.bit_length()), "memory for one partial sum a level"


def test_the_plain_sum_is_not_that_of_the_tree():
    """Or the tests above would show nothing."""
    found = []
    for blocks in (0, 4):
        model, opt = new(GPT2, blocks=blocks)
        for step in range(3):
            do_step(model, opt, step, 12)
        found.append(digest(opt))
    assert found[0] != found[1]


@SHARED
def test_dropout_is_the_same_for_any_number_of_ranks(worlds, world_size, count):
    wanted = worlds[1].records[0][f"dropout {count}"]
    without = worlds[1].records[0][f"adamw {count}"]["losses"]
    assert wanted[0] != pytest.approx(without[0], rel=1e-4)
    for record in worlds[world_size].records:
        assert record[f"dropout {count}"] == pytest.approx(wanted, rel=1e-5)


# ---- what happens on one rank, all ranks answer ----------------------------------------------------------


@OPTIMIZERS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_numbers_of_one_rank_make_all_ranks_skip_the_step(worlds, fault, world_size, optimizer):
    seen = [record[f"{optimizer} {fault}"] for record in worlds[world_size].records]
    for record in seen:
        assert [outcome["verdict"] for outcome in record["outcomes"]] == ["bad", "applied", "applied"]
        assert math.isfinite(record["outcomes"][0]["loss"]) == ("gradient" in fault and "loss" not in fault)
        assert record["digests"] == seen[0]["digests"]
        assert record["digests"][0] == record["digests"][1]  # weights, state, count of updates: to the bit
        assert len(set(record["digests"])) == 3  # and the steps after it are applied


@OPTIMIZERS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_late_signal_on_one_rank_drops_this_step_and_all_after_it_on_all(worlds, world_size, optimizer):
    for record in worlds[world_size].records:
        record = record[f"{optimizer} drop"]
        assert [outcome["verdict"] for outcome in record["outcomes"]] == ["dropped"] * 3
        assert record["outcomes"][0]["stop"] == "signal" and record["halted"] == [1, 1, 1]
        assert len(set(record["digests"])) == 1
        assert record["digests"] == worlds[world_size].records[0][f"{optimizer} drop"]["digests"]


@OPTIMIZERS
@SEVERAL
@pytest.mark.parametrize("request_", ["signal", "minutes", "data", "save"])
def test_a_request_of_one_rank_reaches_all_with_the_step_applied(worlds, request_, world_size, optimizer):
    seen = [record[f"{optimizer} {request_}"] for record in worlds[world_size].records]
    for record in seen:
        assert [outcome["stop"] for outcome in record["outcomes"]] == [request_, "", ""]
        assert [outcome["verdict"] for outcome in record["outcomes"]] == ["applied"] * 3
        assert record["digests"] == seen[0]["digests"] and len(set(record["digests"])) == 4
        assert record["halted"] == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_overflow_on_one_rank_scales_down_on_all(worlds, world_size):
    seen = [record["overflow"] for record in worlds[world_size].records]
    for record in seen:
        assert [outcome["verdict"] for outcome in record["outcomes"]] == ["overflow", "applied", "applied"]
        assert [outcome["loss_scale"] for outcome in record["outcomes"]] == [2.0**12, 2.0**11, 2.0**11]
        assert (record["loss_scale"], record["growth"]) == (2.0**11, 2)
        assert record["digests"] == seen[0]["digests"]


@SEVERAL
def test_the_memory_of_a_step_is_the_largest_of_any_rank(worlds, world_size):
    found = [record["adamw signal"]["outcomes"][0]["mem_gb"] for record in worlds[world_size].records]
    assert len(set(found)) == 1 and 0.01 < found[0] < 100


# ---- bad numbers, on one rank ----------------------------------------------------------------------------


@OPTIMIZERS
@pytest.mark.parametrize("scaling", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_with_a_bad_number_changes_nothing_but_the_scale(fault, scaling, optimizer):
    model, opt = new(MODERN, optimizer, scaling=scaling)
    autocast = float16 if scaling else contextlib.nullcontext
    do_step(model, opt, 0, autocast=autocast)
    before = numbers_of(opt)
    assert before["updates"] == 1
    outcome = outcome_of(do_step(model, opt, 1, faults={2: fault}, autocast=autocast), opt)
    overflow = scaling and "loss" not in fault
    assert outcome.verdict == ("overflow" if overflow else "bad")
    assert_unchanged(opt, before, *(["loss_scale", "growth"] if overflow else []))


def test_a_skipped_step_leaves_no_trace_in_the_steps_after_it():
    digests = []
    for faults in ({}, {1: "nan gradient"}):
        model, opt = new(GPT2, "muon")
        do_step(model, opt, 0)
        if faults:
            do_step(model, opt, 1, faults=faults)
        do_step(model, opt, 2)
        digests.append(digest(opt))
    assert digests[0] == digests[1]


def test_a_single_infinite_number_in_the_gradient_is_enough():
    model, opt = new(GPT2)
    model.h[1].ln_2.bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), math.inf))
    before = numbers_of(opt)
    assert outcome_of(do_step(model, opt, 1), opt).verdict == "bad"
    assert_unchanged(opt, before)


def test_no_clipping_when_grad_clip_is_0_or_the_norm_is_smaller():
    for grad_clip in (0.0, 100.0):
        model, opt = new(GPT2, grad_clip=grad_clip)
        outcome = outcome_of(do_step(model, opt, 0), opt)
        assert outcome.grad_norm > 0.2
        assert opt.gradients.norm().item() == pytest.approx(outcome.grad_norm, rel=1e-6)


def test_gradients_of_a_step_do_not_reach_the_next_one():
    model, opt = new(GPT2)
    do_step(model, opt, 0, lr=0.0)
    do_step(model, opt, 1, lr=0.0)
    found = opt.gradients.clone()
    model, opt = new(GPT2)
    do_step(model, opt, 1, lr=0.0)
    assert torch.equal(found, opt.gradients)


# ---- loss scaling ----------------------------------------------------------------------------------------


@OPTIMIZERS
def test_the_loss_scale_is_divided_out_before_norm_clipping_and_update(optimizer):
    """In float32 a power of two costs no bit."""
    digests = []
    for scale in (1.0, 2.0**16):
        model, opt = new(MODERN, optimizer)
        opt.loss_scale.fill_(scale)
        numbers = [do_step(model, opt, step).tolist()[:2] for step in range(3)]
        opt.loss_scale.fill_(1.0)
        digests.append((numbers, digest(opt)))
    assert digests[0] == digests[1]


@OPTIMIZERS
def test_float16_trains_with_the_loss_scale_as_float32_does_without(optimizer):
    losses = []
    for scaling in (False, True):
        model, opt = new(MODERN, optimizer, scaling=scaling)
        autocast = float16 if scaling else contextlib.nullcontext
        outcomes = [outcome_of(do_step(model, opt, step, autocast=autocast), opt) for step in range(10)]
        losses.append([outcome.loss for outcome in outcomes if outcome.verdict == "applied"])
    assert len(losses[1]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_an_overflow_in_float16_halves_the_scale_until_it_fits():
    model, opt = new(MODERN, "muon", scaling=True)
    do_step(model, opt, 0, autocast=float16)
    assert (opt.loss_scale, opt.growth) == (2.0**16, 1)
    opt.loss_scale.fill_(2.0**30)  # too much for float16's 65504
    verdicts = []
    for step in range(1, 40):
        before, scale = numbers_of(opt), float(opt.loss_scale)
        outcome = outcome_of(do_step(model, opt, step, autocast=float16), opt)
        verdicts.append(outcome.verdict)
        assert outcome.loss_scale == scale and math.isfinite(outcome.loss)
        if outcome.verdict == "applied":
            break
        assert (opt.loss_scale, opt.growth) == (scale / 2, 0)
        assert_unchanged(opt, before, "loss_scale", "growth")
    assert verdicts == ["overflow"] * (len(verdicts) - 1) + ["applied"] and len(verdicts) > 3
    assert (opt.updates, opt.growth) == (2, 1)


def test_an_overflow_at_a_loss_scale_of_1_is_a_bad_step():
    model, opt = new(MODERN, scaling=True)
    opt.loss_scale.fill_(1.0)
    before = numbers_of(opt)
    outcome = outcome_of(do_step(model, opt, 1, faults={0: "inf gradient"}, autocast=float16), opt)
    assert outcome.verdict == "bad"
    assert_unchanged(opt, before, "loss_scale", "growth")


def test_the_loss_scale_doubles_after_so_many_applied_steps_since_it_changed(monkeypatch):
    monkeypatch.setattr(train, "LOSS_SCALE_GROWTH_STEPS", 3)
    model, opt = new(MODERN, scaling=True)
    opt.loss_scale.fill_(16.0)
    faults = {2: "inf gradient", 5: "nan loss", 7: "inf gradient"}
    seen = []
    for step in range(12):
        do_step(model, opt, step, faults={1: faults[step]} if step in faults else {}, autocast=float16)
        seen.append((float(opt.loss_scale), float(opt.growth)))
    assert seen == [(16, 1), (16, 2), (8, 0), (8, 1), (8, 2), (8, 2), (16, 0), (8, 0), (8, 1), (8, 2),
                    (16, 0), (16, 1)]
    assert opt.updates == 9


def test_the_loss_scale_stays_1_where_it_is_not_used(monkeypatch):
    monkeypatch.setattr(train, "LOSS_SCALE_GROWTH_STEPS", 2)
    model, opt = new(MODERN)
    for step in range(5):
        do_step(model, opt, step, faults={0: "inf gradient"} if step == 2 else {})
    assert (opt.loss_scale, opt.growth, opt.updates) == (1, 0, 4)


# ---- dropped steps ---------------------------------------------------------------------------------------


def test_a_step_is_dropped_only_some_time_after_the_signal():
    model, opt = new(GPT2)
    early = train.Interrupt("SIGTERM", time.monotonic() - train.DROP_STEP_AFTER_S + 5)
    outcome = outcome_of(do_step(model, opt, 0, interrupt=early), opt)
    assert (outcome.verdict, outcome.stop, float(opt.updates)) == ("applied", "signal", 1)
    outcome = outcome_of(do_step(model, opt, 1, interrupt=late()), opt)
    assert (outcome.verdict, outcome.stop, float(opt.updates)) == ("dropped", "signal", 1)


def test_a_signal_during_a_step_drops_what_is_left_of_it():
    """The micro-batches after it are not computed, and what was computed is not applied."""
    model, opt = new(GPT2, scaling=True)
    do_step(model, opt, 0)
    before, interrupt, computed = numbers_of(opt), train.Interrupt(), []

    def batches():
        for index in range(6):
            if index == 2:
                interrupt.name, interrupt.at = "SIGTERM", time.monotonic() - train.DROP_STEP_AFTER_S - 1
            yield index, batch_of(1, index)

    def counting(idx_BT, targets_BT):
        computed.append(1)
        return model(idx_BT, targets_BT)

    numbers = train.train_step(counting, ONE_RANK, opt, 6, contextlib.nullcontext, 0.01, 0.01, batches(),
                               None, (), interrupt)
    assert outcome_of(numbers, opt).verdict == "dropped" and len(computed) == 2
    assert_unchanged(opt, before, "halted")


def test_the_first_signal_is_the_one_that_counts(monkeypatch):
    interrupt = train.Interrupt()
    assert (interrupt.name, interrupt.at) == ("", math.inf)
    monkeypatch.setattr(train.time, "monotonic", lambda: 5.0)
    interrupt.arrived(signal.SIGUSR1, None)
    monkeypatch.setattr(train.time, "monotonic", lambda: 9.0)
    interrupt.arrived(signal.SIGTERM, None)
    assert (interrupt.name, interrupt.at) == ("SIGUSR1", 5.0)


# ---- dropout ---------------------------------------------------------------------------------------------


def masks_of(step, indices, seed=7, key=True):
    """The masks of the micro-batches `indices` in a step that computes these alone."""
    model, opt = new(GPT2)
    masks = {}

    def dropping(idx_BT, targets_BT, index):
        masks[index] = F.dropout(torch.ones(200))
        return model(idx_BT, targets_BT)

    train.train_step(dropping, ONE_RANK, opt, 8, contextlib.nullcontext, 0.01, 0.01,
                     [(index, (*batch_of(step, index), index)) for index in indices],
                     (seed, "dropout", step) if key else None, (), train.Interrupt())
    return masks


def test_dropout_depends_on_seed_step_and_micro_batch_alone():
    whole = masks_of(3, range(8))
    torch.manual_seed(99)  # the global generator stands elsewhere
    for indices in ([0, 1, 2], [6, 7], [4]):  # as other ranks would have them
        torch.rand(11)
        for index, mask in masks_of(3, indices).items():
            assert torch.equal(mask, whole[index])
    all_masks = [*whole.values(), *masks_of(4, range(8)).values(), *masks_of(3, range(8), seed=8).values()]
    assert len({mask.numpy().tobytes() for mask in all_masks}) == 24
    assert all(0.3 < (mask == 0).float().mean() < 0.7 for mask in all_masks)


def test_without_dropout_a_step_leaves_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, opt = new(MODERN, "muon")
    do_step(model, opt, 0)
    assert torch.equal(torch.get_rng_state(), before)


# ---- no host read in a step ------------------------------------------------------------------------------


class HostRead(Exception):
    """A step looked at a number on the host, which on a GPU waits for everything that was queued."""


class NoHostReads(TorchDispatchMode):
    """Raises HostRead for operators whose result, or its shape, the host needs."""

    READS = {getattr(torch.ops.aten, name) for name in ("_local_scalar_dense", "item", "equal", "is_nonzero",
                                                        "allclose", "nonzero", "masked_select", "_unique2")}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in self.READS:
            raise HostRead(function)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_host_reads(monkeypatch):
    """A context in which a host read raises; some reach no operator on the CPU, so methods raise, too."""
    @contextlib.contextmanager
    def watching():
        with monkeypatch.context() as patch, NoHostReads():
            for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__",
                         "__array__", "__contains__"):
                patch.setattr(torch.Tensor, name, reads(name))
            yield

    def reads(name):
        def read(*_):
            raise HostRead(name)
        return read
    return watching


@OPTIMIZERS
@pytest.mark.parametrize("scaling", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("fault", [None, "nan loss", "inf gradient"])
@pytest.mark.parametrize("blocks", [0, 4])
def test_a_step_reads_nothing_on_the_host(no_host_reads, blocks, fault, scaling, optimizer):
    for kind in (dict(GPT2, dropout=0.1), MODERN):
        model, opt = new(kind, optimizer, scaling=scaling, blocks=blocks)
        autocast = float16 if scaling else contextlib.nullcontext
        with no_host_reads():
            numbers = do_step(model, opt, 0, faults={1: fault} if fault else {}, autocast=autocast,
                              dropout_key=(7, "dropout", 0))
        verdict = outcome_of(numbers, opt).verdict
        assert verdict == ("applied" if not fault else "overflow" if scaling and "inf" in fault else "bad")


@pytest.mark.parametrize("read", [
    lambda x: x.item(), float, int, bool, lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.numpy(),
    lambda x: 1 if x > 0 else 2, lambda x: max(x, x), lambda x: torch.equal(x, x), lambda x: torch.nonzero(x),
    lambda x: x[x > 0], lambda x: torch.allclose(x, x), lambda x: [0, 1][x.long()]])
def test_a_host_read_in_a_step_would_be_noticed(no_host_reads, read):
    model, opt = new(GPT2)

    def reading(idx_BT, targets_BT):
        loss_BT = model(idx_BT, targets_BT)
        read(loss_BT.detach().mean() * 0)
        return loss_BT

    with no_host_reads(), pytest.raises(HostRead):
        train.train_step(reading, ONE_RANK, opt, 1, contextlib.nullcontext, 0.01, 0.01, [(0, batch_of(0, 0))],
                         None, (), train.Interrupt())


# ---- the outcome on the host -----------------------------------------------------------------------------

nan, inf = math.nan, math.inf


@pytest.mark.parametrize("scaling, loss, norm, bad_loss, bad_gradient, halted, loss_scale, wanted", [
    (False, 3.0, 0.5, 0, 0, 0, 1, "applied"),
    (False, nan, 0.5, 1, 0, 0, 1, "bad"),
    (False, nan, nan, 1, 1, 0, 1, "bad"),
    (False, 3.0, inf, 0, 1, 0, 1, "bad"),
    (False, 3.0, 0.5, 0, 0, 1, 1, "dropped"),
    (False, nan, nan, 1, 1, 1, 1, "dropped"),
    (True, 3.0, 0.5, 0, 0, 0, 65536, "applied"),
    (True, 3.0, 0.5, 0, 0, 0, 1, "applied"),
    (True, 3.0, inf, 0, 1, 0, 65536, "overflow"),
    (True, 3.0, nan, 0, 1, 0, 2, "overflow"),
    (True, 3.0, inf, 0, 1, 0, 1, "bad"),
    (True, 3.0, inf, 0, 1, 0, 0.5, "bad"),
    (True, nan, inf, 1, 1, 0, 65536, "bad"),
    (True, 3.0, inf, 0, 1, 1, 65536, "dropped"),
])
def test_verdict_of_an_outcome(scaling, loss, norm, bad_loss, bad_gradient, halted, loss_scale, wanted):
    numbers = [loss, norm, bad_loss, bad_gradient, halted, loss_scale, 0, 0, 0, 0, 0, 0.5]
    outcome = train.outcome_of([float(number) for number in numbers], scaling)
    assert (outcome.verdict, outcome.loss_scale, outcome.stop) == (wanted, loss_scale, "")
    assert repr((outcome.loss, outcome.grad_norm)) == repr((loss, norm))


@pytest.mark.parametrize("signalled, minutes, data, save, dropped, wanted", [
    (0, 0, 0, 0, 0, ""), (1, 0, 0, 0, 0, "signal"), (3, 0, 0, 0, 0, "signal"), (0, 1, 0, 0, 0, "minutes"),
    (0, 0, 1, 0, 0, "data"), (2, 4, 0, 0, 0, "signal"), (1, 1, 1, 1, 0, "data"), (0, 0, 0, 0, 1, "signal"),
    (1, 0, 0, 0, 1, "signal"), (0, 2, 1, 0, 0, "data"), (0, 0, 0, 1, 0, "save"), (1, 1, 0, 1, 1, "save")])
def test_stop_and_memory_of_an_outcome(signalled, minutes, data, save, dropped, wanted):
    numbers = [3.0, 0.5, 0.0, 0.0, 0.0, 1.0, signalled, minutes, data, save, dropped, 0.5, 2.5, 1.5]
    outcome = train.outcome_of(numbers, False)
    assert (outcome.stop, outcome.mem_gb) == (wanted, 2.5)


# ---- judging an outcome ----------------------------------------------------------------------------------

DRAWN = train.draw_windows(0, 3, [(0, 1000)], 1337, 8)


def judged(verdicts, max_bad_steps):
    """Judges steps 1, 2, ... with these verdicts; returns the run and the events."""
    run, events = train.Run(), []
    report = lambda event, **fields: events.append((event, fields))
    for step, verdict in enumerate(verdicts, start=1):
        loss = nan if verdict == "bad" else 2.0
        outcome = train.Outcome(loss, 0.25, verdict, 4.0, "", 0.0)
        train.judge(outcome, step, run, report, DRAWN, max_bad_steps)
    return run, events


def test_judge_counts_bad_steps_in_a_row_and_starts_again_after_an_applied_one():
    run, events = judged(["bad", "bad", "applied", "bad", "applied", "applied"], 3)
    assert run.bad_steps == 0
    assert [(event, fields["at"], fields["in_a_row"]) for event, fields in events] == [
        ("skip", 1, 1), ("skip", 2, 2), ("skip", 4, 1)]
    windows = train.window_ids(DRAWN)
    assert len(windows) == 3
    for _, fields in events:
        assert (fields["loss"], fields["grad_norm"], fields["windows"]) == (None, 0.25, windows)
    json.dumps(events, allow_nan=False)
    assert judged(["applied", "bad", "bad"], 3)[0].bad_steps == 2


def test_judge_reports_an_overflow_and_does_not_count_it():
    run, events = judged(["overflow"] * 5, 2)
    assert run.bad_steps == 0
    assert events == [("overflow", {"at": step, "loss_scale": 4.0}) for step in range(1, 6)]


def test_judge_reports_nothing_for_applied_steps():
    assert judged(["applied"] * 3, 1)[1] == []


@pytest.mark.parametrize("max_bad_steps", [1, 3])
def test_judge_fails_after_max_bad_steps_in_a_row_and_names_the_windows(max_bad_steps):
    judged(["bad"] * (max_bad_steps - 1), max_bad_steps)
    with pytest.raises(checkpoint.Failed) as failure:
        judged(["applied"] + ["bad"] * max_bad_steps, max_bad_steps)
    assert failure.value.reason == "bad_steps"
    assert str(train.window_ids(DRAWN)) in str(failure.value)
    assert f"step {max_bad_steps + 1}" in str(failure.value)


# ---- a loss far above the others -------------------------------------------------------------------------


def spikes_in(losses, run=None):
    """The steps, from 1, of the spikes that are reported, and the run."""
    run, events = run or train.Run(), []
    for step, loss in enumerate(losses, start=1):
        train.judge(train.Outcome(loss, 0.25, "applied", 1.0, "", 0.0), step, run,
                    lambda event, **fields: events.append((event, fields)), DRAWN, 3)
    assert {event for event, _ in events} <= {"spike"}
    return [fields["at"] for _, fields in events], run


def falling(steps):
    return [3 + 2 * math.exp(-i / 50) + 0.05 * math.sin(12.9898 * i * i) for i in range(steps)]


def test_a_loss_far_above_the_running_ones_is_a_spike_and_nothing_else_is():
    losses = falling(400)
    assert spikes_in(losses)[0] == []
    losses[299] += 2.0
    found, run = spikes_in(losses)
    assert found == [300]
    assert run.loss_spread[0] == 400 and run.loss_spread[1] == pytest.approx(3.0, abs=0.1)


def test_no_spike_is_seen_before_there_is_a_spread_to_compare_with():
    losses = falling(train.SPIKE_STEPS)
    losses[-1] += 9.0
    assert spikes_in(losses)[0] == []
    assert spikes_in([*falling(train.SPIKE_STEPS), 9.0])[0] == [train.SPIKE_STEPS + 1]


def test_a_loss_that_stays_high_is_not_a_spike_for_ever():
    found = spikes_in(falling(300) + [9.0] * 100)[0]
    assert found and found[0] == 301 and found[-1] < 400


def test_a_resumed_run_sees_the_spikes_of_one_that_was_not_stopped():
    losses = falling(400)
    losses[250] += 2.0
    run = spikes_in(losses[:200])[1]
    resumed = train.Run(loss_spread=json.loads(json.dumps(run.loss_spread)))
    assert spikes_in(losses[200:], resumed)[0] == [51] and spikes_in(losses)[0] == [251]


if __name__ == "__main__":
    launch(sys.argv[1])
