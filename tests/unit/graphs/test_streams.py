"""Which forks may be open where?"""

from __future__ import annotations

import pytest
import torch

from tokamak.errors import GraphError, LateBuffer, UnjoinedSideStream
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.streams import SideStreams

CPU = torch.device("cpu")


def test_work_of_a_fork_runs_in_place_on_a_cpu():
    streams, order = SideStreams(CPU), []

    with streams.fork("copy"):
        order.append("copy")
    order.append("compute")
    streams.join("copy")
    streams.check_forward_end()

    assert order == ["copy", "compute"]


def test_a_joined_fork_may_be_forked_again():
    streams = SideStreams(CPU)

    for _ in range(2):
        with streams.fork("copy"):
            pass
        streams.join("copy")

    streams.check_forward_end()


def test_a_fork_that_is_open_cannot_be_forked():
    streams = SideStreams(CPU)
    streams.begin_segment(2)
    with streams.fork("copy"):
        pass

    with (
        pytest.raises(UnjoinedSideStream, match="'copy' was forked in segment 2 while open"),
        streams.fork("copy"),
    ):
        pass


def test_a_join_of_nothing_names_what_is_open():
    streams = SideStreams(CPU)
    with streams.fork("copy"):
        pass

    with pytest.raises(
        UnjoinedSideStream, match=r"'rows' is joined .* was not forked.*open are copy"
    ):
        streams.join("rows")


def test_a_segment_ends_with_its_own_forks_joined_and_those_of_regions_open():
    streams = SideStreams(CPU)
    with streams.within_region("prefetch"), streams.fork("rows"):
        pass
    streams.begin_segment(1)
    with streams.fork("copy"):
        pass

    with pytest.raises(UnjoinedSideStream, match="'copy', opened in segment 1"):
        streams.check_segment_end(1)
    streams.join("copy")
    streams.check_segment_end(1)
    with streams.within_region("arrive"):
        streams.join("rows")

    streams.check_forward_end()


def test_a_segment_cannot_wait_for_what_a_region_forked():
    streams = SideStreams(CPU)
    with streams.within_region("prefetch"), streams.fork("rows"):
        pass
    streams.begin_segment(1)

    with pytest.raises(
        UnjoinedSideStream, match="opened in region 'prefetch' and is joined in segment 1"
    ):
        streams.join("rows")


def test_a_forward_ends_with_everything_joined():
    streams = SideStreams(CPU)
    with streams.fork("copy"):
        pass

    with pytest.raises(UnjoinedSideStream, match="'copy', opened in the eager forward"):
        streams.check_forward_end()

    streams.forget()
    streams.check_forward_end()


def test_buffers_are_made_once_and_by_name():
    buffers = StaticBuffers()

    made = buffers.make("outlet", (2, 3), torch.bfloat16, CPU)

    assert made.shape == (2, 3)
    assert buffers.total_bytes == 12
    with pytest.raises(GraphError, match=r"there is a buffer 'outlet' already, of shape \[2, 3\]"):
        buffers.make("outlet", (1,), torch.float32, CPU)


def test_no_buffer_is_made_while_they_are_sealed():
    buffers = StaticBuffers()

    with buffers.sealed(), pytest.raises(LateBuffer, match=r"'late' of shape \[4\]"):
        buffers.make("late", (4,), torch.float32, CPU)

    assert buffers.make("late", (4,), torch.float32, CPU).shape == (4,)
