"""IVON against its authors' implementation, its equations in float64, and its promises about state and errors."""

import copy
import math

import ivon as peer
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpivon import adaptive, curvature, models
from dpivon.ivon import IVON, new_curvature

# 0.25 because the peer keeps hess_init in single precision.
SETTINGS = {"lr": 0.1, "ess": 500.0, "hess_init": 0.25, "beta1": 0.8, "beta2": 0.98, "weight_decay": 1e-2}
QUIET = {**SETTINGS, "noise_std": 0.0}


class SameNoise:
    """Standard normal draws in a fixed order, whatever the shapes they are asked in."""

    def __init__(self, monkeypatch):
        self.source = torch.Generator().manual_seed(0)
        self.randn = torch.randn
        monkeypatch.setattr(torch, "randn", self)

    def __call__(self, *shape, generator=None, dtype=None, device=None, out=None):
        shape = shape[0] if isinstance(shape[0], torch.Size) else shape
        draws = [self.randn((), generator=self.source, dtype=torch.float64) for _ in range(math.prod(shape))]
        draws = torch.tensor(draws, dtype=dtype).view(shape)
        return draws if out is None else out.copy_(draws)


def small_cnn():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)).double()


@pytest.mark.parametrize(("ours", "theirs"), [("price", "price"), ("gradsq", "gradsq")])
def test_the_authors_implementation_takes_the_same_200_steps(monkeypatch, ours, theirs):
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 8, 1, 8, 8, generator=source).double(), torch.randint(0, 4, (200, 8), generator=source)
    results = []
    for build in (
        lambda p: IVON(p, curvature=ours, **SETTINGS),
        lambda p: peer.IVON(p, hess_approx=theirs, **SETTINGS),
    ):
        with monkeypatch.context() as patch:
            model = small_cnn()
            optimizer = build(model.parameters())
            SameNoise(patch)
            mine = isinstance(optimizer, IVON)
            for t in range(200):
                with optimizer.sampled_params() if mine else optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[t]), y[t]).backward()
                optimizer.step()
        states = [optimizer.state[p]["h"] for p in model.parameters()] if mine else [optimizer.param_groups[0]["hess"]]
        means = torch.cat([p.detach().flatten() for p in model.parameters()])
        results.append((means, torch.cat([h.flatten() for h in states])))
    for got, reference in zip(*results, strict=True):
        torch.testing.assert_close(got, reference, atol=1e-8, rtol=0)


finite = st.floats(-1e6, 1e6)


@given(h=st.floats(1e-6, 1e4), h_hat=finite, beta2=st.floats(0, 0.9999), damping=st.floats(1e-6, 10))
def test_equation_2_and_its_positivity(h, h_hat, beta2, damping):
    group = {"beta2": beta2, "weight_decay": damping}
    new = float(
        new_curvature(torch.tensor([h], dtype=torch.float64), torch.tensor([h_hat], dtype=torch.float64), group)
    )
    paper = beta2 * h + (1 - beta2) * h_hat + (1 - beta2) ** 2 * (h - h_hat) ** 2 / (2 * (h + damping))
    assert new == pytest.approx(paper, rel=1e-9, abs=1e-12 * (abs(h_hat) + h))
    u = (1 - beta2) * (h_hat - h) / (h + damping)
    assert new + damping == pytest.approx((h + damping) * (1 + u + u * u / 2), rel=1e-6)
    assert new + damping > 0


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=60), st.sampled_from([0.0, 1e-8, 1e-3, 1.0])
)
def test_h_plus_damping_stays_positive_in_float32(targets, damping):
    group, h = {"beta2": 0.9, "weight_decay": damping}, torch.tensor([0.1])
    for target in targets:
        h = new_curvature(h, torch.tensor([target]), group)
        if not h.isfinite():
            break
        assert h + damping > 0


def test_a_curvature_driven_down_for_a_thousand_steps_stays_positive():
    group, h = {"beta2": 0.9, "weight_decay": 1e-3}, torch.tensor([0.1])
    for _ in range(1000):
        h = new_curvature(h, h - 10 * (h + 1e-3), group)  # u = -1: the factor is one half, each time
        assert h + 1e-3 > 0


def test_equations_3_and_4():
    p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = IVON([p], curvature="constant", **SETTINGS)
    m, momentum, h, delta = p.detach().clone(), torch.zeros(2, dtype=torch.float64), 0.25, 1e-2
    alpha = 0.1 * (h + delta)
    for t in range(1, 20):
        g = torch.tensor([math.sin(t), math.cos(2 * t)], dtype=torch.float64)
        with optimizer.sampled_params():
            p.grad = g.clone()
        optimizer.step()
        momentum = 0.8 * momentum + 0.2 * g
        m = m - alpha * (momentum / (1 - 0.8**t) + delta * m) / (h + delta)
        torch.testing.assert_close(p.detach(), m, rtol=1e-12, atol=0)


def test_without_preconditioning_the_mean_steps_like_momentum_descent_and_h_learns_all_the_same():
    """The curvature then sets nothing but the posterior's width."""
    torch.manual_seed(3)
    p, q, r = (torch.nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(3))
    options = {**QUIET, "curvature": "gradsq", "lr": 0.3}
    split, plain = IVON([p], precondition=False, **options), IVON([r], **options)
    descent = adaptive.sgd([q], lr=0.3, beta1=SETTINGS["beta1"], weight_decay=SETTINGS["weight_decay"])
    for _ in range(5):
        g = torch.randn(6, dtype=torch.float64)
        for optimizer, parameter in ((split, p), (plain, r), (descent, q)):
            with optimizer.sampled_params():
                parameter.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(p, q)
    assert (p - r).abs().max() > 0.01
    torch.testing.assert_close(split.state[p]["h"], plain.state[r]["h"])
    assert (split.state[p]["h"] != SETTINGS["hess_init"]).all()


def test_the_draw_has_the_posteriors_moments_and_the_mean_is_restored_exactly():
    p = nn.Parameter(torch.full((200_000,), 0.7))
    optimizer = IVON([p], **SETTINGS, generator=torch.Generator().manual_seed(0))
    with optimizer.sampled_params():
        z = (p.detach() - 0.7) * math.sqrt(500 * (0.25 + 1e-2))
        assert abs(float(z.mean())) < 4 / len(z) ** 0.5
        assert float(z.var()) == pytest.approx(1, abs=4 * (2 / len(z)) ** 0.5)
    assert torch.equal(p, torch.full_like(p, 0.7))


def test_the_mean_is_restored_whatever_happens_inside():
    p = nn.Parameter(torch.ones(5))
    optimizer = IVON([p], **SETTINGS)
    with pytest.raises(KeyError), optimizer.sampled_params():
        raise KeyError
    assert torch.equal(p, torch.ones(5))


def test_a_draw_inside_a_draw_raises_and_the_mean_survives():
    p = nn.Parameter(torch.ones(5))
    optimizer = IVON([p], lr=0.1, ess=10.0)
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match="a draw already"), optimizer.sampled_params():
        pass
    assert torch.equal(p, torch.ones(5))
    with optimizer.sampled_params():
        assert not torch.equal(p, torch.ones(5))


def test_a_parameter_that_skips_a_step_keeps_its_own_deviation():
    """Parameters of different ages are updated apart, each with the draw at which its own gradient was taken."""

    def go(together):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
        optimizer = IVON([a, b], lr=0.1, ess=10.0, curvature="price", generator=torch.Generator().manual_seed(0))
        for t in range(4):
            with optimizer.sampled_params():
                deviation = b.detach() - 1.0
                a.grad = torch.full((3,), 0.1)
                b.grad = None if (t == 0 or (t == 1 and together)) else torch.full((4,), 0.2)
            optimizer.step()
            if b.grad is not None:
                state = {"h": torch.full((4,), 0.1)}
                group = optimizer.param_groups[0]
                h_hat = curvature.price(b.grad, deviation, state, group)
                return optimizer.state[b]["h"], new_curvature(state["h"], h_hat, group)
        raise AssertionError

    for together in (True, False):
        got, expected = go(together)
        torch.testing.assert_close(got, expected)


def test_a_backward_outside_the_context_raises():
    model = models.build("mlp", (1, 4, 4), 3, seed=0)
    optimizer = IVON(model.parameters(), **SETTINGS)
    with optimizer.sampled_params():
        loss = F.cross_entropy(model(torch.randn(2, 1, 4, 4)), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_without_a_draw_raises():
    p = nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"inside `with optimizer\.sampled_params"):
        IVON([p], **SETTINGS).step()


@pytest.mark.parametrize("name", list(curvature.ESTIMATORS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e19])
def test_bad_gradients_raise_before_any_state_changes(name, bad):
    p = nn.Parameter(torch.ones(3))
    optimizer = IVON([p], **{**QUIET, "curvature": name}, generator=torch.Generator().manual_seed(0))
    for value in (0.5, -1.0):
        with optimizer.sampled_params():
            p.grad = torch.full((3,), value)
        optimizer.step()
    before, weights = copy.deepcopy(optimizer.state[p]), p.detach().clone()
    with optimizer.sampled_params():
        p.grad = torch.tensor([0.1, bad, 0.1])
    if name == "constant" and bad == 3e19:
        return
    with pytest.raises(FloatingPointError, match="lower"):
        optimizer.step()
    after = optimizer.state[p]
    assert before.keys() == after.keys()
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)
    assert torch.equal(p, weights)


@pytest.mark.parametrize("name", list(curvature.ESTIMATORS))
def test_state_dict_resumes_the_trajectory(name, tmp_path):
    def fresh():
        p = nn.Parameter(torch.ones(4, dtype=torch.float64))
        return p, IVON([p], **{**QUIET, "curvature": name}, generator=torch.Generator().manual_seed(0))

    def go(p, optimizer, times):
        for t in times:
            with optimizer.sampled_params():
                p.grad = torch.sin(t + 1.0 + torch.arange(4.0, dtype=torch.float64)) + 0.3 * p.detach()
            optimizer.step()

    p, whole = fresh()
    go(p, whole, range(10))
    torch.save({"p": p.detach(), "state": whole.state_dict(), "rng": whole.generator.get_state()}, tmp_path / "s.pt")
    go(p, whole, range(10, 20))
    q, resumed = fresh()
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    resumed.load_state_dict(saved["state"])
    resumed.generator.set_state(saved["rng"])
    q.data.copy_(saved["p"])
    go(q, resumed, range(10, 20))
    assert torch.equal(p, q)


def test_a_state_without_the_newest_setting_is_taken_up():
    p = torch.nn.Parameter(torch.ones(2))
    saved = IVON([p], **QUIET).state_dict()
    del saved["param_groups"][0]["precondition"]
    optimizer = IVON([p], **QUIET)
    optimizer.load_state_dict(saved)
    with optimizer.sampled_params():
        p.grad = torch.ones(2)
    optimizer.step()
    assert (p < 1).all()


def test_late_groups_frozen_and_unused_parameters_and_schedulers():
    p, late, frozen, idle = (nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    optimizer = IVON([p, frozen, idle], **QUIET)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    for t in range(3):
        if t == 1:
            optimizer.add_param_group({"params": [late], "lr": 0.2, "initial_lr": 0.2, "hess_init": 1.0})
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
        with optimizer.sampled_params():
            p.grad = torch.ones(2)
            late.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert optimizer.state[p]["step"] == 3
    assert optimizer.state[late]["step"] == 2
    assert torch.equal(frozen, torch.ones(2))
    assert torch.equal(idle, torch.ones(2))
    assert not torch.equal(p, torch.ones(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"ess": -1.0}, "ess must be finite and > 0, got -1.0"),
        ({"hess_init": 0.0}, "hess_init must be finite and > 0"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1e-4}, "weight_decay must be finite and >= 0"),
        ({"noise_std": float("nan")}, "noise_std must be finite and >= 0, got nan"),
        ({"curvature": "fisher"}, "unknown curvature 'fisher'; choose one of price, gradsq"),
    ],
)
def test_errors_name_value_and_remedy(change, message):
    with pytest.raises(ValueError, match=message):
        IVON([nn.Parameter(torch.ones(1))], **{**SETTINGS, **change})


@pytest.mark.parametrize("name", ["noise-corrected", "average-then-project", "block-mean"])
def test_a_correction_refuses_to_guess_the_noise(name):
    p = nn.Parameter(torch.ones(2))
    optimizer = IVON([p], curvature=name, **SETTINGS)
    with optimizer.sampled_params():
        p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="noise_std is not known"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(2))


def test_a_step_inside_the_draw_raises():
    p = nn.Parameter(torch.ones(2))
    optimizer = IVON([p], **QUIET)
    with optimizer.sampled_params():
        p.grad = torch.ones(2)
        with pytest.raises(RuntimeError, match="put the old mean back"):
            optimizer.step()


def test_it_finds_the_exact_posterior_of_bayesian_linear_regression():
    """The mean, and of the covariance what independent weights can hold: 1 / A_jj, not the larger (A^-1)_jj."""
    n, noise, scale, steps = 40, 0.5, 2.0, 8000
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5], dtype=torch.float64)
    y = y + noise * torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    A = x.T @ x / noise**2 + torch.eye(2, dtype=torch.float64) / scale**2
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = IVON(
        model.parameters(), lr=0.05, ess=n, curvature="price", hess_init=1.0, beta2=0.9995, noise_std=0.0,
        weight_decay=1 / (n * scale**2), generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    for _ in range(steps):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (((model(x)[:, 0] - y) ** 2).mean() / (2 * noise**2)).backward()
        optimizer.step()
        schedule.step()
    sigma = optimizer.variance()[model.weight][0].sqrt()
    exact = torch.linalg.solve(A, x.T @ y / noise**2)
    assert ((model.weight.detach()[0] - exact).abs() < 0.1 * sigma).all()
    torch.testing.assert_close(sigma, A.diagonal().rsqrt(), rtol=0.05, atol=0)
    assert (torch.linalg.inv(A).diagonal().sqrt() / sigma > 1.3).all()
