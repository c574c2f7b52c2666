"""Do the block tables on the device follow the grants?"""

from __future__ import annotations

import torch

from tests.support.factory import a_request, some_holdings
from tokamak.cache.tables import BlockTables
from tokamak.core.plan import BlockGrant, Grants


def test_granted_blocks_stand_where_the_grants_say():
    tables = BlockTables(2, 4, 5, torch.device("cpu"))

    tables.apply(
        Grants.of(
            [
                BlockGrant(slot=2, group=0, start=1, block_ids=(7, 8)),
                BlockGrant(slot=3, group=1, start=0, block_ids=(9,)),
            ]
        )
    )

    assert tables.tables[0, 2].tolist() == [0, 7, 8, 0, 0]
    assert tables.tables[1, 3].tolist() == [9, 0, 0, 0, 0]
    assert int((tables.tables != 0).sum()) == 3


def test_a_cleared_slot_names_the_null_block_alone():
    tables = BlockTables(2, 4, 5, torch.device("cpu"))
    for group in range(2):
        for slot in (1, 2):
            grant = BlockGrant(slot=slot, group=group, start=0, block_ids=(3, 4))
            tables.apply(Grants.of([grant]))

    tables.clear(1)

    assert not tables.tables[:, 1].any()
    assert tables.tables[:, 2, :2].tolist() == [[3, 4], [3, 4]]


def test_grants_of_a_holding_are_one_element_a_block():
    holdings = some_holdings(block_tokens=4)
    request = a_request(prompt=9)
    request.slot = 3

    grants = Grants.of(holdings.admit(request, holdings.match(request), 9))

    assert grants.slots.tolist() == [3, 3, 3]
    assert grants.entries.tolist() == [0, 1, 2]
    assert grants.groups.tolist() == [0, 0, 0]
    assert len(set(grants.block_ids.tolist())) == len(grants) == 3
    assert {a.dtype.name for a in (grants.groups, grants.slots, grants.entries)} == {"int32"}


def test_no_grants_are_one_and_the_same_value():
    assert Grants.of([]) is Grants.none()
    assert len(Grants.none()) == 0
