"""torch.distributions in a model: what it checks of its arguments becomes a check of the program."""
import pytest
import torch
import torch.distributions as dist
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import CheckError


@pytest.fixture(autouse=True)
def checked():
    """Whatever ran before in this process: torch.compile switches the checks off for good."""
    before = dist.Distribution._validate_args
    dist.Distribution.set_default_validate_args(True)
    yield
    dist.Distribution.set_default_validate_args(before)


class Heads(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.trunk, self.mean, self.scale = body, nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.body(x, self.mean(h), self.scale(h))


def vae(x, mean, scale):
    q = dist.Normal(mean, F.softplus(scale) + 1e-3)
    return (x - q.rsample().repeat(1, 2)).square().mean() + dist.kl_divergence(q, dist.Normal(0.0, 1.0)).sum(-1).mean()


def policy(x, mean, scale):
    chosen = dist.Categorical(logits=mean)
    return chosen.log_prob(x[:, 0].long() % 4) + 0.01 * chosen.entropy()


def squashed(x, mean, scale):
    d = dist.TransformedDistribution(dist.Normal(mean, scale.exp()), [dist.TanhTransform()])
    return dist.Independent(d, 1).log_prob(0.9 * torch.tanh(x[:, :4]))


def mixture(x, mean, scale):
    return dist.MixtureSameFamily(dist.Categorical(logits=mean), dist.Normal(scale, torch.ones_like(scale))).log_prob(x[:, 0])


def correlated(x, mean, scale):
    root = torch.diag_embed(scale.exp()) + torch.tril(mean[:, :, None] * mean[:, None], -1)
    return dist.MultivariateNormal(mean, scale_tril=root).log_prob(x[:, :4])


def by_matrices(x, mean, scale):
    square = mean.mT @ mean + torch.diag(scale.exp().mean(0))
    given = dist.MultivariateNormal(mean[0], covariance_matrix=square), dist.MultivariateNormal(mean[1], precision_matrix=square)
    return dist.kl_divergence(*given) + given[0].log_prob(x[:, :4])


@pytest.mark.parametrize("body", [vae, policy, squashed, mixture, correlated, by_matrices])
def test_same_numbers(body):
    torch.manual_seed(0)
    report = autoshard.verify(Heads(body), "d=4", (torch.randn(8, 8),), plans=("split", "random:0"))
    assert report.ok, str(report)


SCALE, SAMPLE, BOUNDS = (r"scale of Normal is not GreaterThan\(lower_bound=0.0\)", r"a value of Exponential is not GreaterThanEq",
                         "low of Uniform is not _LessThan")
MATRIX = "covariance_matrix of MultivariateNormal is not PositiveDefinite"


@pytest.mark.parametrize("body, bad, says", [
    (lambda x, mean, scale: dist.Normal(mean, x[:, :4]).log_prob(mean), -1.0, SCALE),
    (lambda x, mean, scale: dist.Exponential(mean.exp()).log_prob(x[:, :4]), -1.0, SAMPLE),
    (lambda x, mean, scale: mean * dist.MultivariateNormal(mean[0], 9 * torch.eye(4) + (x[:4, :4] - 0.25).tril(-1)).log_prob(mean)[:, None], 2.0, MATRIX),
    (lambda x, mean, scale: mean * dist.Uniform(x[:, :4] - 1, x.new_zeros(4)).log_prob(x[:, :4] - 0.5), 2.0, BOUNDS),
], ids=["parameter", "sample", "symmetric", "bounds"])
def test_what_a_distribution_does_not_take_raises_with_the_users_line(body, bad, says):
    compiled = autoshard.compile(Heads(body), "d=1", cluster="cpu-gloo", cache=False)
    compiled(torch.full((8, 8), 0.25))
    with pytest.raises(CheckError, match=rf"test_distributions.py:\d+: .*{says}"):
        compiled(torch.full((8, 8), bad))
