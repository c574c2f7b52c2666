"""Which rows run beside others, and is everything joined that was forked?"""

from types import SimpleNamespace

import pytest
import torch

from tokamak.core.context import installed
from tokamak.errors import UnjoinedSideStream
from tokamak.graphs.streams import SideStreams
from tokamak.layers.beside import MOST_ROWS, Beside


@pytest.mark.parametrize(("rows", "forks"), [(1, True), (MOST_ROWS, True), (MOST_ROWS + 1, False)])
def test_few_rows_fork_a_stream_and_join_it(rows, forks):
    streams, beside = SideStreams(torch.device("cpu")), Beside("part")

    with installed(SimpleNamespace(streams=streams)):
        for _ in range(2):
            with beside.fork(rows):
                pass
            assert bool(streams._opened_in) is forks
            beside.join(rows)


def test_two_parts_of_a_name_are_not_open_at_once():
    streams = SideStreams(torch.device("cpu"))
    with installed(SimpleNamespace(streams=streams)):
        with Beside("part").fork(1):
            pass
        with pytest.raises(UnjoinedSideStream, match="'part' was forked"), Beside("part").fork(1):
            pass
        streams.join("part")


def test_many_rows_need_no_step():
    beside = Beside("part")

    with beside.fork(MOST_ROWS + 1):
        ran = True
    beside.join(MOST_ROWS + 1)

    assert ran
