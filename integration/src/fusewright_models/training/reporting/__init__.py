"""What is told of a training: lines of metrics, what goes wrong, pictures, traces, and one page."""
