"""IVON inside other people's loops: the door in all its modes, physical batches, Opacus' own engine, and known traps.

Known traps, by number, and where each is a test or an error: 1 an optimizer that keeps raw gradients (here, and
`check_steps_by_private_gradient` in test_privacy); 2 a backward or step on the wrong side of the draw (here,
test_ivon); 3 empty batches (here); 4 cut batches and loops left early (here); 5 several draws (test_privacy,
test_mechanism); 6 the noise's scale (test_mechanism, test_distributed, here); 7 several processes (test_distributed);
8 no way to the wrapped optimizer's methods (here: `mechanism.sampled_params`, schedules); 9 checkpoints (here,
test_ivon, test_train); 10 exceptions (here); 11 and 12 unsuitable layers and samplers (test_mechanism, test_gradients).
"""

import copy

import ivon as peer
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon import mechanism, posterior
from dpivon.door import PrivateParts, discard, make_private
from dpivon.ivon import IVON

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning"),
]

N, B, SIGMA, C = 24, 3, 0.8, 0.6
SOURCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 1, 6, 6, generator=SOURCE).double(), torch.randint(0, 3, (N,), generator=SOURCE)
DATA = TensorDataset(X, Y)
MODES = [("hooks", True), ("ghost", True), ("hooks", False), ("ghost", False)]
IDS = ["hooks", "ghost", "hooks unwrapped", "ghost unwrapped"]
every_mode = pytest.mark.parametrize(("mode", "wrap"), MODES, ids=IDS)


def seeded(seed):
    return mechanism.new_generator(seed)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()


def ivon_of(model, curvature="noise-corrected", **changes):
    settings = {"lr": 0.3, "ess": 100.0, "hess_init": 0.5, "generator": seeded(1), **changes}
    return IVON(model.parameters(), curvature=curvature, **settings)


def door(model, optimizer, mode="hooks", wrap=True, **changes):
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": C, "batch_size": B, "generator": seeded(2), **changes}
    return make_private(model, optimizer, DATA, loss=nn.CrossEntropyLoss(), mode=mode, wrap=wrap, **settings)


def step(private, x, y):
    """One step of the loop that the documentation shows."""
    with mechanism.sampled_params(private.optimizer):
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
    private.optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def waiting(model):
    """What hangs on the parameters besides `.grad`."""
    kinds = (torch.Tensor, list)
    return {name for p in model.parameters() for name, value in vars(p).items() if isinstance(value, kinds)} - {"grad"}


# The same trajectory as our own loop.


@every_mode
@pytest.mark.parametrize("curvature", ["noise-corrected", "price"])
def test_ivon_takes_the_same_steps_through_the_door_as_in_our_own_loop(mode, wrap, curvature):
    batches = [*mechanism.poisson_batches(N, B, 6, seeded(3)), torch.arange(0), torch.arange(1), torch.arange(N)]
    own_model, accountant = network(), RDPAccountant()
    own = ivon_of(own_model, curvature)
    dp = mechanism.mechanism(own, noise_multiplier=SIGMA, max_grad_norm=C, batch_size=B, n=N, generator=seeded(2))
    model = network()
    private = door(model, ivon_of(model, curvature), mode, wrap, accountant=accountant)
    assert (private.model is model) is not wrap
    for index in batches:
        with own.sampled_params():
            mechanism.private_gradient(own_model, F.cross_entropy, X[index], Y[index], dp)
        own.step()
        step(private, X[index], Y[index])
        torch.testing.assert_close(gradient(model), gradient(own_model), rtol=0, atol=1e-12)
        torch.testing.assert_close(weights(model), weights(own_model), rtol=0, atol=1e-10)
    assert accountant.history == [(SIGMA, B / N, len(batches))]
    assert not waiting(model)


@every_mode
def test_cleanup_takes_the_hooks_off_the_model(mode, wrap):
    model = network()
    private = door(model, ivon_of(model), mode, wrap)
    assert isinstance(private.hooks, nn.Module) is wrap
    step(private, X[:4], Y[:4])
    private.hooks.cleanup()
    F.cross_entropy(model(X[:4]), Y[:4]).backward()
    assert not waiting(model)
    assert not any(vars(layer).get("activations") for layer in model.modules())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


# The noise's scale reaches the optimizer without the user's help.


@every_mode
def test_the_optimizer_is_told_its_noise_also_when_a_schedule_changes_it(mode, wrap):
    model = network()
    optimizer = ivon_of(model)
    private = door(model, optimizer, mode, wrap)
    assert optimizer.param_groups[0]["noise_std"] == pytest.approx(SIGMA * C / B)
    noise = ExponentialNoise(private.optimizer, gamma=0.5)
    for halvings in range(3):
        with optimizer.sampled_params():  # its own draw is enough where no batch is cut
            private.optimizer.zero_grad()
            private.loss(private.model(X), Y).backward()
        private.optimizer.step()
        assert optimizer.param_groups[0]["noise_std"] == pytest.approx(SIGMA * C / B / 2**halvings)
        noise.step()


def test_our_own_loop_tells_the_optimizer_its_noise():
    model = network()
    optimizer = ivon_of(model)
    dp = mechanism.mechanism(optimizer, noise_multiplier=SIGMA, max_grad_norm=C, batch_size=B, n=N)
    assert optimizer.param_groups[0]["noise_std"] == pytest.approx(SIGMA * C / B)
    noise = ExponentialNoise(dp, gamma=0.5)
    for halvings in range(3):
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, X, Y, dp)
        optimizer.step()
        assert optimizer.param_groups[0]["noise_std"] == pytest.approx(SIGMA * C / B / 2**halvings)
        noise.step()


def test_a_schedule_of_the_clipping_norm_is_followed_by_hooks_and_refused_with_ghost_clipping():
    for mode in ("hooks", "ghost"):
        model = network()
        private = door(model, ivon_of(model), mode, noise_multiplier=0.0, max_grad_norm=1e-3)
        ExponentialGradClip(private.optimizer, gamma=0.1).step()
        if mode == "hooks":
            step(private, X[:1], Y[:1])
            assert float(gradient(model).norm()) == pytest.approx(1e-4 / B, rel=0.01)
            continue
        with pytest.raises(ValueError, match="ghost clipping cannot follow"):
            step(private, X[:1], Y[:1])


@pytest.mark.parametrize("wrapped", [True, False], ids=["of the private optimizer", "of the optimizer itself"])
def test_learning_rate_schedules(wrapped):
    model = network()
    optimizer = ivon_of(model)
    private = door(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(private.optimizer if wrapped else optimizer, lambda t: 0.5**t)
    for halvings in range(3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 / 2**halvings)
        step(private, X[:4], Y[:4])
        schedule.step()
    before = weights(model)
    optimizer.param_groups[0]["lr"] = 0.0
    step(private, X[:4], Y[:4])
    assert torch.equal(weights(model), before)


# Physical batches.


def epoch(physical, mode, wrap, curvature="price", through=None):
    """An epoch of the loader's own Poisson batches, whole or in parts; some of these batches are empty."""
    model, accountant = network(), RDPAccountant()
    private = door(model, ivon_of(model, curvature), mode, wrap, batch_size=2, accountant=accountant)
    empty = 0
    if physical is None:
        for x, y in private.loader:
            empty += len(x) == 0
            step(private, x, y)
    else:
        manager = BatchMemoryManager(
            data_loader=private.loader, max_physical_batch_size=physical, optimizer=private.optimizer
        )
        with manager as loader:
            for x, y in loader:
                assert len(x) <= physical
                empty += len(x) == 0
                step(private, x, y)
    assert accountant.history == [(SIGMA, 2 / N, N // 2)]
    assert not waiting(model)
    return weights(model), empty


@every_mode
def test_results_do_not_depend_on_the_physical_batch_size(mode, wrap):
    whole, empty = epoch(None, mode, wrap)
    assert empty > 0
    for physical in (1, 2, 100):
        cut, empties = epoch(physical, mode, wrap)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-10)
        assert empties == empty


@every_mode
def test_an_optimizer_without_draws_needs_no_context(mode, wrap):
    results = []
    for physical in (100, 2):
        model = network()
        private = door(model, torch.optim.SGD(model.parameters(), lr=0.1), mode, wrap)
        for x, y in parts_of(private, physical):
            private.optimizer.zero_grad()
            private.loss(private.model(x), y).backward()
            private.optimizer.step()
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def parts_of(private, physical=2):
    """The loader of a `BatchMemoryManager`, whose context does nothing."""
    return BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=physical, optimizer=private.optimizer
    ).__enter__()


def large_batches(mode="hooks", wrap=True, **changes):
    model = network()
    optimizer = ivon_of(model)
    return model, optimizer, door(model, optimizer, mode, wrap, batch_size=N // 2, **changes)


@every_mode
def test_no_part_of_a_batch_exports_its_draw_as_a_mean(mode, wrap, tmp_path):
    model, optimizer, private = large_batches(mode, wrap)
    for part, (x, y) in enumerate(parts_of(private)):
        with mechanism.sampled_params(private.optimizer):
            private.optimizer.zero_grad()
            private.loss(private.model(x), y).backward()
            for either in (optimizer, private.optimizer):
                with pytest.raises(RuntimeError, match="a draw, not the mean"):
                    posterior.save(tmp_path / "p", model, either, architecture="mine", shape=(1, 6, 6), classes=3)
        private.optimizer.step()
        if part == 1:
            break


@every_mode
def test_a_new_draw_inside_a_logical_batch_raises(mode, wrap):
    _, optimizer, private = large_batches(mode, wrap)

    def naive():
        for x, y in parts_of(private):
            with optimizer.sampled_params():  # draws for each part
                private.optimizer.zero_grad()
                private.loss(private.model(x), y).backward()
            private.optimizer.step()

    with pytest.raises(RuntimeError, match=r"see different weights; use `with mechanism\.sampled_params"):
        naive()


def leave(private, how):
    """Train, and leave the loop between two parts of a logical batch."""
    for count, (x, y) in enumerate(parts_of(private)):
        step(private, x, y)
        if count == 1:
            if how == "break":
                break
            raise KeyboardInterrupt


@every_mode
@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_loop_left_early_leaves_nothing_behind(mode, wrap, how):
    model, _, private = large_batches(mode, wrap, noise_multiplier=0.0)
    before = weights(model)
    try:
        leave(private, how)
    except KeyboardInterrupt:
        assert how == "exception"
    assert not waiting(model)
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())  # with ghost clipping, a sum without noise stood there
    step(private, X[:1], Y[:1])
    assert float(gradient(model).norm()) * N / 2 <= C * (1 + 1e-6)  # one example, not those of the batch left behind
    assert not torch.equal(weights(model), before)  # and this was a step, not a part


def test_an_old_iterator_that_ends_late_does_not_disturb_the_new_loop():
    model, _, private = large_batches()
    old = iter(parts_of(private))
    step(private, *next(old))
    new = iter(parts_of(private))
    x, y = next(new)
    assert not waiting(model)
    assert private.optimizer._step_skip_queue == [True]
    step(private, x, y)
    assert "summed_grad" in waiting(model)  # that of the first part
    del old
    assert "summed_grad" in waiting(model)


@pytest.mark.parametrize("which", ["first", "second", "last"])
def test_a_part_without_a_step_raises(which):
    _, _, private = large_batches()

    def forgetful():
        for count, (x, y) in enumerate(parts_of(private)):
            last = private.optimizer._step_skip_queue == [False]
            if not {"first": count == 0, "second": count == 1, "last": last}[which]:
                step(private, x, y)

    with pytest.raises(RuntimeError, match=r"was not followed by optimizer\.step"):
        forgetful()
    for x, y in parts_of(private):  # the next loop begins clean
        step(private, x, y)


@every_mode
def test_a_step_inside_the_draw_raises(mode, wrap):
    """It would move the parameters, and then the context puts the old mean back: a silent standstill."""
    model = network()
    private = door(model, ivon_of(model), mode, wrap)
    with mechanism.sampled_params(private.optimizer):
        private.loss(private.model(X), Y).backward()
        with pytest.raises(RuntimeError, match=r"belongs after sampled_params"):
            private.optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_backward_after_the_draw_raises_also_in_a_later_part(mode):
    _, _, private = large_batches(mode)
    parts = iter(parts_of(private))
    step(private, *next(parts))
    x, y = next(parts)
    with mechanism.sampled_params(private.optimizer):
        loss = private.loss(private.model(x), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("part", [0, 1])
def test_the_draw_cannot_be_entered_twice(part):
    _, _, private = large_batches()
    parts = iter(parts_of(private))
    for _ in range(part):
        step(private, *next(parts))
    with mechanism.sampled_params(private.optimizer), pytest.raises(RuntimeError, match="a draw already"):
        mechanism.sampled_params(private.optimizer).__enter__()


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("part", [0, 1])
def test_hooks_refuse_a_second_backward_pass_in_any_part(wrap, part):
    _, _, private = large_batches("hooks", wrap)
    parts = iter(parts_of(private))
    for _ in range(part):
        step(private, *next(parts))
    x, y = next(parts)
    with mechanism.sampled_params(private.optimizer):
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        with pytest.raises(ValueError, match="not compatible with grad accumulation"):
            private.loss(private.model(x), y).backward()


@pytest.mark.parametrize("wrap", [True, False])
def test_with_ghost_clipping_a_second_backward_pass_replaces_the_first(wrap):
    model, _, private = large_batches("ghost", wrap, noise_multiplier=0.0, max_grad_norm=1e-3)
    seen = 0
    for x, y in parts_of(private, 1):
        last = private.optimizer._step_skip_queue == [False]
        with mechanism.sampled_params(private.optimizer):
            private.optimizer.zero_grad()
            for _ in range(2):
                private.loss(private.model(x), y).backward()
        private.optimizer.step()
        seen += 1
        if last:
            break
    assert seen > 1
    assert 0 < float(gradient(model).norm()) * N / 2 <= seen * 1e-3 * (1 + 1e-6)


# Exceptions.


class SomeError(Exception):
    pass


def fail_in_backward(output, times):
    """Raise in the backward pass through `output`, at its `times`-th run."""
    runs = []

    def hook(g):
        runs.append(g)
        if len(runs) == times:
            raise SomeError

    output.register_hook(hook)


class Twice(nn.Module):
    """A layer used twice: between its two backward passes, Opacus keeps half of its gradient."""

    def __init__(self):
        super().__init__()
        self.inner, self.middle, self.last = nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 3)

    def forward(self, x):
        return self.last(self.inner(self.middle(self.inner(x.flatten(1)))))


FAULTS = [(network, mode, wrap, where) for mode, wrap in MODES for where in ("forward", "backward")]
FAULTS += [(network, "ghost", wrap, "second backward") for wrap in (True, False)]
FAULTS += [(Twice, "hooks", wrap, "backward") for wrap in (True, False)]


@pytest.mark.parametrize(("build", "mode", "wrap", "where"), FAULTS)
def test_a_batch_that_raises_leaves_nothing_for_the_next(build, mode, wrap, where):
    model = build().double()
    twin = copy.deepcopy(model)
    private = door(model, torch.optim.SGD(model.parameters(), lr=0.0), mode, wrap, noise_multiplier=0.0)
    dp = mechanism.mechanism(
        torch.optim.SGD(twin.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=C, batch_size=B, n=N
    )
    middle = next(layer for layer in model.modules() if isinstance(layer, nn.Tanh))

    def fault(layer, inputs, output):
        handle.remove()
        if where == "forward":
            raise SomeError
        fail_in_backward(output, 1 if where == "backward" else 2)

    handle = middle.register_forward_hook(fault)
    sizes, failures = [], 0
    for x, y in private.loader:
        sizes.append(len(x))
        try:
            step(private, x, y)
        except SomeError:
            failures += 1
            continue
        mechanism.private_gradient(twin, F.cross_entropy, x, y, dp)
        torch.testing.assert_close(gradient(model), gradient(twin), rtol=0, atol=1e-12)
    assert failures == 1
    assert 0 < sizes[0] != sizes[1]  # what the failed batch left has another size than the next
    assert not waiting(model)


def test_ghost_clipping_does_not_go_on_after_its_second_pass_failed():
    """Opacus leaves its hooks off: the next batch would be clipped by the norms of the failed one."""
    model = network()
    private = door(model, ivon_of(model), "ghost")
    output = private.model(X[:4])
    fail_in_backward(output, 2)
    with pytest.raises(SomeError):
        private.loss(output, Y[:4]).backward()
    with pytest.raises(RuntimeError, match=r"failed midway; call door\.discard"):
        step(private, X[:4], Y[:4])
    discard(private.optimizer, private.hooks)
    step(private, X[:4], Y[:4])
    assert not waiting(model)


# Opacus' own engine.


def engine_of(mode, sigma=SIGMA, clip=C, posterior=1, engine=None):
    """People's existing code: `PrivacyEngine.make_private`, with our IVON as the optimizer."""
    model = network()
    engine = engine or PrivacyEngine(accountant="rdp")
    parts = engine.make_private(
        module=model, optimizer=ivon_of(model, generator=seeded(posterior)), data_loader=DataLoader(DATA, batch_size=4),
        noise_multiplier=sigma, max_grad_norm=clip, grad_sample_mode=mode, noise_generator=seeded(2),
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    wrapped, optimizer, *loss, loader = parts
    loader.batch_sampler.generator = seeded(4)
    hooks = wrapped
    return engine, PrivateParts(wrapped, optimizer, loader, loss[0] if loss else nn.CrossEntropyLoss(), hooks)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_updates_change_with_noise_and_clipping_under_opacus_engine(mode):
    """An IVON that keeps raw gradients would give the same weights in all of these, at a normal epsilon."""
    results = []
    for sigma, clip in ((SIGMA, C), (SIGMA, C), (2 * SIGMA, C), (SIGMA, C / 10)):
        engine, private = engine_of(mode, sigma, clip)
        for x, y in private.loader:
            step(private, x, y)
        results.append(weights(private.model))
        assert private.optimizer.param_groups[0]["noise_std"] == pytest.approx(sigma * clip / 4)
        assert engine.accountant.history == [(sigma, 4 / N, N // 4)]
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2], atol=1e-3)
    assert not torch.allclose(results[0], results[3], atol=1e-3)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_physical_batches_under_opacus_engine_share_one_draw(mode):
    results = []
    for physical in (100, 1):
        _, private = engine_of(mode)
        for x, y in parts_of(private, physical):
            step(private, x, y)
        results.append(weights(private.model))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_a_batch_that_began_with_another_draw_raises_under_opacus_engine():
    _, private = engine_of("hooks")
    parts = iter(parts_of(private, 1))
    with private.optimizer.original_optimizer.sampled_params():
        x, y = next(parts)
        private.loss(private.model(x), y).backward()
    private.optimizer.step()
    with pytest.raises(RuntimeError, match="see different weights"):
        step(private, *next(parts))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_checkpoints_resume_the_run(mode, tmp_path):
    engine, private = engine_of(mode)
    batches = [torch.arange(i, N, 5) for i in range(5)]
    for index in batches[:3]:
        step(private, X[index], Y[index])
    engine.save_checkpoint(path=tmp_path / "c.pt", module=private.model, optimizer=private.optimizer)
    # Opacus saves no generator, so the same noise needs what our own checkpoints hold besides.
    generators = [private.optimizer.generator, private.optimizer.original_optimizer.generator]
    states = [generator.get_state() for generator in generators]
    for index in batches[3:]:
        step(private, X[index], Y[index])
    other_engine, other = engine_of(mode, posterior=77)
    other_engine.load_checkpoint(path=tmp_path / "c.pt", module=other.model, optimizer=other.optimizer)
    assert other_engine.accountant.history == [(SIGMA, 4 / N, 3)]
    for generator, state in zip(
        [other.optimizer.generator, other.optimizer.original_optimizer.generator], states, strict=True
    ):
        generator.set_state(state)
    for index in batches[3:]:
        step(other, X[index], Y[index])
    assert torch.equal(weights(other.model), weights(private.model))
    p, q = next(private.model.parameters()), next(other.model.parameters())
    ours, theirs = private.optimizer.state[p], other.optimizer.state[q]
    assert theirs["step"] == ours["step"] == 5  # the bias correction goes on where it was
    assert torch.equal(ours["h"], theirs["h"])
    assert other_engine.accountant.history == engine.accountant.history


def test_the_authors_optimizer_is_refused():
    model = network()
    with pytest.raises(ValueError, match="keeps the gradient it saw before the noise"):
        door(model, peer.IVON(model.parameters(), lr=0.1, ess=10.0))


def test_without_the_doors_help_the_authors_optimizer_would_not_be_private():
    """Why it is refused: the weights do not know how much noise there was."""
    results = []
    for sigma in (1e-9, 1e3):
        model = network()
        optimizer = peer.IVON(model.parameters(), lr=0.1, ess=10.0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            dp = mechanism.mechanism(optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=B, n=N)
            with optimizer.sampled_params(train=True):
                F.cross_entropy(model(X), Y).backward()
            mechanism.private_gradient(model, F.cross_entropy, X, Y, dp)
            optimizer.step()
        results.append(weights(model))
    assert torch.equal(*results)


class Mixed(nn.Module):
    """Examples mixed by hand, by a function of the batch."""

    def __init__(self, mix, before):
        super().__init__()
        self.first, self.last, self.mix, self.before = nn.Linear(3, 3), nn.Linear(3, 2), mix, before

    def forward(self, x):
        if self.before:
            return self.last(self.first(self.mix(self, x)))
        return self.last(self.mix(self, self.first(x)))


MIXES = {
    "centered": lambda net, h: h - h.mean(0),
    "in training": lambda net, h: h - h.mean(0) if net.training else h,
    "a little": lambda net, h: h + 1e-4 * h.sum(0),
    "the next but one": lambda net, h: h.roll(2, 0),
}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", MIXES)
def test_examples_mixed_by_hand_are_refused(mode, before, name):
    net = Mixed(MIXES[name], before)
    before = {name: p.clone() for name, p in net.named_parameters()}
    dataset = TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    with pytest.raises(ValueError, match="depends on the others in its batch"):
        make_private(
            net, torch.optim.SGD(net.parameters(), lr=0.1), dataset, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
            max_grad_norm=1.0, batch_size=5, mode=mode,
        )  # fmt: skip
    assert net.training
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    net(torch.randn(4, 3)).sum().backward()  # no hook is left on it


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_random_numbers_of_the_network_s_own_are_no_mixing(mode):
    net = Mixed(lambda net, h: F.dropout(h, 0.5), before=False)
    dataset = TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    parts = make_private(
        net, torch.optim.SGD(net.parameters(), lr=0.1), dataset, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        max_grad_norm=1.0, batch_size=5, mode=mode,
    )  # fmt: skip
    assert parts.optimizer.expected_batch_size == 5


def test_tokens_that_are_mixed_are_refused_too():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x):
            h = self.words(x)[:, 0]
            return self.last(h - h.mean(0))

    net = Bag()
    dataset = TensorDataset(torch.zeros(20, 4, dtype=torch.long), torch.zeros(20, dtype=torch.long))
    with pytest.raises(ValueError, match="depends on the others in its batch"):
        make_private(
            net, torch.optim.SGD(net.parameters(), lr=0.1), dataset, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
            max_grad_norm=1.0, batch_size=5,
        )  # fmt: skip
