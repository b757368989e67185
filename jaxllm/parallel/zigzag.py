"""Zigzag: the part of the sequence that each context rank holds, and the blocks of attention that it computes per ring step.

    order(S, c)      the sequence cut into 2 c chunks; rank r holds chunk r ("low"), then chunk 2c-1-r ("high")
    blocks(c)        table [rank][step] of the products (query chunk, key chunk)
    table_text(c)    both as text; picture(c, path) as an image

With causal attention a query costs all the keys before it. With contiguous parts the last rank would work 2c-1 times as long as
the first, and a ring waits for its slowest rank. With an early and a late chunk each, every rank does the same at every step:

    c = 2              keys 0    1    2    3        rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2
    queries 0 (rank 0)      /                       / a causal half square, at step 0
            1 (rank 1)      #    /                  o a square of two chunks of the same rank, at step 0
            2 (rank 1)      #    o    /             # a square with the other rank's keys, at step 1: two for each rank
            3 (rank 0)      o    #    #    /

Plain Python and numpy, no JAX.
"""

import numpy as np

Product = tuple[int, int]
"""(query chunk, key chunk): the full square of two chunks, or the causal half of a chunk with itself."""


def chunks(rank: int, c: int) -> Product:
    """(low, high): the chunks that context rank `rank` of `c` holds, in this order."""
    return rank, 2 * c - 1 - rank


def order(S: int, c: int) -> np.ndarray:
    """int64 [S]: for each index of the zigzag array, which holds one rank after the other, the position in the sequence.

    `x_S[order(S, c)]` is the zigzag array of a sequence.
    """
    positions = np.arange(S, dtype=np.int64).reshape(2 * c, -1)
    return np.concatenate([positions[chunk] for rank in range(c) for chunk in chunks(rank, c)])


def inverse(S: int, c: int) -> np.ndarray:
    """int64 [S]: for each position of the sequence its index in the zigzag array. `x_S[inverse(S, c)]` undoes `order`."""
    return np.argsort(order(S, c))


def blocks(c: int) -> list[list[list[Product]]]:
    """[rank][ring step] -> products. At step t rank r has the keys of rank (r - t) mod c.

    A lower rank's low chunk is before both of ours, its high chunk before neither. A higher rank's chunks are both before our
    high chunk alone. So (our high, its low) is always computed, and one more product.
    """

    def at(rank: int, step: int) -> list[Product]:
        low, high = chunks(rank, c)
        if step == 0:
            return [(low, low), (high, low), (high, high)]
        source = (rank - step) % c
        k_low, k_high = chunks(source, c)
        return [(high, k_low), (low, k_low) if source < rank else (high, k_high)]

    return [[at(rank, step) for step in range(c)] for rank in range(c)]


def cost(products: list[Product]) -> float:
    """Cost of products in full squares. The causal product of a chunk with itself is half of one."""
    return sum(0.5 if query == key else 1.0 for query, key in products)


def table_text(c: int) -> str:
    """The chunks and blocks of each rank. `3<1` means queries of chunk 3 and keys of chunk 1; `3<3` is causal."""
    table = blocks(c)
    rows = [["rank", "holds", *(f"step {step}" for step in range(c))]]
    for rank in range(c):
        low, high = chunks(rank, c)
        rows.append([str(rank), f"{low}, {high}", *(" ".join(f"{q}<{k}" for q, k in table[rank][t]) for t in range(c))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
