"""The neural memory as a layer, and the state that it passes from call to call."""
