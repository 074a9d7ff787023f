"""The one rule by which parts of an attention are put together, for every kernel that needs it.

Softmax over scores that come in parts: keep for each row the largest score so far, `top`, and the sum of
`2^(score - top)`, `total`; when a new part has a larger score, what was summed before shrinks by a factor. A part may
be a tile of keys. It may also be the finished attention over some of the keys, `(out, lse)`: it then counts as *one*
key whose score is its `lse` and whose value is its `out`. So tiles inside a kernel and results of several programs
are merged by the same few lines, in any order and grouping.

Scores are in base 2, because a GPU computes 2^x and not e^x: `scale` brings them there, log2(e) with it.
Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # log2(e): natural scores to base 2
LN_2 = tl.constexpr(0.6931471805599453)  # and back


@triton.jit
def online_softmax(scores, scale, top, total):
    """Take `scores` `[R, T]` into the running `top` and `total`, each `[R]`.

    `scale` > 0 is still to be multiplied in, and -inf marks a key that may not be seen. Returns the weights of the
    new part `[R, T]`, the factor `[R]` for whatever was weighted and summed before, and the new `top` and `total`.
    A row that has seen no key yet has `top` = -inf and `total` = 0, and stays so: nothing becomes -inf - (-inf).
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp2(top - base)
    weights = tl.exp2(scores * scale - base[:, None])
    return weights, factor, new_top, total * factor + tl.sum(weights, 1)


@triton.jit
def finish(acc, top, total):
    """`(out, lse)` of rows whose weighted values sum to `acc` `[R, d_v]`: lse is a natural logarithm.

    A row that saw no key has `out` 0 and `lse` -inf.
    """
    divisor = tl.where(total == 0.0, 1.0, total)
    return acc / divisor[:, None], (top + tl.log2(divisor)) * LN_2
