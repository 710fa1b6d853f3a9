"""Averages of iterates: of the right ones, resumed to the bit, with a variance that a known chain confirms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpivon import adaptive, backprop, checkpoint, data, iterates, methods, predict, snapshots, train
from dpivon.ivon import IVON

NAMES = [
    "sgd-average", "dp-sgd-average", "dp-bbp-average", "dp-sgd-snapshots", "dp-adam-snapshots",
    "dp-ivon-price-snapshots",
]  # fmt: skip


def run(optimizer, p, steps, gradient):
    """The iterates after each step, and what the parameters are at the end."""
    found = []
    for t in range(steps):
        with optimizer.sampled_params():
            p.grad = gradient(t)
        optimizer.step()
        found.append(optimizer.param_groups[0]["params"][0].detach().clone())
    return found


@pytest.mark.parametrize(("steps", "share", "first"), [(40, 0.5, 24), (41, 0.5, 25), (5, 0.5, 0), (1, 1.0, 0)])
def test_the_last_step_leaves_the_mean_of_the_last_part(steps, share, first):
    p, twin = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, 3, generator=source, dtype=torch.float64)
    plain = run(adaptive.sgd([twin], 0.1), twin, steps, lambda t: noise[t])
    optimizer = iterates.average(adaptive.sgd([p], 0.1), steps, share)
    got = run(optimizer, p, steps, lambda t: noise[t])
    assert all(torch.equal(a, b) for a, b in zip(got[:-1], plain, strict=False))
    torch.testing.assert_close(got[-1], torch.stack(plain[first:]).mean(0))
    if steps >= 8:
        blocks = torch.stack([part.mean(0) for part in torch.stack(plain[first:]).chunk(8)])
        torch.testing.assert_close(optimizer.state[p]["average_variance"], blocks.var(0) / 8)


def test_the_variance_is_that_of_the_average_and_not_of_an_iterate():
    """On a quadratic the iterates are an AR(1) chain: mean zero, covariance and variance of the mean are known."""
    d, steps, lr, curvature, s = 20_000, 1600, 0.1, 1.0, 0.7
    rho = 1 - lr * curvature
    source = torch.Generator().manual_seed(0)
    one = (lr * s) ** 2 / (1 - rho**2)
    p = nn.Parameter(one**0.5 * torch.randn(d, generator=source))  # starts in the stationary distribution
    optimizer = iterates.average(adaptive.sgd([p], lr, beta1=0.0), steps)
    for _ in range(steps):
        p.grad = curvature * p.detach() + s * torch.randn(d, generator=source)
        optimizer.step()
    window = 800
    true = one / window * ((1 + rho) / (1 - rho) - 2 * rho * (1 - rho**window) / (window * (1 - rho) ** 2))
    assert float(p.detach().var()) == pytest.approx(true, rel=0.05)
    estimate = float(optimizer.state[p]["average_variance"].mean())
    # Means of neighboring blocks are a little alike, which the estimate does not see.
    assert 0.75 * true < estimate < 1.02 * true
    assert one > 30 * true
    assert one / window < true / 10  # as if the iterates were independent


def test_the_posterior_of_bayes_by_backprop_is_widened_by_it():
    steps, source = 64, torch.Generator().manual_seed(0)
    p, twin = (nn.Parameter(torch.zeros(50)) for _ in range(2))
    noise = torch.randn(steps, 50, generator=source)
    options = {"ess": 100.0, "sigma_init": 0.1}
    plain = backprop.BayesByBackprop([twin], 0.1, generator=torch.Generator().manual_seed(1), **options)
    rhos, means = [], []
    for t in range(steps):
        with plain.sampled_params():
            twin.grad = noise[t]
        plain.step()
        rhos.append(plain.state[twin]["rho"].clone())
        means.append(twin.detach().clone())
    optimizer = iterates.bayes_by_backprop([p], 0.1, steps=steps, **options)
    optimizer.generator = torch.Generator().manual_seed(1)
    run(optimizer, p, steps, lambda t: noise[t])
    torch.testing.assert_close(p.detach(), torch.stack(means[32:]).mean(0))
    v = torch.stack([part.mean(0) for part in torch.stack(means[32:]).chunk(8)]).var(0) / 8
    own = F.softplus(torch.stack(rhos[32:]).mean(0)).square()
    torch.testing.assert_close(optimizer.variance()[p], own + v, rtol=1e-4, atol=1e-7)
    assert (v > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_at_the_same_average_bit_for_bit(name, tmp_path):
    images = data.digits()
    private = methods.get(name).private
    noise = 3.0 if private else None
    config = train.resolve(train.Config(method=name, noise_multiplier=noise, epochs=4, seed=0))
    whole = train.Run(config, images)
    train.train(whole, None, lambda line: None)
    for stop_at in (5, 14, 20):  # before, in and near the end of the last part
        now = train.Run(config, images)
        steps, now.steps = now.steps, stop_at
        train.train(now, tmp_path / "c", lambda line: None)
        state = checkpoint.load(tmp_path / "c")
        resumed = train.Run(config, images)
        resumed.load_state_dict(state)
        assert resumed.step == stop_at < steps
        train.train(resumed, None, lambda line: None)
        for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(resumed.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
            assert all(torch.equal(a[k], b[k]) for k in b if isinstance(b[k], torch.Tensor))
            kept = zip(a.get("snapshots", []), b.get("snapshots", []), strict=True)
            assert all(torch.equal(before, after) for before, after in kept)


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_update_changes_with_the_noise_and_with_c(name):
    images, found = data.digits(), []
    for sigma, c in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.5)):
        config = train.Config(method=name, noise_multiplier=sigma, max_grad_norm=c, epochs=1, seed=0)
        now = train.Run(train.resolve(config), images)
        train.train(now, None, lambda line: None)
        found.append(tuple(next(now.model.parameters()).detach().flatten()[:50].tolist()))
    assert len(set(found)) == 3


def test_the_schedule_is_constant_unless_it_is_given():
    assert train.resolve(train.Config(method="dp-sgd-average")).schedule == "constant"
    assert train.resolve(train.Config(method="dp-sgd-average", schedule="cosine")).schedule == "cosine"
    assert train.resolve(train.Config(method="dp-sgd")).schedule == "cosine"


def test_nothing_to_average_is_refused():
    for steps, share in ((0, 0.5), (10, 0.0), (10, 1.5)):
        with pytest.raises(ValueError, match=r"steps must be at least 1 and share in \(0, 1\]"):
            iterates.average(adaptive.sgd([nn.Parameter(torch.ones(1))], 0.1), steps, share)


def test_the_posterior_of_ivon_is_widened_by_it_and_its_mean_is_the_average():
    steps, source = 64, torch.Generator().manual_seed(0)
    p, twin = (nn.Parameter(torch.zeros(50, dtype=torch.float64)) for _ in range(2))
    noise = torch.randn(steps, 50, generator=source, dtype=torch.float64)
    options = {"ess": 100.0, "curvature": "gradsq", "noise_std": 0.0, "precondition": False}
    plain = IVON([twin], 1.0, **options)
    optimizer = iterates.ivon([p], 1.0, steps=steps, **options)
    run(optimizer, p, steps, lambda t: noise[t])
    means = torch.stack(run(plain, twin, steps, lambda t: noise[t])[32:])
    torch.testing.assert_close(p.detach(), means.mean(0))
    v = torch.stack([part.mean(0) for part in means.chunk(8)]).var(0) / 8
    assert (v > 0.1 * plain.variance()[twin]).any()  # or its being added would not show
    torch.testing.assert_close(optimizer.variance()[p], plain.variance()[twin] + v)


def test_adam_ends_at_its_average():
    p, twin = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    noise = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    got = run(iterates.adam([p], 0.1, steps=16, beta2=0.9), p, 16, lambda t: noise[t])
    plain = run(adaptive.adam([twin], 0.1, beta2=0.9), twin, 16, lambda t: noise[t])
    assert torch.equal(got[-2], plain[-2])
    torch.testing.assert_close(got[-1], torch.stack(plain[8:]).mean(0))


def test_snapshots_are_iterates_before_the_average_takes_the_last_one_s_place(tmp_path):
    """In memory or in files; the mean is the average, as that of the method without snapshots."""
    images, runs = data.digits(), {}
    for name, folder in (("dp-sgd-snapshots", None), ("dp-sgd-snapshots", tmp_path), ("dp-sgd-average", None)):
        config = train.Config(method=name, epsilon=1.0, epochs=4, seed=0, lr=1.0, samples=5 if "snap" in name else 0)
        now = train.Run(train.resolve(config), images)
        if folder is not None:
            now.optimizer.folder = str(folder)
        walked = []
        now.optimizer.register_step_pre_hook(
            lambda *_, now=now, w=walked: w.append(next(now.model.parameters()).clone())
        )
        train.train(now, None, lambda line: None)
        runs[name, folder] = now, walked
    memory, walked = runs["dp-sgd-snapshots", None]
    kept = memory.optimizer.state[next(memory.model.parameters())]["snapshots"]
    assert len(kept) == 5
    for at, iterate in zip(list(memory.optimizer.kept_at)[::-1][:-1], kept, strict=False):
        assert torch.equal(walked[at], iterate)  # the weights before the next step
    average = runs["dp-sgd-average", None][0]
    for a, b in zip(memory.model.parameters(), average.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(kept[-1], next(memory.model.parameters()))
    files = runs["dp-sgd-snapshots", tmp_path][0]
    assert isinstance(files.posterior(), snapshots.Stored)
    log_probs = [predict.log_probs(r.model, images.x_test, r.posterior(), 5) for r in (memory, files)]
    torch.testing.assert_close(*log_probs)


def test_a_method_without_snapshots_takes_no_folder(tmp_path):
    for config in (
        train.Config(method="dp-sgd-average", epochs=1, seed=0),
        train.Config(method="dp-sgd-snapshots", epochs=1, seed=0, samples=0),
    ):
        with pytest.raises(ValueError, match="keeps no iterates, so it takes no folder for them; 'dp-sgld' and"):
            train.run(config, images=data.digits(), samples_path=tmp_path)
