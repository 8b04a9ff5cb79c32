"""What a token is drawn from, and how drafts are held against it."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.text.sampling import Sampling, nucleus

DRAWS = 40_000


def drawn_logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def fewest(p: list[float], least: float) -> set[int]:
    """By the definition, one token after the other."""
    kept, reached = set(), 0.0
    for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
        if reached >= least:
            break
        kept.add(token)
        reached += p[token]
    return kept


@pytest.mark.parametrize("least", [1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999])
def test_nucleus_is_the_smallest_set_that_reaches_it(least):
    p = torch.cat([(3.0 * drawn_logits(5, 17)).softmax(-1), torch.full((1, 17), 1.0 / 17.0)])
    found = nucleus(p, least)
    for row, kept in zip(p, found, strict=True):
        wanted = fewest(row.tolist(), least)
        assert set(kept.nonzero().flatten().tolist()) == wanted
        share = sum(row[token].item() for token in wanted)
        within = [token in wanted for token in range(17)]
        expected = torch.tensor(within) * row.double() / share
        eps = torch.finfo(torch.float32).eps
        assert ((kept - expected).abs() <= 17 * eps * expected).all()


@pytest.mark.parametrize(
    ("least", "wanted"), [(0.25, [0]), (0.375, [0, 1]), (0.5, [0, 1]), (0.51, [0, 1, 3])]
)
def test_equal_tokens_are_taken_by_their_numbers(least, wanted):
    """Sums of these are exact."""
    p = torch.tensor([[0.25, 0.25, 0.125, 0.25, 0.125]])
    assert nucleus(p, least)[0].nonzero().flatten().tolist() == wanted


def test_all_of_it_is_plain_sampling_to_the_bit():
    logits = drawn_logits(64, 33)
    plain = torch.multinomial(logits.softmax(-1), 1, generator=generator())
    sampling = Sampling(top_p=1.0, generator=generator())
    assert torch.equal(sampling.draw(sampling.probabilities(logits)[0]), plain)
    narrow = Sampling(top_p=0.3, generator=generator())
    assert not torch.equal(narrow.draw(narrow.probabilities(logits)[0]), plain)


def test_the_temperature_comes_before_the_nucleus():
    logits = torch.tensor([2.0, 1.0, 0.0])
    hot, _ = Sampling(temperature=4.0, top_p=0.6).probabilities(logits)
    cold, _ = Sampling(temperature=0.25, top_p=0.6).probabilities(logits)
    assert hot.count_nonzero() == 2
    assert cold.tolist() == [1.0, 0.0, 0.0]


def test_no_temperature_takes_the_first_of_the_most_likely():
    sampling = Sampling(temperature=0.0, top_p=0.5)
    p, sound = sampling.probabilities(torch.tensor([[1.0, 3.0, 3.0], [0.0, torch.inf, 0.0]]))
    assert p[0].tolist() == [0.0, 1.0, 0.0]
    assert sampling.draw(p)[0].tolist() == [1]
    assert sound.tolist() == [True, False]


def shares_of(tokens, count):
    return tokens.flatten().bincount(minlength=count) / tokens.numel()


def assert_drawn_from(tokens, p):
    """Within five standard deviations of each share."""
    shares = shares_of(tokens, len(p)).double()
    p = p.double()
    assert ((shares - p).abs() <= 5.0 * (p * (1.0 - p) / tokens.numel()).sqrt()).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_p": 0.7}], ids=str)
def test_verified_drafts_have_the_distribution_of_the_model(options):
    sampling = Sampling(generator=generator(), **options)
    p, q = (
        sampling.probabilities(2.0 * drawn_logits(1, 6, seed=seed))[0].expand(DRAWS, 6)
        for seed in (1, 2)
    )
    draft = sampling.draw(q)
    accepted, other = sampling.verified(p, q, draft)
    assert_drawn_from(torch.where(accepted, draft, other), p[0])
    # As often as the two agree.
    agreed = torch.minimum(p[0], q[0]).sum()
    assert_drawn_from(accepted.long(), torch.stack([1.0 - agreed, agreed]))
    # And the test would see drafts that are taken as they are.
    with pytest.raises(AssertionError):
        assert_drawn_from(draft, p[0])


def test_drafts_of_the_model_itself_are_all_accepted():
    sampling = Sampling(generator=generator())
    p, _ = sampling.probabilities(drawn_logits(1000, 50))
    accepted, other = sampling.verified(p, p, sampling.draw(p))
    assert accepted.all()
    assert ((other >= 0) & (other < 50)).all()


def test_the_most_likely_token_is_drafted_or_taken_instead():
    sampling = Sampling(temperature=0.0)
    p, _ = sampling.probabilities(drawn_logits(100, 4))
    q, _ = sampling.probabilities(drawn_logits(100, 4, seed=1))
    draft, most = q.argmax(-1, keepdim=True), p.argmax(-1, keepdim=True)
    accepted, other = sampling.verified(p, q, draft)
    assert torch.equal(accepted, draft == most)
    assert 0 < accepted.sum() < 100
    assert torch.equal(torch.where(accepted, draft, other), most)
