"""Divides samples among packed rows, and rows among ranks, so that no rank waits long for another.

With sharded parameters every rank runs as many rows, and at each micro-step all wait for the one whose row costs most.
So a step costs `waiting_cost`, the sum over micro-steps of the costliest row.

A sample of T tokens costs T + attention * T^2: packed attention never crosses samples. With N weights in matrices, L
layers, H heads of D each, training takes 6 N T FLOPs in the matrices and 6 L H D T^2 in causal attention, so attention
= L H D / N: 1 / 10 400 for Qwen3-0.6B, 1 / 27 000 for Qwen3-4B, 1 / 76 000 for Qwen2.5-7B. The default lies between
small models: measured attention is less efficient than matrix products.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Rows = list[list[int]]
"""The indices of each row's samples."""


ATTENTION_COST = 1.0 / 16384.0
"""Of a pair of tokens, where a token costs 1."""


def sample_cost(tokens: int) -> float:
    return tokens + ATTENTION_COST * tokens * tokens


def divide(lengths: Sequence[int], costs: Sequence[float], *, seq_len: int, dp_size: int) -> Rows:
    """Rows of at most seq_len tokens, in the order of their micro-steps: row i belongs to rank i % dp_size.

    There are as many rows as first-fit decreasing needs (at most 11/9 of the fewest plus one), rounded up to a multiple
    of dp_size while a row holds several samples. Of three divisions into that many rows the one of least `waiting_cost`
    is taken: first-fit decreasing, each sample (longest first) to the row that costs least, and the latter with the
    rows beside a very long sample filled up first.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = _split_for_ranks(_first_fit(longest_first, lengths, seq_len), dp_size)
    if dp_size == 1:
        return sorted(rows, key=lambda row: (-sum(lengths[index] for index in row), row))
    candidates = [
        rows,
        _least_cost_first(longest_first, lengths, costs, len(rows), seq_len),
        _filled_to_the_longest(longest_first, lengths, costs, len(rows), dp_size, seq_len),
    ]
    ordered = [  # costliest first: for given rows no other grouping waits less
        sorted(map(sorted, candidate), key=lambda row: (-sum(costs[index] for index in row), row))
        for candidate in candidates
        if candidate and all(candidate)
    ]
    return min(ordered, key=lambda candidate: waiting_cost(candidate, costs, dp_size))


def waiting_cost(rows: Sequence[Sequence[int]], costs: Sequence[float], dp_size: int) -> float:
    """Rows in the order of `divide`, costs by sample."""
    totals = [sum(costs[index] for index in row) for row in rows]
    return sum(max(totals[start : start + dp_size]) for start in range(0, len(totals), dp_size))


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], seq_len: int) -> Rows:
    rows: Rows = []
    room: list[int] = []
    for index in longest_first:
        row = next((row for row, free in enumerate(room) if lengths[index] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _split_for_ranks(rows: Rows, dp_size: int) -> Rows:
    rows = [sorted(row) for row in rows]
    while len(rows) % dp_size:
        fullest = max(range(len(rows)), key=lambda row: (len(rows[row]), -row))
        row = rows[fullest]
        if len(row) == 1:
            break
        rows[fullest : fullest + 1] = [row[::2], row[1::2]]
    return rows


def _filled_to_the_longest(
    longest_first: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_rows: int,
    dp_size: int,
    seq_len: int,
) -> Rows | None:
    """None when a sample finds no room in num_rows."""
    rows: Rows = []
    left = longest_first
    while left and num_rows - len(rows) > dp_size:
        share = sum(costs[index] for index in left) / (num_rows - len(rows))
        if costs[left[0]] <= share:
            break
        filled, left = _fill(left, lengths, costs, dp_size, seq_len)
        rows += filled
    shared = _least_cost_first(left, lengths, costs, num_rows - len(rows), seq_len)
    return None if shared is None else [*rows, *shared]


def _fill(
    left: Sequence[int], lengths: Sequence[int], costs: Sequence[float], dp_size: int, seq_len: int
) -> tuple[Rows, list[int]]:
    limit = costs[left[0]]
    rows: Rows = [[] for _ in range(dp_size)]
    room, spare = [seq_len] * dp_size, [limit] * dp_size
    rest: list[int] = []
    for index in left:
        row = next((r for r in range(dp_size) if lengths[index] <= room[r] and costs[index] <= spare[r]), None)
        if row is None:
            rest.append(index)
            continue
        rows[row].append(index)
        room[row] -= lengths[index]
        spare[row] -= costs[index]
    return rows, rest


def _least_cost_first(
    left: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_rows: int, seq_len: int
) -> Rows | None:
    rows: Rows = [[] for _ in range(num_rows)]
    room = [seq_len] * num_rows
    heap = [(0.0, row) for row in range(num_rows)]
    for index in left:
        full: list[tuple[float, int]] = []
        while heap and room[heap[0][1]] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        row_cost, row = heap[0]
        heapq.heapreplace(heap, (row_cost + costs[index], row))
        rows[row].append(index)
        room[row] -= lengths[index]
        for entry in full:
            heapq.heappush(heap, entry)
    return rows
