"""What the answers of the self-check questions state as facts, where the chapter itself does not compute it."""

import math

import numpy as np
import torch
from notebook import definitions
from torch.nn.utils import parameters_to_vector

from dpivon import accounting, adaptive, audit, data, mechanism, models
from dpivon.ivon import IVON


def test_masks_of_their_own_average_out_and_a_shared_one_does_not() -> None:
    chapter = definitions("book/06_sampling_and_dropout.ipynb")
    digits = data.digits()
    theta = parameters_to_vector(models.build("mlp", digits.shape, digits.classes, seed=0).parameters()).detach()
    x, y, generator = digits.x_train.flatten(1)[:256], digits.y_train[:256], torch.Generator().manual_seed(0)

    def spread(masks: int) -> float:
        found = []
        for _ in range(40):
            each = chapter["each_gradient"](theta, x, y, chapter["masks"](masks, 0.5, generator))
            each = chapter["clip_factors"](each.norm(dim=1), 1.0)[:, None] * each
            assert each.norm(dim=1).max() <= 1 + 1e-6
            found.append(each.mean(0))
        return float(torch.stack(found).var(0).sum().sqrt())

    assert spread(1) > 2 * spread(256)


def test_a_narrow_posterior_needs_no_evidence() -> None:
    chapter = definitions("book/10_dp_ivon_gradsq.ipynb")
    plan = chapter["plan"](455, 64, 10, 1.0, 1e-4)
    digits = data.digits()
    x, true = digits.x_train.flatten(1)[:455, 10:40] / 2, (digits.y_train[:455] > 4).long()
    shuffled = true[torch.randperm(455, generator=torch.Generator().manual_seed(0))]

    def posterior(y: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        net = torch.nn.Linear(30, 2)
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        batches, draws, noise = chapter["streams"](seed)
        optimizer = IVON(net.parameters(), lr=1.0, ess=455, hess_init=plan["h0"], beta2=plan["beta2"], generator=draws)
        dp = mechanism.mechanism(
            optimizer, noise_multiplier=plan["sigma"], max_grad_norm=1.0, batch_size=64, n=455, generator=noise
        )
        for batch in mechanism.poisson_batches(455, 64, plan["T"], batches):
            with optimizer.sampled_params():
                mechanism.private_gradient(net, torch.nn.functional.cross_entropy, x[batch], y[batch], dp)
            optimizer.step()
        return chapter["weights"](net), chapter["variance_of"](optimizer).sqrt()

    (mean, width), (_, by_chance), (other, _) = posterior(true, 0), posterior(shuffled, 0), posterior(true, 1)
    assert math.isclose(float(width.mean()), plan["sigma_v"], rel_tol=0.15)
    assert math.isclose(float(by_chance.mean()), plan["sigma_v"], rel_tol=0.15)
    assert 7 < float((mean - other).square().mean().sqrt()) / plan["sigma_v"] < 25


def test_the_curve_certifies_too_much_of_laplace_noise_and_the_rates_do_not() -> None:
    chapter = definitions("book/12_attack_your_own_model.ipynb")
    sigma = audit.noise_of(4.0, 1e-5)
    true = math.sqrt(2) / sigma
    assert round(true, 1) == 1.3
    rng = np.random.default_rng(0)
    coins = torch.from_numpy(rng.random(20_000) < 0.5)
    seen = coins.double() + torch.from_numpy(rng.laplace(0, sigma / math.sqrt(2), 20_000))
    assert 0.9 < chapter["rates_bound"](seen, coins, 1e-5, 0.5) < true
    assert chapter["gaussian_bound"](seen, coins, 1e-5, 0.5) > 5


def test_an_audit_does_not_refute_a_quarter_of_the_noise() -> None:
    chapter = definitions("book/12_attack_your_own_model.ipynb")
    q, steps, delta = 256 / 2438, 57, 1e-5
    sigma = accounting.noise_for(4.0, q, steps, delta) / 4
    assert min(accounting.epsilon(sigma, q, steps, delta, accountant=name) for name in ("rdp", "prv")) > 60
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(2):
        included = rng.random(1000) < 0.5
        shown, _ = chapter["simulated_run"](sigma, q, steps, included, rng)
        scores, coins = torch.from_numpy(shown.sum(1)), torch.from_numpy(included)
        bounds.append(chapter["one_run_bound"](scores, coins, delta, [20, 100, 332, 1000], 0.05 / 3))
    assert min(bounds) > 2
    assert max(bounds) < 4


def test_a_clipping_norm_is_a_unit() -> None:
    def walk(method: str, norm: float, lr: float) -> torch.Tensor:
        weight, source = torch.nn.Parameter(torch.ones(5, dtype=torch.float64)), torch.Generator().manual_seed(1)
        optimizer = {"sgd": adaptive.sgd, "adam": adaptive.adam}[method]([weight], lr=lr)
        for _ in range(20):
            each = 100 * torch.randn(64, 5, generator=source, dtype=torch.float64) + 50 * weight.detach()
            each = each * (norm / each.norm(dim=1, keepdim=True)).clamp(max=1)
            noise = torch.randn(5, generator=source, dtype=torch.float64)
            weight.grad = (each.sum(0) + norm * noise) / 64
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(walk("sgd", 5, 0.1), walk("sgd", 1, 0.5))
    assert (walk("sgd", 5, 0.5) - walk("sgd", 1, 0.5)).abs().max() > 0.1
    torch.testing.assert_close(walk("adam", 5, 0.01), walk("adam", 1, 0.01), rtol=1e-5, atol=1e-7)
