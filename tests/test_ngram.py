"""Guesses from the text itself, against a search through all of it. Failures print their seed."""

import os
import random
from itertools import pairwise

import pytest

from mlxserve.scheduler.ngram import PRIORS, SIZES, HitRate, NgramIndex

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)


def indexed(token_ids: list[int], num_prompt_tokens: int | None = None) -> NgramIndex:
    index = NgramIndex(token_ids, len(token_ids) if num_prompt_tokens is None else num_prompt_tokens)
    assert index.advance(len(token_ids))
    return index


def latest_match(token_ids: list[int]) -> int | None:
    """The position after the latest place where the last tokens stood before, by searching all places."""
    for size in SIZES:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[len(token_ids) - size :]:
                return end
    return None


def test_it_goes_on_as_before() -> None:
    index = indexed([1, 2, 3, 4, 5, 9, 2, 3])
    assert index.guess(3) == [4, 5, 9]
    assert indexed([1, 2, 3, 4, 5, 9, 3]).guess(3) == []
    assert indexed([7]).guess(3) == indexed([]).guess(3) == []


def test_the_longest_match_goes_before_the_latest_one() -> None:
    assert indexed([1, 2, 3, 50, 8, 2, 3, 60, 1, 2, 3]).guess(1) == [50]
    assert indexed([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3]).guess(1) == [60]


def test_a_match_is_followed_while_it_holds() -> None:
    """Once it follows a place it stays there, though the last tokens stand somewhere later as well."""
    token_ids = [1, 2, 3, 4, 5, 6, 3, 4, 9, 1, 2]
    index = indexed(token_ids)
    for token_id in (3, 4):
        assert index.guess(1) == [token_id]
        token_ids.append(token_id)
        assert index.advance(10)
    assert index.guess(2) == [5, 6]
    token_ids.append(9)
    assert index.advance(10)
    # 3 4 9: found anew at the other place.
    assert index.guess(2) == [1, 2]


def test_a_short_period_is_gone_on_with() -> None:
    assert indexed([5, 1, 2, 1, 2, 1]).guess(5) == [2, 1, 2, 1, 2]
    assert indexed([4, 4, 4]).guess(4) == [4, 4, 4, 4]


def test_random_texts() -> None:
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    num_guesses = 0
    for _ in range(300):
        token_ids: list[int] = []
        index = NgramIndex(token_ids, 0)
        followed: int | None = None
        for _ in range(80):
            token_ids.append(rng.randrange(rng.choice([2, 4, 8])))
            assert index.advance(1)
            is_right = followed is not None and token_ids[followed] == token_ids[-1]
            followed = followed + 1 if is_right and followed is not None else latest_match(token_ids)
            guess = index.guess(6)
            assert bool(guess) == (followed is not None)
            if followed is not None:
                num_guesses += 1
                text = [*token_ids]
                for position in range(followed, followed + 6):
                    text.append(text[position])
                assert guess == text[len(token_ids) :]
                assert index.guess(3) == guess[:3]
            chances = index.chances(6)
            assert len(chances) == len(guess)
            assert all(0.0 < second < first < 1.0 for first, second in pairwise(chances))
    assert num_guesses > 1000


def test_a_long_prompt_is_taken_in_bit_by_bit() -> None:
    token_ids = [i % 50 for i in range(100)]
    index = NgramIndex(token_ids, 100)
    assert [index.advance(40) for _ in range(3)] == [False, False, True]
    assert index.guess(3) == [0, 1, 2]


def test_chances_are_learned_from_the_answer_alone() -> None:
    token_ids = [1, 2, 3, 4] * 20
    prompt = indexed(token_ids, len(token_ids)).chances(1)
    assert prompt == [PRIORS[-1]]
    answer = indexed(token_ids, 4).chances(1)
    assert answer[0] > 0.9


def test_what_never_repeats_as_guessed_is_not_expected_to() -> None:
    token_ids: list[int] = []
    index = NgramIndex(token_ids, 0)
    for other in range(100, 130):
        token_ids += [1, 2, other]
        index.advance(3)
    token_ids += [1, 2]
    index.advance(2)
    assert index.guess(1) == [129]
    assert index.chances(1)[0] < 0.1


@pytest.mark.parametrize("is_hit", [True, False])
def test_what_was_learned_long_ago_fades(is_hit: bool) -> None:
    rate = HitRate(0.6)
    assert rate.value == pytest.approx(0.6)
    for _ in range(30):
        rate.observe(is_hit)
    assert abs(rate.value - is_hit) < 0.1
    for _ in range(1000):
        rate.fade()
    assert rate.value == pytest.approx(0.6, abs=0.01)
