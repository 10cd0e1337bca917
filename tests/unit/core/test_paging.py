"""Pages of a list: together they are the list, and a token outlives what is added behind it."""

import pytest

from meshrl.core.rpc.paging import page_of
from meshrl.v1.trainer_pb2 import ListRunsRequest
from meshrl.wire.errors import MeshError, Reason


def pages(names: list[str], size: int) -> list[list[str]]:
    found, request = [], ListRunsRequest(page_size=size)
    while True:
        page, request.page_token = page_of(request, names, str)
        found.append(list(page))
        if not request.page_token:
            return found


@pytest.mark.parametrize(("size", "expected"), [(0, [3]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (9, [3])])
def test_pages_have_their_size_and_are_the_list_together(size: int, expected: list[int]) -> None:
    found = pages(["a", "b", "c"], size)
    assert [len(page) for page in found] == expected
    assert [name for page in found for name in page] == ["a", "b", "c"]


def test_an_empty_list_is_one_empty_page() -> None:
    assert pages([], 2) == [[]]


def test_a_token_goes_on_behind_its_entry_whatever_came_meanwhile() -> None:
    _, token = page_of(ListRunsRequest(page_size=2), ["a", "b", "c"], str)
    assert "b" not in {token, bytes.fromhex(token).decode(errors="replace")}  # the caller may not know of its entry
    request = ListRunsRequest(page_size=1, page_token=token)
    assert page_of(request, ["a", "b", "b2", "c"], str)[0] == ["b2"]


def test_a_token_whose_entry_is_gone_is_refused() -> None:
    with pytest.raises(MeshError, match="page_token: its entry is gone") as refused:
        page_of(ListRunsRequest(page_token="b"), ["a", "c"], str)
    assert refused.value.reason is Reason.INVALID_REQUEST
