"""Monte Carlo dropout: a mask for each example, on in prediction when asked, and off and invisible otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpivon import data, dropout, gradients, models, predict, train


def test_names_and_weights_stay_and_evaluation_is_unchanged():
    plain, dropped = (models.build("lenet", (1, 16, 16), 3, seed=0) for _ in range(2))
    dropout.add(dropped, 0.5)
    assert list(plain.state_dict()) == list(dropped.state_dict())
    x = torch.randn(4, 1, 16, 16)
    torch.testing.assert_close(plain.eval()(x), dropped.eval()(x))
    assert not torch.allclose(dropped.train()(x), plain(x))


def test_layers_that_see_the_raw_input_keep_all_of_it():
    model = dropout.add(nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 1)), 0.5)
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    x = torch.ones(2, 500)
    assert model[0](x).eq(500).all()
    assert model(x).ne(500 * 500).all()


def test_each_example_has_its_own_mask_in_the_private_gradient():
    model = dropout.add(nn.Sequential(nn.Linear(2, 200), nn.Linear(200, 2)), 0.5)
    x, y = torch.ones(2, 2), torch.tensor([0, 0])
    found, _ = gradients.per_example_gradients(model.train(), F.cross_entropy, x, y)
    weight = found[2]
    assert not torch.equal(weight[0] != 0, weight[1] != 0)
    share = float((weight == 0).double().mean())
    assert share == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("own", [False, True])
def test_masks_are_drawn_in_prediction_and_off_again_after(own):
    model = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), *([nn.Dropout(0.5)] if own else []), nn.Linear(50, 2)).eval()
    if not own:
        dropout.add(model, 0.5)
    masks, x = dropout.Masks(model), torch.randn(5, 3)
    before = model(x)
    with masks.sampled_params():
        first, second = model(x), model(x)
    assert not torch.equal(first, second)
    assert torch.equal(model(x), before)
    spread = torch.stack([predict.log_probs(model, x, masks, 1) for _ in range(3)]).std(0)
    assert spread.min() > 0
    assert torch.equal(predict.log_probs(model, x), before.log_softmax(1))


def test_a_run_predicts_both_ways_and_its_network_is_not_exported_without_its_masks(tmp_path, monkeypatch):
    images, config = data.digits(), train.Config(method="dp-mc-dropout", epochs=4, seed=0)
    record = train.run(config, images=images)
    assert record["config"]["dropout"] == 0.1
    assert record["results"]["mean"] != record["results"]["samples"]
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained for nothing"))
    with pytest.raises(ValueError, match="a posterior of 'dp-mc-dropout' cannot be exported, since its network is"):
        train.run(config, images=images, export_path=tmp_path / "p")


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        dropout.add(nn.Linear(1, 1), 1.0)
