"""Langevin dynamics: samples of a known posterior, privacy noise that counts, and what exact samples cost."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpivon import accounting, checkpoint, data, langevin, metrics, predict, snapshots, train

K, CENTER = torch.tensor([1.0, 4.0], dtype=torch.float64), torch.tensor([0.5, -2.0], dtype=torch.float64)
ESS, LR, DECAY = 50.0, 0.1, 0.5


def chain(noise_std, steps=40_000, temperature=1.0):
    """SGLD on the mean loss k (theta - c)^2 / 2, with gradient noise as a mechanism would add it; the second half."""
    source = torch.Generator().manual_seed(0)
    theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = langevin.SGLD([theta], LR, ESS, steps, steps // 2, temperature, DECAY, noise_std, generator=source)
    for _ in range(steps):
        noise = noise_std * torch.randn(2, dtype=torch.float64, generator=source)
        theta.grad = K * (theta.detach() - CENTER) + noise
        optimizer.step()
    return torch.stack(optimizer.state[theta]["snapshots"])


@pytest.mark.parametrize("noise_std", [0.0, 0.5, math.sqrt(2 / (ESS * LR))])
def test_it_samples_a_gaussian_posterior_to_its_exact_mean_and_variance(noise_std):
    """Precision N (k + delta_v); the finite step widens the variance by 1 / (1 - alpha (k + delta_v) / 2), exactly."""
    samples = chain(noise_std)
    assert len(samples) == 20_000
    rate = LR * (K + DECAY)
    mean, variance = K * CENTER / (K + DECAY), 1 / (ESS * (K + DECAY) * (1 - rate / 2))
    correlated = (1 + (1 - rate)) / (1 - (1 - rate))  # samples in units of independent ones
    error = (variance * correlated / len(samples)).sqrt()
    assert ((samples.mean(0) - mean).abs() < 4 * error).all()
    relative = (samples.var(0) / variance - 1).abs()
    assert (relative < 4 * (2 * correlated / len(samples)).sqrt()).all()


def test_privacy_noise_above_the_need_is_a_temperature():
    s = 3 * math.sqrt(2 / (ESS * LR))
    assert langevin.temperature_of(LR, ESS, s) == pytest.approx(9.0)
    wide, narrow = chain(s).var(0), chain(0.0).var(0)
    torch.testing.assert_close(wide / narrow, torch.full((2,), 9.0, dtype=torch.float64), rtol=0.1, atol=0)


@given(st.floats(0.01, 10), st.floats(10, 1e5), st.floats(1, 1e3), st.floats(0.01, 10), st.floats(0.1, 10))
def test_the_free_noise_is_the_noise_whose_temperature_is_the_wanted_one(lr, ess, b, c, temperature):
    sigma = langevin.free_noise_multiplier(lr, ess, b, c, temperature)
    assert langevin.temperature_of(lr, ess, sigma * c / b) == pytest.approx(temperature)


def test_free_noise_pays_for_privacy_where_it_is_large_enough():
    """At the published example's numbers the dynamics' own noise is a multiplier of 4.6, an epsilon below 1."""
    sigma = langevin.free_noise_multiplier(lr=0.5, ess=50_000, batch_size=512, max_grad_norm=1.0)
    assert sigma == pytest.approx(4.6, abs=0.05)
    assert accounting.epsilon(sigma, 512 / 50_000, 2929, 1e-5) < 1.0


def test_exact_posterior_samples_cost_what_they_say():
    """A Bernoulli parameter on a grid: the worst density ratio of neighbors, over all small data sets."""
    grid = torch.linspace(0.2, 0.8, 13, dtype=torch.float64)
    log_p = torch.stack([(1 - grid).log(), grid.log()])
    spread = float(log_p.max() - log_p.min())
    worst = 0.0
    for n in range(6):
        for ones in range(n + 1):
            posterior = (ones * log_p[1] + (n - ones) * log_p[0]).log_softmax(0)
            for x in (0, 1):
                more = (ones * log_p[1] + (n - ones) * log_p[0] + log_p[x]).log_softmax(0)
                worst = max(worst, float((posterior - more).abs().max()))
    assert 0.5 * spread < worst <= langevin.one_sample_epsilon(spread)
    assert langevin.one_sample_epsilon(spread, samples=3) == 3 * langevin.one_sample_epsilon(spread)
    assert langevin.one_sample_epsilon(spread, temperature=4.0) == spread / 4


def test_prediction_averages_the_kept_iterates():
    images = data.digits()
    now = train.Run(train.resolve(train.Config(method="dp-sgld", epochs=4, seed=0, samples=5)), images)
    train.train(now, None, lambda line: None)
    kept = [now.optimizer.state[p]["snapshots"] for p in now.model.parameters()]
    assert {len(samples) for samples in kept} == {5}
    latest = [p.detach().clone() for p in now.model.parameters()]
    got = predict.log_probs(now.model, images.x_test, now.posterior(), 5)
    each = []
    for i in range(5):
        with torch.no_grad():
            for p, samples in zip(now.model.parameters(), kept, strict=True):
                p.copy_(samples[i])
        each.append(predict.log_probs(now.model, images.x_test).exp())
    torch.testing.assert_close(got.exp(), torch.stack(each).mean(0))
    assert not torch.equal(kept[0][0], kept[0][1])
    with torch.no_grad():
        for p, before in zip(now.model.parameters(), latest, strict=True):
            p.copy_(before)
    predict.log_probs(now.model, images.x_test[:2], now.posterior(), 2)
    assert all(torch.equal(p, before) for p, before in zip(now.model.parameters(), latest, strict=True))
    assert metrics.evaluate(got, images.y_test)["accuracy"] > 0.3


def test_errors_name_the_value():
    p = nn.Parameter(torch.ones(1))
    for change, message in (
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"ess": -1.0}, "ess must be finite and > 0, got -1.0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            langevin.SGLD([p], **{"lr": 0.1, "ess": 10.0, "steps": 10, **change})
    kept = snapshots.Kept(langevin.SGLD([p], 0.1, 10.0, 10))
    with pytest.raises(RuntimeError, match="no iterate was kept"), kept.sampled_params():
        pass
    with pytest.raises(ValueError, match="must be finite and > 0"):
        langevin.free_noise_multiplier(0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="must be finite and > 0"):
        langevin.one_sample_epsilon(0.0)


# ---- Iterates in a folder


def test_iterates_in_a_folder_predict_as_those_in_memory_and_leave_memory_alone(tmp_path):
    images = data.digits()
    config = train.Config(method="dp-sgld", epochs=4, seed=0, samples=5, noise_multiplier=3.0)
    memory, disk = (train.run(config, images=images, samples_path=folder) for folder in (None, tmp_path))
    assert disk["results"] == memory["results"]
    assert disk["cost"]["stored"] == memory["cost"]["stored"] == 5 * 4810
    assert len(list(tmp_path.iterdir())) == 5
    now = train.Run(train.resolve(config), images)
    now.optimizer.folder = str(tmp_path)
    train.train(now, None, lambda line: None)
    assert not any("snapshots" in state for state in now.optimizer.state.values())
    latest = [p.detach().clone() for p in now.model.parameters()]
    stored = snapshots.Stored(now.model.parameters(), tmp_path)
    predict.log_probs(now.model, images.x_test[:2], stored, 7)
    assert all(torch.equal(p, q) for p, q in zip(now.model.parameters(), latest, strict=True))
    with stored.sampled_params():
        assert not torch.equal(next(now.model.parameters()), latest[0])


def test_a_resumed_run_writes_the_same_files(tmp_path):
    images = data.digits()
    config = train.Config(method="dp-sgld", epochs=4, seed=0, samples=5, noise_multiplier=3.0, schedule="constant")
    config = train.resolve(config)
    train.run(config, images=images, samples_path=(tmp_path / "a", (tmp_path / "a").mkdir())[0])
    folder = (tmp_path / "b", (tmp_path / "b").mkdir())[0]
    now = train.Run(config, images)
    now.optimizer.folder, now.steps = str(folder), 16
    train.train(now, tmp_path / "c", lambda line: None)
    assert 0 < len(list(folder.iterdir())) < 5
    train.run(config, images=images, samples_path=folder, checkpoint_path=tmp_path / "c")
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / "a" / name).read_bytes() for name in files)


def test_a_folder_that_cannot_serve_is_named(tmp_path):
    images = data.digits()
    config = train.Config(method="dp-sgld", epochs=1, seed=0, samples=2, noise_multiplier=3.0)
    with pytest.raises(
        OSError, match=r"^the folder .*/none for the iterates does not exist; create it, or .* another one"
    ):
        train.run(config, images=images, samples_path=tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"^the folder .*/file for the iterates is no folder"):
        train.run(config, images=images, samples_path=tmp_path / "file")
    (tmp_path / "file").unlink()
    with pytest.raises(ValueError, match="'dp-sgd' keeps no iterates"):
        train.run(train.Config(method="dp-sgd", noise_multiplier=3.0), images=images, samples_path=tmp_path)
    with pytest.raises(ValueError, match="holds no iterate"):
        snapshots.Stored([], tmp_path)
    train.run(config, images=images, samples_path=tmp_path)
    with pytest.raises(ValueError, match="holds iterates of another run; choose an empty folder"):
        train.run(config, images=images, samples_path=tmp_path)
    with (
        pytest.raises(ValueError, match="does not fit this network"),
        snapshots.Stored(nn.Linear(2, 2).parameters(), tmp_path).sampled_params(),
    ):
        pass
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole iterate"), snapshots.Stored([], tmp_path).sampled_params():
        pass


def stopped(config, images, folder, at, path):
    """A run in a folder, stopped after some steps, with a checkpoint."""
    now = train.Run(config, images)
    now.optimizer.folder = str(folder)
    keep, now.steps = now.optimizer.kept_at, at
    train.train(now, path, lambda line: None)
    return keep


def test_a_resumed_run_takes_no_iterates_of_another_run_nor_of_later_steps(tmp_path):
    """Those of a run without privacy would predict better than this epsilon allows."""
    images = data.digits()
    other, mine, empty = (tmp_path / name for name in ("other", "mine", "empty"))
    for folder in (other, mine, empty):
        folder.mkdir()
    train.run(train.Config(method="sgld", epochs=2, seed=1, samples=5), images=images, samples_path=other)
    config = train.Config(method="dp-sgld", epochs=4, seed=0, samples=5, noise_multiplier=20.0, schedule="constant")
    config = train.resolve(config)
    keep = stopped(config, images, mine, 16, tmp_path / "c")
    for folder in (other, empty):
        with pytest.raises(ValueError, match="does not hold the iterates that the checkpoint knows of"):
            train.run(config, images=images, samples_path=folder, checkpoint_path=tmp_path / "c")
    with pytest.raises(ValueError, match="iterates differ"):  # half of them would be in memory
        train.run(config, images=images, checkpoint_path=tmp_path / "c")
    # Written after the checkpoint, before the machine went down: no statement of this run counts those steps.
    known = {path.name for path in mine.iterdir()}
    (mine / f"{keep[0]:08}.safetensors").write_bytes((next(other.iterdir())).read_bytes())
    now = train.Run(config, images)
    now.optimizer.folder = str(mine)
    now.load_state_dict(checkpoint.load(tmp_path / "c"))
    assert {path.name for path in mine.iterdir()} == known == {path.name for path in now.posterior().files}
    # An earlier one can be no one's but another run's, and what is not known is not removed.
    (mine / "00000001.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="or other ones; give the folder of the run that is resumed"):
        now.load_state_dict(checkpoint.load(tmp_path / "c"))
    assert (mine / "00000001.safetensors").exists()


def test_a_run_predicts_by_the_iterates_that_it_wrote_itself(tmp_path):
    images = data.digits()
    config = train.Config(method="dp-sgld", epochs=2, seed=0, samples=3, noise_multiplier=3.0)
    now = train.Run(train.resolve(config), images)
    now.optimizer.folder = str(tmp_path)
    assert now.posterior() is now.optimizer  # none is kept yet: a run that is stopped now predicts by the latest
    assert set(train.evaluate(now)) == {"mean", "samples"}
    assert train.stored(now) == 4810
    train.train(now, None, lambda line: None)
    (tmp_path / "00000001.safetensors").write_bytes(b"another run's")
    assert len(now.posterior().files) == 3
    file = now.posterior().files[0]
    file.write_bytes(now.posterior().files[1].read_bytes())
    with pytest.raises(ValueError, match="two runs cannot share a folder"), now.posterior().sampled_params():
        pass
