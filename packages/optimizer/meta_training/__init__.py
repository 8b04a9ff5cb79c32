r"""Meta-training: how the network of ``trained_update_mlp`` was trained, on one device in minutes.

In ``packages/optimizer``, with the package installed or its source on the path:

    python -m meta_training --out weights.pt --minutes 6 --device cuda

Many small trainings run side by side, in pairs whose networks have weights w + e and w - e, e drawn
from N(0, sigma^2) again for each training. Every few steps, without waiting for the trainings'
ends,

    w <- AdamW(w, mean over pairs of e (L+ - L-) / (2 sigma^2)),

L the mean of log(loss / first loss + 0.01) over these steps: noise-reuse evolution strategies, Li
et al., arXiv 2304.12180, an unbiased gradient of the smoothed loss over whole trainings, whose
lengths are drawn up to a horizon. (Persistent evolution strategies, Vicol et al., arXiv 2112.13835,
draw e again at every truncation, which costs variance.) The network that is written is a running
mean of w, the one with the lowest L of its time.

Time features whose scale is over a third of the horizon keep weights of zero: at the horizon the
others no longer change, so that a longer training has no inputs that the network never saw.

The seed decides everything on a device; the clock only decides when it ends.
"""
