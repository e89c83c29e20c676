"""Random streams: exact numbers, keyed by the sample, with the right distribution."""

import sys

import pytest
import torch

from image_diffusion.core.random import streams as module
from image_diffusion.core.random.streams import Streams, philox4x32


def streams(seed: int = 0, epoch: int = 0, samples: int | range = 8) -> Streams:
    ids = torch.tensor(list(samples if isinstance(samples, range) else range(samples)), dtype=torch.int64)
    return Streams(seed, torch.full_like(ids, epoch), ids)


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [  # the known answers published with Random123, for a counter and key of all zeros and all ones
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, 0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_words(word: int, key: int, expected: tuple[int, ...]) -> None:
    counter = torch.full((1,), word, dtype=torch.int64)
    words = philox4x32((counter, counter, counter, counter), (key, key))
    assert tuple(int(w) for w in words) == expected


@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_numbers_of_a_sample_do_not_depend_on_its_batch(draw: str) -> None:
    whole = getattr(streams(samples=33), draw)("noise", (3, 5))
    for start, stop in [(0, 1), (1, 8), (8, 33)]:
        part = getattr(streams(samples=range(start, stop)), draw)("noise", (3, 5))
        assert torch.equal(part, whole[start:stop])


def test_seed_epoch_sample_and_purpose_each_change_the_numbers() -> None:
    base = streams().normal("noise", (16,))
    others = [
        streams(seed=1).normal("noise", (16,)),
        streams(epoch=1).normal("noise", (16,)),
        streams().normal("posterior", (16,)),
        streams(samples=range(8, 16)).normal("noise", (16,)),
    ]
    assert all(not torch.isclose(base, other).any() for other in others)


def test_sample_ids_above_32_bits_differ() -> None:
    ids = torch.tensor([5, 5 + 2**32], dtype=torch.int64)
    first, second = Streams(0, torch.zeros_like(ids), ids).uniform("t", (4,))
    assert not torch.equal(first, second)


def test_the_numbers_have_the_right_distribution() -> None:
    many = streams(samples=2000)
    normal, uniform = many.normal("noise", (101,)).double(), many.uniform("t", (101,)).double()
    n = normal.numel()
    assert normal.mean().abs() < 5 / n**0.5 and (normal.var() - 1).abs() < 5 * (2 / n) ** 0.5
    assert ((normal**4).mean() - 3).abs() < 5 * (96 / n) ** 0.5
    assert uniform.min() >= 0 and uniform.max() < 1 and (uniform.mean() - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5
    counts = torch.bincount(many.integers("label", 10, (101,)).flatten(), minlength=10).double()
    assert ((counts - n / 10) ** 2 / (n / 10)).sum() < 40  # chi-squared, 9 degrees of freedom: p < 1e-5
    assert (many.event("drop", 0.1).double().mean() - 0.1).abs() < 5 * (0.09 / 2000) ** 0.5


def test_without_triton_numbers_are_drawn_by_pytorch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "image_diffusion.core.random.philox_gpu", None)
    assert module._by_kernel.__wrapped__() is module._by_pytorch
    said = capsys.readouterr()
    assert said.out == "" and "warning: Triton is not available" in said.err
