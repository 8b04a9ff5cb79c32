"""What a training step takes: ours beside plain torch, and beside others' libraries.

    python -m fusewright_models.bench --out integration/results
    python -m fusewright_models.bench matrix --out integration/results
    python -m fusewright_models.bench titan-mac --out integration/results
    python -m fusewright_models.bench titan-mac --switches
    python -m fusewright_models.bench hybrid --preset 350m
    python -m fusewright_models.bench llama --out integration/results

One step is data, forward pass, backward pass and optimizer; tokens per second are B (M + N), or
B T of text, over its wall time.
"""
