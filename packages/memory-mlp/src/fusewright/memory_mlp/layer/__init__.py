"""The neural memory as a layer, and the state that it hands from call to call."""
