"""What is kept beside a trace."""

from meshrl.rollout.engines.sessions import Session, SessionBook


def test_the_first_call_has_the_seed_of_its_rollout_and_every_other_call_its_own():
    first, second = Session(), Session(stream=1)
    seeds = [first.next_seed(7), first.next_seed(7), first.next_seed(7), second.next_seed(7), second.next_seed(7)]
    assert seeds[0] == 7
    assert len({*seeds, first.next_seed(8), Session().next_seed(8)}) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_book_forgets_closed_sessions():
    book = SessionBook()
    book.open("a", Session())
    assert book.get("a") is not None
    book.close("a")
    book.close("a")
    assert book.get("a") is None
    assert len(book) == 0
