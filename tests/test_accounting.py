"""Accounting against Opacus and Google's dp-accounting, in both directions; the traps; every error."""

import dataclasses
import math
import warnings

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from scipy.optimize import brentq
from scipy.stats import norm

from dpivon import accounting

# sigma, q, T: small and large noise, rare and frequent sampling, one step and many
RUNS = [(1.0, 0.01, 1000), (0.8, 0.05, 20), (2.0, 0.1, 300), (4.0, 0.5, 10), (1.5, 0.002, 1)]
DELTA = 1e-5


def gaussian_epsilon(sigma: float, steps: int, delta: float) -> float:
    """The exact epsilon of T Gaussian releases without sampling (Balle and Wang, 2018)."""
    mu = math.sqrt(steps) / sigma

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu) - tail - delta)

    return float(brentq(excess, 0, mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))))


def peer_distribution(sigma: float, q: float, steps: int, interval: float, pessimistic: bool = True):
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval, pessimistic_estimate=pessimistic
    ).self_compose(steps)


def peer_rdp(sigma: float, q: float, steps: int, delta: float, orders: list[float]) -> float:
    event = dp_accounting.GaussianDpEvent(sigma)
    if q < 1:
        event = dp_accounting.PoissonSampledDpEvent(q, event)
    return float(RdpAccountant(orders=orders).compose(event, steps).get_epsilon(delta))


@pytest.mark.parametrize(("sigma", "q", "steps"), RUNS)
def test_rdp_agrees_with_dp_accounting(sigma, q, steps):
    # Whole orders: dp-accounting refuses some fractional ones, where its series does not converge.
    orders = [order for order in accounting.RDP_ORDERS if order == int(order) and order <= 1024]
    theirs = peer_rdp(sigma, q, steps, DELTA, orders)
    ours = accounting.epsilon(sigma, q, steps, DELTA)
    assert theirs * 0.98 - 1e-3 <= ours <= theirs + 1e-9  # the fractional orders can only lower it, and by little


@pytest.mark.parametrize(("sigma", "q", "steps"), RUNS)
def test_rdp_is_opacus_where_opacus_orders_suffice(sigma, q, steps):
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = opacus.get_epsilon(DELTA)
    ours = accounting.epsilon(sigma, q, steps, DELTA)
    assert ours <= theirs + 1e-12
    if theirs > 0.3:
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(("sigma", "q", "steps"), RUNS)
def test_prv_agrees_with_dp_accounting_and_is_an_upper_bound(sigma, q, steps):
    interval = 2e-4
    upper = peer_distribution(sigma, q, steps, interval).get_epsilon_for_delta(DELTA)
    lower = peer_distribution(sigma, q, steps, interval, pessimistic=False).get_epsilon_for_delta(DELTA)
    ours = accounting.epsilon(sigma, q, steps, DELTA, accountant="prv")
    assert lower <= ours <= upper + 0.03  # Opacus adds its error bound of 0.01 on top
    assert ours <= accounting.epsilon(sigma, q, steps, DELTA, accountant="rdp") + 0.01


@pytest.mark.parametrize(("sigma", "q", "steps"), RUNS)
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
def test_both_directions_are_covered(sigma, q, steps, delta):
    """Removing an example costs at least as much as adding it, so the direction that Opacus computes is enough here."""
    peer = peer_distribution(sigma, q, steps, 1e-3)
    removed, added = (part.get_epsilon_for_delta(delta) for part in (peer._pmf_remove, peer._pmf_add))
    assert added <= removed
    assert accounting.epsilon(sigma, q, steps, delta) >= max(removed, added) - 0.05


@pytest.mark.parametrize(("sigma", "steps"), [(0.8, 1), (0.8, 10), (3.0, 100), (20.0, 10)])
def test_without_sampling_both_bound_the_exact_gaussian(sigma, steps):
    exact = gaussian_epsilon(sigma, steps, DELTA)
    rdp = accounting.epsilon(sigma, 1.0, steps, DELTA)
    prv = accounting.epsilon(sigma, 1.0, steps, DELTA, accountant="prv")
    assert exact <= rdp <= 1.25 * exact
    assert exact <= prv <= exact + 0.03
    assert rdp == pytest.approx(peer_rdp(sigma, 1.0, steps, DELTA, accounting.RDP_ORDERS), rel=1e-9)


@given(st.floats(0.6, 3.0), st.floats(0.001, 0.05), st.integers(1, 2000), st.floats(1e-8, 1e-3))
@settings(max_examples=12)
def test_epsilon_moves_the_right_way(sigma, q, steps, delta):
    base = accounting.epsilon(sigma, q, steps, delta)
    assert 0 < base < math.inf
    assert accounting.epsilon(1.2 * sigma, q, steps, delta) < base
    assert accounting.epsilon(sigma, 1.2 * q, steps, delta) > base
    assert accounting.epsilon(sigma, q, 2 * steps, delta) > base
    assert accounting.epsilon(sigma, q, steps, delta / 2) > base


# ---- The traps


def test_more_orders_than_opacus_for_very_private_runs():
    """Opacus' own orders never report below 0.103 at delta = 1e-5."""
    opacus = RDPAccountant()
    opacus.history = [(100.0, 0.01, 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert opacus.get_epsilon(DELTA) > 0.1
    ours = accounting.epsilon(100.0, 0.01, 1000, DELTA)
    assert ours < 0.02
    assert ours >= peer_distribution(100.0, 0.01, 1000, 1e-5, pessimistic=False).get_epsilon_for_delta(DELTA)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_no_noise_is_no_privacy(accountant):
    assert accounting.epsilon(0.0, 0.01, 10, DELTA, accountant) == math.inf
    history = accounting.new_accountant(accountant)
    history.history = [(1.0, 0.01, 100), (0.0, 0.01, 1), (1.0, 0.01, 100)]
    assert accounting.spent(history, DELTA) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_nothing_done_is_nothing_spent(accountant):
    assert accounting.epsilon(1.0, 0.01, 0, DELTA, accountant) == 0.0
    assert accounting.epsilon(0.0, 0.01, 0, DELTA, accountant) == 0.0
    assert accounting.spent(accounting.new_accountant(accountant), DELTA) == 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(("sigma", "q"), [(100.0, 0.01), (100.0, 1.0), (0.3, 0.01)])
def test_nothing_is_said_on_stderr(sigma, q, accountant):
    """Opacus warns that its own list of orders is too short, and of a logarithm that it does not use."""
    accounting.epsilon(sigma, q, 10, DELTA, accountant)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_never_negative(accountant):
    """At a large delta the formulas of both accountants fall below zero."""
    assert accounting.epsilon(1.0, 0.01, 1000, 0.5, accountant) == 0.0


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_almost_no_noise_is_no_privacy_at_once(accountant):
    """Opacus would compute for ever at a noise multiplier whose square is not a number that floats can hold."""
    assert accounting.epsilon(1e-160, 0.01, 10, DELTA, accountant) == math.inf


def test_the_central_limit_understates_and_is_not_offered():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit = GaussianAccountant()
    limit.history = [(0.6, 0.01, 300)]
    lower = peer_distribution(0.6, 0.01, 300, 1e-3, pessimistic=False).get_epsilon_for_delta(DELTA)
    assert limit.get_epsilon(DELTA) < 0.7 * lower
    with pytest.raises(ValueError, match="accountant must be one of rdp, prv, got 'gdp'"):
        accounting.new_accountant("gdp")


def test_spent_adds_up_a_changing_history():
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        history = accounting.new_accountant(name)
        assert type(history) is kind
        for sigma, q, steps in ((2.0, 0.01, 300), (1.0, 0.02, 200)):
            for _ in range(steps):
                history.step(noise_multiplier=sigma, sample_rate=q)
        assert [steps for _, _, steps in history.history] == [300, 200]
        event = dp_accounting.ComposedDpEvent(
            [
                dp_accounting.SelfComposedDpEvent(
                    dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps
                )
                for sigma, q, steps in ((2.0, 0.01, 300), (1.0, 0.02, 200))
            ]
        )
        exact = dp_accounting.pld.PLDAccountant(value_discretization_interval=5e-4).compose(event).get_epsilon(DELTA)
        assert exact - 0.02 <= accounting.spent(history, DELTA) <= exact * (1.25 if name == "rdp" else 1.02)


# ---- Noise for a budget


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(("epsilon", "q", "steps"), [(0.3, 0.05, 100), (1.0, 0.01, 1000), (3.0, 0.1, 400)])
def test_noise_for_keeps_the_budget_and_uses_it(epsilon, q, steps, accountant):
    sigma = accounting.noise_for(epsilon, q, steps, DELTA, accountant)
    price = accounting.epsilon(sigma, q, steps, DELTA, accountant)
    assert epsilon - min(0.01, 0.01 * epsilon) <= price <= epsilon
    assert accounting.epsilon(0.97 * sigma, q, steps, DELTA, accountant) > epsilon


@pytest.mark.parametrize("epsilon", [0.01, 0.05])
def test_noise_for_tiny_budgets(epsilon):
    """Opacus' own orders would say that such a budget cannot be kept at any noise."""
    sigma = accounting.noise_for(epsilon, 0.01, 100, DELTA)
    assert 0.99 * epsilon <= accounting.epsilon(sigma, 0.01, 100, DELTA) <= epsilon


def test_noise_for_large_budgets():
    sigma = accounting.noise_for(200.0, 0.01, 50, DELTA)
    assert 199.99 <= accounting.epsilon(sigma, 0.01, 50, DELTA) <= 200.0


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_noise_for_counts_steps_not_epochs():
    """With `epochs`, Opacus rounds the steps down: here one step instead of two."""
    careless = get_noise_multiplier(
        target_epsilon=1.0, target_delta=DELTA, sample_rate=0.6, epochs=1, epsilon_tolerance=0.05, alphas=[10, 15, 20]
    )
    assert accounting.epsilon(careless, 0.6, 2, DELTA) > 1.2
    assert accounting.epsilon(accounting.noise_for(1.0, 0.6, 2, DELTA), 0.6, 2, DELTA) <= 1.0


# ---- The statement


def test_statement_computes_what_it_states():
    said = accounting.statement(1.1, 800, DELTA, max_grad_norm=0.5, batch_size=512, n=50_000, simulation=False)
    assert said.epsilon == accounting.epsilon(1.1, 512 / 50_000, 800, DELTA)
    assert said.sample_rate == 512 / 50_000
    text = str(said)
    for part in ("512 / 50000", "800 steps", "sigma 1.1", "clipping norm 0.5", "Poisson", "RDP", "1e-05"):
        assert part in text
    for part in (
        "one training example",
        "add or remove",
        "not the training loss",
        "each tried setting",
        "not cryptographic",
    ):
        assert part in text
    assert "simulation" not in text


def test_statement_of_a_seeded_run_says_so():
    common = {"max_grad_norm": 1.0, "batch_size": 10, "n": 100, "accountant": "prv"}
    seeded = accounting.statement(1.0, 5, 1e-3, simulation=True, **common)
    assert "a simulation, reproducible and not private" in str(seeded)
    assert "PRV" in str(seeded)
    assert seeded.epsilon == accounting.epsilon(1.0, 0.1, 5, 1e-3, "prv")
    record = seeded.record()
    assert record["unit"] == "one training example"
    assert (record["noise_multiplier"], record["steps"], record["simulation"]) == (1.0, 5, True)


# ---- Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.0, 10, DELTA), r"sample_rate must be in \(0, 1\], got 0.0; it is batch_size / n"),
        ((1.0, 1.01, 10, DELTA), r"sample_rate must be in \(0, 1\], got 1.01"),
        ((1.0, math.nan, 10, DELTA), r"sample_rate must be in \(0, 1\], got nan"),
        ((1.0, 0.1, -1, DELTA), r"steps must be a whole number >= 0, got -1"),
        ((1.0, 0.1, 2.5, DELTA), r"steps must be a whole number >= 0, got 2.5"),
        ((1.0, 0.1, math.nan, DELTA), r"steps must be a whole number >= 0, got nan"),
        ((1.0, 0.1, math.inf, DELTA), r"steps must be a whole number >= 0, got inf"),
        ((1.0, 0.01, 1000, 1e-15, "prv"), r"the 'prv' accountant cannot compute epsilon at delta 1e-15 .*; use 'rdp'"),
        ((1.0, 0.1, 10, 0.0), r"delta must be in \(0, 1\), got 0.0; a value well below 1 / n is usual"),
        ((1.0, 0.1, 10, 1.0), r"delta must be in \(0, 1\), got 1.0"),
        ((-0.1, 0.1, 10, DELTA), r"noise_multiplier must be finite and >= 0, got -0.1"),
        ((math.inf, 0.1, 10, DELTA), r"noise_multiplier must be finite and >= 0, got inf"),
        ((math.nan, 0.1, 10, DELTA), r"noise_multiplier must be finite and >= 0, got nan"),
        ((1.0, 0.1, 10, DELTA, "gdp"), r"accountant must be one of rdp, prv, got 'gdp'"),
    ],
)
def test_epsilon_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.epsilon(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.1, 10, DELTA), r"epsilon must be finite and > 0, got 0.0; for no privacy choose"),
        ((-1.0, 0.1, 10, DELTA), r"epsilon must be finite and > 0, got -1.0"),
        ((math.inf, 0.1, 10, DELTA), r"epsilon must be finite and > 0, got inf"),
        ((math.nan, 0.1, 10, DELTA), r"epsilon must be finite and > 0, got nan"),
        ((1.0, 0.1, 0, DELTA), r"steps must be at least 1 to spend a budget, got 0"),
        ((1.0, 1.5, 10, DELTA), r"sample_rate must be in \(0, 1\], got 1.5"),
        ((1.0, 0.1, 10, 2.0), r"delta must be in \(0, 1\), got 2.0"),
        ((1.0, 0.1, 10, DELTA, "moments"), r"accountant must be one of rdp, prv, got 'moments'"),
        (
            (1e-4, 0.1, 10, DELTA),
            r"epsilon 0.0001 is out of reach in 10 steps at delta 1e-05",
        ),
        ((0.005, 0.1, 10, DELTA, "prv"), r"epsilon 0.005 is out of reach in 10 steps at delta 1e-05"),
    ],
)
def test_noise_for_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.noise_for(*arguments)


def test_statement_never_rounds_down():
    said = accounting.statement(1.1, 800, DELTA, max_grad_norm=1.0, batch_size=512, n=50_000, simulation=False)
    for exact in (1.2340001, 2.9947, 0.00012, 12.0):
        shown = str(dataclasses.replace(said, epsilon=exact)).partition("(")[2].partition(",")[0]
        assert exact <= float(shown) <= exact + 0.001


def test_statement_without_noise_promises_nothing():
    said = accounting.statement(0.0, 10, DELTA, max_grad_norm=1.0, batch_size=10, n=100, simulation=True)
    assert said.epsilon == math.inf
    assert "no differential privacy" in str(said)


def test_statement_errors():
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\], got 2"):
        accounting.statement(1.0, 10, DELTA, max_grad_norm=1.0, batch_size=200, n=100, simulation=True)


def test_a_statement_about_nobody_is_refused():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        accounting.statement(1.0, 1, DELTA, max_grad_norm=1.0, batch_size=1, n=0, simulation=True)


# ---- Several releases together


@pytest.mark.parametrize("besides", [[(5.0, 1.0, 1)], [(20.0, 1.0, 3), (2.0, 0.01, 100)]])
def test_releases_besides_are_composed_as_dp_accounting_does(besides):
    sigma, q, steps = 1.2, 0.02, 500
    orders = [order for order in accounting.RDP_ORDERS if order == int(order) and order <= 1024]
    peer = RdpAccountant(orders=orders)
    for s, rate, t in [(sigma, q, steps), *besides]:
        event = dp_accounting.GaussianDpEvent(s)
        peer.compose(event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event), t)
    theirs = float(peer.get_epsilon(DELTA))
    ours = accounting.epsilon(sigma, q, steps, DELTA, besides=besides)
    assert theirs * 0.98 - 1e-3 <= ours <= theirs + 1e-9
    assert ours > accounting.epsilon(sigma, q, steps, DELTA) + 1e-3


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("budget", [0.3, 3.0])
def test_the_noise_besides_other_releases_spends_what_they_leave(budget, accountant):
    besides = [(3 * accounting.noise_for(budget, 1.0, 1, DELTA, accountant), 1.0, 1)]
    sigma = accounting.noise_for(budget, 0.05, 200, DELTA, accountant, besides)
    spent = accounting.epsilon(sigma, 0.05, 200, DELTA, accountant, besides)
    assert budget - min(0.01, 0.01 * budget) <= spent <= budget
    assert sigma > accounting.noise_for(budget, 0.05, 200, DELTA, accountant)


def test_what_the_others_have_spent_already_is_out_of_reach():
    with pytest.raises(ValueError, match=r"epsilon 1 is out of reach in 10 steps .* besides \[\(0.5, 1.0, 1\)\]"):
        accounting.noise_for(1.0, 0.1, 10, DELTA, besides=[(0.5, 1.0, 1)])


def test_a_statement_says_what_was_released_besides_and_of_a_temperature():
    arguments = {"max_grad_norm": 1.0, "batch_size": 100, "n": 10_000, "simulation": True}
    plain = accounting.statement(1.1, 400, 1e-5, **arguments)
    assert not {"besides", "set_aside", "temperature_epsilon"} & plain.record().keys()
    more = accounting.statement(1.1, 400, 1e-5, **arguments, besides=[(4.0, 1.0, 1)])
    assert more.epsilon > plain.epsilon
    assert "besides      Gaussian, sigma 4, q = 1, steps: 1" in str(more)
    assert more.record()["besides"] == [[4.0, 1.0, 1]]
    for cost in (plain.epsilon / 2, 2 * plain.epsilon):
        tempered = accounting.statement(1.1, 400, 1e-5, **arguments, set_aside=500, temperature_epsilon=cost)
        assert tempered.epsilon == max(plain.epsilon, cost)
        assert "on 500 examples" in str(tempered)
        assert "the temperature" in tempered.released
        assert tempered.record()["set_aside"] == 500


@pytest.mark.parametrize("event", [(-1.0, 1.0, 1), (float("nan"), 1.0, 1), (1.0, 2.0, 1), (1.0, 0.5, -1)])
def test_a_further_release_out_of_range_is_refused(event):
    with pytest.raises(ValueError, match="must be"):
        accounting.epsilon(1.0, 0.1, 10, 1e-5, besides=[event])


def test_a_budget_that_needs_no_noise_is_refused():
    with pytest.raises(ValueError, match=r"epsilon 1e\+06 allows a noise multiplier below 0\.01"):
        accounting.noise_for(1e6, 0.01, 10, DELTA)
