"""What only a GPU can show: a step that the host does not wait for, its numbers, snapshots, sessions, float16.

`python -m pytest -m gpu` runs these; without a CUDA device they are skipped.
"""

import contextlib

import pytest
import torch

import checkpoint
import preflight
import train
from driver import assert_same, rows, session, words_of
from model import GPT, GPTConfig

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CONFIG = dict(vocab_size=60, block_size=32, n_layer=2, n_head=2, n_embd=64, norm="rmsnorm", position="rope",
              mlp="swiglu", bias=False, qk_norm=True, value_residual=True)
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


@pytest.fixture(scope="module", autouse=True)
def deterministic_products():
    """What deterministic=True sets, before the first product of this process: cuBLAS reads it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield


@pytest.fixture(autouse=True)
def float32_in_full():
    """No TF32: numbers are held against the CPU's. train.main sets its own precision and puts this back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def stepper(device, optimizer, scaling=False):
    """(model, optimizer, a function that does step i)."""
    device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config, ranks = GPTConfig(**CONFIG), preflight.Ranks(0, 1, device)
    model = GPT(config, seed=5).to(device)
    opt = train.new_optimizer(model, optimizer, ranks, scaling, betas=(0.9, 0.95), weight_decay=0.1, momentum=0.95,
                              grad_clip=1.0, heads=(2, 2, 32), matrix_dtype=torch.float32)

    def windows(number):
        return torch.randint(60, (4, 33), generator=torch.Generator().manual_seed(number)).numpy()

    def step(i):
        batches = ((index, train.to_batch(windows(10 * i + index), device)) for index in range(2))
        return train.train_step(model, ranks, opt, 2, contextlib.nullcontext, 1e-3, 0.02, batches, ("d", i), (),
                                preflight.Interrupt())
    return model, opt, step


@OPTIMIZERS
def test_the_host_waits_for_nothing_in_a_step(optimizer):
    _, opt, step = stepper(DEVICE, optimizer)
    for i in range(2):  # the first ones load kernels
        step(i)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = step(2)
        read = preflight.to_host(outcome)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert train.outcome_of(read(), opt.scaling).verdict == "applied"


@OPTIMIZERS
def test_steps_have_the_numbers_of_the_cpu(optimizer):
    (here, _, step), (there, _, its_step) = stepper("cpu", optimizer), stepper(DEVICE, optimizer)
    for i in range(5):
        wanted, found = (train.outcome_of(preflight.to_host(do(i))(), False) for do in (step, its_step))
        assert found.verdict == wanted.verdict == "applied"
        assert (found.loss, found.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-3)
    for (name, parameter), other in zip(here.named_parameters(), there.parameters()):
        assert (other.cpu() - parameter).norm() <= 1e-2 * parameter.norm() + 1e-6, name


@OPTIMIZERS
def test_a_bad_step_changes_no_bit(optimizer):
    model, opt, step = stepper(DEVICE, optimizer)
    step(0)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *opt.state.items()]}
    handle = model.register_forward_hook(lambda module, args, loss: loss * float("inf"))
    assert train.outcome_of(preflight.to_host(step(1))(), False).verdict == "bad"
    handle.remove()
    after = dict([*model.named_parameters(), *opt.state.items()])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()) and int(opt.updates) == 1
    assert train.outcome_of(preflight.to_host(step(2))(), False).verdict == "applied"


def test_a_snapshot_is_of_its_step_whatever_comes_after(tmp_path):
    """The copy is queued; training goes on at once and must not get into it."""
    live = {"model.safetensors": {"w": torch.zeros(2**24, device=DEVICE)},
            "optimizer.safetensors": {"m": torch.zeros(2**24, device=DEVICE)}}
    saver = checkpoint.Saver(tmp_path, "run", live, 2, 0.0, lambda: "", lambda *_, **__: None, lambda _: None,
                             saved_at=-1, touch=True)
    for step in (1, 2):
        live["model.safetensors"]["w"].fill_(step)
        assert saver.begin(step, "nonce", lambda: lambda whole: {"model.json": {}, "trainer.json": {}}, True, False)
        live["model.safetensors"]["w"].fill_(100.0)  # the next step
        saver.saving.result()
        assert saver.held["model.safetensors"]["w"].unique().tolist() == [float(step)]
    saver.close()
    assert not saver.pinned


@pytest.mark.parametrize("changes", [
    {"dtype": "float32"}, {"dtype": "bfloat16", "optimizer": "muon"}, {"dtype": "float16"},
    {"dtype": "bfloat16", "loss_chunk_tokens": 24, "activation_checkpointing": True}], ids=str)
def test_two_sessions_have_the_bits_of_one(tmp_path, data, changes):
    changes = {"device": DEVICE, "deterministic": True, "dropout": 0.1, **changes}
    code, text = session(words_of(tmp_path / "one", data, **changes))
    assert code == 0, text
    for stop in (5, 0):
        code, text = session(words_of(tmp_path / "two", data, stop_after_steps=stop, **changes))
        assert code == 0, text
    assert_same(tmp_path / "two", tmp_path / "one")
    losses = [row["loss"] for row in rows(tmp_path / "one" / "metrics.jsonl")]
    assert len(losses) == 12 and losses[-1] < losses[0]
