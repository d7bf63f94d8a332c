"""A draft that can say a few tokens alone: what their numbers are, and which ones they are."""

from __future__ import annotations

import pytest
import torch

from lightning_specdec.drafters import DraftVocabulary


def test_logits_go_to_the_target_and_back() -> None:
    own = DraftVocabulary([1, 4, 6], 8)
    logits = torch.tensor([[0.5, -1.0, 2.0]])
    spread = own.spread(logits, -torch.inf)
    assert spread.tolist() == [[-torch.inf, 0.5, -torch.inf, -torch.inf, -1.0, -torch.inf, 2.0, -torch.inf]]
    assert own.to_draft(torch.tensor([6, 0, 1, -100]), -7).tolist() == [2, -7, 0, -7]
    assert spread.softmax(-1).sum() == 1


def test_the_most_frequent_tokens_are_chosen_and_those_that_end_a_text_always() -> None:
    own = DraftVocabulary(3, 8)
    own.choose(torch.tensor([0, 5, 0, 9, 5, 5, 0, 0]), required=[7])
    assert own.arguments() == [1, 3, 7]  # of equally frequent ones the first
    assert own.to_draft(torch.tensor([7, 4]), -1).tolist() == [2, -1]
    own.check_has([3, 7], "the end")
    with pytest.raises(ValueError, match=r"leaves out the end \(0, 4\)"):
        own.check_has([4, 0, 3], "the end")


def test_a_vocabulary_too_small_for_what_must_be_there_is_refused() -> None:
    with pytest.raises(ValueError, match="a draft vocabulary of 2 has no room for 3 tokens"):
        DraftVocabulary(2, 8).choose(torch.zeros(8), required=[1, 2, 3])


def test_it_is_built_without_memory_and_keeps_its_numbers() -> None:
    with torch.device("meta"):
        own = DraftVocabulary([2, 3], 5)
    assert own.arguments() == [2, 3]
    assert not own.state_dict()
