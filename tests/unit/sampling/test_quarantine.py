"""Services whose groups fail again and again are left out for a growing time."""

from meshrl.sampling.hosts import FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S, Quarantine


def test_three_bad_groups_in_a_row_leave_a_service_out_and_each_time_lasts_twice_as_long() -> None:
    quarantine = Quarantine()
    assert [quarantine.group_failed(10.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
    assert quarantine.until_s == 10.0 + FIRST_QUARANTINE_S
    assert quarantine.group_failed(11.0) == 0.0  # it was out already
    assert quarantine.group_failed(50.0) == 2 * FIRST_QUARANTINE_S
    for _ in range(10):
        quarantine.group_failed(quarantine.until_s)
    assert quarantine.group_failed(quarantine.until_s) == LONGEST_QUARANTINE_S


def test_a_group_that_goes_well_ends_the_count_and_the_doubling() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.group_failed(0.0)
    quarantine.group_went_well()
    assert [quarantine.group_failed(1.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
    quarantine.group_went_well()
    assert [quarantine.group_failed(100.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
