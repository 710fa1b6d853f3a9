"""An exported posterior: whole, safe, without secrets, and usable where there are no training data."""

import copy
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from dpivon import adaptive, data, mechanism, metrics, models, posterior, predict, train
from dpivon.ivon import IVON

SHAPE, CLASSES = (1, 8, 8), 10
ABOUT = {"architecture": "mlp", "shape": SHAPE, "classes": CLASSES}


@pytest.fixture
def learned():
    """A network and an IVON that has taken a few steps, so that h differs between weights."""
    model = models.mlp(SHAPE, CLASSES)
    source = torch.Generator().manual_seed(0)
    optimizer = IVON(model.parameters(), lr=0.1, ess=1000.0, curvature="gradsq", generator=source)
    for _ in range(3):
        with optimizer.sampled_params():
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=source)
        optimizer.step()
    return model, optimizer


def test_mean_and_variance_come_back(learned, tmp_path):
    model, optimizer = learned
    posterior.save(tmp_path / "p", model, optimizer, **ABOUT, privacy={"epsilon": 1.5})
    got = posterior.load(tmp_path / "p")
    assert (got.architecture, got.shape, got.classes, got.privacy) == ("mlp", SHAPE, CLASSES, {"epsilon": 1.5})
    for name, p in model.named_parameters():
        assert torch.equal(dict(got.model.named_parameters())[name], p)
        group = optimizer.param_groups[0]
        expected = 1 / (group["ess"] * (optimizer.state[p]["h"] + group["weight_decay"]))
        torch.testing.assert_close(got.variance[name], expected)


def test_draws_have_the_saved_moments_and_predict_as_the_optimizer_does(learned, tmp_path):
    model, optimizer = learned
    posterior.save(tmp_path / "p", model, optimizer, **ABOUT)
    got = posterior.load(tmp_path / "p")
    got.generator = torch.Generator().manual_seed(1)
    name, p = next((n, p) for n, p in got.model.named_parameters() if p.dim() == 2)
    mean, z = p.detach().clone(), []
    for _ in range(20):
        with got.sampled_params():
            z.append((p.detach() - mean) / got.variance[name].sqrt())
    z = torch.cat(z).flatten()
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    assert abs(z.square().mean() - 1) < 4 * (2 / len(z)) ** 0.5
    assert torch.equal(p, mean)
    x = torch.rand(20, *SHAPE)
    torch.testing.assert_close(got.log_probs(x, samples=0), predict.log_probs(model, x))
    theirs = predict.log_probs(model, x, optimizer, 400).exp()
    torch.testing.assert_close(got.log_probs(x, samples=400).exp(), theirs, atol=0.05, rtol=0)
    assert not torch.allclose(got.log_probs(x, samples=400), got.log_probs(x, samples=0), atol=1e-3)


def test_it_loads_and_predicts_in_a_process_without_training_data(learned, tmp_path):
    posterior.save(tmp_path / "p", *learned, **ABOUT)
    program = (
        "import sys, torch; from dpivon import posterior; p = posterior.load('p');"
        "print(p.log_probs(torch.zeros(2, *p.shape)).shape, 'dpivon.data' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "torch.Size([2, 10]) False", done.stderr


def test_the_file_holds_mean_and_variance_and_no_more(learned, tmp_path):
    model, optimizer = learned
    posterior.save(tmp_path / "p", model, optimizer, **ABOUT)
    names = {name for name, _ in model.named_parameters()}
    found = safetensors.torch.load_file(tmp_path / "p")
    assert set(found) == {f"mean.{name}" for name in names} | {f"variance.{name}" for name in names}
    again = tmp_path / "again"
    optimizer.generator.manual_seed(99)  # another state of the generator leaves no trace
    posterior.save(again, model, optimizer, **ABOUT)
    assert again.read_bytes() == (tmp_path / "p").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again", "p"]


def test_a_method_without_variance_exports_its_mean(tmp_path):
    model = models.mlp(SHAPE, CLASSES)
    posterior.save(tmp_path / "p", model, adaptive.sgd(model.parameters(), lr=0.1), **ABOUT)
    got = posterior.load(tmp_path / "p")
    assert got.variance == {}
    x = torch.rand(3, *SHAPE)
    torch.testing.assert_close(got.log_probs(x, samples=2), predict.log_probs(model, x))


def test_a_network_of_ones_own_is_passed_in(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = IVON(model.parameters(), lr=0.1, ess=10.0)
    posterior.save(tmp_path / "p", model, optimizer, architecture="mine", shape=(4,), classes=3)
    with pytest.raises(ValueError, match=r"'mine' is not one of mlp, .*pass the network"):
        posterior.load(tmp_path / "p")
    got = posterior.load(tmp_path / "p", nn.Linear(4, 3))
    assert torch.equal(got.model.weight, model.weight)
    with pytest.raises(ValueError, match="does not fit this mine"):
        posterior.load(tmp_path / "p", nn.Linear(5, 3))


def test_what_is_not_a_posterior_is_refused(learned, tmp_path):
    path = tmp_path / "p"
    posterior.save(path, *learned, **ABOUT)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a whole posterior file"):
        posterior.load(path)
    path.write_bytes(safetensors.torch.save({"x": torch.ones(2)}))
    with pytest.raises(ValueError, match="not a posterior of dpivon"):
        posterior.load(path)
    tensors = safetensors.torch.load(whole)
    with safetensors.safe_open((tmp_path / "q", (tmp_path / "q").write_bytes(whole))[0], framework="pt") as file:
        metadata = file.metadata()
    for change in (lambda t: t["variance.1.bias"].mul_(-1), lambda t: t.update({"variance.none": torch.ones(1)})):
        spoiled = {name: value.clone() for name, value in tensors.items()}
        change(spoiled)
        path.write_bytes(safetensors.torch.save(spoiled, metadata))
        with pytest.raises(ValueError, match="negative or values of no weight"):
            posterior.load(path)


@pytest.mark.parametrize("about", ["[]", "{}", "no json", '{"architecture": ["mlp"], "shape": 3, "classes": 10}'])
def test_a_file_that_does_not_say_what_it_holds_is_refused(tmp_path, about):
    (tmp_path / "p").write_bytes(safetensors.torch.save({"mean.x": torch.ones(2)}, {posterior.GAUSSIAN: about}))
    with pytest.raises(ValueError, match="does not say what network it holds"):
        posterior.load(tmp_path / "p")


@pytest.mark.parametrize("name", ["mean.1.bias", "variance.1.bias"])
def test_a_file_with_values_that_are_not_finite_is_refused(learned, tmp_path, name):
    posterior.save(tmp_path / "p", *learned, **ABOUT)
    with safetensors.safe_open(tmp_path / "p", framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(tmp_path / "p")
    tensors[name] = torch.full_like(tensors[name], float("inf"))
    (tmp_path / "q").write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ValueError, match=rf"values of '{name}' that are not finite"):
        posterior.load(tmp_path / "q")


def test_the_mechanism_around_an_optimizer_hides_neither_variance_nor_draw(learned, tmp_path):
    model, optimizer = learned
    dp = mechanism.mechanism(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=5, n=10)
    posterior.save(tmp_path / "p", model, dp, **ABOUT)
    assert len(posterior.load(tmp_path / "p").variance) == len(list(model.parameters()))
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match="a draw, not the mean"):
        posterior.save(tmp_path / "p", model, dp, **ABOUT)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(learned, tmp_path):
    model, optimizer = learned
    posterior.save(tmp_path / "p", model, optimizer, **ABOUT)
    before = (tmp_path / "p").read_bytes()
    with optimizer.sampled_params(), pytest.raises(RuntimeError, match="a draw, not the mean"):
        posterior.save(tmp_path / "p", model, optimizer, **ABOUT)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        posterior.save(tmp_path / "p", model, optimizer, **ABOUT)
    assert (tmp_path / "p").read_bytes() == before
    assert os.listdir(tmp_path) == ["p"]


def test_a_run_exports_what_it_learned_with_its_statement(tmp_path):
    images = data.digits()
    config = train.Config(method="dp-ivon-gradsq", epochs=4, seed=0, samples=8)
    record = train.run(config, images=images, export_path=tmp_path / "p")
    got = posterior.load(tmp_path / "p")
    assert got.privacy == record["privacy"]
    assert got.privacy["simulation"]
    accuracy = (got.log_probs(images.x_test, samples=0).argmax(1) == images.y_test).float().mean()
    assert float(accuracy) == pytest.approx(record["results"]["mean"]["accuracy"], abs=1e-6)
    assert set(got.variance) == {name for name, _ in got.model.named_parameters()}


def test_what_cannot_be_exported_is_said_before_any_training(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained for nothing"))
    for name in ("dp-bbp-joint", "dp-mc-dropout", "dp-ensemble"):
        config = train.Config(method=name, epochs=1, seed=0)
        with pytest.raises(ValueError, match=f"a posterior of '{name}' cannot be exported"):
            train.run(config, images=data.digits(), export_path=tmp_path / "p")


def test_a_temperature_travels_with_the_posterior(learned, tmp_path):
    model, optimizer = learned
    posterior.save(tmp_path / "p", model, optimizer, **ABOUT, temperature=2.0)
    got, x = posterior.load(tmp_path / "p"), torch.rand(3, *SHAPE)
    expected = (predict.log_probs(model, x) / 2).log_softmax(1)
    torch.testing.assert_close(got.log_probs(x, samples=0), expected)
    posterior.save(tmp_path / "q", model, optimizer, **ABOUT)
    assert posterior.load(tmp_path / "q").temperature == 1
    with pytest.raises(ValueError, match="tells of a temperature; give it too"):
        posterior.save(tmp_path / "q", model, optimizer, **ABOUT, privacy={"set_aside": 3})
    about = '{"architecture": "mlp", "shape": [1, 8, 8], "classes": 10, "privacy": null, "temperature": -1.0}'
    (tmp_path / "r").write_bytes(safetensors.torch.save({"mean.x": torch.ones(2)}, {posterior.GAUSSIAN: about}))
    with pytest.raises(ValueError, match="does not say what network it holds"):
        posterior.load(tmp_path / "r")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("method", ["dp-sgd-snapshots", "dp-ivon-snapshots", "dp-sgld"])
def test_kept_iterates_are_exported_and_predict_as_the_run_did(tmp_path, method, stored):
    config = train.Config(method=method, epsilon=3, epochs=4, samples=5, calibration=0.1, seed=0)
    (tmp_path / "iterates").mkdir()
    images = data.digits()
    where = {"samples_path": tmp_path / "iterates"} if stored else {}
    record = train.run(config, images=images, export_path=tmp_path / "p", **where)
    got = posterior.load(tmp_path / "p")
    assert len(got.iterates) == 5
    assert got.variance == {}
    before = {name: p.detach().clone() for name, p in got.model.named_parameters()}
    found = metrics.evaluate(got.log_probs(images.x_test), images.y_test)
    assert found == pytest.approx(record["results"]["samples"], abs=1e-6)
    at_mean = metrics.evaluate(got.log_probs(images.x_test, samples=0), images.y_test)
    assert at_mean == pytest.approx(record["results"]["mean"], abs=1e-6)
    assert abs(found["nll"] - at_mean["nll"]) > 1e-3
    assert all(torch.equal(p, before[name]) for name, p in got.model.named_parameters())
    assert got.privacy == record["privacy"]


def test_an_iterate_of_another_network_is_refused(tmp_path):
    config = train.resolve(train.Config(method="dp-sgd-snapshots", epochs=1, samples=2, seed=0))
    run = train.Run(config, data.digits())
    train.train(run, None, lambda line: None)
    posterior.save(tmp_path / "p", run.model, run.optimizer, **ABOUT, privacy=run.statement())  # the optimizer will do
    got = posterior.load(tmp_path / "p")
    assert len(got.iterates) == 2
    assert got.privacy == run.statement().record()
    whole = (tmp_path / "p").read_bytes()
    with safetensors.safe_open(tmp_path / "p", framework="pt") as file:
        metadata = file.metadata()
    assert posterior.GAUSSIAN not in metadata  # who knows that form alone must not take the mean for all
    tensors = {**safetensors.torch.load(whole), "iterate.000001.none": torch.ones(1)}
    (tmp_path / "p").write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ValueError, match="lacks a part"):
        posterior.load(tmp_path / "p")


def test_a_frozen_or_a_copied_network_does_not_lose_what_predicts(tmp_path):
    config = train.resolve(train.Config(method="dp-sgd-snapshots", epochs=8, samples=4, seed=0))
    run = train.Run(config, data.digits())
    train.train(run, None, lambda line: None)
    run.model.requires_grad_(False)
    posterior.save(tmp_path / "p", run.model, run.optimizer, **ABOUT)
    got, x = posterior.load(tmp_path / "p"), data.digits().x_test
    assert len(got.iterates) == 4
    torch.testing.assert_close(got.log_probs(x), predict.log_probs(run.model, x, run.posterior(), 4))
    for trained in (run.optimizer, run.posterior(), learner()[1]):
        with pytest.raises(ValueError, match="not this model's"):
            posterior.save(tmp_path / "q", copy.deepcopy(run.model), trained, **ABOUT)
    assert not (tmp_path / "q").exists()


def learner():
    model = models.mlp(SHAPE, CLASSES)
    return model, IVON(model.parameters(), lr=0.1, ess=1000.0)


@pytest.mark.parametrize("damage", ["one weight less", "none", "with variances", "an unknown part", "a strange place"])
def test_a_file_with_iterates_is_whole_or_refused(tmp_path, damage):
    config = train.resolve(train.Config(method="dp-sgd-snapshots", epochs=4, samples=3, seed=0))
    run = train.Run(config, data.digits())
    train.train(run, None, lambda line: None)
    posterior.save(tmp_path / "p", run.model, run.optimizer, **ABOUT)
    tensors = safetensors.torch.load((tmp_path / "p").read_bytes())
    with safetensors.safe_open(tmp_path / "p", framework="pt") as file:
        metadata = file.metadata()
    if damage == "one weight less":
        del tensors["iterate.000001.1.bias"]
    elif damage == "none":
        tensors = {name: value for name, value in tensors.items() if name.startswith("mean.")}
    elif damage == "with variances":
        tensors["variance.1.bias"] = torch.ones_like(tensors["mean.1.bias"])
    else:
        tensors[{"an unknown part": "foo.1.bias", "a strange place": "iterate.mean.1.bias"}[damage]] = torch.ones(1)
    (tmp_path / "p").write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ValueError, match="lacks a part, or holds one that is no posterior's"):
        posterior.load(tmp_path / "p")
