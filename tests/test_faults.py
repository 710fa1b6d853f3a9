"""What goes wrong around a run: it goes on, or ends with one clear message; nothing recorded is lost or misreported."""

import hashlib
import os
import pickle
import random
import resource
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import build

from dpivon import (
    accounting,
    audit,
    checkpoint,
    data,
    gradients,
    ledger,
    mechanism,
    methods,
    metrics,
    models,
    posterior,
    train,
)

KILLS = 50
CONFIG = train.Config(epochs=3, seed=3, method="dp-ivon-gradsq")


@pytest.fixture(scope="module")
def digits():
    return data.digits()


class WatchedRun(train.Run):
    """A run that writes down a digest of each private gradient, before anything else can happen to it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        inner = self.gradient

        def gradient(*arguments):
            diagnostics = inner(*arguments)
            flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
            log = os.open("releases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(log, f"{self.step} {digest}\n".encode())
            os.close(log)
            return diagnostics

        self.gradient = gradient


def forked(images, config, folder):
    """The run in a child process, whose files are in `folder`; its process number."""
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            torch.set_num_threads(1)
            train.Run = WatchedRun
            train.run(config, images=images, ledger_path="runs.jsonl", checkpoint_path="run.ckpt")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def test_killed_at_any_moment_a_run_repeats_the_same_releases_and_ends_the_same(digits, tmp_path):
    """SIGKILL at 50 random moments. A repeated step releases what it released before, so epsilon counts it once."""
    reference = tmp_path / "whole"
    reference.mkdir()
    begin = time.perf_counter()
    _, status = os.waitpid(forked(digits, CONFIG, reference), 0)
    duration = time.perf_counter() - begin
    assert status == 0
    (whole,) = ledger.read(reference / "runs.jsonl")
    released = dict(line.split() for line in (reference / "releases").read_text().splitlines())

    kills, runs = 0, 0
    moments = random.Random(0)
    while kills < KILLS:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        runs += 1
        finished = False
        while not finished:
            child = forked(digits, CONFIG, folder)
            if kills < KILLS:
                time.sleep(moments.uniform(0, 0.6 * duration))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert status in (0, signal.SIGKILL)
            kills += status == signal.SIGKILL
            finished = status == 0
        records = ledger.read(folder / "runs.jsonl")
        # Killed between writing its record and ending, a run writes it once more when it is started again.
        for record in records:
            assert record["results"] | {"resumed_at": 0} == whole["results"]
            assert record["privacy"] == whole["privacy"]
        for line in (folder / "releases").read_text().splitlines():
            step, digest = line.split()
            assert released[step] == digest, f"step {step} was released twice, differently"
        assert not (folder / "run.ckpt.part").exists()


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path_factory, position, bit):
    file = tmp_path_factory.mktemp("flip") / "run.ckpt"
    checkpoint.save(file, {"step": 5, "model": {"w": torch.arange(10.0)}})
    content = bytearray(file.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a whole checkpoint"):
        checkpoint.load(file)


def test_a_checkpoint_of_another_torch_or_thread_count_is_refused(digits, tmp_path, monkeypatch):
    """Both may round differently, and the same noise on another sum would tell the difference."""
    file = tmp_path / "run.ckpt"
    small = replace(CONFIG, epochs=0.5)
    train.run(small, images=digits, checkpoint_path=file)
    state = checkpoint.load(file)
    for name, value in (("torch", "1.0"), ("threads", 77)):
        checkpoint.save(file, {**state, "identity": {**state["identity"], name: value}})
        with pytest.raises(ValueError, match=rf"another run \({name} differ\)"):
            train.run(small, images=digits, checkpoint_path=file)


def test_a_full_disk_at_a_checkpoint_ends_the_run_and_keeps_the_last_one(digits, tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    checkpoint.save(file, train.Run(train.resolve(replace(CONFIG, epochs=2)), digits).state_dict())
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        train.run(replace(CONFIG, epochs=2), images=digits, checkpoint_path=file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.ckpt"]


def tiny(n, channels=1, size=8, classes=2):
    x = torch.rand(n, channels, size, size)
    y = torch.arange(n) % classes
    return data.Images("digits", x, y, x[:1], y[:1], tuple(str(k) for k in range(classes)))


def test_one_example_is_a_data_set():
    config = train.Config(method="dp-sgd", batch_size=1, epochs=5, delta=0.5, noise_multiplier=1.0, seed=0)
    record = train.run(config, images=tiny(1))
    assert record["results"]["steps"] == 5
    assert record["privacy"]["sample_rate"] == 1.0


def test_no_example_is_not():
    with pytest.raises(data.DataError, match="at least one float32 image"):
        tiny(0)


def test_labels_out_of_range_are_refused():
    x = torch.rand(3, 1, 8, 8)
    for bad in (-1, 2):
        y = torch.tensor([0, 1, bad])
        with pytest.raises(data.DataError, match=f"y_train must lie in 0..1.*got {bad}"):
            data.Images("bad", x, y, x, torch.zeros(3, dtype=torch.int64), ("a", "b"))


@pytest.mark.parametrize("model", ["mlp", "lenet", "tanh_cnn"])
def test_greyscale_images_train(model):
    images = tiny(20, channels=1, size=32)
    record = train.run(
        train.Config(method="dp-sgd", model=model, batch_size=10, epochs=1, noise_multiplier=1.0, delta=1e-2, seed=0),
        images=images,
    )
    assert record["status"] == "finished"


def test_images_too_small_for_the_network_are_named():
    with pytest.raises(ValueError, match="lenet"):
        train.run(
            train.Config(method="dp-sgd", model="lenet", batch_size=1, seed=0, delta=1e-2), images=tiny(4, size=4)
        )


def test_a_batch_whose_gradients_do_not_fit_in_memory_is_no_obstacle():
    """60,000 per-example gradients of this network would be 5 GB; the peak grows by less than a tenth of that."""
    model = nn_conv()
    x, y = torch.randn(60_000, 1, 8, 8), torch.zeros(60_000, dtype=torch.int64)
    size = 4 * len(y) * sum(p.numel() for p in model.parameters())
    assert size > 5e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 0.1 * size


def nn_conv():
    """Weights that are not linear layers', so that their per-example gradients are formed."""
    return torch.nn.Sequential(torch.nn.Conv2d(1, 340, 8), torch.nn.Flatten(), torch.nn.Linear(340, 2, bias=False))


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_exploding_or_missing_gradients_raise_before_the_weights_change(name):
    for bad in (float("nan"), float("inf")):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer = build(name, [p])
        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(p.detach().view(2, 2))
        with pytest.raises(FloatingPointError), optimizer.sampled_params():
            mechanism.plain_gradient(model, lambda out, y, bad=bad: out.sum() * bad, torch.ones(1, 2), torch.zeros(1))
        assert torch.equal(p.detach(), torch.ones(4))


# Any input to a public function gives a result within its promise, or an error of the documented kind.

anything = st.one_of(st.floats(allow_nan=True), st.integers(-(10**12), 10**12))


@given(sigma=anything, q=anything, steps=st.integers(-5, 10**7), delta=anything)
@settings(max_examples=150, deadline=None)
def test_epsilon_of_anything(sigma, q, steps, delta):
    try:
        found = accounting.epsilon(sigma, q, steps, delta)
    except ValueError:
        assert not (sigma >= 0 and 0 < q <= 1 and steps >= 0 and 0 < delta < 1)
    else:
        assert found >= 0


@given(batch_size=anything, n=st.integers(-3, 1000), steps=st.integers(-3, 5))
@settings(deadline=None)
def test_poisson_batches_of_anything(batch_size, n, steps):
    try:
        batches = list(mechanism.poisson_batches(n, batch_size, steps))
    except ValueError:
        assert not 0 < batch_size <= n or steps < 0
    else:
        assert len(batches) == steps
        assert all(len(set(index.tolist())) == len(index) for index in batches)
        assert all(0 <= i < n for index in batches for i in index.tolist())


@given(name=st.text(max_size=8), shape=st.tuples(*[st.integers(-1, 12)] * 3), classes=st.integers(-1, 5))
@settings(max_examples=50, deadline=None)
def test_models_of_anything(name, shape, classes):
    with pytest.raises(ValueError, match="unknown model"):
        models.build(f"no-{name}", (1, 8, 8), 2)
    try:
        model = models.build("mlp", shape, classes)
    except ValueError:
        assert min(*shape, classes) < 1
    else:
        assert model(torch.zeros(1, *shape)).shape == (1, classes)


@given(content=st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_files_of_anything(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("any") / "file"
    file.write_bytes(content)
    for load in (checkpoint.load, posterior.load):
        with pytest.raises(ValueError, match="not a"):
            load(file)
    if content.strip():
        with pytest.raises(ledger.LedgerError, match="line"):
            ledger.read(file)
        assert ledger.read(file, strict=False) == []


@given(epsilon=anything, q=anything, steps=st.integers(-2, 5000), delta=anything)
@settings(max_examples=40, deadline=None)
def test_noise_for_anything(epsilon, q, steps, delta):
    try:
        sigma = accounting.noise_for(epsilon, q, steps, delta)
    except ValueError:
        return
    assert sigma > 0
    assert accounting.epsilon(sigma, q, steps, delta) <= epsilon


plausible = st.floats(1e-3, 0.99)
six = st.one_of(st.lists(plausible, min_size=6, max_size=6), st.lists(anything, min_size=6, max_size=6))


@given(name=st.sampled_from(sorted(methods.METHODS)), lr=st.one_of(plausible, anything), values=six)
@settings(max_examples=200, deadline=None)
def test_configurations_of_anything(name, lr, values):
    """Its optimizer is built and stepped, or it is refused by a ValueError; there is never another error."""
    method = methods.get(name)
    names = [key for key in (*method.settings, *method.network_settings) if key != "samples"]
    config = train.Config(
        method=name, lr=lr, noise_multiplier=1.0 if method.private else None, batch_size=4, epochs=1, seed=0,
        delta=1e-2,
        **dict(zip(names, values, strict=False)),
    )  # fmt: skip
    images = tiny(8)
    try:
        now = train.Run(train.resolve(config), images)
    except ValueError:
        return
    before = [p.detach().clone() for p in now.model.parameters()]
    try:
        with now.optimizer.sampled_params():
            now.gradient(now.model, now.loss, images.x_train, images.y_train)
        now.optimizer.step()
    except FloatingPointError:
        for p, value in zip(now.model.parameters(), before, strict=True):
            assert torch.equal(p, value)


@given(
    rows=st.integers(0, 4), classes=st.integers(0, 4), values=st.lists(st.floats(), min_size=16, max_size=16),
    labels=st.lists(st.integers(-2, 5), max_size=5),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_metrics_of_anything(rows, classes, values, labels):
    log_probs = torch.tensor(values, dtype=torch.float64)[: rows * classes].view(rows, classes)
    y = torch.tensor(labels, dtype=torch.int64)
    for logits in (log_probs, log_probs.log_softmax(1)):
        try:
            found = metrics.evaluate(logits, y)
        except ValueError:
            continue
        assert 0 <= found["accuracy"] <= 1
        assert 0 <= found["ece"] <= 1
        assert 0 <= found["brier"] <= 2 + 1e-9
        assert found["nll"] >= -1e-3


@given(
    scores=st.lists(st.floats(allow_nan=False), min_size=1, max_size=30),
    seed=st.integers(0, 9),
    delta=st.floats(0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_audits_of_any_scores(scores, seed, delta):
    included = audit.coins(len(scores), seed)
    for bound in (audit.one_run_bound, audit.rates_bound, audit.gaussian_bound):
        try:
            found = bound(torch.tensor(scores, dtype=torch.float64), included, delta)
        except ValueError:
            assert len(scores) < 20  # too few canaries: none in, none out, or fewer than two guesses
        else:
            assert 0 <= found <= 100


def test_a_pickle_is_not_loaded_as_a_posterior(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "p").write_bytes(pickle.dumps(Evil()))
    torch.save(Evil(), tmp_path / "q")
    for name in ("p", "q"):
        with pytest.raises(ValueError, match="not a whole posterior"):
            posterior.load(tmp_path / name)
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            checkpoint.load(tmp_path / name)
    assert not (tmp_path / "owned").exists()
