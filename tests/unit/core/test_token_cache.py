"""What is used least goes first, and nothing stays for long."""

from meshrl.core.token_cache import TokenCache


def test_the_least_used_values_go_first_and_none_stays_for_long() -> None:
    now_s = 0.0
    cache = TokenCache[str, str](10, kept_s=300.0, clock=lambda: now_s)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("A", None, "C")
    cache.put("d", "D", 11)
    assert cache.get("d") is None
    now_s = 301.0
    assert cache.get("a") is None
    cache.put(None, "E", 1)
    assert cache.get(None) is None
