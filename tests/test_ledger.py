"""The ledger of blocks against plain adding up."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fused_remat._ledger import blocks_of, levels, peak, total
from fused_remat._trace import Change


@st.composite
def allocator_events(draw):
    """A legal history: addresses reused, some blocks made before the record, some never freed."""
    free_addresses, alive, changes = list(range(1, 5)), {100: 7, 101: 9}, []
    for time_ns in range(1, draw(st.integers(1, 24))):
        if alive and (not free_addresses or draw(st.booleans())):
            address = draw(st.sampled_from(sorted(alive)))
            changes.append(Change(time_ns, address, -alive.pop(address)))
            if address < 100:
                free_addresses.append(address)
        else:
            address = free_addresses.pop()
            alive[address] = draw(st.integers(1, 1000))
            changes.append(Change(time_ns, address, alive[address]))
    return changes


@settings(max_examples=50, deadline=None)
@given(allocator_events(), st.integers(0, 12), st.integers(0, 12))
def test_ledger_agrees_with_adding_up(changes, start, length):
    blocks = blocks_of(changes)
    own = [change for change in changes if change.address < 100]
    seen = [change for change in own if change.time_ns >= start]
    running = [sum(c.nbytes for c in seen[: i + 1]) for i in range(len(seen))]
    assert levels(blocks, start) == [(c.time_ns, n) for c, n in zip(seen, running, strict=True)]
    inside = [n for c, n in zip(seen, running, strict=True) if c.time_ns <= start + length]
    assert peak(blocks, start, (start, start + length)) == max([0, *inside])
    assert total(block for block in blocks if block.died == math.inf) == sum(c.nbytes for c in own)


def test_ledger_dates_an_unseen_release_by_the_next_use_of_its_address():
    blocks = blocks_of([Change(1, 5, 10), Change(4, 5, 30), Change(6, 5, -30)])
    assert [(b.nbytes, b.born, b.died) for b in blocks] == [(10, 1, 4), (30, 4, 6)]
    assert peak(blocks, 0, (2, 9)) == 30
