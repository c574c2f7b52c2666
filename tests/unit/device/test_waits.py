"""Is every wait counted, and does it give what it waited for?"""

import pytest

from tokamak.device.waits import HostWaits


def test_a_wait_is_counted_and_gives_what_it_waited_for():
    waits = HostWaits()

    answer = waits.wait(lambda: 7)

    assert (answer, waits.host_waits) == (7, 1)


def test_a_wait_that_fails_is_counted_too():
    waits = HostWaits()

    with pytest.raises(ZeroDivisionError):
        waits.wait(lambda: 1 // 0)

    assert waits.host_waits == 1
