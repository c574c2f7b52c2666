"""Are the bits of 4-bit numbers where kernels cut them out, and can they be put back?"""

import torch

from tokamak.ops.moe_experts.cut_words import PLACES, in_columns, in_places

EVERY_HALF = torch.arange(1 << 16).to(torch.int16).view(torch.uint8).view(-1, 4)


def test_every_half_word_comes_back_from_its_places_and_from_its_columns():
    assert torch.equal(in_columns(in_places(EVERY_HALF)), EVERY_HALF)
    assert torch.equal(in_places(in_columns(EVERY_HALF)), EVERY_HALF)


def test_a_shift_puts_sign_and_size_of_each_number_where_bfloat16_has_them():
    codes = torch.tensor([[0x21, 0xF4, 0x9A, 0x75]], dtype=torch.uint8)
    columns = [1, 2, 4, 15, 10, 9, 5, 7]

    (word,) = in_places(codes).view(torch.int32).tolist()[0]

    for at, code in enumerate(columns):
        half = (word >> 16 * (at // 4)) & 0xFFFF
        sign, size = PLACES[at % 4]
        assert half >> sign & 1 == code >> 3
        assert half >> size & 7 == code & 7


def test_places_take_every_bit_once():
    taken = [bit for sign, size in PLACES for bit in (sign, size, size + 1, size + 2)]

    assert sorted(taken) == list(range(16))
