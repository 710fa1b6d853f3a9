"""Per-example gradients: right for any module, clipped to sensitivity C, in constant memory."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpivon import gradients, models


class Recurrent(nn.Module):
    """A bidirectional LSTM and a linear layer that share nothing with torch.func's simple cases."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Shared(nn.Module):
    """Dict input, a parameter used twice, one not used, one frozen, an in-place activation."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, batch):
        h = F.relu(self.twice(batch["u"]), inplace=True)
        return self.out(self.twice(h) + self.frozen(batch["v"]))


class Tied(nn.Module):
    """Weights of linear layers in other company: transposed, on a sequence, through a function of the user's own."""

    def __init__(self, use):
        super().__init__()
        self.code, self.out, self.use = nn.Linear(4, 4), nn.Linear(4, 3), use

    def forward(self, x):
        return self.out(self.use(self.code, x))


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


def unseen(layer, x):
    """Compiled code uses a weight where torch shows it to nobody; so does this."""
    with torch._C.DisableTorchFunction():
        product = x @ layer.weight.T
    return layer(x) + product


USES = {
    "unseen": unseen,
    "transposed": lambda layer, x: layer(x) @ layer.weight.T,
    "sequence": lambda layer, x: layer(x.unsqueeze(1).expand(-1, 3, -1).cumsum(1)).mean(1),
    "function": lambda layer, x: layer(x) + Product.apply(x, layer.weight),
    "keyword": lambda layer, x: F.linear(x, weight=layer.weight),
    "penalty": lambda layer, x: layer(x) * layer.weight.square().sum(),
    "input": lambda layer, x: F.linear(layer.weight[:1] * x, layer.weight),
}


# Models that differentiate, or map over, a part of themselves.
TRANSFORMS = {
    "own gradient": lambda layer, x: torch.func.grad(lambda z: layer(z).tanh().sum())(x),
    "own map": lambda layer, x: torch.vmap(layer)(torch.stack([x, 2 * x])).sum(0),
    "own direction": lambda layer, x: torch.func.jvp(lambda z: layer(z).tanh(), (x,), (torch.ones_like(x),))[1],
}


def cases():
    torch.manual_seed(0)
    y = torch.randint(0, 3, (7,))
    yield "mlp", models.mlp((1, 2, 2), 3), torch.randn(7, 1, 2, 2), y
    yield "lenet", models.lenet((3, 16, 16), 3), torch.randn(7, 3, 16, 16), y
    yield "lstm", Recurrent(), torch.randn(7, 6, 4), y
    yield "dict", Shared(), {"u": torch.randn(7, 4), "v": torch.randn(7, 4)}, y
    inplace = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    yield "in-place", inplace, torch.randn(7, 4), y
    yield "one layer", nn.Linear(4, 3), torch.randn(7, 4), y
    bias = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    bias[0].bias.requires_grad_(False)
    yield "frozen bias", bias, torch.randn(7, 4), y
    for name, use in (USES | TRANSFORMS).items():
        yield name, Tied(use), torch.randn(7, 4), y


@pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning")
@pytest.mark.parametrize(("name", "model", "x", "y"), list(cases()), ids=[case[0] for case in cases()])
def test_agrees_with_one_backward_per_example(name, model, x, y):
    before = copy.deepcopy(model.state_dict())
    got, losses = gradients.per_example_gradients(model, F.cross_entropy, x, y)
    parameters = list(gradients.trainable(model).values())
    assert [g.shape[1:] for g in got] == [p.shape for p in parameters]
    for i in range(len(y)):
        loss = F.cross_entropy(model(gradients.take(x, slice(i, i + 1))), y[i : i + 1])
        expected = torch.autograd.grad(loss, parameters, allow_unused=True)
        torch.testing.assert_close(losses[i], loss.detach())
        for g, e, p in zip(got, expected, parameters, strict=True):
            torch.testing.assert_close(g[i], torch.zeros_like(p) if e is None else e, atol=1e-6, rtol=1e-5)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning")
@pytest.mark.parametrize(("name", "model", "x", "y"), list(cases()), ids=[case[0] for case in cases()])
@pytest.mark.parametrize("max_grad_norm", [0.1, 1e6])
def test_the_clipped_sum_is_the_sum_of_clipped_gradients(name, model, x, y, max_grad_norm):
    per_example, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
    norms = torch.cat([g.flatten(1) for g in per_example], dim=1).norm(dim=1)
    factors = (max_grad_norm / norms).clamp(max=1)
    got = gradients.clipped_sum(model, F.cross_entropy, x, y, max_grad_norm, chunk_size=4).sums
    for total, g in zip(got, per_example, strict=True):
        torch.testing.assert_close(total, torch.tensordot(factors, g, dims=1), atol=1e-5, rtol=1e-4)


def test_linear_layers_take_the_short_way_where_it_is_right():
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    for use in (lambda layer, x: layer(x), *USES.values()):
        model = Tied(use)
        names = gradients.linear_weights(model)
        found, _, others = gradients.chunk_gradients(model, F.cross_entropy, x, y, names)
        assert names == {"code.weight", "out.weight"}
        assert isinstance(found["out.weight"], gradients.Outer)
        assert others == ({"code.weight"} if use in USES.values() else set())


class Watched(nn.Linear):
    """Its output is what it computes and its weight."""

    def forward(self, x):
        return super().forward(x), self.weight


def test_a_loss_that_uses_a_weight_is_differentiated_by_it():
    model, x, y = Watched(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,))

    def loss(output, y):
        return F.cross_entropy(output[0], y) + output[1].square().sum()

    got = flat(gradients.clipped_sum(model, loss, x, y, 1e6).sums)
    gradient, _ = gradients.mean_gradient(model, loss, x, y)
    torch.testing.assert_close(got / len(y), flat(gradient))


def test_a_parameter_that_is_reached_past_its_module_is_refused():
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    model = Tied(lambda layer, x: layer(x))
    model.elsewhere = [model.out.weight]
    model.use = lambda layer, x: layer(x) + F.linear(x, model.elsewhere[0].T @ model.elsewhere[0])
    with pytest.raises(ValueError, match=r"'out.weight' is reached past its module.*let forward\(\) use or return it"):
        gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0)
    model.use = lambda layer, x: layer(x) * len(model.elsewhere[0].data) * model.elsewhere[0].detach().norm()
    assert gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0).size == 5
    with pytest.raises(
        ValueError, match=r"'code.bias' is reached past its module.*weight decay belongs to the optimizer"
    ):
        gradients.clipped_sum(model, lambda o, y: F.cross_entropy(o, y) + model.code.bias.norm(), x, y, 1.0)


def test_a_tiny_delta_times_a_huge_input_is_clipped():
    """The squares of the first are zero in float32, those of the second are not infinite."""
    model = nn.Linear(1, 1000, bias=False)
    x, y = torch.full((1, 1), 1e19), torch.zeros(1)
    total = gradients.clipped_sum(model, lambda output, y: (2e-23 * output).sum(), x, y, 1e-4).sums[0]
    assert float(total.norm()) == pytest.approx(1e-4, rel=0.02)


def test_autocast_does_not_round_the_sum(problem):
    """Half precision in the model is its own business; in the sum it would exceed the sensitivity."""
    model, x, y = problem
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = flat(gradients.clipped_sum(model, F.cross_entropy, x, y, 0.1).sums)
        parts = [gradients.clipped_sum(model, F.cross_entropy, x[i : i + 1], y[i : i + 1], 0.1) for i in range(len(y))]
    torch.testing.assert_close(whole, sum(flat(part.sums) for part in parts), atol=1e-5, rtol=1e-5)


def test_complex_parameters_are_refused():
    """Opacus gives each of their two parts noise that is smaller by the root of two than what is accounted."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64.*keep the parameters in float32"):
        gradients.clipped_sum(
            model, lambda output, y: F.cross_entropy(output.abs(), y), torch.randn(2, 4) + 0j, torch.tensor([0, 1]), 1.0
        )


def test_an_input_that_is_changed_in_place_afterwards_is_remembered_as_it_was():
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    model = Tied(lambda layer, x: layer(h := 2 * x) + h.mul_(3))
    expected = gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0)
    model.use = lambda layer, x: layer(2 * x) + 6 * x
    torch.testing.assert_close(gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0), expected)


def test_chunks_shrink_with_what_must_be_stored():
    small, large = models.lenet((3, 32, 32), 10), models.tanh_cnn((3, 32, 32), 10)
    assert gradients.default_chunk(small, gradients.linear_weights(small)) == 128
    assert gradients.default_chunk(large, gradients.linear_weights(large)) < 32
    assert gradients.default_chunk(large, ()) < gradients.default_chunk(large, gradients.linear_weights(large))


@given(
    norms=st.lists(st.floats(0, 1e30), min_size=1, max_size=8),
    max_grad_norm=st.floats(1e-3, 1e3),
)
def test_clipped_norm_is_at_most_c(norms, max_grad_norm):
    norms = torch.tensor(norms, dtype=torch.float64)
    factors = gradients.clip_factors(norms, max_grad_norm)
    assert (factors * norms <= max_grad_norm * (1 + 1e-12)).all()
    assert ((factors == 1) | (norms > max_grad_norm - 2e-6)).all()


def test_not_finite_norms_count_as_zero():
    norms = torch.tensor([1.0, float("inf"), float("nan")])
    assert gradients.clip_factors(norms, 0.5).tolist()[1:] == [0.0, 0.0]


@pytest.fixture
def problem():
    torch.manual_seed(1)
    return models.mlp((1, 4, 4), 3), 3 * torch.randn(23, 1, 4, 4), torch.randint(0, 3, (23,))


def flat(sums):
    return torch.cat([s.flatten() for s in sums])


def test_chunks_do_not_change_the_sum(problem):
    model, x, y = problem
    whole = flat(gradients.clipped_sum(model, F.cross_entropy, x, y, 0.7, chunk_size=100).sums)
    for chunk_size in (1, 5, 23):
        part = flat(gradients.clipped_sum(model, F.cross_entropy, x, y, 0.7, chunk_size).sums)
        torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.5, 100.0])
def test_one_example_moves_the_sum_by_at_most_c(problem, max_grad_norm):
    model, x, y = problem
    whole = flat(gradients.clipped_sum(model, F.cross_entropy, x, y, max_grad_norm).sums)
    for i in range(len(y)):
        keep = torch.arange(len(y)) != i
        without = flat(gradients.clipped_sum(model, F.cross_entropy, x[keep], y[keep], max_grad_norm).sums)
        assert (whole - without).norm() <= max_grad_norm * (1 + 1e-4) + 1e-5


def test_clipping_acts(problem):
    model, x, y = problem
    small, large = (gradients.clipped_sum(model, F.cross_entropy, x, y, c) for c in (0.01, 1e6))
    assert small.clipped == 1.0
    assert large.clipped == 0.0
    gradient, loss = gradients.mean_gradient(model, F.cross_entropy, x, y)
    torch.testing.assert_close(flat(large.sums) / len(y), flat(gradient), atol=1e-5, rtol=1e-4)
    assert large.loss == pytest.approx(loss, rel=1e-5)


def test_empty_batch_gives_zeros(problem):
    model, x, y = problem
    result = gradients.clipped_sum(model, F.cross_entropy, x[:0], y[:0], 1.0)
    assert flat(result.sums).abs().max() == 0
    assert result.size == 0
    assert flat(gradients.mean_gradient(model, F.cross_entropy, x[:0], y[:0])[0]).abs().max() == 0


def test_an_example_with_infinite_gradient_counts_as_zero(problem):
    model, x, y = problem
    clean = flat(gradients.clipped_sum(model, F.cross_entropy, x[1:], y[1:], 1.0).sums)
    for bad in (float("nan"), float("inf"), 1e30):
        spoiled = x.clone()
        spoiled[0] = bad
        total = flat(gradients.clipped_sum(model, F.cross_entropy, spoiled, y, 1.0).sums)
        assert total.isfinite().all()
        assert (total - clean).norm() <= 1.0 + 1e-5


def test_dropout_draws_a_mask_for_each_example():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 2))
    x, y = torch.ones(2, 200), torch.tensor([0, 0])
    weight, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)[0]
    assert not torch.equal(weight[0] != 0, weight[1] != 0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_layers_that_mix_examples_are_refused(layer):
    with pytest.raises(ValueError, match=r"at '1' uses statistics of the batch.*GroupNorm"):
        gradients.check_examples_independent(nn.Sequential(nn.Linear(4, 4), layer))


def test_errors_name_value_and_remedy(problem):
    model, x, y = problem
    with pytest.raises(ValueError, match=r"max_grad_norm must be > 0, got -1"):
        gradients.clipped_sum(model, F.cross_entropy, x, y, -1.0)
    with pytest.raises(ValueError, match=r"max_grad_norm must be > 0, got nan"):
        gradients.clipped_sum(model, F.cross_entropy, x, y, float("nan"))
    with pytest.raises(ValueError, match=r"same number of examples, got \[22, 23\]"):
        gradients.clipped_sum(model, F.cross_entropy, x, y[1:], 1.0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got -9"):  # which would never end
        gradients.clipped_sum(model, F.cross_entropy, x, y, 1.0, chunk_size=-9)
    with pytest.raises(ValueError, match="no trainable parameter"):
        gradients.clipped_sum(model.requires_grad_(False), F.cross_entropy, x, y, 1.0)


def test_class_weights_that_would_cancel_are_refused_and_the_remedy_weights():
    """In a batch of one torch divides by the weight of its label, so gradients would be as without weights."""
    net, weight = nn.Linear(3, 2), torch.tensor([0.1, 10.0])
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    losses = (nn.CrossEntropyLoss(weight=weight), nn.NLLLoss(weight=weight), partial(F.cross_entropy, weight=weight))
    for loss in losses:
        with pytest.raises(ValueError, match=r"class weights have no effect.*use lambda output, y:"):
            gradients.clipped_sum(net, loss, x, y, 1.0)
        with pytest.raises(ValueError, match="class weights have no effect"):
            gradients.mean_gradient(net, loss, x, y)

    def remedy(output, y):
        return (F.cross_entropy(output, y, reduction="none") * weight[y]).mean()

    plain, _ = gradients.per_example_gradients(net, F.cross_entropy, x, y)
    weighted, _ = gradients.per_example_gradients(net, remedy, x, y)
    for a, b in zip(plain, weighted, strict=True):
        torch.testing.assert_close(b, a * weight[y].view(-1, *[1] * (a.dim() - 1)))
    soft, sequence = torch.rand(4, 2), torch.zeros(4, 5, dtype=torch.long)
    gradients.check_loss(nn.CrossEntropyLoss(), y)
    gradients.check_loss(nn.CrossEntropyLoss(weight=weight, reduction="sum"), y)
    gradients.check_loss(nn.MultiMarginLoss(weight=weight), y)
    gradients.check_loss(partial(F.binary_cross_entropy_with_logits, weight=weight), y)
    for labels in (soft, sequence):  # of which one example has several, so that weights do not cancel
        gradients.check_loss(nn.CrossEntropyLoss(weight=weight), labels)


def test_arrays_are_refused_by_name():
    net, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for inputs, labels in ((x.numpy(), y), (x, y.numpy()), ({"a": x.numpy()}, y)):
        with pytest.raises(ValueError, match=r"must be tensors, got ndarray; torch\.as_tensor"):
            gradients.clipped_sum(net, F.cross_entropy, inputs, labels, 1.0)
