"""SiLU gating: silu_mul of two tensors, and of the two halves of one."""
