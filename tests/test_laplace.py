"""Last-layer Laplace: the probe's gradient is the curvature, its release is clipped, noised and paid for exactly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpivon import (
    accounting,
    checkpoint,
    data,
    gradients,
    laplace,
    ledger,
    mechanism,
    models,
    posterior,
    predict,
    train,
)


@pytest.fixture(scope="module")
def digits():
    return data.digits()


def small(**changes):
    return train.resolve(train.Config(**{"method": "dp-laplace", "epochs": 2, "seed": 0, **changes}))


def trained(config, images):
    now = train.Run(config, images)
    train.train(now, None, lambda line: None)
    return now


@pytest.mark.parametrize(("name", "shape"), [("mlp", (1, 8, 8)), ("lenet", (3, 16, 16))])
def test_the_probes_gradient_is_the_diagonal_of_the_hessian(name, shape):
    """For the last layer the generalized Gauss-Newton matrix is the Hessian itself, which autograd knows."""
    model = models.build(name, shape, 4, seed=0).double().eval()
    x, y = torch.randn(3, *shape, dtype=torch.float64), torch.tensor([0, 1, 3])
    probe = laplace.Probe(model)
    (got,), _ = gradients.per_example_gradients(probe, laplace.mean_product, x, y)
    layer = laplace.last_layer(model)
    names = {id(p): name for name, p in model.named_parameters()}
    weight, bias = names[id(layer.weight)], names[id(layer.bias)]
    for i in range(3):

        def loss(w, b, i=i):
            replaced = {weight: w, bias: b}
            return F.cross_entropy(torch.func.functional_call(model, replaced, (x[i : i + 1],)), y[i : i + 1])

        hessian = torch.autograd.functional.hessian(loss, (layer.weight.detach(), layer.bias.detach()))
        k, d = layer.weight.shape
        torch.testing.assert_close(got[i, :, :-1], hessian[0][0].reshape(k * d, k * d).diagonal().view(k, d))
        torch.testing.assert_close(got[i, :, -1], hessian[1][1].diagonal())
    assert all(p.requires_grad for p in model.parameters())  # the run's own network is untouched
    assert list(gradients.trainable(probe)) == ["v"]


def test_one_example_moves_the_released_sum_by_c_at_most():
    model, c = models.build("mlp", (1, 8, 8), 10, seed=0), 0.3
    source = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(30, 1, 8, 8, generator=source), torch.zeros(30, dtype=torch.int64)
    probe = laplace.Probe(model)
    whole = gradients.clipped_sum(probe, laplace.mean_product, x, y, c).sums[0]
    moved = []
    for i in range(30):
        keep = torch.arange(30) != i
        moved.append(
            float((whole - gradients.clipped_sum(probe, laplace.mean_product, x[keep], y[keep], c).sums[0]).norm())
        )
    assert max(moved) <= c * (1 + 1e-4)
    assert max(moved) > 0.9 * c


def test_the_release_is_the_clipped_mean_and_noise_of_the_stated_size(digits):
    """Two runs that differ in the last release's noise alone; its size by a chi-square test."""
    now = train.Run(small(), digits)
    sigma = now.planned[0][0]
    train.train(now, None, lambda line: None)
    layer = laplace.last_layer(now.model)
    got = torch.cat([now.optimizer.state[layer.weight]["curvature"],
                     now.optimizer.state[layer.bias]["curvature"].unsqueeze(1)], dim=1)  # fmt: skip
    probe = laplace.Probe(now.model)
    clipped = gradients.clipped_sum(
        probe, laplace.mean_product, digits.x_train, digits.y_train, now.config.max_grad_norm
    )
    z = (got * digits.n - clipped.sums[0]) / (sigma * now.config.max_grad_norm)
    assert abs(float(z.double().square().mean()) - 1) < 4 * math.sqrt(2 / z.numel())
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert now.accountant.history[-1] == (sigma, 1.0, 1)


def test_no_noise_gives_the_clipped_curvature_and_no_promise(digits):
    now = trained(small(noise_multiplier=0.0, epochs=0.2), digits)
    probe = laplace.Probe(now.model)
    expected = (
        gradients.clipped_sum(probe, laplace.mean_product, digits.x_train, digits.y_train, 1.0).sums[0] / digits.n
    )
    torch.testing.assert_close(now.optimizer.state[laplace.last_layer(now.model).bias]["curvature"], expected[:, -1])
    assert now.statement().epsilon == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_whole_run_spends_the_budget_and_anyone_can_compute_it_again(digits, epsilon, accountant):
    record = train.run(train.Config(method="dp-laplace", epsilon=epsilon, accountant=accountant, epochs=2, seed=0),
                       images=digits)  # fmt: skip
    ledger.validate(record)
    p = record["privacy"]
    assert epsilon - min(0.01, 0.01 * epsilon) <= p["epsilon"] <= epsilon
    ((sigma, q, steps),) = p["besides"]
    assert (q, steps) == (1.0, 1)
    again = accounting.epsilon(
        p["noise_multiplier"], p["batch_size"] / p["n"], p["steps"], p["delta"], accountant, p["besides"]
    )
    assert again == p["epsilon"]
    alone = accounting.epsilon(p["noise_multiplier"], p["batch_size"] / p["n"], p["steps"], p["delta"], accountant)
    assert alone < p["epsilon"] - 0.001
    # A tenth of a release that would spend everything, at every order.
    assert sigma == pytest.approx(accounting.noise_for(epsilon, 1.0, 1, p["delta"], accountant) * math.sqrt(10))


def test_an_interrupted_run_releases_and_states_no_curvature(digits):
    now = train.Run(small(), digits)
    now.step = now.steps - 1
    now.besides = []
    assert now.statement().besides == ()
    assert now.posterior().variance() == {}
    before = predict.log_probs(now.model, digits.x_test[:5])
    torch.testing.assert_close(predict.log_probs(now.model, digits.x_test[:5], now.posterior(), 3), before)


def test_it_is_released_once_and_a_resumed_run_repeats_the_same(digits, tmp_path):
    now = train.Run(small(), digits)
    train.train(now, tmp_path / "c", lambda line: None)
    layer = laplace.last_layer(now.model)
    first = now.optimizer.state[layer.weight]["curvature"].clone()
    history = list(now.accountant.history)
    train.train(now, None, lambda line: None)
    assert now.accountant.history == history
    assert torch.equal(now.optimizer.state[layer.weight]["curvature"], first)
    resumed = train.Run(small(), digits)
    resumed.load_state_dict(checkpoint.load(tmp_path / "c"))
    train.train(resumed, None, lambda line: None)
    assert torch.equal(resumed.optimizer.state[laplace.last_layer(resumed.model).weight]["curvature"], first)
    assert resumed.statement() == now.statement()


def test_the_variance_is_the_formula_and_the_draws_have_it(digits):
    now = trained(small(), digits)
    layer, known = laplace.last_layer(now.model), now.posterior()
    variance = known.variance()
    assert set(variance) == {layer.weight, layer.bias}
    h = now.optimizer.state[layer.weight]["curvature"]
    assert (h < 0).any()
    torch.testing.assert_close(variance[layer.weight], 1 / (digits.n * (h.clamp(min=0) + now.config.weight_decay)))
    mean, z = layer.weight.detach().clone(), []
    for _ in range(20):
        with known.sampled_params():
            z.append((layer.weight.detach() - mean) / variance[layer.weight].sqrt())
    assert torch.equal(layer.weight, mean)
    z = torch.stack(z)
    assert abs(float(z.square().mean()) - 1) < 4 * (2 / z.numel()) ** 0.5


def test_where_there_is_only_noise_its_projection_leaves_four_tenths_of_it():
    z = torch.randn(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(z.clamp(min=0).mean()) == pytest.approx(1 / math.sqrt(2 * math.pi), abs=0.003)
    assert "0.40 s" in laplace.Laplace.__doc__


def test_without_privacy_it_is_the_exact_mean_curvature(digits):
    now = trained(small(method="laplace"), digits)
    probe = laplace.Probe(now.model)
    mechanism.plain_gradient(probe, laplace.mean_product, digits.x_train, digits.y_train)
    got = now.optimizer.state[laplace.last_layer(now.model).weight]["curvature"]
    torch.testing.assert_close(got, probe.v.grad[:, :-1], rtol=1e-4, atol=1e-7)
    assert now.accountant.history == []
    assert now.statement() is None


def test_it_exports_with_its_variances(digits, tmp_path):
    record = train.run(small(samples=8), images=digits, export_path=tmp_path / "p")
    got = posterior.load(tmp_path / "p")
    assert set(got.variance) == {"3.weight", "3.bias"}
    assert got.privacy == record["privacy"]
    assert got.privacy["besides"]
    assert record["cost"]["stored"] == 4810 + 650


def test_errors_name_the_value():
    p = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="weight_decay must be > 0, got 0"):
        laplace.sgd(p, 0.1, 10.0, weight_decay=0.0)
    with pytest.raises(ValueError, match="ess must be finite and > 0, got 0"):
        laplace.sgd(p, 0.1, 0.0)
    for model in (nn.Sequential(nn.Tanh()), nn.Linear(2, 2, bias=False)):
        with pytest.raises(ValueError, match="must end in a linear layer with a bias"):
            laplace.Probe(model)


def test_the_state_after_the_release_holds_it_and_no_second_one_is_made(digits):
    config = small(calibration=0.2, epochs=1)
    kept, aside = train.set_aside(digits, 0.2)
    now = train.Run(config, kept, calibration=aside)
    train.train(now, None, lambda line: None)
    again = train.Run(config, kept, calibration=aside)
    again.load_state_dict(now.state_dict())
    train.train(again, None, lambda line: None)
    weight, its = (laplace.last_layer(run.model).weight for run in (now, again))
    assert torch.equal(again.optimizer.state[its]["curvature"], now.optimizer.state[weight]["curvature"])
    assert again.accountant.history == now.accountant.history
    assert again.statement() == now.statement()
    assert again.temperature == now.temperature


def test_a_record_of_a_run_must_state_its_release(digits):
    record = train.run(small(epochs=1), images=digits)
    ledger.check(record)
    p = record["privacy"]
    p["epsilon"] = accounting.epsilon(p["noise_multiplier"], p["sample_rate"], p["steps"], p["delta"])
    del p["besides"]
    with pytest.raises(ledger.LedgerError, match="'dp-laplace' releases a curvature, and privacy has no besides"):
        ledger.check(record)
    ledger.check({**record, "status": "interrupted"})
