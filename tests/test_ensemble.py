"""Ensembles in one mechanism: the engine's sums are a loop's, one example moves them by C, shards stay apart."""

import math

import pytest
import torch
import torch.nn.functional as F

from dpivon import adaptive, data, ensemble, gradients, mechanism, methods, models, train
from dpivon.assignment import place

C, N = 0.5, 40
SOURCE = torch.Generator().manual_seed(0)
X, Y = 2 * torch.randn(N, 1, 16, 16, generator=SOURCE), torch.randint(0, 3, (N,), generator=SOURCE)
LOSS = ensemble.summed(F.cross_entropy)


def network(shards=False, members=3, name="lenet"):
    return ensemble.Ensemble(models.build(name, (1, 16, 16), 3, seed=0), members, shards)


def loop(model, x, y):
    """Clipped sums by one example at a time, written without the engine."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(y)):
        if model.shards:
            k = int(place(x[i : i + 1], len(model.members)))
            loss = F.cross_entropy(model.members[k](x[i : i + 1]), y[i : i + 1])
        else:
            loss = sum(F.cross_entropy(member(x[i : i + 1]), y[i : i + 1]) for member in model.members)
        each = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        each = [torch.zeros_like(p) if g is None else g for g, p in zip(each, model.parameters(), strict=True)]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in each))
        for t, g in zip(total, each, strict=True):
            t += g * min(1.0, C / (norm + 1e-6))
    return total


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
@pytest.mark.parametrize("shards", [False, True])
def test_the_engine_gives_the_sums_of_a_plain_loop(shards, name, chunk_size):
    model = network(shards, name=name).train()
    got = gradients.clipped_sum(model, LOSS, X, Y, C, chunk_size).sums
    for a, b in zip(got, loop(model, X, Y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shards", [False, True])
def test_neighbors_sums_are_at_most_c_apart(shards):
    model = network(shards).train()
    whole = gradients.clipped_sum(model, LOSS, X, Y, C).sums
    for i in range(0, N, 5):
        keep = torch.arange(N) != i
        less = gradients.clipped_sum(model, LOSS, X[keep], Y[keep], C).sums
        moved = torch.cat([(a - b).flatten() for a, b in zip(whole, less, strict=True)]).norm()
        assert 0.2 * C < moved <= C * (1 + 1e-4)


def test_a_member_has_about_its_share_of_the_norm_and_in_shards_all_or_nothing():
    for shards in (False, True):
        model = network(shards).train()
        for i in range(6):
            sums = gradients.clipped_sum(model, LOSS, X[i : i + 1], Y[i : i + 1], C).sums
            each = len(sums) // 3
            norms = torch.stack([torch.cat([g.flatten() for g in sums[m * each :][:each]]).norm() for m in range(3)])
            if shards:
                assert norms.nonzero().flatten().tolist() == [int(place(X[i : i + 1], 3))]
                assert float(norms.max()) == pytest.approx(C, rel=1e-3)
            else:
                assert norms.square().sum().sqrt() == pytest.approx(C, rel=1e-3)
                assert (norms - C / math.sqrt(3)).abs().max() < 0.2 * C


def test_it_predicts_by_the_mean_of_the_probabilities():
    model = network()
    each = torch.stack([member.eval()(X).softmax(1) for member in model.members])
    torch.testing.assert_close(model.eval()(X).exp(), each.mean(0))
    assert [output.shape for output in model.train()(X)] == [(N, 3)] * 3
    assert all((each[0] - other).abs().max() > 0.01 for other in each[1:])


def test_starts_follow_from_the_first_one_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again = network(), network()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    plain = models.build("lenet", (1, 16, 16), 3, seed=0)
    assert all(torch.equal(p, q) for p, q in zip(first.members[0].parameters(), plain.parameters(), strict=True))
    other = ensemble.Ensemble(models.build("lenet", (1, 16, 16), 3, seed=1), 3)
    assert not torch.equal(first.members[1][0].weight, other.members[1][0].weight)


def test_a_shards_step_is_that_of_a_network_trained_on_the_shard_alone():
    """Without noise and clipping: b = N, so the mechanism's mean over N times M is the mean over an equal shard."""
    model = network(shards=True, members=2, name="mlp").train()
    own = place(X, 2)
    size = min(int((own == k).sum()) for k in (0, 1))
    index = torch.cat([(own == k).nonzero().flatten()[:size] for k in (0, 1)])
    x, y = X[index], Y[index]
    optimizer = ensemble.sgd(model.parameters(), lr=0.1, members=2, beta1=0.0, weight_decay=0.3)
    dp = mechanism.mechanism(optimizer, noise_multiplier=0.0, max_grad_norm=1e6, batch_size=2 * size, n=2 * size)
    alone = models.build("mlp", (1, 16, 16), 3, seed=0)
    simple = adaptive.sgd(alone.parameters(), lr=0.1, beta1=0.0, weight_decay=0.3)
    mechanism.private_gradient(model, LOSS, x, y, dp)
    optimizer.step()
    mechanism.plain_gradient(alone, F.cross_entropy, x[:size], y[:size])
    simple.step()
    for p, q in zip(model.members[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dp-ensemble", "dp-ensemble-shards"])
def test_the_update_changes_with_the_noise_and_with_c(name):
    images, found = data.digits(), []
    for sigma, c in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.5)):
        config = train.Config(method=name, noise_multiplier=sigma, max_grad_norm=c, epochs=0.2, seed=0, members=2)
        now = train.Run(train.resolve(config), images)
        train.train(now, None, lambda line: None)
        found.append(torch.cat([p.detach().flatten() for p in now.model.parameters()]))
        assert not any(hasattr(p, "grad_sample") or getattr(p, "summed_grad", None) is not None
                       for p in now.model.parameters())  # fmt: skip
    assert len({tuple(f[:50].tolist()) for f in found}) == 3
    assert methods.get(name).network_settings == ("members",)


def test_the_number_of_members_is_checked():
    for members in (0, 1.5):
        with pytest.raises(ValueError, match=f"members must be a whole number >= 1, got {members}"):
            ensemble.Ensemble(torch.nn.Linear(1, 1), members)
    with pytest.raises(ValueError, match="'dp-sgd' does not read members"):
        train.resolve(train.Config(method="dp-sgd", members=3))
