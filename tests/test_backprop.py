"""Bayes by Backprop: a known posterior, two private gradients of (m, rho), and what its errors say."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

from dpivon import adaptive, backprop, data, gradients, mechanism, methods, predict, train

N, NOISE, SCALE = 40, 0.5, 2.0


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def line():
    """Bayesian linear regression with two correlated features: inputs, labels, exact precision and mean."""
    x = torch.randn(N, 2, generator=seeded(), dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5], dtype=torch.float64)
    y = y + NOISE * torch.randn(N, generator=seeded(1), dtype=torch.float64)
    A = x.T @ x / NOISE**2 + torch.eye(2, dtype=torch.float64) / SCALE**2
    return x, y, A, torch.linalg.solve(A, x.T @ y / NOISE**2)


def regress(model, optimizer, steps=8000):
    x, y, _, _ = line()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    for _ in range(steps):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (((model(x)[:, 0] - y) ** 2).mean() / (2 * NOISE**2)).backward()
        optimizer.step()
        schedule.step()


def fitted(joint):
    model: nn.Module = nn.Linear(2, 1, bias=False).double()
    settings = {"lr": 0.1, "ess": N, "prior_scale": SCALE, "generator": seeded(2)}
    if joint:
        model = backprop.Reparameterized(model, sigma_init=0.05)
        optimizer: torch.optim.Optimizer = backprop.JointBackprop(model.parameters(), **settings)
    else:
        optimizer = backprop.BayesByBackprop(model.parameters(), sigma_init=0.05, **settings)
    regress(model, optimizer)
    m = model.m[0] if joint else model.weight
    sigma = F.softplus(model.rho[0]) if joint else optimizer.variance()[m].sqrt()
    return m.detach()[0], sigma.detach()[0]


@pytest.mark.parametrize("joint", [False, True])
def test_it_finds_the_exact_mean_and_the_mean_field_variance(joint):
    """1 / A_jj, and not the larger (A^-1)_jj."""
    _, _, A, exact = line()
    m, sigma = fitted(joint)
    torch.testing.assert_close(m, exact, atol=0.25 * float(A.diagonal().rsqrt().max()), rtol=0)
    torch.testing.assert_close(sigma, A.diagonal().rsqrt(), rtol=0.06, atol=0)
    assert (torch.linalg.inv(A).diagonal().sqrt() / sigma > 1.3).all()


@pytest.mark.parametrize("theta", [-3.0, -0.2, 0.0, 0.01, 0.15, 2.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_mixture_prior_is_the_gradient_of_the_log_density(theta, share):
    point = torch.tensor([theta], dtype=torch.float64, requires_grad=True)
    weights, scales = torch.tensor([share, 1 - share]).double(), torch.tensor([1.5, 0.1]).double()
    mixture = MixtureSameFamily(Categorical(weights), Normal(torch.zeros(2).double(), scales))
    (expected,) = torch.autograd.grad(-mixture.log_prob(point).sum(), point)
    torch.testing.assert_close(backprop.mixture_prior(1.5, 0.1, share)(point.detach()), expected, rtol=1e-5, atol=1e-7)


def test_a_mixture_of_equal_parts_is_the_gaussian_prior():
    theta = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(backprop.mixture_prior(0.7, 0.7, 0.3)(theta), backprop.gaussian_prior(0.7)(theta))
    ends = []
    for prior in (None, backprop.mixture_prior(0.7, 0.7), backprop.mixture_prior(0.7, 0.05)):
        p = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64))
        optimizer = backprop.BayesByBackprop([p], 0.1, 8, prior_scale=0.7, prior=prior, generator=seeded())
        with optimizer.sampled_params():
            p.grad = torch.zeros(3, dtype=torch.float64)
        optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[0], ends[1])
    assert (ends[2] - ends[0]).abs().min() > 1e-2


@pytest.mark.parametrize("sigma", [1e-4, 0.05, 1.0, 30.0])
def test_inverse_softplus(sigma):
    rho = torch.tensor(backprop.inverse_softplus(sigma), dtype=torch.float64)
    assert float(F.softplus(rho)) == pytest.approx(sigma, rel=1e-6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def examples() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, generator=seeded(4), dtype=torch.float64), torch.arange(8) % 3


def test_the_joint_gradient_of_an_example_is_a_map_of_its_weights_gradient():
    """(g, g epsilon sigmoid(rho)), for every example, where all share the draw."""
    x, y = examples()
    model = backprop.Reparameterized(network(), sigma_init=0.4)
    optimizer, plain = backprop.JointBackprop(model.parameters(), 0.1, 8, generator=seeded(5)), network()
    with optimizer.sampled_params():
        joint, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
        with torch.no_grad():
            for p, epsilon in zip(plain.parameters(), model.epsilon, strict=True):
                p.add_(0.4 * epsilon)
        torch.testing.assert_close(model(x), plain(x))
        slopes = [epsilon * rho.sigmoid() for epsilon, rho in zip(model.epsilon, model.rho, strict=True)]
    g, _ = gradients.per_example_gradients(plain, F.cross_entropy, x, y)
    expected = [*g, *(each * slope for each, slope in zip(g, slopes, strict=True))]
    assert len(joint) == len(expected) == 8
    for found, wanted in zip(joint, expected, strict=True):
        torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(model(x), network()(x))  # outside of a draw: the mean


def test_the_joint_way_clips_and_noises_twice_the_numbers():
    x, y = examples()
    settings = {"max_grad_norm": 0.3, "batch_size": 4, "n": 8}
    model = backprop.Reparameterized(network(), sigma_init=0.4)
    optimizer = backprop.JointBackprop(model.parameters(), 0.1, 8, generator=seeded(5))
    silent = mechanism.mechanism(optimizer, noise_multiplier=1e-9, generator=seeded(6), **settings)
    for i in range(8):
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x[i : i + 1], y[i : i + 1], silent)
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm() * 4
        assert float(norm) == pytest.approx(0.3, rel=1e-4)
    loud = mechanism.mechanism(optimizer, noise_multiplier=50.0, generator=seeded(6), **settings)
    with optimizer.sampled_params():
        mechanism.private_gradient(model, F.cross_entropy, x[:0], y[:0], loud)
    for part in (model.m, model.rho):
        noise = torch.cat([p.grad.flatten() for p in part])
        assert float(noise.std()) == pytest.approx(50 * 0.3 / 4, rel=0.25)


def private_step(method, noise_multiplier, max_grad_norm, tamper=None):
    """All that one private step leaves behind, flat: means and widths."""
    x, y = examples()
    row = methods.get(method)
    model = row.network(network(), **({"sigma_init": 0.4} if method.endswith("joint") else {}))
    more = {} if method.endswith("joint") else {"sigma_init": 0.4}
    optimizer = row.optimizer(model.parameters(), lr=0.5, ess=8.0, generator=seeded(5), **more)
    dp = mechanism.mechanism(
        optimizer, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, batch_size=4, n=8,
        generator=seeded(6),
    )  # fmt: skip
    with optimizer.sampled_params():
        mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        if tamper is not None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.fill_(tamper)
    optimizer.step()
    if method.endswith("joint"):
        return torch.cat([p.detach().flatten() for p in (*model.m, *model.rho)])
    parts = [p.detach() for p in model.parameters()] + list(optimizer.variance().values())
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("method", ["dp-bbp", "dp-bbp-joint"])
def test_the_step_depends_on_noise_and_clipping_and_on_the_private_gradient_alone(method):
    base = private_step(method, 1.0, 0.3)
    half = len(base) // 2
    for other in (private_step(method, 2.0, 0.3), private_step(method, 1.0, 0.6)):
        assert (other - base)[:half].abs().max() > 1e-3
        assert (other - base)[half:].abs().max() > 1e-5
    assert torch.equal(base, private_step(method, 1.0, 0.3))
    # With p.grad replaced, neither the data's gradient, nor the noise, nor the clipping norm can be seen.
    replaced = [private_step(method, s, c, tamper=0.01) for s, c in ((1.0, 0.3), (9.0, 0.3), (1.0, 5.0))]
    assert torch.equal(replaced[0], replaced[1])
    assert torch.equal(replaced[0], replaced[2])


def test_the_mapped_way_noises_only_the_weights_gradient():
    model = network()
    optimizer = backprop.BayesByBackprop(model.parameters(), 0.1, 8)
    dp = mechanism.mechanism(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=4, n=8)
    mechanism.private_gradient(model, F.cross_entropy, *examples(), dp)
    assert sum(p.grad.numel() for p in model.parameters() if p.grad is not None) == sum(
        p.numel() for p in model.parameters()
    )


def test_momentum_is_the_book_s_average():
    """At a vanishing width and a flat prior the mean takes the steps of the module's SGD."""
    ours, theirs = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.ones(4).double())
    first = backprop.BayesByBackprop([ours], 0.3, 1e12, sigma_init=1e-9, beta1=0.7)
    second = adaptive.sgd([theirs], lr=0.3, beta1=0.7)
    for t in range(5):
        with first.sampled_params():
            ours.grad = torch.full((4,), float(t), dtype=torch.float64)
        theirs.grad = torch.full((4,), float(t), dtype=torch.float64)
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)
    assert abs(float(ours.detach()[0]) - 1) > 0.5


def test_prediction_at_the_mean_and_by_samples():
    x, _ = examples()
    model = network()
    optimizer = backprop.BayesByBackprop(model.parameters(), 0.1, 8, sigma_init=0.5, generator=seeded(1))
    at_mean = predict.log_probs(model, x)
    torch.testing.assert_close(at_mean, network()(x).log_softmax(1).detach())
    draws = [predict.log_probs(model, x, optimizer, samples=1).exp() for _ in range(6)]
    optimizer.generator = seeded(1)
    together = predict.log_probs(model, x, optimizer, samples=6).exp()
    torch.testing.assert_close(together, torch.stack(draws).mean(0))
    assert (together - at_mean.exp()).abs().max() > 0.01
    torch.testing.assert_close(predict.log_probs(model, x), at_mean)  # the mean is back


@pytest.mark.parametrize("method", ["bbp", "dp-bbp", "dp-bbp-joint"])
def test_a_run_learns_and_repeats_itself(method):
    config = train.Config(method=method, seed=0, epochs=4, samples=2)
    images = data.digits()
    first, second = (train.run(config, images=images)["results"] for _ in range(2))
    assert first["mean"]["accuracy"] > 0.3
    assert (first["mean"], first["samples"]) == (second["mean"], second["samples"])
    assert first["mean"] != first["samples"]


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0.0}, {"lr": math.nan}, {"ess": 0.0}, {"ess": math.inf}, {"sigma_init": -1.0}, {"prior_scale": 0.0},
     {"beta1": 1.0}, {"beta1": -0.1}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        backprop.BayesByBackprop(network().parameters(), **{"lr": 0.1, "ess": 8.0} | wrong)
    model = backprop.Reparameterized(network())
    if name != "sigma_init":
        with pytest.raises(ValueError, match=f"{name} must be"):
            backprop.JointBackprop(model.parameters(), **{"lr": 0.1, "ess": 8.0} | wrong)
    else:
        with pytest.raises(ValueError, match="sigma_init must be"):
            backprop.Reparameterized(network(), **wrong)


@pytest.mark.parametrize("wrong", [{"wide": 0.0}, {"narrow": -1.0}, {"share": 0.0}, {"share": 1.0}])
def test_a_mixture_out_of_range_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        backprop.mixture_prior(**{"wide": 1.0, "narrow": 0.1} | wrong)


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_without_a_draw_is_refused(joint):
    model: nn.Module = network()
    optimizer: torch.optim.Optimizer
    if joint:
        model = backprop.Reparameterized(model)
        optimizer = backprop.JointBackprop(model.parameters(), 0.1, 8)
    else:
        optimizer = backprop.BayesByBackprop(model.parameters(), 0.1, 8)
    x, y = examples()
    for _ in range(2):  # also the second time: a draw serves one step
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="sampled_params"):
            optimizer.step()
        with optimizer.sampled_params():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_frozen_parameters_stay():
    model = network()
    model[1].requires_grad_(False)
    before = model[1].weight.clone()
    optimizer = backprop.BayesByBackprop(model.parameters(), 0.5, 8)
    with optimizer.sampled_params():
        F.cross_entropy(model(examples()[0]), examples()[1]).backward()
        assert torch.equal(model[1].weight, before)
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert len(optimizer.variance()) == 2


def test_a_draw_is_not_entered_twice_nor_stepped_in_nor_exported(tmp_path):
    from dpivon import posterior

    model = torch.nn.Linear(2, 2)
    optimizer = backprop.BayesByBackprop(model.parameters(), lr=0.1, ess=10.0)
    with optimizer.sampled_params():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="a draw already"), optimizer.sampled_params():
            pass
        with pytest.raises(RuntimeError, match="put the old mean back"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="a draw, not the mean"):
            posterior.save(tmp_path / "p", model, optimizer, architecture="mine", shape=(2,), classes=2)
    optimizer.step()


def test_a_joint_draw_is_not_entered_twice():
    model = backprop.Reparameterized(network())
    optimizer = backprop.JointBackprop(model.parameters(), 0.1, 8)
    with optimizer.sampled_params():
        drawn = [epsilon.clone() for epsilon in model.epsilon]
        with pytest.raises(RuntimeError, match="at a draw already"), optimizer.sampled_params():
            pass
        assert all(torch.equal(now, before) for now, before in zip(model.epsilon, drawn, strict=True))
    assert all((epsilon == 0).all() for epsilon in model.epsilon)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: model.double(), lambda model: model.to("meta")])
def test_the_draws_of_a_joint_network_follow_its_copies_and_moves(change):
    """A copy whose rho had lost its draw would be trained as a mean, silently."""
    model = change(backprop.Reparameterized(network()))
    optimizer = backprop.JointBackprop(model.parameters(), 0.1, 8, generator=torch.Generator().manual_seed(0))
    for rho, epsilon in zip(model.rho, model.epsilon, strict=True):
        assert rho.epsilon is epsilon
        assert (epsilon.dtype, epsilon.device) == (rho.dtype, rho.device)
    if next(model.parameters()).is_meta:
        return
    with optimizer.sampled_params():
        assert all((epsilon != 0).all() for epsilon in model.epsilon)
        x, y = examples()
        F.cross_entropy(model(x.to(next(model.parameters()))), y).backward()
    assert all(rho.grad.abs().sum() > 0 for rho in model.rho)
    optimizer.step()
