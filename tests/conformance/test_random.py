"""Has a random call the promised bits, on every transport?"""

from dataclasses import replace
from functools import partial

import pytest
from calls import LISTS, PLAIN, ROOTED, SHARES, Call, Layout, Part
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, OPS
from promises import promise

BORDERS = [0, 1, 2, 3, 7, 16, 64, 1024, 4096, 8192, 16_384, 32_768]


@st.composite
def layouts(draw, shape, *, can_be_negated):
    dims = draw(st.permutations(range(len(shape))))
    steps = st.integers(1, 3) if draw(st.booleans()) else st.just(1)
    strides, reach = [0] * len(shape), 1
    for dim in dims:
        strides[dim] = reach * draw(steps)
        reach = strides[dim] * max(1, shape[dim])
        if shape[dim] == 1:
            strides[dim] = draw(st.integers(0, 50))  # means nothing
    is_negated = can_be_negated and draw(st.integers(0, 15)) == 15
    return Layout(tuple(strides), draw(st.integers(0, 3)), is_negated=is_negated)


@st.composite
def parts(draw, k, *, seed=0, is_small, num_shares=1):
    small = st.lists(st.integers(0, 6), max_size=4).map(tuple)
    near_borders = st.builds(
        lambda border, offset: (max(0, border + offset),),
        st.sampled_from(BORDERS[:6] if is_small else BORDERS),
        st.integers(-2, 2),
    )
    shape = draw(small | near_borders)
    if num_shares > 1:
        shape = (*shape, num_shares)
    layout = partial(layouts, shape, can_be_negated=True)
    lying = draw(st.just((PLAIN,)) | st.tuples(layout()) | st.tuples(*[layout() for _ in range(k)]))
    return Part(
        draw(st.sampled_from(DTYPES)), shape, lying, seed=4 * draw(st.integers(0, 100)) + seed
    )


@st.composite
def calls(draw, transport):
    k = draw(st.sampled_from(transport.world_sizes))
    entry = draw(st.sampled_from(transport.entries))
    op = draw(st.sampled_from(OPS))
    is_plain = entry == "book"
    orders = (*transport.orders, *transport.made_orders)
    order = "any" if is_plain else draw(st.sampled_from(orders))
    algorithm = "auto" if is_plain else draw(st.sampled_from(transport.algorithms))
    is_list = entry in LISTS or entry.endswith("coalesced")
    num_parts = draw(st.integers(1, 3)) if is_list else 1
    call = Call(
        entry,
        k,
        tuple(
            draw(
                parts(k, seed=i, is_small=order == "exact", num_shares=k if entry in SHARES else 1)
            )
            for i in range(num_parts)
        ),
        op,
        algorithm,
        order,
        root=draw(st.integers(0, k - 1)),
        by_communicator=entry in SHARES or draw(st.booleans()),
        holds="tensors"
        if entry in ("repeated", *ROOTED)
        else draw(st.sampled_from(["tensors", "tuples", "arrays"])),
        flushes=draw(st.booleans()),
    )
    order = "rank" if "rank" in transport.orders and not is_plain else "any"
    nearest = replace(call, algorithm="auto", order=order)
    plainest = replace(nearest, holds="tensors", parts=call.parts[:1])
    return next(one for one in (call, nearest, plainest) if transport.can_run(one))


@promise("all_reduce", "layouts")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_calls", [None, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_random_calls(transport, num_calls):
    @settings(max_examples=num_calls or transport.num_random_calls)
    @given(call=calls(transport))
    def check(call):
        transport.check([call])

    check()
