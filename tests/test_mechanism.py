"""The Gaussian mechanism: right noise, exact q and b, Opacus' answer, and no way round it."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpivon import accounting, adaptive, backprop, gradients, mechanism, models
from dpivon.door import make_private
from dpivon.ivon import IVON

N, B = 60, 20
SETTINGS = {"noise_multiplier": 1.5, "max_grad_norm": 0.7, "batch_size": B}


def network():
    return models.build("lenet", (3, 16, 16), 5, seed=0)


@pytest.fixture(scope="module")
def images():
    source = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, 16, 16, generator=source), torch.randint(0, 5, (N,), generator=source)


def own(model, x, y, seed=3, accountant=None, **changes):
    """One call of our own mechanism; the gradient it leaves, flattened."""
    dp = mechanism.mechanism(
        adaptive.sgd(model.parameters(), lr=0.1),
        **{**SETTINGS, **changes}, n=N, generator=mechanism.new_generator(seed), accountant=accountant,
    )  # fmt: skip
    mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
    return flat(model)


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("size", [0, 1, B, N])
def test_opacus_gives_the_same_gradient_for_the_same_noise(images, mode, size):
    x, y = (part[:size] for part in images)
    expected = own(network(), x, y)
    model = network()
    private = make_private(
        model, adaptive.sgd(model.parameters(), lr=0.1), TensorDataset(*images), loss=nn.CrossEntropyLoss(),
        mode=mode, generator=mechanism.new_generator(3), **SETTINGS,
    )  # fmt: skip
    private.optimizer.zero_grad()
    private.loss(private.model(x), y).backward()
    private.optimizer.pre_step()
    torch.testing.assert_close(flat(model), expected, atol=1e-6, rtol=0)


def test_opacus_optimizer_fed_with_our_per_example_gradients_agrees(images):
    """A second path: Opacus clips, sums, noises and scales; we only supply the per-example gradients."""
    expected = own(network(), *images)
    model = network()
    dp = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.5, max_grad_norm=0.7, expected_batch_size=B,
        generator=mechanism.new_generator(3),
    )  # fmt: skip
    per_example, _ = gradients.per_example_gradients(model, F.cross_entropy, *images)
    for p, g in zip(model.parameters(), per_example, strict=True):
        p.grad_sample = g
    dp.pre_step()
    torch.testing.assert_close(flat(model), expected, atol=1e-6, rtol=0)


def test_an_empty_batch_gives_pure_noise_of_the_stated_scale():
    model = models.mlp((3, 16, 16), 5, hidden=256)
    noise = own(model, torch.zeros(0, 3, 16, 16), torch.zeros(0, dtype=torch.int64))
    assert float(noise.std()) == pytest.approx(1.5 * 0.7 / B, rel=0.01)
    assert abs(float(noise.mean())) < 4 * 1.5 * 0.7 / B / len(noise) ** 0.5


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", B), ("sum", 1)])
def test_noise_std_matches_the_noise_for_both_reductions(reduction, divisor):
    p = nn.Parameter(torch.zeros(100_000))
    dp = mechanism.DPOptimizerFastGradientClipping(
        torch.optim.SGD([p], lr=1.0), noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=B,
        loss_reduction=reduction, generator=mechanism.new_generator(0),
    )  # fmt: skip
    p.grad = torch.zeros_like(p)
    dp.pre_step()
    assert mechanism.noise_std(dp) == pytest.approx(2.0 * 0.5 / divisor)
    assert float(p.grad.std()) == pytest.approx(mechanism.noise_std(dp), rel=0.02)


def test_noise_std_counts_accumulated_iterations():
    p = nn.Parameter(torch.zeros(100_000))
    dp = DPOptimizer(
        torch.optim.SGD([p], lr=1.0), noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=B,
        generator=mechanism.new_generator(0),
    )  # fmt: skip
    p.grad_sample = [torch.zeros(3, 100_000), torch.zeros(2, 100_000)]
    dp.pre_step()
    p.grad_sample = [torch.zeros(1, 1)] * 2
    assert mechanism.noise_std(dp) == pytest.approx(2.0 * 0.5 / (2 * B))
    assert float(p.grad.std()) == pytest.approx(mechanism.noise_std(dp), rel=0.02)


def test_noise_std_is_known_before_the_first_backward():
    parts = door(nn.Linear(4, 3), "hooks", noise_multiplier=3.0)
    assert mechanism.noise_std(parts.optimizer) == pytest.approx(3.0 / 2)


def test_noise_std_refuses_clipping_that_adapts():
    dp = AdaClipDPOptimizer(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), noise_multiplier=1.0, target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.1, max_clipbound=2.0, min_clipbound=0.1, unclipped_num_std=1.0, max_grad_norm=1.0,
        expected_batch_size=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="adaptive clipping changes C"):
        mechanism.noise_std(dp)


def test_the_update_changes_with_noise_and_with_clipping(images):
    base = own(network(), *images)
    assert torch.equal(base, own(network(), *images))
    assert not torch.allclose(base, own(network(), *images, noise_multiplier=1e-6))
    assert not torch.allclose(base, own(network(), *images, max_grad_norm=0.07))
    assert not torch.allclose(base, own(network(), *images, seed=4))


def test_two_datasets_that_differ_in_one_example_give_sums_at_most_c_apart(images):
    x, y = images
    for i in range(0, N, 7):
        keep = torch.arange(N) != i
        whole, without = (
            own(network(), x, y, noise_multiplier=0.0),
            own(network(), x[keep], y[keep], noise_multiplier=0.0),
        )
        assert 0 < B * (whole - without).norm() <= 0.7 * (1 + 1e-4)


def test_every_step_is_accounted_with_exact_q(images):
    accountant = RDPAccountant()
    model = network()
    dp = mechanism.mechanism(adaptive.sgd(model.parameters(), lr=0.1), n=N, accountant=accountant, **SETTINGS)
    for _ in range(3):
        mechanism.private_gradient(model, F.cross_entropy, *images, dp)
    assert accountant.history == [(1.5, B / N, 3)]


def test_opacus_rounds_where_the_door_does_not():
    """`PrivacyEngine.make_private` accounts 50,000 / 4,096 as 1 / 13 and divides by 3,846; ours does what was asked."""
    data = TensorDataset(torch.zeros(50_000, 1), torch.zeros(50_000, dtype=torch.int64))
    model = nn.Linear(1, 2)
    _, theirs, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=4096),
    )  # fmt: skip
    assert (theirs.expected_batch_size, loader.sample_rate) == (3846, 1 / 13)
    model = nn.Linear(1, 2)
    accountant = RDPAccountant()
    ours = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        max_grad_norm=1.0, batch_size=4096, accountant=accountant,
    )  # fmt: skip
    assert (ours.optimizer.expected_batch_size, ours.loader.batch_sampler.sample_rate) == (4096, 4096 / 50_000)
    x, y = next(iter(ours.loader))
    ours.loss(ours.model(x), y).backward()
    ours.optimizer.step()
    assert accountant.history == [(1.0, 4096 / 50_000, 1)]


def test_nothing_but_grad_is_left_on_a_parameter(images):
    model = network()
    own(model, *images)
    for p in model.parameters():
        tensors = {name for name, value in vars(p).items() if value is not None}
        assert tensors <= {"grad"}, tensors


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_when_the_mechanism_is_interrupted(images, monkeypatch, error):
    def fail(*_):
        raise error

    model = network()
    monkeypatch.setattr(mechanism.DPOptimizerFastGradientClipping, "add_noise", fail)
    with pytest.raises(error):
        own(model, *images)
    for p in model.parameters():
        assert not {name for name, value in vars(p).items() if value is not None}
        assert p.grad is None


def posterior(model, curvature="gradsq"):
    return IVON(model.parameters(), lr=0.1, ess=20.0, curvature=curvature, generator=mechanism.new_generator(1))


def several(images, samples, curvature="gradsq", **changes):
    """One private gradient averaged over draws, and who made it."""
    model = network()
    optimizer = posterior(model, curvature)
    dp = mechanism.mechanism(optimizer, n=N, generator=mechanism.new_generator(3), **{**SETTINGS, **changes})
    mechanism.private_gradient(model, F.cross_entropy, *images, dp, samples=samples)
    return model, optimizer


def test_several_draws_are_averaged(images):
    """With the clip out of reach and no noise, the result is the mean of ordinary gradients at the draws."""
    model, optimizer = several(images, 3, noise_multiplier=0.0, max_grad_norm=1e6)
    twin = network()
    thetas, expected = mechanism.draws(posterior(twin), list(twin.parameters()), 3), 0.0
    for theta in thetas:
        other = network()
        with torch.no_grad():
            for p, value in zip(other.parameters(), theta, strict=True):
                p.copy_(value)
        F.cross_entropy(other(images[0]), images[1], reduction="sum").backward()
        expected = expected + flat(other) / (3 * B)
    assert not torch.equal(thetas[0][0], thetas[1][0])
    torch.testing.assert_close(flat(model), expected, atol=1e-5, rtol=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    torch.testing.assert_close(before, list(network().parameters()))  # the mean is back
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("curvature", ["gradsq", "price"])
def test_one_draw_is_the_ordinary_loop(images, curvature):
    model, optimizer = several(images, 1, curvature)
    optimizer.step()
    other = network()
    usual = posterior(other, curvature)
    dp = mechanism.mechanism(usual, n=N, generator=mechanism.new_generator(3), **SETTINGS)
    with usual.sampled_params():
        mechanism.private_gradient(other, F.cross_entropy, *images, dp)
    usual.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(optimizer.state[p]["h"], usual.state[q]["h"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("curvature", ["price", "price-block", "price-shrink"])
def test_prices_estimates_are_not_averaged_over_draws(images, curvature):
    with pytest.raises(ValueError, match=rf"'{curvature}' multiplies each gradient by its own theta - m, but clipping"):
        several(images, 2, curvature)


def test_several_draws_where_they_have_no_meaning(images):
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        several(images, 0)
    model = network()
    optimizer = posterior(model)
    dp = mechanism.mechanism(optimizer, n=N, **SETTINGS)
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match="a draw already"):
        mechanism.private_gradient(model, F.cross_entropy, *images, dp, samples=2)


@pytest.mark.parametrize(("joint", "refused"), [(False, [4]), (True, [1, 4])])
def test_bayes_by_backprop_does_not_average_over_draws(images, joint, refused):
    """It keeps one draw, and maps the gradient by that; the draw of `JointBackprop` is not in the weights at all."""
    model = backprop.Reparameterized(network()) if joint else network()
    kind = backprop.JointBackprop if joint else backprop.BayesByBackprop
    optimizer = kind(model.parameters(), lr=0.1, ess=10.0)
    dp = mechanism.mechanism(optimizer, n=N, **SETTINGS)
    for samples in (1, 4):
        if samples in refused:
            with pytest.raises(ValueError, match=rf"{kind.__name__} maps each gradient .*without samples"):
                mechanism.private_gradient(model, F.cross_entropy, *images, dp, samples=samples)
        else:
            mechanism.private_gradient(model, F.cross_entropy, *images, dp, samples=samples)


def test_draws_of_a_deterministic_method_are_its_weights(images):
    gradients_of = []
    for samples in (None, 2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # has no sampled_params at all
        dp = mechanism.mechanism(optimizer, n=N, generator=mechanism.new_generator(3), **SETTINGS)
        mechanism.private_gradient(model, F.cross_entropy, *images, dp, samples=samples)
        gradients_of.append(flat(model))
    torch.testing.assert_close(*gradients_of, atol=1e-6, rtol=0)


def test_a_private_gradient_that_is_not_finite_raises_before_any_step(images):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        own(model, *images, noise_multiplier=1e38, max_grad_norm=1e30)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_poisson_batches_have_the_right_law():
    n, b, steps = 40, 10, 4000
    sets = list(mechanism.poisson_batches(n, b, steps, mechanism.new_generator(0)))
    counts = torch.zeros(n)
    for index in sets:
        assert len(index.unique()) == len(index)
        counts[index] += 1
    q, sizes = b / n, torch.tensor([float(len(index)) for index in sets])
    error = (q * (1 - q) / steps) ** 0.5
    assert ((counts / steps - q).abs() < 4.5 * error).all()  # each example has probability q
    assert float(sizes.var()) == pytest.approx(n * q * (1 - q), rel=0.1)  # independently of the others
    assert len({tuple(index.tolist()) for index in sets[:100]}) > 95


def test_unseeded_generators_hold_more_than_32_bits():
    """`manual_seed` keeps 32 bits: an attacker could try them all. No such seed explains an unseeded stream."""
    generator = mechanism.new_generator()
    plain = torch.Generator().manual_seed(generator.initial_seed())
    assert not torch.equal(torch.randn(9, generator=plain), torch.randn(9, generator=generator))
    words = [mechanism.new_generator().get_state().view(torch.int64)[3:627] for _ in range(2)]
    assert all(len(w.unique()) > 620 and w.min() >= 0 and w.max() < 2**32 for w in words)
    assert (words[0] == words[1]).sum() < 3
    draws = torch.randn(200_000, generator=generator, dtype=torch.float64)
    assert abs(float(draws.mean())) < 4 / len(draws) ** 0.5
    assert abs(float(draws.var()) - 1) < 4 * (2 / len(draws)) ** 0.5


def test_successive_noises_are_independent():
    model = models.mlp((3, 16, 16), 5, hidden=64)
    dp = mechanism.mechanism(adaptive.sgd(model.parameters(), lr=0.1), n=N, **SETTINGS)
    empty = torch.zeros(0, 3, 16, 16), torch.zeros(0, dtype=torch.int64)
    first, second = ((mechanism.private_gradient(model, F.cross_entropy, *empty, dp), flat(model))[1] for _ in range(2))
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(float(correlation)) < 4 / len(first) ** 0.5


def test_half_precision_is_refused(images):
    with pytest.raises(ValueError, match="keep the parameters in float32"):
        own(network().bfloat16(), images[0].bfloat16(), images[1])


def door(model, mode="hooks", loss=None, optimizer=None, **changes):
    return make_private(
        model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), VECTORS, loss=loss or nn.CrossEntropyLoss(),
        mode=mode, **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 2, **changes},
    )  # fmt: skip


def test_the_doors_loader_draws_with_exact_q():
    parts = door(nn.Linear(4, 3))
    sizes = [len(x) for _ in range(300) for x, _ in parts.loader]
    assert sum(sizes) / len(sizes) == pytest.approx(2, abs=4 * (2 * 0.75 / len(sizes)) ** 0.5)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_after_a_step_through_the_door_no_parameter_carries_an_example(mode):
    model = nn.Linear(4, 3)
    parts = door(model, mode)
    for _ in range(2):
        parts.optimizer.zero_grad()
        parts.loss(parts.model(VECTORS.tensors[0]), VECTORS.tensors[1]).backward()
        parts.optimizer.step()
        for p in model.parameters():
            assert {name for name, value in vars(p).items() if isinstance(value, (torch.Tensor, list))} <= {"grad"}


def test_the_door_refuses_what_breaks_its_sensitivity():
    x, y = VECTORS.tensors
    parts = door(nn.Linear(4, 3))
    parts.loss(parts.model(x), y).backward()
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        parts.loss(parts.model(x), y).backward()
    for loss in (nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(ignore_index=0)):
        with pytest.raises(ValueError, match="class weights or ignore_index"):
            door(nn.Linear(4, 3), loss=loss)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="exactly the model's trainable parameters"):
        door(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    model[0].requires_grad_(False)
    parts = door(model, "ghost", optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    model[0].requires_grad_(True)
    parts.loss(parts.model(x), y).backward()
    with pytest.raises(ValueError, match="frozen or unfrozen after make_private"):
        parts.optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_door_raises_on_a_gradient_that_is_not_finite(mode):
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    parts = door(model, mode)
    x = VECTORS.tensors[0].clone()
    x[0, 0] = float("inf")
    parts.loss(parts.model(x), VECTORS.tensors[1]).backward()
    with pytest.raises(FloatingPointError, match="not finite"):
        parts.optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="steps must be >= 0, got -1"):
        next(mechanism.poisson_batches(10, 2, -1))


def test_unseeded_masks_and_noise_differ_from_run_to_run():
    first, second = (next(mechanism.poisson_batches(1000, 500, 1)).tolist() for _ in range(2))
    assert first != second
    assert mechanism.new_generator().initial_seed() != mechanism.new_generator().initial_seed()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -1.0}, r"noise_multiplier must be finite and >= 0, got -1.0; accounting.noise_for"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be finite"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be finite and > 0, got 0.0"),
        ({"batch_size": N + 1}, rf"batch_size .* got {N + 1} for {N} examples"),
        ({"batch_size": 0}, "batch_size must be > 0"),
    ],
)
def test_settings_out_of_range(images, changes, message):
    with pytest.raises(ValueError, match=message):
        own(network(), *images, **changes)
    model = network()
    with pytest.raises(ValueError, match=message):
        make_private(
            model, adaptive.sgd(model.parameters(), lr=0.1), TensorDataset(*images), loss=nn.CrossEntropyLoss(),
            **{**SETTINGS, **changes},
        )  # fmt: skip


def test_batch_norm_and_missing_parameters_are_refused(images):
    with pytest.raises(ValueError, match="BatchNorm2d at '0'"):
        own(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(768, 5)), *images)
    model = network()
    dp = mechanism.mechanism(adaptive.sgd(list(model.parameters())[:2], lr=0.1), n=N, **SETTINGS)
    with pytest.raises(ValueError, match=r"exactly the model's trainable parameters"):
        mechanism.private_gradient(model, F.cross_entropy, *images, dp)


class Dicts(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": torch.zeros(4), "y": 0}


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, x):
        return self.gru(x.unsqueeze(1))[0][:, -1]


class Twice(nn.Module):
    """A layer, used in one more way."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.out, self.use = nn.Linear(4, 4), nn.Linear(4, 3), use

    def forward(self, x):
        return self.out(self.use(self.layer, x))


ELSEWHERE = Twice(lambda layer, x: layer(x) + 3 * F.linear(x, layer.weight))
GATE = Twice(lambda layer, x: layer(x) + GATE.gate(F.linear(x, layer.weight)))
GATE.gate = nn.Linear(4, 4)
nn.init.zeros_(GATE.gate.weight)  # closed at first: the other use has no gradient yet
FOLDED = Twice(lambda layer, x: layer(x.view(-1, 2, 2).repeat(1, 1, 2).flatten(0, 1)).view(-1, 2, 4).mean(1))
REFLECTED = nn.Sequential(
    nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(12, 3)
)

VECTORS = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), VECTORS, "in-place layer '1' .* inplace=False"),
        (Unused(), VECTORS, r"unused parameters .*: idle.weight, idle.bias; freeze them"),
        (Recurrent(), VECTORS, "GRU at 'gru' .* opacus.layers.DPGRU"),
        (nn.Linear(4, 3), Dicts(), r"tuples \(x, y\), got dict"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)), VECTORS, "BatchNorm1d"),
        (nn.Linear(4, 3), DataLoader(VECTORS), "sampler of one's own is not Poisson's"),
        (ELSEWHERE, VECTORS, r"hooks see .* of the gradient of 'layer.weight', .* use dpivon's private_gradient"),
        (GATE, VECTORS, r"hooks see .* of the gradient of 'layer.weight'"),
        (FOLDED, VECTORS, r"hooks see .* of the gradient of 'layer.weight'.*folded into the batch"),
        (REFLECTED, VECTORS, r"hooks see .* of the gradient of '1.weight'.*Opacus does not heed the layer's padding"),
        (nn.Linear(4, 3).bfloat16(), VECTORS, "'weight' is torch.bfloat16.*keep the parameters in float32"),
        (nn.Linear(4, 3, dtype=torch.complex64), VECTORS, "'weight' is torch.complex64"),
    ],
)
def test_what_hooks_cannot_do_is_refused_with_a_remedy(model, data, message, mode):
    with pytest.raises(ValueError, match=message):
        make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
            max_grad_norm=1.0, batch_size=2, mode=mode,
        )  # fmt: skip


def test_a_layer_that_is_used_twice_goes_with_hooks_and_is_refused_with_ghost_clipping():
    model = Twice(lambda layer, x: layer(layer(x).tanh()))
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(ValueError, match=r"Parameter tying is not supported.*use mode='hooks'"):
        door(model, "ghost")
    model.layer.eval()
    door(model).hooks.cleanup()
    assert [name for name, layer in model.named_modules() if not layer.training] == ["layer"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(set(vars(p)) <= {"grad_sample", "summed_grad", "_norm_sample"} for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_an_example_whose_label_is_ignored_does_not_rescale_the_others(mode):
    x, totals = VECTORS.tensors[0], []
    for labels in ([1], [1] + 3 * [-100]):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        parts = door(model, mode, noise_multiplier=0.0, max_grad_norm=1e3)
        parts.loss(parts.model(x[: len(labels)]), torch.tensor(labels)).backward()
        parts.optimizer.step()
        totals.append(flat(model))
    torch.testing.assert_close(*totals)


def test_unknown_mode_and_summed_loss_are_refused():
    model = nn.Linear(4, 3)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="'hooks' or 'ghost', got 'fast'"):
        make_private(model, optimizer, VECTORS, loss=nn.CrossEntropyLoss(), mode="fast", **arguments)
    with pytest.raises(ValueError, match="reduction='mean'"):
        make_private(model, optimizer, VECTORS, loss=nn.CrossEntropyLoss(reduction="sum"), **arguments)


def test_the_plain_twin_is_the_mean_gradient(images):
    model, other = network(), network()
    mechanism.plain_gradient(model, F.cross_entropy, *images)
    F.cross_entropy(other(images[0]), images[1]).backward()
    torch.testing.assert_close(flat(model), flat(other))


def test_the_statement_is_of_the_steps_that_were_taken_and_of_nothing_that_was_typed():
    """A cell that is run twice takes twice the steps, and says so."""
    net, x, y = nn.Linear(3, 1), torch.zeros(1000, 3), torch.zeros(1000, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    dp = mechanism.mechanism(sgd, noise_multiplier=2.0, max_grad_norm=0.5, batch_size=10, n=1000)
    with pytest.raises(ValueError, match="nothing was released yet"):
        mechanism.statement(dp, 1e-5)
    for times in (1, 2):
        for batch in mechanism.poisson_batches(1000, 10, 50):
            mechanism.private_gradient(net, F.mse_loss, x[batch], y[batch], dp)
            sgd.step()
        said = mechanism.statement(dp, 1e-5)
        expected = accounting.statement(
            2.0, 50 * times, 1e-5, max_grad_norm=0.5, batch_size=10, n=1000, simulation=False
        )
        assert said == expected
    for sigma in (4.0, 2.0, 4.0):
        dp.noise_multiplier = sigma
        mechanism.private_gradient(net, F.mse_loss, x[:3], y[:3], dp)
    more = mechanism.statement(dp, 1e-5)
    assert (more.steps, more.besides) == (101, ((4.0, 0.01, 2),))
    assert more.epsilon > said.epsilon
    with pytest.raises(ValueError, match="delta must be below"):
        mechanism.statement(dp, 0.1)


@pytest.mark.parametrize("kind", ["rdp", "prv"])
def test_the_statement_goes_by_the_accountant_and_tells_of_a_generator(kind):
    net = nn.Linear(3, 1)
    mine = accounting.new_accountant(kind)  # empty, and so false where it is asked for its truth
    dp = mechanism.mechanism(
        torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=2.0, max_grad_norm=0.5, batch_size=10, n=1000,
        accountant=mine, generator=mechanism.new_generator(0),
    )  # fmt: skip
    mechanism.private_gradient(net, F.mse_loss, torch.zeros(0, 3), torch.zeros(0, 1), dp)
    assert [tuple(entry) for entry in mine.history] == [(2.0, 0.01, 1)]
    said = mechanism.statement(dp, 1e-5)
    assert (said.accountant, said.simulation) == (kind, True)
    assert not mechanism.statement(dp, 1e-5, simulation=False).simulation


def test_a_raw_gradient_does_not_reach_the_optimizer():
    """Two habits of other loops: a penalty's backward after the private gradient, and a backward in its place."""
    net, x, y = nn.Linear(3, 1), torch.ones(4, 3), torch.ones(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    dp = mechanism.mechanism(sgd, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=2, n=4)
    before = [p.clone() for p in net.parameters()]
    F.mse_loss(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) has put a gradient into p\.grad"):
        sgd.step()
    mechanism.private_gradient(net, F.mse_loss, x, y, dp)
    net.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"neither clipped nor noised"):
        sgd.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    mechanism.private_gradient(net, F.mse_loss, x, y, dp)
    torch.autograd.grad(F.mse_loss(net(x), y), list(net.parameters()))  # a look puts nothing into p.grad
    sgd.step()
    assert not any(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    F.mse_loss(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # another optimizer may train on public data
    del dp
    gc.collect()
    F.mse_loss(net(x), y).backward()
    sgd.step()


def small(accountant=None, optimizer=None, **settings):
    net = nn.Linear(3, 1)
    sgd = optimizer(net.parameters()) if optimizer else torch.optim.SGD(net.parameters(), lr=0.1)
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 14, "n": 100, **settings}
    return net, sgd, mechanism.mechanism(sgd, accountant=accountant, **common)


def step_of(net, dp):
    mechanism.private_gradient(net, F.mse_loss, torch.ones(4, 3), torch.ones(4, 1), dp)


def test_a_statement_of_a_shared_accountant_or_of_two_norms_is_refused():
    shared = accounting.new_accountant("rdp")
    (net, _, dp), (other, _, another) = small(shared), small(shared, n=400, batch_size=100)
    step_of(net, dp)
    with pytest.raises(ValueError, match=r"dp must come from mechanism\(\).*accounting\.statement"):
        mechanism.statement(DPOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
        ), 1e-4)  # fmt: skip
    assert mechanism.statement(dp, 1e-4).batch_size == 14  # and not 14.000000000000002
    with pytest.raises(ValueError, match="nothing was released yet"):
        mechanism.statement(another, 1e-4)
    step_of(other, another)
    with pytest.raises(ValueError, match=r"counts 2 steps and this mechanism 1, .*an accountant of its own"):
        mechanism.statement(dp, 1e-4)
    net, _, dp = small()
    step_of(net, dp)
    dp.max_grad_norm = 2.0
    step_of(net, dp)
    with pytest.raises(ValueError, match=r"clipping norms \[1\.0, 2\.0\]"):
        mechanism.statement(dp, 1e-4)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_a_closure_does_not_carry_a_raw_gradient_past_the_guard(kind):
    net, optimizer, dp = small(optimizer=kind)
    before = [p.clone() for p in net.parameters()]

    def raw():
        optimizer.zero_grad()
        loss = F.mse_loss(net(torch.ones(4, 3)), torch.ones(4, 1))
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="neither clipped nor noised"):
        optimizer.step(raw)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))

    def private():
        step_of(net, dp)
        return torch.zeros(())

    optimizer.step(private)
    assert dp.taken >= 1


def test_the_guard_follows_the_optimizer_and_not_an_older_mechanism():
    net, sgd, old = small()
    step_of(net, old)
    sgd.step()
    dp = mechanism.mechanism(sgd, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=14, n=100)
    net(torch.ones(1, 3)).sum().backward()  # a look at a gradient, before the private one
    sgd.zero_grad()
    sgd.step()  # without gradients nothing happens
    step_of(net, dp)
    sgd.step()
    torch.optim.lr_scheduler.LambdaLR(dp, lambda t: 0.5)  # which wraps step()


def test_layers_that_are_unfrozen_later_are_named():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    dp = mechanism.mechanism(sgd, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=14, n=100)
    net[0].requires_grad_(True)
    with pytest.raises(ValueError, match="unfrozen after mechanism"):
        step_of(net, dp)
    net[1].requires_grad_(False)
    net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="unfrozen after mechanism"):
        sgd.step()
