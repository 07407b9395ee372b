"""The optimizer of train.py: groups, AdamW and Muon against torch and float64, skipped updates.

N matrices of one shape, R rows, C columns. Every rate here is large enough that a wrong update would show.
"""

import contextlib
import copy
import math

import pytest
import torch

import preflight
import train
from model import GPT, GPTConfig

GPT2 = dict(vocab_size=60, block_size=8, n_layer=2, n_head=4, n_embd=16)
MODERN = dict(GPT2, n_kv_head=2, norm="rmsnorm", position="rope", mlp="swiglu", bias=False, qk_norm=True,
              value_residual=True)
WIDE_HEADS = dict(MODERN, head_width=8)  # 32 rows of queries, 16 of keys, 16 of values: none is c_attn's 64
MATRICES = {"GPT2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
            "MODERN": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_gate", "mlp.c_proj"]}
KINDS = pytest.mark.parametrize("kind", [GPT2, MODERN, WIDE_HEADS], ids=["gpt2", "modern", "wide_heads"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])
ONE_RANK = preflight.Ranks(0, 1, torch.device("cpu"))
SHAPES = pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)], ids=["tall", "wide", "square"])
NOT_SKIPPED = torch.zeros(())
SKIPPED = torch.ones(())


def new(kind, optimizer, **changed):
    """A model and its optimizer; no clipping unless it is asked for."""
    config = GPTConfig(**kind)
    model = GPT(config, seed=5)
    constants = dict(betas=(0.9, 0.95), weight_decay=0.1, momentum=0.95, grad_clip=0.0,
                     heads=(config.n_head, config.n_kv_head, config.head_width), matrix_dtype=torch.float32)
    return model, train.new_optimizer(model, optimizer, ONE_RANK, False, **(constants | changed))


def draw_gradients(opt, seed, scale=1.0):
    """Fills every gradient, each parameter's with numbers of another size, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    for _, _, named in opt.groups:
        for _, parameter in named:
            size = scale * 10 ** float(torch.rand((), generator=generator) * 2 - 2)
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * size)


def update(opt, lr, muon_lr, skip=NOT_SKIPPED):
    """One update of all groups from the gradients as they stand."""
    opt.updates.add_(1 - skip)
    with torch.no_grad():
        for kind, decays, named in opt.groups:
            if kind == "adamw":
                train.adamw_update(opt, named, lr, opt.weight_decay * decays, skip)
            else:
                train.muon_update(opt, named, muon_lr, opt.weight_decay * decays, skip)


def muon_named(opt):
    return next(named for kind, _, named in opt.groups if kind == "muon")


def bits(opt):
    """Every number that an update may change, as copies of the bits."""
    tensors = {name: parameter.data for _, _, named in opt.groups for name, parameter in named} | opt.state
    tensors |= {name: getattr(opt, name) for name in ("updates", "loss_scale", "growth", "halted")}
    return {name: tensor.clone().view(torch.int32) for name, tensor in tensors.items()}


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def flattened(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def assert_close(found, wanted, relative):
    """The norm of the difference against the norm of what is wanted."""
    difference = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert difference <= relative, f"relative difference {difference:.2e}, wanted at most {relative:.0e}"


# -- the oracles: float64, one matrix at a time, straight from the definitions


def newton_schulz_singular_values(values):
    """What five steps of the quintic make of singular values."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def plain_newton_schulz(matrix_RC):
    x = matrix_RC.double() / matrix_RC.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def parts_of(name, tensor, kind):
    """Queries, keys and values of a fused projection, or the matrix itself."""
    if not name.endswith("c_attn.weight"):
        return [tensor]
    config = GPTConfig(**kind)
    q, kv = config.n_head * config.head_width, config.n_kv_head * config.head_width
    assert tensor.shape[0] == q + 2 * kv
    return [tensor[:q], tensor[q:q + kv], tensor[q + kv:]]


def shape_factor(matrix_RC):
    rows, columns = matrix_RC.shape
    return math.sqrt(max(1, rows / columns))


class PlainMuon:
    """Muon in float64, with the momentum that belongs to the number of the update."""

    def __init__(self, named, kind):
        self.kind, self.updates = kind, 0
        self.weights = {name: parameter.detach().double() for name, parameter in named}
        self.momenta = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def update(self, named, lr, weight_decay):
        self.updates += 1
        beta = 0.85 + 0.10 * min(1, self.updates / 300)
        for name, parameter in named:
            gradient = parameter.grad.double()
            self.momenta[name] = beta * self.momenta[name] + (1 - beta) * gradient
            ahead = (1 - beta) * gradient + beta * self.momenta[name]
            direction = torch.cat([plain_newton_schulz(part) * shape_factor(part)
                                   for part in parts_of(name, ahead, self.kind)])
            self.weights[name] = self.weights[name] * (1 - lr * weight_decay) - lr * direction


# -- groups


@OPTIMIZERS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["GPT2", "MODERN"])
def test_each_parameter_is_in_exactly_one_group_by_its_name(kind, tied, optimizer):
    model, opt = new(dict(GPT2 if kind == "GPT2" else MODERN, tie_embeddings=tied), optimizer)
    names = [name for _, _, named in opt.groups for name, _ in named]
    grouped = [id(parameter) for _, _, named in opt.groups for _, parameter in named]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sorted(grouped) == sorted({id(parameter) for parameter in model.parameters()})
    assert all(dict(model.named_parameters())[name] is parameter
               for _, _, named in opt.groups for name, parameter in named)

    hidden = {f"h.{layer}.{matrix}.weight" for layer in range(2) for matrix in MATRICES[kind]}
    tables = {"wte.weight"}
    if kind == "GPT2":
        tables.add("wpe.weight")
    if not tied:
        tables.add("lm_head.weight")
    found = {(kind, decays): {name for name, _ in named} for kind, decays, named in opt.groups}
    vectors = set(names) - hidden - tables
    assert all(parameter.ndim == 1 for name, parameter in model.named_parameters() if name in vectors)
    assert {"ln_f.weight", "h.1.attn.value_mix" if kind == "MODERN" else "h.1.mlp.c_fc.bias"} <= vectors
    if optimizer == "muon":
        assert found == {("muon", True): hidden, ("adamw", True): tables, ("adamw", False): vectors}
    else:
        assert found == {("adamw", True): hidden | tables, ("adamw", False): vectors}


@OPTIMIZERS
def test_state_has_every_key_from_the_start_in_float32(optimizer):
    model, opt = new(dict(MODERN, tie_embeddings=False), optimizer)
    wanted = {}
    for kind, _, named in opt.groups:
        for name, parameter in named:
            for slot in ["momentum"] if kind == "muon" else ["exp_avg", "exp_avg_sq"]:
                wanted[f"{slot}.{name}"] = parameter.shape
    assert {name: tensor.shape for name, tensor in opt.state.items()} == wanted
    assert all(tensor.dtype == torch.float32 and not tensor.any() for tensor in opt.state.values())
    draw_gradients(opt, 1)
    update(opt, 0.01, 0.02)
    assert {name: tensor.shape for name, tensor in opt.state.items()} == wanted
    assert all(tensor.any() for tensor in opt.state.values())


def test_gradients_of_all_parameters_fill_one_vector():
    model, opt = new(dict(MODERN, tie_embeddings=False), "muon")
    opt.gradients.copy_(torch.arange(len(opt.gradients)))
    held = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.equal(held.sort().values, torch.arange(len(opt.gradients)).float())
    assert opt.gradients.untyped_storage().data_ptr() == opt.flat.untyped_storage().data_ptr()


# -- AdamW


@KINDS
def test_adamw_is_bit_equal_to_torch_fused_adamw(kind):
    model, opt = new(kind, "adamw")
    oracle = copy.deepcopy(model)
    theirs = dict(oracle.named_parameters())
    torch_opt = torch.optim.AdamW(
        [{"params": [theirs[name] for name in theirs if theirs[name].ndim == 2], "weight_decay": 0.1},
         {"params": [theirs[name] for name in theirs if theirs[name].ndim == 1], "weight_decay": 0.0}],
        lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for i in range(6):
        lr = 0.003 * (i + 1)
        draw_gradients(opt, i)
        for name, parameter in model.named_parameters():
            theirs[name].grad = parameter.grad.clone()
        for group in torch_opt.param_groups:
            group["lr"] = lr
        torch_opt.step()
        update(opt, lr, 0.0)
        for name, parameter in model.named_parameters():
            state = torch_opt.state[theirs[name]]
            assert torch.equal(parameter, theirs[name]), f"{name} after update {i + 1}"
            assert torch.equal(opt.state["exp_avg." + name], state["exp_avg"])
            assert torch.equal(opt.state["exp_avg_sq." + name], state["exp_avg_sq"])


def test_adamw_is_close_to_the_definition_in_float64():
    model, opt = new(GPT2, "adamw")
    first = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    weights, m, v = first, dict.fromkeys(first, 0), dict.fromkeys(first, 0)
    for t in range(1, 7):
        lr = 0.003 * t
        draw_gradients(opt, t)
        update(opt, lr, 0.0)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.double()
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.95 * v[name] + 0.05 * gradient**2
            direction = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            decay = 0.1 if parameter.ndim == 2 else 0.0
            weights = weights | {name: weights[name] * (1 - lr * decay) - lr * direction}
            assert_close(parameter, weights[name], 1e-6)
    for name, parameter in model.named_parameters():
        assert (weights[name] - first[name]).norm() > 1e-3 * first[name].norm()  # it moved


@OPTIMIZERS
def test_matrices_and_tables_decay_and_vectors_do_not(optimizer):
    model, opt = new(dict(MODERN, tie_embeddings=False), optimizer, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    update(opt, 0.25, 0.25)  # all gradients are zero: what is left is the decay
    for name, parameter in model.named_parameters():
        wanted = before[name] * (1 - 0.25 * 0.5) if parameter.ndim == 2 else before[name]
        assert torch.equal(parameter, wanted), name


# -- Muon: the orthogonalisation


@SHAPES
def test_orthogonalise_is_newton_schulz_in_float64(shape):
    matrices_NRC = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    found_NRC = train.orthogonalise(matrices_NRC, torch.float32)
    assert found_NRC.dtype == torch.float32 and found_NRC.shape == matrices_NRC.shape
    for matrix, found in zip(matrices_NRC, found_NRC):
        wanted = plain_newton_schulz(matrix)
        assert_close(found, wanted, 1e-5)
        assert (found - wanted).abs().max() <= 1e-5


@SHAPES
def test_orthogonalise_keeps_singular_vectors_and_maps_singular_values_into_the_band(shape):
    generator = torch.Generator().manual_seed(2)
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    values = torch.logspace(0, -1.5, min(shape), dtype=torch.float64)
    found = train.orthogonalise((u * values @ vh).float()[None], torch.float32)[0]
    wanted_values = newton_schulz_singular_values(values / values.norm())
    assert_close(found, u * wanted_values @ vh, 1e-5)
    found_values = torch.linalg.svdvals(found)
    assert 0.67 <= found_values.min() and found_values.max() <= 1.15
    assert found_values.max() - found_values.min() > 0.1  # coefficients that converge would not spread


@SHAPES
def test_orthogonalise_of_a_stack_is_that_of_each_matrix(shape):
    generator = torch.Generator().manual_seed(3)
    sizes_N11 = torch.tensor([1e-3, 1.0, 1e4]).view(3, 1, 1)
    matrices_NRC = torch.randn(3, *shape, generator=generator) * sizes_N11
    looped = [train.orthogonalise(matrix[None], torch.float32)[0] for matrix in matrices_NRC]
    for found, wanted in zip(train.orthogonalise(matrices_NRC, torch.float32), looped):
        assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("size", [2.0**20, 2.0**-20], ids=["above", "below"])
def test_orthogonalise_normalises_in_float32_before_the_cast(size):
    """They lie outside the range of float16 as they come."""
    matrices_NRC = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(4)) * size
    found = train.orthogonalise(matrices_NRC, torch.float16)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert_close(found, train.orthogonalise(matrices_NRC, torch.float32), 1e-2)


def test_orthogonalise_of_zeros_is_zeros():
    assert torch.equal(train.orthogonalise(torch.zeros(2, 4, 6), torch.float32), torch.zeros(2, 4, 6))


# -- Muon: the update


@KINDS
def test_muon_is_close_to_the_definition_in_float64(kind):
    """In the warmup of the momentum; queries, keys and values apart."""
    model, opt = new(kind, "muon")
    named = muon_named(opt)
    plain = PlainMuon(named, kind)
    for i in range(4):
        lr = 0.02 * (i + 1)
        draw_gradients(opt, i)
        update(opt, 0.0, lr)
        plain.update(named, lr, 0.1)
        for name, parameter in named:
            assert_close(parameter, plain.weights[name], 1e-5)
            assert_close(opt.state["momentum." + name], plain.momenta[name], 1e-6)


@KINDS
def test_muon_agrees_with_torch_muon(kind):
    """torch's works in bfloat16, and queries, keys and values are parameters of their own there."""
    model, opt = new(kind, "muon")
    named = muon_named(opt)
    opt.updates.fill_(1000)  # the warmup of the momentum is over
    theirs = {name: [torch.nn.Parameter(part.clone()) for part in parts_of(name, parameter.data, kind)]
              for name, parameter in named}
    torch_opt = torch.optim.Muon([part for parts in theirs.values() for part in parts], lr=0.02,
                                 weight_decay=0.1, momentum=0.95, nesterov=True)
    for i in range(3):
        draw_gradients(opt, 10 + i)
        before = {name: parameter.detach().clone() for name, parameter in named}
        for name, parameter in named:
            for part, now, gradient in zip(theirs[name], parts_of(name, parameter.data, kind),
                                           parts_of(name, parameter.grad, kind)):
                part.data.copy_(now)
                part.grad = gradient.clone()
        torch_opt.step()
        update(opt, 0.0, 0.02)
        found = {name: parameter.detach() - before[name] for name, parameter in named}
        wanted = {name: torch.cat([part.detach() for part in theirs[name]]) - before[name] for name in theirs}
        assert_close(flattened(found), flattened(wanted), 2e-2)
        for name, change in wanted.items():
            assert_close(found[name], change, 4e-2)  # one matrix alone: bfloat16 errs by up to 3e-2


@KINDS
def test_queries_keys_and_values_are_orthogonalised_apart(kind):
    """Gradients of very different size: in one piece the small ones would stay small."""
    model, opt = new(kind, "muon", weight_decay=0.0)
    draw_gradients(opt, 1)
    name, parameter = next(pair for pair in muon_named(opt) if pair[0] == "h.1.attn.c_attn.weight")
    for part, size in zip(parts_of(name, parameter.grad, kind), (1e2, 1.0, 1e4)):
        part.mul_(size)
    before = parameter.detach().clone()
    update(opt, 0.0, 0.02)
    change = before - parameter.detach()
    for part, gradient in zip(parts_of(name, change, kind), parts_of(name, parameter.grad, kind)):
        assert_close(part, 0.02 * shape_factor(part) * plain_newton_schulz(gradient), 1e-4)


@pytest.mark.parametrize("name, factor", [
    ("mlp.c_fc.weight", 8**0.5), ("mlp.c_proj.weight", 1.0), ("attn.c_proj.weight", 1.0)])
def test_shape_factor_is_the_root_of_rows_over_columns_but_at_least_1(name, factor):
    """c_fc has 128 rows and 16 columns, its c_proj 16 and 128, attention's 16 and 16."""
    model, opt = new(dict(GPT2, mlp_hidden=128), "muon", weight_decay=0.0)
    parameter = dict(muon_named(opt))["h.0." + name]
    u, _, vh = torch.linalg.svd(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)),
                                full_matrices=False)
    parameter.grad.copy_(u @ vh)
    before = parameter.detach().clone()
    update(opt, 0.0, 0.5)
    wanted = 0.5 * factor * newton_schulz_singular_values(torch.tensor(1 / 4))  # all 16 are 1/4 of the norm
    values = torch.linalg.svdvals(before - parameter.detach())
    assert torch.allclose(values, wanted.expand(16), rtol=1e-4)


@pytest.mark.parametrize("updates, momentum, wanted", [
    (0, 0.95, 0.85), (150, 0.95, 0.90), (300, 0.95, 0.95), (10_000, 0.95, 0.95), (150, 0.99, 0.92),
    (0, 0.8, 0.8)])
def test_momentum_warms_up_from_085_over_300_updates(updates, momentum, wanted):
    model, opt = new(GPT2, "muon", momentum=momentum)
    opt.updates.fill_(updates)
    named = muon_named(opt)
    draw_gradients(opt, 1)
    with torch.no_grad():
        train.muon_update(opt, named, 0.02, 0.1, NOT_SKIPPED)
    for name, parameter in named:
        assert torch.allclose(opt.state["momentum." + name], (1 - wanted) * parameter.grad, rtol=1e-4)


def test_momentum_warmup_counts_applied_updates_only():
    model, opt = new(GPT2, "muon")
    draw_gradients(opt, 1)
    for skip in (SKIPPED, SKIPPED, NOT_SKIPPED):
        update(opt, 0.0, 0.02, skip)
    name, parameter = muon_named(opt)[0]
    assert opt.updates == 1
    assert torch.allclose(opt.state["momentum." + name], (0.15 - 0.10 / 300) * parameter.grad, rtol=1e-4)


def test_muon_decay_uses_the_unscaled_rate():
    """Without a gradient c_fc, whose shape factor is 2, shrinks as every other matrix does."""
    model, opt = new(dict(GPT2, mlp_hidden=64), "muon", weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in muon_named(opt)}
    update(opt, 0.0, 0.25)
    for name, parameter in muon_named(opt):
        assert torch.equal(parameter, before[name] * (1 - 0.25 * 0.5)), name


def test_muon_update_does_not_depend_on_the_size_of_the_gradient():
    """Up to where the norm overflows in float32, which train_step answers with a bad step."""
    changes = []
    for size in (1.0, 1e3, 1e16):
        model, opt = new(MODERN, "muon", weight_decay=0.0)
        before = {name: parameter.detach().clone() for name, parameter in muon_named(opt)}
        draw_gradients(opt, 1, size)
        update(opt, 0.0, 0.02)
        changes.append({name: before[name] - parameter.detach() for name, parameter in muon_named(opt)})
    for change in changes:
        for name, wanted in changes[0].items():
            assert wanted.norm() > 0.02
            assert_close(change[name], wanted, 1e-4)


# -- skipping


@OPTIMIZERS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1.0])
def test_a_skipped_update_changes_no_bit(optimizer, poison):
    model, opt = new(dict(MODERN, tie_embeddings=False), optimizer)
    for i in range(2):
        draw_gradients(opt, i)
        update(opt, 0.01, 0.02)
    before = bits(opt)
    draw_gradients(opt, 3)
    opt.gradients[::3] = poison
    update(opt, 0.01, 0.02, SKIPPED)
    assert_same_bits(bits(opt), before)


@OPTIMIZERS
def test_after_a_skipped_update_the_next_one_is_as_if_it_had_not_been(optimizer):
    opts = []
    for poisoned in (False, True):
        model, opt = new(MODERN, optimizer)
        draw_gradients(opt, 1)
        update(opt, 0.01, 0.02)
        if poisoned:
            opt.gradients.fill_(math.nan)
            update(opt, 0.01, 0.02, SKIPPED)
        draw_gradients(opt, 2)
        update(opt, 0.01, 0.02)
        opts.append(opt)
    assert_same_bits(bits(opts[1]), bits(opts[0]))


@OPTIMIZERS
@pytest.mark.parametrize("size", [1e20, 1e30])
@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_huge_gradients_are_a_bad_step_and_no_silent_zero_update(optimizer, size, grad_clip):
    """Each number is finite, the norm is not: divided by it, all of them would be zero."""
    model, opt = new(GPT2, optimizer, grad_clip=grad_clip)
    idx_BT = torch.arange(8)[None]

    def steep(idx_BT, targets_BT):
        loss_BT = model(idx_BT, targets_BT)
        return loss_BT * size - (loss_BT * size - loss_BT).detach()  # a finite loss, its gradient times size

    before = bits(opt)
    numbers = train.train_step(steep, ONE_RANK, opt, 1, contextlib.nullcontext, 0.01, 0.02,
                               [(0, (idx_BT, idx_BT))], None, (), train.Interrupt())
    outcome = train.outcome_of(numbers.tolist(), opt.scaling)
    assert math.isfinite(outcome.loss) and outcome.verdict == "bad"
    assert_same_bits(bits(opt), before)
