"""What a training step takes: ours beside plain torch.

    python -m fusewright_models.bench --out integration/results

One step is data, forward pass, backward pass and optimizer; tokens per second are B (M + N) over
its wall time.
"""
