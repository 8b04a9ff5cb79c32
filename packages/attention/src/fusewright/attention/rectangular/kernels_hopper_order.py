"""Device functions of the backward pass on Hopper: the work of each program, and the order in which
programs add to dq.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon
from .kernels_hopper import keys_of

# Keys of a piece of work.
KEYS = gl.constexpr(128)


@gluon.jit
def work_of(piece, sizes, lengths_ptr, CONFIG: gl.constexpr):
    """Three of a piece of work: its head, stripe, first key, and number of keys from this one on;
    the first of its tiles of queries, how many these are and at which it begins; and what
    ``pieces_before`` takes.

    A stripe is one of the ``ranges`` of a head's keys, ``key_tiles`` of them. Pieces lie side by
    side for STRIPES stripes. The first ``whole`` pieces have all queries; then each tile of keys is
    ``parts`` pieces.
    """
    whole, parts, pieces, key_tiles, query_tiles, keys, heads, ranges = sizes
    programs = gl.num_programs(0)
    is_part = piece >= whole
    beyond = piece - whole
    tile = gl.where(is_part, whole + beyond // parts, piece)
    part = gl.where(is_part, beyond % parts, 0)
    blocks = (query_tiles + CONFIG.TILES - 1) // CONFIG.TILES
    first = gl.where(is_part, part * blocks // parts, 0)
    last = gl.where(is_part, (part + 1) * blocks // parts, blocks)
    tiles = gl.minimum(last * CONFIG.TILES, query_tiles) - first * CONFIG.TILES
    column = tile // CONFIG.STRIPES
    stripe = column // key_tiles * CONFIG.STRIPES + tile % CONFIG.STRIPES
    key_tile = column % key_tiles
    head = stripe // ranges
    first_key = (stripe % ranges * key_tiles + key_tile) * KEYS
    limit = keys_of(head // heads, lengths_ptr, keys, CONFIG) - first_key
    if CONFIG.RAGGED:
        tiles = gl.where(limit > 0, tiles, 0)
        # Those of the stripe that have keys.
        key_tiles = gl.minimum(key_tiles, key_tile + (limit + KEYS - 1) // KEYS)
    # The columns that programs have at this time, those of them that are of this stripe, and this
    # one's place among these.
    wave = gl.where(is_part, whole, piece // programs * programs) // CONFIG.STRIPES
    columns = gl.where(is_part, (pieces - whole) // parts, programs) // CONFIG.STRIPES
    lowest = gl.maximum(column - key_tile, wave)
    # Of a piece without keys these numbers are of no use.
    places = gl.maximum(gl.minimum(column - key_tile + key_tiles, wave + columns) - lowest, 1)
    place = column - lowest
    span = gl.minimum(last - first, places * CONFIG.GAP)
    begin = place * span // places
    turn = place, places, span, key_tile
    return (
        (head, stripe, first_key, limit),
        (first * CONFIG.TILES, tiles, begin * CONFIG.TILES),
        turn,
    )


@gluon.jit
def pieces_before(block, turn):
    """How many pieces add their dq to a block before this one: all of earlier waves, then, as
    programs come to the block, those that begin at it or before it, the last one first, and those
    that begin behind it.
    """
    place, places, span, key_tile = turn
    # The last place that begins at the block or before it.
    begun = gl.minimum(((block + 1) * places - 1) // span, places - 1)
    of_this_wave = gl.where(place <= begun, begun - place, places + begun - place)
    return key_tile - place + of_this_wave


@gluon.jit
def tile_at(step, tiles, begin):
    """The tile that a piece has at a step: from ``begin`` on, and around."""
    tile = step + begin
    return gl.where(tile >= tiles, tile - tiles, tile)
