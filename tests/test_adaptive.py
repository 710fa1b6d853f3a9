"""The adaptive family's frame and DP-SGD's momentum convention."""

import copy

import pytest
import torch
from torch import nn

from dpivon import adaptive, methods
from dpivon.ivon import IVON


def steps(optimizer_of, gradients, start=1.0):
    p = nn.Parameter(torch.full((3,), start, dtype=torch.float64))
    optimizer = optimizer_of([p])
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


@pytest.fixture
def gradients():
    return list(torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def test_without_momentum_it_is_torch_sgd(gradients):
    ours = steps(lambda p: adaptive.sgd(p, lr=0.3, beta1=0.0, weight_decay=0.01), gradients)
    torch.testing.assert_close(ours, steps(lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.01), gradients))


def test_momentum_is_the_bias_corrected_average(gradients):
    beta, lr, m, theta = 0.9, 0.3, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for t, g in enumerate(gradients, start=1):
        m = beta * m + (1 - beta) * g
        theta = theta - lr * m / (1 - beta**t)
    torch.testing.assert_close(steps(lambda p: adaptive.sgd(p, lr=lr, beta1=beta), gradients), theta)


def test_the_effective_step_is_the_learning_rate_from_the_first_step_on():
    constant = [torch.ones(3, dtype=torch.float64)] * 7
    torch.testing.assert_close(steps(lambda p: adaptive.sgd(p, lr=0.5), constant, start=0.0), -3.5 * constant[0])


def test_torch_reaches_the_same_speed_with_a_tenth_of_the_learning_rate():
    constant = [torch.ones(3, dtype=torch.float64)] * 400
    ours = steps(lambda p: adaptive.sgd(p, lr=0.5), constant)
    theirs = steps(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), constant)
    assert float((ours / theirs).mean()) == pytest.approx(1, abs=0.03)


def test_adam_and_rmsprop_are_torchs(gradients):
    ours = steps(lambda p: adaptive.adam(p, lr=0.1, beta1=0.8, beta2=0.95), gradients)
    torch.testing.assert_close(ours, steps(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95)), gradients))
    # torch's RMSprop has no bias correction; Adam without momentum is RMSProp with it.
    ours = steps(lambda p: adaptive.rmsprop(p, lr=0.1, beta2=0.95), gradients)
    torch.testing.assert_close(ours, steps(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.95)), gradients))


def test_adambc_subtracts_the_noise_before_the_root(gradients):
    s, floor, beta2, v = 0.6, 0.2, 0.9, torch.zeros(3, dtype=torch.float64)
    theta, m = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, beta2 * v + (1 - beta2) * g * g
        psi = torch.maximum(v / (1 - beta2**t) - s**2, torch.tensor(floor**2)).sqrt()
        theta = theta - 0.1 * m / (1 - 0.8**t) / psi
    options = {"beta1": 0.8, "beta2": beta2, "damping": floor, "noise_std": s}
    torch.testing.assert_close(steps(lambda p: adaptive.adambc(p, lr=0.1, **options), gradients), theta)
    assert not torch.allclose(
        steps(lambda p: adaptive.adambc(p, lr=0.1, **{**options, "noise_std": 0}), gradients), theta
    )


def test_adambc_without_noise_and_floor_is_adam(gradients):
    theirs = steps(lambda p: torch.optim.Adam(p, lr=0.1, eps=0), gradients)
    torch.testing.assert_close(
        steps(lambda p: adaptive.adambc(p, lr=0.1, damping=1e-12, noise_std=0.0), gradients), theirs
    )


def test_dp_ivon_gradsq_is_a_member_of_the_family(gradients):
    """The same private gradients move IVON's mean and the family's parameters alike."""
    options = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 1e-2, "noise_std": 0.5, "hess_init": 0.3, "ess": 10.0}
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    ivon = IVON([p], lr=0.1, curvature="noise-corrected", rescale_lr=False, **options)
    for g in gradients:
        with ivon.sampled_params():
            p.grad = g.clone()
        ivon.step()
    torch.testing.assert_close(steps(lambda p: adaptive.ivon_gradsq(p, lr=0.1, **options), gradients), p.detach())


def test_state_survives_a_state_dict(gradients):
    p, q = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    one, two = adaptive.sgd([p], lr=0.3), adaptive.sgd([q], lr=0.3)
    for g in gradients[:10]:
        p.grad = g.clone()
        one.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    q.data.copy_(p.data)
    for g in gradients[10:]:
        p.grad, q.grad = g.clone(), g.clone()
        one.step()
        two.step()
    assert torch.equal(p, q)


def test_parameters_without_gradient_stay():
    p = nn.Parameter(torch.ones(3))
    adaptive.sgd([p], lr=0.3, weight_decay=1.0).step()
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be finite and > 0, got nan"),
        ({"lr": 0.1, "beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"lr": 0.1, "weight_decay": -1.0}, "weight_decay must be finite and >= 0, got -1.0"),
    ],
)
def test_errors_name_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        adaptive.sgd([nn.Parameter(torch.ones(1))], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"damping": 0.0}, "damping must be finite and > 0, got 0.0"),
    ],
)
def test_errors_of_the_moments(arguments, message):
    with pytest.raises(ValueError, match=message):
        adaptive.adam([nn.Parameter(torch.ones(1))], lr=0.1, **arguments)


def test_unknown_method():
    with pytest.raises(ValueError, match=r"unknown method 'dp-foo'; choose one of sgd, adam, ivon, sgld"):
        methods.get("dp-foo")


def test_the_noise_floor_is_the_scatter_of_the_corrected_second_moment():
    """Measured: the standard deviation of v_hat - s^2 on pure noise is the square of lambda_t."""
    s, steps, beta2 = 0.3, 200, 0.99
    g = s * torch.randn(steps, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, group = {}, {"beta2": beta2}
    for step in range(steps):
        state["step"] = step + 1
        v = adaptive.second_moment(state, g[step], group)
    scatter = float((v - s**2).std())
    assert adaptive.noise_floor(s, steps, beta2) ** 2 == pytest.approx(scatter, rel=0.03)


def test_dp_adambc_sets_its_floor_by_the_noise():
    from dpivon import data, train

    images = data.digits()
    for epsilon in (1.0, 8.0):
        now = train.Run(train.resolve(train.Config(method="dp-adambc", epsilon=epsilon, seed=0)), images)
        (group,) = now.optimizer.param_groups
        assert group["damping"] == adaptive.noise_floor(group["noise_std"], now.steps, group["beta2"])
    given = train.Run(train.resolve(train.Config(method="dp-adambc", damping=0.5, seed=0)), images)
    assert given.optimizer.param_groups[0]["damping"] == 0.5
